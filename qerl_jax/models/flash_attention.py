"""Causal attention by cuDNN on a GPU, whose gradient can be had the same bit for bit each time.

cuDNN's backward pass adds the parts of a query's gradient in the order in which they are ready, unless XLA asks it for
a fixed one, which it does in a program that is compiled without nondeterministic operations. But XLA then writes that
into the first of several equal calls only, and does not find the others when the program runs (`IndexError:
raw_hash_map<>::at`; `HloCustomCallToCuDnnGraph` in its cudnn_custom_call_compiler.cc). So the calls must say it
themselves (`force_deterministic` of CudnnfMHABackendConfig), and only in such a program, or the same happens the other
way round. `jax.nn.dot_product_attention` has no argument for it. So under `jax.grad` the two calls are made here, as it
makes them but for that field. (It also refuses an odd number of positions under `jax.grad`, which cuDNN does not.)

Dimension letters: B rows, T positions, H query heads, K key-value heads, E head size.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

# Without kernels of Triton for products: cuBLAS's are as fast in an update, which then compiles in a seventh less time.
_PROGRAM_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
# Whether what is being traced becomes such a program; it is one anyway where XLA_FLAGS asks for it.
_deterministic = jax.make_user_context(
    re.search(
        r"--xla_gpu_(exclude_nondeterministic|deterministic)_ops(=true|=1|\s|$)", os.environ.get("XLA_FLAGS", ""), re.I
    )
    is not None
)
_DTYPES = {"bfloat16": "BF16", "float16": "F16"}
# What a product contracts and what it keeps apart, of its left and its right side: queries, keys, values and the output
# are [B, T, heads, E], probabilities P [B, H, T, T].
_FORWARD = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),  # q k^T = P
    "bmm2": ((3, 1), ((0, 1), (0, 2))),  # P v = o
}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # dP^T q = dk
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),  # dP k = dq
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # P^T do = dv
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),  # do v^T = dP
}
_Products = dict[str, tuple[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]]
# cuDNN's gradient in a fixed order keeps 16 bits for each query and key, of 28 heads with 16,640 positions 15.5 GB: so
# it is made of no more heads at once than have 2.5 GB.
_MOST_SCORES = 1_250_000_000
_HEADS_BEFORE_POSITIONS = (0, 2, 1, 3)  # of results: [B, heads, T, E] in the shape, [B, T, heads, E] in memory


def deterministic_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a function that gives the same bits each time it is called, on a GPU as on a CPU.

    On a GPU attention takes a fifth longer with its gradient, and matrix products are cuBLAS's alone. Kernels that XLA
    has tuned may differ from one compiled program to the next: bits are kept where the program is
    (`jax_compilation_cache_dir`).

    Args:
      function: to be compiled as a program of its own, not inside another one.
      options: of `jax.jit`.
    """

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _deterministic(True):
            return function(*args, **kwargs)

    inner = getattr(function, "func", function)  # of a functools.partial
    traced.__name__ = getattr(inner, "__name__", type(inner).__name__)
    on_gpu = jax.default_backend() == "gpu"
    return jax.jit(traced, compiler_options=_PROGRAM_OPTIONS if on_gpu else None, **options)


@jax.custom_vjp
def flash_attention(q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array) -> jax.Array:
    """Grouped-query causal attention, scores divided by sqrt(E).

    Args:
      q_BTHE: bfloat16 or float16; E at most 256 (128 before Hopper) and a multiple of 8.
      k_BTKE: of the same dtype; K divides H.
      v_BTKE: likewise.

    Returns:
      [B, T, H, E] in their dtype.
    """
    return jax.nn.dot_product_attention(q_BTHE, k_BTKE, v_BTKE, is_causal=True, implementation="cudnn")


