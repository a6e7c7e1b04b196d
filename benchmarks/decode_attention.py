"""Device times of decode_attention against the bytes it must read: live keys and values, a group's prompt once.

    python -m benchmarks.decode_attention [--out benchmarks/results/h200/decode_attention.json] [--batch 1 8] [--all]
        [--kv-cache-dtype auto fp8_values fp8]

Prompts of 256 tokens, 8 samples to a prompt where the batch has as many, 256 own tokens each, caches rotated past the
L2. --all times every configuration that fits; the default is what the library chooses.
"""

import argparse
import itertools
import json
import os
import sys

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.attention import OwnKV, PromptKV, choose_attention, decode_attention
from pallas_kernels.attention_plan import AttentionConfig, AttentionPlan
from qerl_jax.format_names import KV_CACHE_DTYPES
from qerl_jax.rollout.attention import kv_dtypes

MODELS = {"7B": (28, 4, 128), "14B": (40, 8, 128), "32B": (40, 8, 128)}
PROMPT, OWN, SLOTS, GROUP = 256, 256, 512, 8
BANDWIDTH = 4.24e6  # bytes a microsecond, read
ROTATE_BYTES = 150e6


def configurations(B, H, K, E, N, sizes):
    """Those that fit and give every multiprocessor something to do, as far as there is work."""
    for slots, cluster, warps, depth in itertools.product((1, 2), (1, 2, 4, 8), (4, 8, 16), (2, 3, 4, 6)):
        config = AttentionConfig(slots, cluster, warps, depth)
        try:
            AttentionPlan(B, H, K, E, N, PROMPT, SLOTS, False, config, *sizes)
        except ValueError:
            continue
        if B // slots * K * cluster <= 1100 and (slots == 1 or B >= GROUP):
            yield config


def measure(name, B, every, cache):
    H, K, E = MODELS[name]
    dtypes = kv_dtypes(cache, jnp.dtype(jnp.bfloat16))
    sizes = [dtype.itemsize for dtype in dtypes]
    N = max(1, B // GROUP)
    key = jax.random.key(B)
    live = (N * PROMPT + B * OWN) * K * E * sum(sizes)
    copies = max(2, min(8, int(-(-ROTATE_BYTES // live))))

    def normal(i, *shape):
        return jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16)

    q, k, v = normal(0, B, H * E), normal(1, B, K * E), normal(2, B, K * E)
    angles = jax.random.uniform(key, (B, E // 2)) * 100
    of = jnp.arange(B, dtype=jnp.int32) // GROUP
    shapes = [(N, PROMPT, K, E)] * 2 + [(B, SLOTS, K, E)] * 2
    caches = [
        [normal(10 * copy + i, *shape).astype(dtypes[i % 2]) for i, shape in enumerate(shapes)]
        for copy in range(copies)
    ]
    rows = []
    chosen = choose_attention(B, K, B >= GROUP, PROMPT + OWN, *sizes)
    for config in configurations(B, H, K, E, N, sizes) if every else [chosen]:

        def run(caches, config=config):
            outs = []
            for prompt_k, prompt_v, own_k, own_v in caches:
                prompt = PromptKV(prompt_k, prompt_v, of, jnp.full(B, PROMPT, jnp.int32))
                own = OwnKV(own_k, own_v, jnp.full(B, OWN, jnp.int32))
                outs += list(decode_attention(q, k, v, jnp.cos(angles), jnp.sin(angles), prompt, own, config=config))
            return outs

        try:
            us = kernel_us(jax.jit(run), caches) / copies
        except jax.errors.JaxRuntimeError as error:
            print("refused", config, str(error)[:100])
            continue
        row = {"model": name, "batch": B, "prompt": PROMPT, "own": OWN, "kv_cache_dtype": cache}
        row |= {"config": list(vars(config).values())}
        rows.append(row | {"device_us": us, "floor_us": live / BANDWIDTH})
    return rows


def kernel_us(f, caches):
    """Device time of the attention kernels alone, without the copies that keep the caller's caches."""
    _, events = profiler.measure(f, aggregate=False)(caches)
    return sum(ms for name, ms in events if "attention" in name) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/h200/decode_attention.json")
    parser.add_argument("--models", nargs="+", default=["7B", "14B"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, nargs="+", default=["auto"])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    rows = []
    for name, batch, cache in itertools.product(args.models, args.batch, args.kv_cache_dtype):
        found = sorted(measure(name, batch, args.all, cache), key=lambda r: r["device_us"])
        for row in found[:4]:
            print(
                f"{name} batch {batch:4} {cache:10} {row['config']} {row['device_us']:8.2f} us, "
                f"floor {row['floor_us']:.2f}",
                flush=True,
            )
        rows += found
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    with open(args.out, "w") as f:
        json.dump({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
