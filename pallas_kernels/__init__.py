"""GPU kernels behind plain functions, each with a pure-JAX reference beside it."""

from .attention import (
    HeadNorms,
    OwnKV,
    PromptKV,
    decode_attention,
    decode_attention_reference,
    marked,
    stored,
    takes_decode_attention,
)
from .block import (
    between_attentions,
    between_attentions_reference,
    reads_units,
    takes_between_attentions,
    wanted_a,
)
from .float16_range import range_scale
from .fp4_matmul import fp4_matmul, fp4_matmul_dx
from .fp4_mlp import fp4_mlp
from .fragment_order import in_unit_order
from .layer_part import LayerPart, Projection
from .layout import KernelWeight, dequantize, repack, unpack
from .operands import padded_rank
from .reference import fp4_matmul_dx_reference, fp4_matmul_reference
from .variants import compiling_for, describe, has_kernels, joins_gate_and_up, kernel_family, lora_inside

__all__ = [
    "HeadNorms",
    "KernelWeight",
    "LayerPart",
    "OwnKV",
    "Projection",
    "PromptKV",
    "between_attentions",
    "between_attentions_reference",
    "compiling_for",
    "decode_attention",
    "decode_attention_reference",
    "dequantize",
    "describe",
    "fp4_matmul",
    "fp4_matmul_dx",
    "fp4_matmul_dx_reference",
    "fp4_matmul_reference",
    "fp4_mlp",
    "has_kernels",
    "in_unit_order",
    "joins_gate_and_up",
    "kernel_family",
    "lora_inside",
    "marked",
    "padded_rank",
    "range_scale",
    "reads_units",
    "repack",
    "stored",
    "takes_between_attentions",
    "takes_decode_attention",
    "unpack",
    "wanted_a",
]
