"""The weight formats by name, for what must not import JAX. `qerl_jax.formats.PACKED` says what they are."""

from typing import Literal, get_args

FormatName = Literal["nvfp4", "mxfp4", "nf4", "nf4_double_quant", "bf16"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