def _fwd(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    o, log_sums = flash_forward(q, k, v)
    return o, (q, k, v, log_sums, o)


def _bwd(kept: tuple[jax.Array, ...], do_BTHE: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, log_sums, o = kept
    return flash_backward(q, k, v, log_sums, do_BTHE, o)


flash_attention.defvjp(_fwd, _bwd)


@custom_vmap
def flash_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`flash_attention`'s result o, and each query's float32 log of the sum of its scores' exponentials [B, H, T].
    (`return_residual` of JAX's function gives that rounded.)"""
    B, T, H, E = q.shape
    shapes = [
        jax.ShapeDtypeStruct((B, H, T, E), q.dtype),
        jax.ShapeDtypeStruct((B, H, T), jnp.float32),
    ]
    o, log_sums = _call("__cudnn$fmhaSoftmax", _FORWARD, shapes, q, k, v)
    return o.transpose(_HEADS_BEFORE_POSITIONS), log_sums


@custom_vmap
def flash_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, log_sums: jax.Array, do: jax.Array, o: jax.Array
) -> tuple[jax.Array, ...]:
    """dq, dk, dv of what `flash_forward` was given and gave, and do."""
    if _deterministic.value:
        return backward_in_parts(q, k, v, log_sums, do, o)
    return _backward(q, k, v, log_sums, do, o)


def backward_in_parts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_sums: jax.Array,
    do: jax.Array,
    o: jax.Array,
    most_scores: int = _MOST_SCORES,
) -> tuple[jax.Array, ...]:
    """`_backward` of all heads or, where they would keep more scores than that, of some after the others: of key-value
    heads with their queries, or of one of them and some of its query heads."""
    (B, T, H, _), K = q.shape, k.shape[2]
    at_once = max(1, most_scores // (B * T**2))
    if at_once >= H:
        return _backward(q, k, v, log_sums, do, o)
    together = max((n for n in range(1, K) if K % n == 0 and n * H // K <= at_once), default=1)

    def add(i: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def some(x: jax.Array, axis: int = 2) -> jax.Array:
            size = x.shape[axis] * together // K
            return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)

        gradients = _by_queries(at_once, some(q), some(k), some(v), some(log_sums, 1), some(do), some(o))
        updates = zip(found, gradients, (i * new.shape[2] for new in gradients), strict=True)
        return tuple(jax.lax.dynamic_update_slice_in_dim(*update, axis=2) for update in updates)

    return jax.lax.fori_loop(0, K // together, add, tuple(map(jnp.zeros_like, (q, k, v))))


def _by_queries(
    at_once: int, q: jax.Array, k: jax.Array, v: jax.Array, log_sums: jax.Array, do: jax.Array, o: jax.Array
) -> tuple[jax.Array, ...]:
    """`_backward` of at most so many heads or, of one key-value head, of some of its query heads after the others. What
    these add to the gradients of keys and values is rounded before it is added up, as in cuDNN."""
    H = q.shape[2]
    if at_once >= H:
        return _backward(q, k, v, log_sums, do, o)
    gradients = []
    for part in np.array_split(np.arange(H), -(-H // at_once)):
        at = slice(part[0], part[-1] + 1)
        keys, values = (jnp.repeat(x, len(part), axis=2) for x in (k, v))
        gradients.append(_backward(q[:, :, at], keys, values, log_sums[:, at], do[:, :, at], o[:, :, at]))
    dq, *of_keys = (jnp.concatenate(of_parts, axis=2) for of_parts in zip(*gradients, strict=True))
    return dq, *(x.sum(2, jnp.float32, keepdims=True).astype(x.dtype) for x in of_keys)


def _backward(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    shapes = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (q, k, v)]
    gradients = _call("__cudnn$fmhaSoftmaxBackward", _BACKWARD, shapes, q, k, v, *rest)
    return tuple(x.transpose(_HEADS_BEFORE_POSITIONS) for x in gradients)


def _call(
    name: str, products: _Products, shapes: list[jax.ShapeDtypeStruct], q: jax.Array, k: jax.Array, *rest: jax.Array
) -> Sequence[jax.Array]:
    layouts = [_HEADS_BEFORE_POSITIONS if len(s.shape) == 4 else tuple(range(len(s.shape))) for s in shapes]
    call = jax.ffi.ffi_call(
        name,
        [*shapes, jax.ShapeDtypeStruct((0,), jnp.uint8)],  # the last is cuDNN's workspace
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=_config(products, q, k),
    )
    return call(q, k, *rest)[:-1]


def _config(products: _Products, q: jax.Array, k: jax.Array) -> str:
    """XLA's GpuBackendConfig as JSON: what the call computes."""
    (B, T, H, E), S = q.shape, k.shape[1]
    config: dict[str, Any] = {
        "algorithm": {"math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"}, "is_cudnn_frontend": True},
        "fmha_scale": 1 / math.sqrt(E),
        "intermediate_tensor_shape": {
            "element_type": _DTYPES[q.dtype.name],
            "dimensions": [B, H, T, S],
            "layout": {"minor_to_major": [3, 2, 1, 0]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL",
        "force_deterministic": _deterministic.value,
        "seed": 42,
        "max_seg_per_batch": 1,
    }
    for name, (contracted, kept) in products.items():
        sides = {side: (contracted[i], kept[i]) for i, side in enumerate(("lhs", "rhs"))}
        config[f"{name}_dot_dimension_numbers"] = {
            f"{side}_contracting_dimensions": [dim] for side, (dim, _) in sides.items()
        } | {f"{side}_batch_dimensions": list(dims) for side, (_, dims) in sides.items()}
    return json.dumps({"cudnn_fmha_backend_config": config})


@flash_forward.def_vmap
def _fold_forward(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, tuple[bool, ...]]:
    return _folded(flash_forward, axis_size, in_batched, operands)


@flash_backward.def_vmap
def _fold_backward(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, tuple[bool, ...]]:
    return _folded(flash_backward, axis_size, in_batched, operands)


def _folded(function: Any, size: int, batched: list[bool], operands: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    """`function` of batches, as one call of more rows."""
    each = zip(operands, batched, strict=True)
    full = [x if is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in each]
    results = function(*(x.reshape(-1, *x.shape[2:]) for x in full))
    return tuple(y.reshape(size, -1, *y.shape[1:]) for y in results), (True,) * len(results)
