"""All that a decode step computes between two attentions, as one kernel or by calls: time a layer, beside its floor.

    python -m benchmarks.fp4_block OUT.json [--models 7B 14B 32B qwen3-4b] [--m 1 8 64] [--rank 0 32] [--layers 3]
        [--dtype bfloat16 float16]

Layers follow each other in a jitted while loop as in a decode step, with attention between them, over 256 tokens of a
prompt for 8 samples and as many of their own. `us` is the loop's wall time over layers and steps. `kernels_us` is the
kernels' own (CUPTI) without attention, `matmuls_us` of those that multiply by the weights among them, `attention_us` of
attention, which makes x A^T of o where `wanted_a` says so: what adapters cost is in both. They are medians of five
loops. `launches` names the last layer's kernels, each with its us. tb_per_s counts packed bytes over `us`; both are
null where the host was too busy to tell. `error` is the largest difference of an output to the reference in plain JAX,
over the output's root mean square. The L2 holds less than one layer's weights.
"""

import argparse
import concurrent.futures
import itertools
import json
import statistics
import sys

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.fp4_layer import unit_scale
from benchmarks.fp4_matmul import random_weight
from benchmarks.report import of_device, require_gpu, write
from benchmarks.shapes import MODELS
from benchmarks.wall_time import STEPS, possible, turn_us
from pallas_kernels import (
    LayerPart,
    OwnKV,
    Projection,
    PromptKV,
    between_attentions,
    between_attentions_reference,
    decode_attention,
    reads_units,
    wanted_a,
)
from pallas_kernels.hidden import hidden_parts

EPS = 1e-6
HEAD, GROUP, TOKENS = 128, 8, 256  # size of a head, samples of a prompt, and tokens of it and of each sample


def shape_of(config):
    """Hidden size, inner size, outputs of q and of k and v each."""
    heads = config.num_attention_heads, config.num_key_value_heads
    return config.hidden_size, config.intermediate_size, *(count * config.head_dim for count in heads)


SIZES = ("7B", "14B", "32B")  # of Qwen2.5
SHAPES = {size: shape_of(MODELS[f"qwen2.5-{size.lower()}"]) for size in SIZES}
SHAPES |= {name: shape_of(config) for name, config in MODELS.items() if config.head_dim == HEAD}


def random_projection(key, n, k, rank, dtype, biased=False):
    """Weights of unit size, so that what goes through them keeps its own."""
    keys = jax.random.split(key, 4)
    weight = random_weight(keys[0], n, k, dtype)
    lora = None
    if rank:
        a = jax.random.normal(keys[2], (rank, k), dtype) / k**0.5
        lora = a, jax.random.normal(keys[3], (n, rank), dtype) / rank**0.5, jnp.float32(0.5)
    return Projection(weight, unit_scale(weight), jax.random.normal(keys[1], (n,)) if biased else None, lora)


def random_layer(key, shape, rank, dtype="bfloat16"):
    hidden, inner, heads, kv = shape
    keys = jax.random.split(key, 9)
    o, gate, up, down = (
        random_projection(key, n, k, rank, dtype)
        for key, n, k in zip(keys, (hidden, inner, inner, hidden), (heads, hidden, hidden, inner), strict=False)
    )
    qkv = tuple(
        random_projection(key, n, hidden, rank, dtype, True) for key, n in zip(keys[4:], (heads, kv, kv), strict=False)
    )
    norms = tuple(jax.random.uniform(key, (hidden,), minval=0.5, maxval=1.5) for key in keys[7:])
    return LayerPart(o, gate, up, down, qkv), norms


