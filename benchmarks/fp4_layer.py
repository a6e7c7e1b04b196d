"""A layer's four matmuls in sequence, each fed by the one before, with no other kernel between, in a jitted while loop.

    python -m benchmarks.fp4_layer OUT.json [--models 7B] [--m 1 8] [--rank 0 32]

`us` is the loop's wall time over layers and steps, with launches and gaps; null, as tb_per_s then, where the host was
too busy to tell. `kernels_us` is the sum of CUPTI's kernel times of the same loop. `worst_error` is that of one layer's
calls against XLA's float32 products, over |x| |W|^T: bfloat16's rounding where they are right, 4e-3 at most. q, k, v
are one call, as are gate and up; the layers' weights exceed the L2 many times.
"""

import argparse
import functools
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.fp4_matmul import random_weight
from benchmarks.fp4_rows import MODELS, SPLITS
from benchmarks.report import of_device, require_gpu, write
from benchmarks.wall_time import STEPS, possible, turn_us
from pallas_kernels import layout, stream_kernel, variants
from pallas_kernels.operands import number
from pallas_kernels.stream_plan import StreamConfig

# K and the N of each call's matrices; the first output of a call is the next call's x
CALLS = {name: [(k, SPLITS.get((k, n), (n,))) for k, n in shapes] for name, shapes in MODELS.items()}
LAYERS = {"7B": 6, "14B": 4, "32B": 3}


def unit_scale(weight):
    """The global scale that keeps the size of x: so no call meets zeros or infinities."""
    sample = layout.KernelWeight(weight.data[:4], min(64, weight.n), weight.k)
    rms = jnp.sqrt(jnp.mean(layout.dequantize(sample, jnp.float32(1.0), jnp.float32) ** 2))
    return number(rms * np.sqrt(weight.k))


def make_model(name, rank):
    model = []
    for layer in range(LAYERS[name]):
        calls = []
        for i, (k, ns) in enumerate(CALLS[name]):
            keys = jax.random.split(jax.random.key(10 * layer + i), 3 * len(ns))
            weights = [random_weight(keys[j], n, k) for j, n in enumerate(ns)]
            loras = [None] * len(ns)
            if rank:
                loras = [
                    (jax.random.normal(a, (rank, k), jnp.bfloat16) / k**0.5,
                     jax.random.normal(b, (n, rank), jnp.bfloat16) / rank**0.5, jnp.float32(1e-3))
                    for a, b, n in zip(keys[len(ns):], keys[2 * len(ns):], ns, strict=False)
                ]  # fmt: skip
            operands = stream_kernel.lora_operands(loras, k)
            calls.append([*[w.data for w in weights], *map(unit_scale, weights), *operands])
        model.append(calls)
    return model


def make_kernels(name, m, rank, configs):
    kernels = []
    for i, (k, ns) in enumerate(CALLS[name]):
        ranks = (rank,) * len(ns) if rank else ()
        config = configs[i] if configs else variants.config_for(m, k, ns, ranks)
        kernels.append(stream_kernel.build(m, k, ns, config, ranks=ranks))
    return kernels


@functools.partial(jax.jit, static_argnums=(2, 3))
def plain_call(x, operands, ns, rank):
    """The first output of a call, and |x| |W|^T + |h| |B|^T, by XLA in float32."""
    weight = layout.KernelWeight(operands[0], ns[0], x.shape[1])
    dot = functools.partial(jnp.dot, precision="highest", preferred_element_type=jnp.float32)
    w, x = layout.dequantize(weight, operands[len(ns)], jnp.float32), x.astype(jnp.float32)
    y, size = dot(x, w.T), dot(jnp.abs(x), jnp.abs(w).T)
    if rank:
        a, b, scaling = (operands[(2 + i) * len(ns)].astype(jnp.float32) for i in range(3))
        h = scaling * dot(x, a.T)
        y, size = y + dot(h, b.T), size + dot(jnp.abs(h), jnp.abs(b).T)
    return y, size


def worst_error(kernels, calls, name, rank, x):
    """The calls of a layer in turn: the largest error of an output over its size, with the rounding to bfloat16."""
    errors = []
    for kernel, operands, (_, ns) in zip(kernels, calls, CALLS[name], strict=True):
        true, size = plain_call(x, operands, ns, rank)
        x = kernel(x, *operands)[0]
        errors.append(float((jnp.abs(x.astype(jnp.float32) - true) / size).max()))
    return max(errors)


def make_loop(kernels):
    def loop(x, model, steps):
        def body(state):
            i, x = state
            for calls in model:
                for kernel, operands in zip(kernels, calls, strict=True):
                    x = kernel(x, *operands)[0]
            return i + 1, x

        return jax.lax.while_loop(lambda s: s[0] < steps, body, (0, x))[1]

    return jax.jit(loop)


def measure(name, m, rank, model, configs=None):
    kernels = make_kernels(name, m, rank, configs)
    loop = make_loop(kernels)
    k = CALLS[name][0][0]
    x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
    y = loop(x, model, STEPS).block_until_ready()
    us = turn_us(lambda turns: loop(x, model, turns)) / LAYERS[name]
    _, ran = profiler.measure(loop, aggregate=False)(x, model, 2)
    kernels_us = sum(t for _, t in ran) * 1e3 / (2 * LAYERS[name])
    us = possible(us, kernels_us)
    size = sum(k * sum(ns) for k, ns in CALLS[name]) * 0.5625
    return {
        "model": name, "m": m, "rank": rank, "us": us, "tb_per_s": us and size / us * 1e-6, "kernels_us": kernels_us,
        "kernels_a_layer": len(ran) / (2 * LAYERS[name]),
        "graphs": "xla_gpu_enable_command_buffer=" not in os.environ.get("XLA_FLAGS", ""),
        "worst_error": worst_error(kernels, model[0], name, rank, x),
        "finite": bool(jnp.isfinite(y).all()), "checksum": float(jnp.abs(y.astype(jnp.float32)).sum()),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--models", nargs="+", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--configs", help="JSON: lists of four configurations to compare, not the table's")
    args = parser.parse_args()
    require_gpu()
    rows = []
    for name in args.models:
        for rank in args.rank:
            model = make_model(name, rank)
            for m in args.m:
                for configs in json.loads(args.configs) if args.configs else [None]:
                    chosen = configs and [StreamConfig(*c) for c in configs]
                    row = measure(name, m, rank, model, chosen) | {"configs": configs}
                    rows.append(row)
                    print({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
            del model
        write(args.out, of_device() | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
