"""Weight formats: how a linear layer's frozen weight [N, K] is held. A plain array is the `bf16` format."""

import jax

from qerl_jax.formats.kernel_nvfp4 import KernelNVFP4, canonical, repacked
from qerl_jax.formats.mxfp4 import MXFP4Weight, quantize_mxfp4
from qerl_jax.formats.nf4 import NF4DoubleQuantWeight, NF4Weight, quantize_nf4, quantize_nf4_double_quant
from qerl_jax.formats.nvfp4 import NVFP4Weight, global_scale, quantize_nvfp4
from qerl_jax.formats.table import PACKED, PackedFormat, PackedWeight, dequantize, dequantized, format_of
from qerl_jax.option_names import FORMATS

__all__ = [
    "FORMATS",
    "PACKED",
    "KernelNVFP4",
    "MXFP4Weight",
    "NF4DoubleQuantWeight",
    "NF4Weight",
    "NVFP4Weight",
    "PackedFormat",
    "PackedWeight",
    "Weight",
    "canonical",
    "dequantize",
    "dequantized",
    "format_of",
    "global_scale",
    "quantize_mxfp4",
    "quantize_nf4",
    "quantize_nf4_double_quant",
    "quantize_nvfp4",
    "repacked",
]

Weight = jax.Array | PackedWeight
