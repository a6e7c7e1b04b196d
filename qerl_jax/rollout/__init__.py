"""Sampling completions."""

from qerl_jax.rollout.generate import Prompts, Rollout, generate
from qerl_jax.rollout.sampling import SamplingSettings

__all__ = ["Prompts", "Rollout", "SamplingSettings", "generate"]
