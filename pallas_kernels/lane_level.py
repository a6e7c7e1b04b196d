"""How Mosaic GPU compiles these kernels: their programs are written lane by lane, and place their own barriers."""

import hashlib

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from . import ptx as p


def kernel(program, out_type, dtype: str, *, grid: int, warps: int, cluster: int = 0, shared: int = 0):
    """A kernel as a function of its operands.

    Args:
      program: what a lane does, under `ptx.halves(dtype)`, of the launch's context and of references to operands,
        results and, if there is any, shared memory. The kernel has its name.
      out_type: shape and dtype of each result.
      grid: the clusters, or the CTAs where there are none.
      warps: of a CTA, a multiple of 4.
      cluster: the CTAs of a cluster; 0 for no clusters.
      shared: bytes of a CTA's shared memory.
    """

    def body(*refs):
        # JAX 0.11 would name the kernels of a process by a count and hash the name: a kernel's hash would depend on
        # what was lowered before it. JAX 0.12 hashes no name, so this can go with 0.11.
        kinds = repr([(ref.shape, ref.dtype.name) for ref in refs])
        name = f"{program.__name__}_{hashlib.sha256(kinds.encode()).hexdigest()[:8]}"

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def inline(ctx, *refs):
            ctx.module.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)
            with p.halves(dtype):
                program(ctx, *refs)

        inline(*refs)

    body.__name__ = program.__name__
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[plgpu.SMEM((shared,), jnp.int8)] if shared else [],
        grid=(grid,),
        grid_names=("clusters" if cluster else "ctas",),
        cluster=(cluster,) if cluster else (),
        cluster_names=("rank",) if cluster else (),
        num_threads=warps // 4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
