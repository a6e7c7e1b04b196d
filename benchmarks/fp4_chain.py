"""All linears of a 7B layer, 28 layers deep, in a jitted while loop: how much time lies between the kernels.

    python -m benchmarks.fp4_chain [--m 8] [--out OUT.json]

`busy` is the sum of the kernels' own device times (CUPTI) over `step_us`, the wall time of a step of the same loop
without a profiler; both are null where the host was too busy to tell.
"""

import argparse
import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.fp4_matmul import random_weight
from benchmarks.fp4_rows import MODELS
from benchmarks.report import of_device, require_gpu, write
from benchmarks.wall_time import STEPS, possible, turn_us
from pallas_kernels import stream_kernel, variants
from pallas_kernels.operands import number

LAYERS = 28


def make_step(m):
    kernels = {}
    for k, n in MODELS["7B"]:
        kernels[k, n] = stream_kernel.build(m, k, (n,), variants.config_for(m, k, (n,)))
    scale = number(2688.0 * 64)

    def linear(x, w):
        return kernels[w.k, w.n](x, w.data, scale)[0]

    def layer(x, weights):
        qkv, o, gate_up, down = weights
        h = linear(x, qkv)[:, :3584]
        x = x + linear(h, o)
        gate, up = jnp.split(linear(x, gate_up), 2, axis=1)
        x = x + linear(jax.nn.silu(gate) * up, down)
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(x.dtype)

    def loop(x, model, steps):
        def body(state):
            i, x = state
            for weights in model:
                x = layer(x, weights)
            return i + 1, x

        return jax.lax.while_loop(lambda s: s[0] < steps, body, (0, x))[1]

    return jax.jit(loop)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, default=8)
    parser.add_argument("--out")
    args = parser.parse_args()
    require_gpu()
    model = [
        [random_weight(jax.random.key(4 * i + j), n, k) for j, (k, n) in enumerate(MODELS["7B"])] for i in range(LAYERS)
    ]
    x = jax.random.normal(jax.random.key(0), (args.m, 3584), jnp.bfloat16)
    step = make_step(args.m)
    y = step(x, model, STEPS).block_until_ready()
    wall = turn_us(lambda turns: step(x, model, turns))
    _, times = profiler.measure(step, aggregate=False)(x, model, 2)
    ours = sum(t for name, t in times if "nvfp4" in name) * 1e3 / 2
    every = sum(t for _, t in times) * 1e3 / 2
    wall = possible(wall, every)
    result = of_device() | {
        "m": args.m, "layers": LAYERS,
        "step_us": wall, "matmul_us": ours, "all_kernels_us": every, "busy": wall and every / wall,
        "kernels_a_step": len(times) // 2, "finite": bool(jnp.isfinite(y).all()),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    write(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
