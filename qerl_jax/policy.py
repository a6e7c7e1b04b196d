"""A policy: a network with what turns text into its tokens and back."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from qerl_jax.formats import KernelNVFP4, format_of
from qerl_jax.models.dtypes import DtypeOption, settled_dtype
from qerl_jax.models.fingerprint import fingerprint
from qerl_jax.models.init import for_kernels
from qerl_jax.models.loading import load_model, open_model
from qerl_jax.models.packed_by import rounded_to
from qerl_jax.models.params import Model
from qerl_jax.models.tokenizer import Tokenizer, load_generation_config, load_tokenizer, tokenizer_fingerprint
from qerl_jax.rollout import Rollout

NOT_A_NUMBER = (
    "completions have log-probabilities that are not finite: the network's logits are no numbers there, and tokens say "
    "nothing. In float16 activations end at 65504 (model.dtype float32 or bfloat16 go further)"
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A frozen model with what turns text into its tokens and back.

    Its NVFP4 weights are in the GPU kernels' order where those run; `fingerprint` is that of the weights as loaded,
    `rounded_to` the format whose values they have (see `models.packed_by`).
    """

    model: Model
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    fingerprint: str
    rounded_to: str


def load_policy(path: str, weight_format: str | None, dtype: DtypeOption) -> Policy:
    """Loads model and tokenizer; `weight_format` None keeps the stored one."""
    # The small files first: to quantize a large model takes minutes, and what is wrong with them can be said before.
    tokenizer = load_tokenizer(path, open_model(path).config.vocab_size)
    generation = load_generation_config(path)
    model = load_model(path, weight_format, settled_dtype(dtype))
    identity = fingerprint(model)
    if model.base.embed.dtype in (jnp.bfloat16, jnp.float16) and pallas_kernels.has_kernels():
        model = for_kernels(model, consume=True)
    ends = generation.eos_token_ids, generation.pad_token_id
    return Policy(model, tokenizer, *ends, identity, rounded_to(path, weight_format))


def kernels_said(model: Model) -> str | None:
    """Which kernels multiply by the NVFP4 weights of a model on a GPU, or why none do; None where there is no GPU, or
    no such weight."""
    weight, dtype = model.base.layers[0].q_proj, model.base.embed.dtype
    if format_of(weight) != "nvfp4" or pallas_kernels.kernel_family() == "reference":
        return None
    if pallas_kernels.has_kernels() and not isinstance(weight, KernelNVFP4):
        return (
            f"NVFP4 kernels: none, dequantize + dot (they multiply in bfloat16 or float16, the model in {dtype.name})"
        )
    return pallas_kernels.describe()


def model_identity(path: str, weights: str | None) -> dict[str, Any]:
    """What a run's identity holds of its model: `weights`, their fingerprint (left out where it is None), and what is
    read from the model's folder."""
    generation = load_generation_config(path)
    return ({} if weights is None else {"base weights": weights}) | {
        "tokenizer and chat template": tokenizer_fingerprint(path),
        "EOS and pad ids": [*generation.eos_token_ids, generation.pad_token_id],
    }


def decode_completions(tokenizer: Tokenizer, completions: Rollout) -> tuple[list[str], list[list[int]]]:
    """Texts without special tokens, and the sampled ids with the EOS, cut by length. Warns of tokens that say nothing
    (see `rollout.sampling`)."""
    tokens, lengths, logps = jax.device_get((completions.tokens, completions.lengths, completions.logps))
    if not np.isfinite(logps[np.arange(logps.shape[1]) < lengths[:, None]]).all():
        _log.warning(NOT_A_NUMBER)
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    # As arrays: of a list transformers looks at each number.
    return tokenizer.batch_decode(rows, skip_special_tokens=True), [row.tolist() for row in rows]
