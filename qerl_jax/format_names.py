"""Formats by name, for what must not import JAX. `qerl_jax.formats.PACKED` says what those of weights are,
`qerl_jax.rollout.SamplingSettings` what those of keys and values."""

from typing import Literal, get_args

FormatName = Literal["nvfp4", "mxfp4", "nf4", "nf4_double_quant", "bf16"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
# Of a model's weights as they are written, and of whatever is exported.
SAVED_FORMATS: tuple[FormatName, ...] = ("bf16", "nvfp4")
EXPORT_FORMATS = ("peft", *SAVED_FORMATS)
KVCacheDtype = Literal["auto", "fp8_values", "fp8"]
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
