"""NVFP4 in the order in which the GPU kernels read it: the same bytes as `NVFP4Weight`, repacked once after loading.

Files, digests and exports use the canonical order (`canonical`); the kernel's own is described in
`pallas_kernels.layout`.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels
from qerl_jax.formats.nvfp4 import NVFP4Weight
from qerl_jax.trees import Tree


class KernelNVFP4(Tree):
    """A packed weight [N, K]: its tiles, and the global scale as in `NVFP4Weight`."""

    tiles: pallas_kernels.KernelWeight
    global_scale: jax.Array
    scale_multiplies: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def divisor(self) -> jax.Array:
        """As `NVFP4Weight.divisor`."""
        return 1 / self.global_scale if self.scale_multiplies else self.global_scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.tiles.n, self.tiles.k


def repacked(weight: NVFP4Weight, dtype: DTypeLike = jnp.bfloat16) -> KernelNVFP4:
    """The weight in the order of the kernels that multiply in `dtype`, the network's compute dtype; there are none for
    float32, whose weights are in bfloat16's."""
    takes = jnp.float16 if dtype == jnp.float16 else jnp.bfloat16
    tiles = pallas_kernels.repack(weight.packed, weight.scale, takes)
    return KernelNVFP4(tiles, weight.global_scale, weight.scale_multiplies)


def canonical(weight: KernelNVFP4) -> NVFP4Weight:
    """The inverse of `repacked`, byte for byte."""
    packed, scale = pallas_kernels.unpack(weight.tiles)
    return NVFP4Weight(packed, scale, weight.global_scale, weight.scale_multiplies)
