"""Which roundings move log-probabilities: a float32 forward pass in which named places are rounded to 16 bits.

    python -m benchmarks.roundings --output benchmarks/results/cpu/roundings.json    # half an hour on two cores

A sampler and a learner that round alike still differ: their sums have other orders, so that after a few layers every
rounding falls independently. Here a random network of Qwen2.5's proportions (and of its gain: std * sqrt(D) as at full
width) runs exactly, and again with the tensor cores' inputs rounded at one place or at all, in BF16 or in FP16. Printed
is the mean absolute change of the log-probabilities of random tokens, in nats. Two passes that both round differ by
about sqrt(2) times as much. For scale, what AQN's noise of sigma 0.01 changes.

How much a network makes of a rounding is a matter of its weights, so each is drawn twice: with the same deviation
everywhere, and as `random_model` draws it (`depth_scaled`). For trained networks see `benchmarks.agreement`.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import versions, write
from benchmarks.shapes import MODELS
from qerl_jax.models.config import ModelConfig

# Inputs of the products: of q, k, v; of the scores; of the weighted sum of values; of o; of gate, up; of SwiGLU, which
# the kernel for up to 16 rows does not round; of down; of the output matrix. q and k are rounded as projections leave
# them and again after their rotation.
PLACES = ("norm_1", "q", "k", "v", "probabilities", "attention", "norm_2", "gate_up", "swiglu", "final_norm")
BITS = {"bf16": (8, 7), "fp16": (5, 10)}  # of exponent and mantissa
_SIGMA, _VOCABULARY, _TOKENS = 1e-2, 8192, (2, 448)


def narrowed(name: str, narrower: int) -> ModelConfig:
    """A model with a smaller width and vocabulary, and the same depth and head size."""
    config = MODELS[name]
    heads, kv = config.num_attention_heads // narrower, max(1, config.num_key_value_heads // narrower)
    return dataclasses.replace(
        config,
        vocab_size=_VOCABULARY,
        hidden_size=heads * config.head_dim,
        intermediate_size=config.intermediate_size // narrower // 16 * 16,
        num_attention_heads=heads,
        num_key_value_heads=kv,
    )


def random_weights(config: ModelConfig, std: float, depth_scaled: bool) -> dict[str, Any]:
    """Dense weights, those of the layers stacked; `depth_scaled` as `random_model` makes them."""
    D, F, E = config.hidden_size, config.intermediate_size, config.head_dim
    Q, K, L = config.num_attention_heads * E, config.num_key_value_heads * E, config.num_hidden_layers
    shapes = {"q": (Q, D), "k": (K, D), "v": (K, D), "o": (D, Q), "gate": (F, D), "up": (F, D), "down": (D, F)}
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 2))
    layers = {name: std * jax.random.normal(next(keys), (L, *shape)) for name, shape in shapes.items()}
    embed, head = (jax.random.normal(next(keys), (config.vocab_size, D)) for _ in range(2))
    if depth_scaled:
        layers |= {name: layers[name] * (2 * L) ** -0.5 for name in ("o", "down")}
    return {"layers": layers, "embed": embed if depth_scaled else std * embed, "head": std * head}


def rotated(x_BTHE: jax.Array, theta: float) -> jax.Array:
    T, half = x_BTHE.shape[1], x_BTHE.shape[3] // 2
    angle = (jnp.arange(T)[:, None] * theta ** (-jnp.arange(half) / half))[None, :, None]
    a, b = x_BTHE[..., :half], x_BTHE[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def logps(config: ModelConfig, weights: dict[str, Any], tokens_BT: jax.Array, rounds: dict, norms) -> jax.Array:
    """Log-probabilities of the second half of the tokens [B, T / 2]. `rounds`: of each place 0, or its format in BITS,
    counted from 1; `norms` the scales of the layers' norms."""
    H, K, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    B, T = tokens_BT.shape

    def at(place: str, x: jax.Array) -> jax.Array:
        ways = [lambda x: x, *(lambda x, bits=bits: jax.lax.reduce_precision(x, *bits) for bits in BITS.values())]
        return jax.lax.switch(rounds[place], ways, x)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * scale

    def layer(x, given):
        w, (scale_1, scale_2) = given
        h = at("norm_1", norm(x, scale_1))
        q, k, v = (at(name, h @ w[name].T).reshape(B, T, -1, E) for name in "qkv")
        q, k = (at(name, rotated(part, config.rope_theta)) for name, part in (("q", q), ("k", k)))
        scores = jnp.einsum("btkqe,bske->bkqts", q.reshape(B, T, K, H // K, E), k) * E**-0.5
        shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf))
        mixed = jnp.einsum("bkqts,bske->btkqe", at("probabilities", shares), v).reshape(B, T, H * E)
        x = x + at("attention", mixed) @ w["o"].T
        h = at("norm_2", norm(x, scale_2))
        gate, up = (at("gate_up", h @ w[name].T) for name in ("gate", "up"))
        return x + at("swiglu", jax.nn.silu(gate) * up) @ w["down"].T, None

    x, _ = jax.lax.scan(layer, weights["embed"][tokens_BT], (weights["layers"], norms))
    h = at("final_norm", norm(x, jnp.ones(config.hidden_size)))[:, T // 2 - 1 : -1]
    found = jax.nn.log_softmax(h @ weights["head"].T)
    return jnp.take_along_axis(found, tokens_BT[:, T // 2 :, None], -1)[..., 0]


def measure(name: str, narrower: int, std: float, depth_scaled: bool) -> dict[str, Any]:
    """One network's changes, in nats."""
    config = narrowed(name, narrower)
    gain = std * math.sqrt(MODELS[name].hidden_size)
    weights = random_weights(config, gain / math.sqrt(config.hidden_size), depth_scaled)
    tokens = jax.random.randint(jax.random.key(1), _TOKENS, 0, config.vocab_size)
    shape = 2, config.num_hidden_layers, config.hidden_size
    clean, noise = jnp.ones(shape), _SIGMA * jax.random.normal(jax.random.key(2), shape)
    run = jax.jit(lambda rounds, norms: logps(config, weights, tokens, rounds, tuple(norms)))

    def way(places: tuple[str, ...], number: int) -> dict[str, np.int32]:
        return {place: np.int32(number if place in places else 0) for place in PLACES}

    exact = run(way((), 0), clean)

    def change(places: tuple[str, ...], number: int = 1, norms: jax.Array = clean) -> float:
        return float(jnp.abs(run(way(places, number), norms) - exact).mean())

    everywhere = {f"all_{kind}": change(PLACES, 1 + i) for i, kind in enumerate(BITS)}
    everywhere["bf16_but_gate_up"] = change(tuple(place for place in PLACES if place != "gate_up"))
    alone = {place: change((place,)) for place in PLACES}
    row = {"model": name, "narrower": narrower, "depth_scaled": depth_scaled} | everywhere
    return row | {"bf16_at": alone, "aqn": change((), 0, clean + noise)}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[f"qwen2.5-{size}b" for size in (7, 14, 32)])
    parser.add_argument("--narrower", type=int, default=7, help="times narrower than the model")
    parser.add_argument("--std", type=float, default=0.02, help="of the weights at full width")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    result = {
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "numpy"),
        "settings": {"sigma": _SIGMA, "tokens": _TOKENS, "std": arguments.std},
        "rows": rows,
    }
    for name, depth_scaled in itertools.product(arguments.model, (False, True)):
        rows.append(measure(name, arguments.narrower, arguments.std, depth_scaled))
        print(json.dumps(rows[-1]), flush=True)
        write(arguments.output, result)


if __name__ == "__main__":
    sys.exit(main())
