"""Sampling completions."""

from qerl_jax.rollout.batch import Prompts, Rollout, join_rows
from qerl_jax.rollout.engine import Engine
from qerl_jax.rollout.generate import generate
from qerl_jax.rollout.requests import Completion, Request
from qerl_jax.rollout.sampling import SamplingSettings

__all__ = ["Completion", "Engine", "Prompts", "Request", "Rollout", "SamplingSettings", "generate", "join_rows"]
