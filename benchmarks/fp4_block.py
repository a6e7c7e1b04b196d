"""All that a decode step computes between two attentions, as one kernel or by calls: time a layer, beside its floor.

    python -m benchmarks.fp4_block OUT.json [--models 7B 14B 32B] [--m 1 8 64] [--rank 0 32]

Layers follow each other in a jitted while loop, q of one as the attention's output of the next, with nothing between.
`us` is the loop's wall time over layers and steps, `kernels_us` the kernels' own (CUPTI) and `matmuls_us` those that
multiply by the weights among them; tb_per_s counts packed bytes over `us`. `error` is the largest difference of an
output to the reference in plain JAX, over the output's root mean square.
"""

import argparse
import collections
import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.fp4_layer import LAYERS, STEPS, turn_us, unit_scale
from benchmarks.fp4_matmul import random_weight
from benchmarks.shapes import MODELS
from pallas_kernels import LayerPart, Projection, between_attentions, between_attentions_reference

EPS = 1e-6


def shape_of(config):
    """Hidden size, inner size, outputs of q and of k and v each."""
    heads = config.num_attention_heads, config.num_key_value_heads
    return config.hidden_size, config.intermediate_size, *(count * config.head_dim for count in heads)


SHAPES = {name: shape_of(MODELS[f"qwen2.5-{name.lower()}"]) for name in LAYERS}


def random_projection(key, n, k, rank, biased=False):
    """Weights of unit size, so that what goes through them keeps its own."""
    keys = jax.random.split(key, 4)
    weight = random_weight(keys[0], n, k)
    lora = None
    if rank:
        a = jax.random.normal(keys[2], (rank, k), jnp.bfloat16) / k**0.5
        lora = a, jax.random.normal(keys[3], (n, rank), jnp.bfloat16) / rank**0.5, jnp.float32(0.5)
    return Projection(weight, unit_scale(weight), jax.random.normal(keys[1], (n,)) if biased else None, lora)


def random_layer(key, shape, rank):
    hidden, inner, heads, kv = shape
    keys = jax.random.split(key, 9)
    o, gate, up, down = (
        random_projection(key, n, k, rank)
        for key, n, k in zip(keys, (hidden, inner, inner, hidden), (heads, hidden, hidden, inner), strict=False)
    )
    qkv = tuple(
        random_projection(key, n, hidden, rank, True) for key, n in zip(keys[4:], (heads, kv, kv), strict=False)
    )
    norms = tuple(jax.random.uniform(key, (hidden,), minval=0.5, maxval=1.5) for key in keys[7:])
    return LayerPart(o, gate, up, down, qkv), norms


@jax.jit
def kernel(x, residual, layer, norms):
    return between_attentions(x, residual, layer, norms, EPS)


@jax.jit
def reference(x, residual, layer, norms):
    return between_attentions_reference(x, residual, layer, norms, EPS)


@jax.jit
def loop(x, residual, model, steps):
    def body(state):
        i, x, _ = state
        stream = residual
        for layer, norms in model:
            stream, (x, *_) = between_attentions(x, stream, layer, norms, EPS)
        return i + 1, x, stream

    return jax.lax.while_loop(lambda state: state[0] < steps, body, (0, x, residual))[1:]


def measure(name, m, rank, model):
    hidden, inner, heads, kv = SHAPES[name]
    x = jax.random.normal(jax.random.key(m), (m, heads), jnp.bfloat16)
    residual = jax.random.normal(jax.random.key(m + 1), (m, hidden))
    made, again, true = (jax.tree.leaves(f(x, residual, *model[0])) for f in (kernel, kernel, reference))
    errors = [
        float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.sqrt(jnp.mean(b.astype(jnp.float32) ** 2)))
        for a, b in zip(made, true, strict=True)
    ]
    last = jax.block_until_ready(loop(x, residual, model, STEPS))
    us = turn_us(lambda turns: loop(x, residual, model, turns)) / len(model)
    _, kernels = profiler.measure(loop, aggregate=False)(x, residual, model, 2)
    took = collections.Counter()
    for ran, t in kernels:
        if "nvfp4" in ran or "matmul_inputs" in ran:  # not the loop's own
            took[ran] += t * 1e3 / (2 * len(model))
    size = 0.5625 * hidden * (2 * heads + 3 * inner + 2 * kv)
    return {
        "model": name, "m": m, "rank": rank, "us": float(us), "tb_per_s": float(size / us * 1e-6),
        "kernels_us": sum(took.values()), "matmuls_us": sum(t for ran, t in took.items() if "nvfp4" in ran),
        "error": max(errors), "same_again": all(bool((a == b).all()) for a, b in zip(made, again, strict=True)),
        "finite": all(bool(jnp.isfinite(v).all()) for v in last),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, nargs="+", default=[0, 32])
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for rank in args.rank:
            model = [random_layer(jax.random.key(layer), SHAPES[name], rank) for layer in range(LAYERS[name])]
            for m in args.m:
                row = measure(name, m, rank, model)
                rows.append(row)
                print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            del model
    with open(args.out, "w") as f:
        json.dump({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