@jax.jit
def kernel(x, residual, layer, norms):
    a = wanted_a(x.shape[0], layer)
    hidden = None if a is None else hidden_parts(x, a, x.shape[1] // HEAD)
    return between_attentions(x, residual, layer, norms, EPS, hidden=hidden)


@jax.jit
def reference(x, residual, layer, norms):
    return between_attentions_reference(x, residual, layer, norms, EPS)


@jax.jit
def loop(qkv, residual, model, caches, steps):
    """The last q, k, v and residual stream after so many steps; `caches` of each layer, of prompts and of samples."""
    m = residual.shape[0]
    of, lengths = jnp.arange(m) // GROUP, jnp.full(m, TOKENS)
    angles = jnp.linspace(0.0, 9.0, m * HEAD // 2).reshape(m, -1)

    def body(state):
        i, qkv, stream, caches = state
        stream, after = residual, []
        for (layer, norms), (prompt, own) in zip(model, caches, strict=True):
            in_units = reads_units(m, layer)
            x, own_k, own_v, *hidden = decode_attention(
                *qkv, jnp.cos(angles), jnp.sin(angles), PromptKV(*prompt, of, lengths), OwnKV(*own, lengths),
                group=min(GROUP, m), in_units=in_units, a=wanted_a(m, layer),
            )  # fmt: skip
            stream, qkv = between_attentions(x, stream, layer, norms, EPS, in_units, *hidden)
            after.append((prompt, (own_k, own_v)))
        return i + 1, qkv, stream, after

    return jax.lax.while_loop(lambda state: state[0] < steps, body, (0, qkv, residual, caches))[1:3]


def inputs(name, m, dtype):
    hidden, _, heads, _ = SHAPES[name]
    x = jax.random.normal(jax.random.key(m), (m, heads), dtype)
    return x, jax.random.normal(jax.random.key(m + 1), (m, hidden))


def caches_of(name, m, dtype, layers):
    """Keys and values of each layer: of the prompts, and of the samples, which have room for one token more."""
    heads = SHAPES[name][3] // HEAD
    shapes = [(-(-m // GROUP), TOKENS, heads, HEAD)] * 2 + [(m, TOKENS + 1, heads, HEAD)] * 2
    keys = jax.random.split(jax.random.key(m), (layers, len(shapes)))
    made = [[jax.random.normal(key, shape, dtype) for key, shape in zip(row, shapes, strict=True)] for row in keys]
    return [((a, b), (c, d)) for a, b, c, d in made]


def loop_operands(name, m, model):
    dtype = model[0][0].dtype
    x, residual = inputs(name, m, dtype)
    kv = x[:, : SHAPES[name][3]]
    return (x, kv, kv), residual, model, caches_of(name, m, dtype, len(model))


def programs(name, m, model):
    """`kernel`, `reference` and `loop`, compiled."""
    operands = inputs(name, m, model[0][0].dtype)
    one = kernel.lower(*operands, *model[0]).compile()
    # XLA would try many kernels for products that are not timed
    true = reference.lower(*operands, *model[0]).compile(compiler_options={"xla_gpu_autotune_level": 0})
    return one, true, loop.lower(*loop_operands(name, m, model), STEPS).compile()


def kernels_of(run, *operands):
    """Each kernel of a run, in order, and its us; the loop's own left out."""
    _, ran = profiler.measure(run, aggregate=False)(*operands)
    names = "nvfp4", "inputs", "attention"
    return [(n.removesuffix("_mosaic_gpu_kernel"), 1e3 * ms) for n, ms in ran if any(name in n for name in names)]


def measure(name, m, rank, model, compiled):
    kernel, reference, loop = compiled
    dtype = model[0][0].dtype
    x, residual = inputs(name, m, dtype)
    made, again, true = (jax.tree.leaves(f(x, residual, *model[0])) for f in (kernel, kernel, reference))
    errors = [
        float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.sqrt(jnp.mean(b.astype(jnp.float32) ** 2)))
        for a, b in zip(made, true, strict=True)
    ]
    operands = loop_operands(name, m, model)
    last = jax.block_until_ready(loop(*operands, STEPS))
    us = turn_us(lambda turns: loop(*operands, turns)) / len(model)
    loops = [kernels_of(loop, *operands, 2) for _ in range(5)]
    of_layer = len(loops[0]) // (2 * len(model))

    def median(wanted):
        return statistics.median(sum(t for n, t in ran if wanted(n)) for ran in loops) / (2 * len(model))

    kernels_us, attention_us = median(lambda n: "attention" not in n), median(lambda n: "attention" in n)
    us = possible(us, kernels_us + attention_us)
    hidden, inner, heads, kv = SHAPES[name]
    size = 0.5625 * hidden * (2 * heads + 3 * inner + 2 * kv)
    return {
        "model": name, "m": m, "rank": rank, "dtype": dtype, "us": us, "tb_per_s": us and size / us * 1e-6,
        "kernels_us": kernels_us, "matmuls_us": median(lambda n: "nvfp4" in n), "attention_us": attention_us,
        "launches": [
            [n, round(statistics.median(ran[i][1] for ran in loops), 2)]
            for i, (n, _) in enumerate(loops[0]) if i >= len(loops[0]) - of_layer
        ],
        "error": max(errors), "same_again": all(bool((a == b).all()) for a, b in zip(made, again, strict=True)),
        "finite": all(bool(jnp.isfinite(v).all()) for v in jax.tree.leaves(last)),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--models", nargs="+", default=SIZES, choices=list(SHAPES))
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16"])
    args = parser.parse_args()
    require_gpu()
    rows, make = [], jax.jit(random_layer, static_argnums=(1, 2, 3))
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        for name in args.models:
            kinds = list(itertools.product(args.rank, args.dtype))
            models = {
                kind: [make(jax.random.key(layer), SHAPES[name], *kind) for layer in range(args.layers)]
                for kind in kinds
            }
            cases = [(kind, m) for m in args.m for kind in kinds]
            compiled = [pool.submit(programs, name, m, models[kind]) for kind, m in cases]
            for (kind, m), ready in zip(cases, compiled, strict=True):
                row = measure(name, m, kind[0], models[kind], ready.result())
                rows.append(row)
                printed = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "launches"}
                print(json.dumps(printed), flush=True)
                write(args.out, of_device() | {"rows": rows})
            del models, compiled
    return 0


if __name__ == "__main__":
    sys.exit(main())
