"""Device times of decode_attention against the bytes it must read: live keys and values, a group's prompt once.

    python -m benchmarks.decode_attention [--out OUT.json] [--batch 1 8] [--prompt 256 2048] [--all]
        [--contexts even refilled] [--config 1 1 4 3 ...] [--kv-cache-dtype auto fp8_values fp8]

Prompts of --prompt tokens, 8 samples to a prompt where the batch has as many, caches rotated past the L2. Contexts are
`even`, 256 own tokens each, or `refilled`: what slots hold at MOMENTS steps of `benchmarks.refill`, beside `mean`, as
many tokens each as its completions have on average half way, and `one`, where one sample has 4000. --config times
configurations (AttentionConfig's numbers), --all every one that fits; the default is what the library chooses.
"""

import argparse
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.refill import long_tailed
from benchmarks.report import of_device, require_gpu, write
from pallas_kernels.attention import OwnKV, PromptKV, choose_attention, decode_attention
from pallas_kernels.attention_plan import AttentionConfig, AttentionPlan
from qerl_jax.option_names import KV_CACHE_DTYPES
from qerl_jax.rollout.attention import kv_dtypes

MODELS = {"7B": (28, 4, 128), "14B": (40, 8, 128), "32B": (40, 8, 128)}
OWN, SLOTS, GROUP = 256, 512, 8
SHORTEST, LONGEST, PROMPTS, MOMENTS = 64, 4096, 256, 12  # of the refilled engine's run
BANDWIDTH = 4.24e6  # bytes a microsecond, read
ROTATE_BYTES = 150e6


def configurations(B, H, K, E, N, P, sizes):
    """Those that fit and give every multiprocessor something to do, as far as there is work."""
    cuts = (1, 2), (1, 2, 4, 8), (4, 8, 16), (2, 3, 4, 6), (1, 2, 4)
    for config in itertools.starmap(AttentionConfig, itertools.product(*cuts)):
        try:
            plan = AttentionPlan(B, H, K, E, N, P, SLOTS, False, config, *sizes)
        except ValueError:
            continue
        if plan.ctas <= 1100 and (plan.samples == 1 or B >= GROUP):
            yield config


def refilled(slots: int) -> np.ndarray:
    """Own tokens of each slot [MOMENTS, slots] at equal distances while samples wait: a slot whose sample has ended
    goes on with the next one."""
    waiting = iter(np.repeat(long_tailed(PROMPTS, SHORTEST, LONGEST), GROUP).tolist())
    ends = np.array([next(waiting) for _ in range(slots)])
    own, steps = np.zeros(slots, int), []
    while True:
        steps.append(own.copy())
        own += 1
        for slot in np.flatnonzero(own >= ends):
            following = next(waiting, None)
            if following is None:
                return np.stack(steps)[np.linspace(0, len(steps) - 1, MOMENTS + 2).astype(int)[1:-1]]
            own[slot], ends[slot] = 0, following


def contexts_of(kind: str, B: int) -> dict[str, np.ndarray]:
    """Own tokens [moments, B] by name."""
    if kind == "even":
        return {"even": np.full((1, B), OWN)}
    half = int(np.mean(long_tailed(PROMPTS, SHORTEST, LONGEST))) // 2
    one = np.full((1, B), half)
    one[0, B // 2] = 4000
    return {"refilled": refilled(B), "mean": np.full((1, B), half), "one": one}


def measure(name, B, P, configs, every, cache, kind):
    H, K, E = MODELS[name]
    dtypes = kv_dtypes(cache, jnp.dtype(jnp.bfloat16))
    sizes = [dtype.itemsize for dtype in dtypes]
    N, C = max(1, B // GROUP), SLOTS if kind == "even" else LONGEST
    key = jax.random.key(B)
    contexts = contexts_of(kind, B)

    def live(own) -> float:
        return (N * P + own.sum(1).mean()) * K * E * sum(sizes)

    copies = max(2, min(8, int(-(-ROTATE_BYTES // min(map(live, contexts.values()))))))

    def normal(i, *shape):
        return jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16)

    q, k, v = normal(0, B, H * E), normal(1, B, K * E), normal(2, B, K * E)
    angles = jax.random.uniform(key, (B, E // 2)) * 100
    of = jnp.arange(B, dtype=jnp.int32) // GROUP
    shapes = [(N, P, K, E)] * 2 + [(B, C, K, E)] * 2
    caches = [
        [normal(10 * copy + i, *shape).astype(dtypes[i % 2]) for i, shape in enumerate(shapes)]
        for copy in range(copies)
    ]
    rows = []
    group = GROUP if B >= GROUP and kind == "even" else 1  # slots that are refilled stand in no groups
    if every:
        configs = configurations(B, H, K, E, N, P, sizes)
    for config in configs or [choose_attention(B, K, group, P, C, *sizes)]:

        def run(caches, own_lengths, config=config):
            outs = []
            for prompt_k, prompt_v, own_k, own_v in caches:
                prompt = PromptKV(prompt_k, prompt_v, of, jnp.full(B, P, jnp.int32))
                own = OwnKV(own_k, own_v, own_lengths)
                outs += list(decode_attention(q, k, v, jnp.cos(angles), jnp.sin(angles), prompt, own, config=config))
            return outs

        row = {"model": name, "batch": B, "prompt": P, "kv_cache_dtype": cache}
        row |= {"config": list(vars(config).values())}
        f = jax.jit(run)
        for contexts_name, moments in contexts.items():
            try:
                us = np.mean([kernel_us(f, caches, jnp.asarray(own, jnp.int32)) for own in moments]) / copies
            except jax.errors.JaxRuntimeError as error:
                print("refused", config, str(error)[:100])
                break
            row |= {f"{contexts_name}_us": us, f"{contexts_name}_floor_us": live(moments) / BANDWIDTH}
        else:
            rows.append(row)
    return rows


def kernel_us(f, *operands):
    """Device time of the attention kernels alone, without the copies that keep the caller's caches."""
    _, events = profiler.measure(f, aggregate=False)(*operands)
    return sum(ms for name, ms in events if "attention" in name) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--models", nargs="+", default=["7B", "14B"], choices=list(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, nargs="+", default=[256], help="tokens of a prompt")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, nargs="+", default=["auto"])
    parser.add_argument("--contexts", choices=["even", "refilled"], nargs="+", default=["even"])
    parser.add_argument("--config", nargs="+", type=int, action="append", default=[])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if args.all and args.config:
        parser.error("--all times every configuration that fits; --config names those to time: give one of them")
    require_gpu()
    configs, rows = [AttentionConfig(*config) for config in args.config], []
    cases = itertools.product(args.models, args.batch, args.prompt, args.kv_cache_dtype, args.contexts)
    for name, batch, prompt, cache, kind in cases:
        found = measure(name, batch, prompt, configs, args.all, cache, kind)
        first = "even_us" if kind == "even" else "refilled_us"
        for row in sorted(found, key=lambda row: row[first])[:8]:
            times = " ".join(f"{what} {value:.2f}" for what, value in row.items() if what.endswith("_us"))
            print(f"{name} batch {batch:4} prompt {prompt:4} {cache:10} {row['config']} {times}", flush=True)
        rows += found
        write(args.out, of_device() | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
