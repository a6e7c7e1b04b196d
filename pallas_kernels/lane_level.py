"""How Mosaic GPU compiles these kernels: their bodies are written lane by lane, and place their own barriers."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.CompilerParams(
    lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)
