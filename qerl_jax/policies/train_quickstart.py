"""Trains the quickstart policy from nothing and writes it as a Hugging Face folder.

    python -m qerl_jax.policies.train_quickstart --output my_policy

A Qwen2-architecture network of 0.9M parameters learns the word problems of `qerl_jax.data.arithmetic`, 80% of them
answered directly and 20% worked out. It can do the steps but not the whole problem in one pass, so the policy has a
strategy that reinforcement learning can find. The last part of the training sees its own weights quantized to NVFP4
(straight-through gradient), so that the policy survives the quantization that the library applies when loading it.

Only split `pretrain` is seen. Everything is a function of the seed: problems by (seed, step), weights by the seed.

The shipped folder came from this command on one NVIDIA H200 with JAX 0.11.2, in 144 s beside four other trainings
(quickstart/training.json holds the versions and the figures measured there). On two CPU cores a step takes about 2 s,
so the 4000 steps take over two hours. Another device rounds differently and gives other weights of the same kind.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax.data import arithmetic
from qerl_jax.durable import not_writable, refuse_no_folder, where_it_leads
from qerl_jax.errors import UserError
from qerl_jax.formats import dequantize
from qerl_jax.models.attention import causal_attention
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_model, quantize
from qerl_jax.models.params import PROJECTIONS, Layer, Model, parameter_count
from qerl_jax.models.rope import rotated
from qerl_jax.models.saving import save_model
from qerl_jax.models.transformer import rms_norm, rotation_at
from qerl_jax.policies.tokenizer import EOS, PAD, PieceEncoder, build_tokenizer, save_tokenizer
from qerl_jax.rollout import Prompts, SamplingSettings, generate

STEPS_PER_CALL = 50
PROMPT_SLOTS, COMPLETION_SLOTS = 40, 40
MAX_POSITIONS = 128


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the shipped policy was trained with; every field is a command-line flag."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    steps: int = 4000
    rows: int = 512
    learning_rate: float = 3e-3
    direct_share: float = 0.8
    quantized_share: float = 0.2
    seed: int = 0


class Rows(NamedTuple):
    """Whole problems, one a row: tokens [B, T] int32, and where the completion starts and ends (EOS included) [B]."""

    tokens: Any
    starts: Any
    ends: Any


def network(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """The shape of the policy: heads of 32, tied embeddings, every linear's input a multiple of 16 (NVFP4's block)."""
    return ModelConfig(
        model_type="qwen2",
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        attention_bias=True,
        max_position_embeddings=MAX_POSITIONS,
    )


def rows_of(encode: PieceEncoder, problems: arithmetic.Problems, worked: bool) -> Rows:
    """Prompt, completion and EOS of every problem, padded on the right to a length that does not depend on them."""
    prompt = arithmetic.prompt_pieces(problems)
    completion = arithmetic.worked_pieces(problems) if worked else arithmetic.direct_pieces(problems)
    end: arithmetic.Piece = ((EOS,), np.zeros(len(problems.answers), np.int64))
    tokens, lengths = encode([*prompt, *completion, end])
    _, starts = encode(prompt)
    slots = PROMPT_SLOTS + (COMPLETION_SLOTS if worked else 8)
    assert lengths.max() <= slots, f"a problem of {lengths.max()} tokens does not fit into {slots}"
    return Rows(tokens[:, :slots], starts, lengths)


def batches(encode: PieceEncoder, recipe: Recipe, call: int) -> tuple[Rows, Rows]:
    """The direct and the worked rows of STEPS_PER_CALL training steps, stacked; a function of (seed, call)."""
    count = STEPS_PER_CALL * recipe.rows
    problems = arithmetic.generate(recipe.seed, "pretrain", np.arange(call * count, (call + 1) * count))
    direct = round(recipe.direct_share * recipe.rows)

    def part(rows: slice, worked: bool) -> Rows:
        fields = (field.reshape(STEPS_PER_CALL, recipe.rows, *field.shape[1:])[:, rows] for field in problems)
        flat = arithmetic.Problems(*(field.reshape(-1, *field.shape[2:]) for field in fields))
        arrays = rows_of(encode, flat, worked)
        return Rows(*(array.reshape(STEPS_PER_CALL, -1, *array.shape[1:]) for array in arrays))

    return part(slice(direct), worked=False), part(slice(direct, None), worked=True)


def logits(model: Model, tokens_BT: jax.Array) -> jax.Array:
    """As `qerl_jax.models.transformer.logits`, but with gradients of the weights, which the library's linear layers
    withhold by design."""
    config = model.config
    B, T = tokens_BT.shape
    turn = rotation_at(config, jnp.broadcast_to(jnp.arange(T), (B, T)))

    def heads(x: jax.Array, weight: Any, bias: Any) -> jax.Array:
        return (x @ weight.T + bias).reshape(B, T, -1, config.head_dim)

    x_BTD = model.base.embed[tokens_BT]
    layers: tuple[Any, ...] = model.base.layers  # every projection is a plain array here
    for layer in layers:
        h = rms_norm(x_BTD, layer.input_norm, config.rms_norm_eps)
        q = rotated(heads(h, layer.q_proj, layer.q_bias), *turn)
        k = rotated(heads(h, layer.k_proj, layer.k_bias), *turn)
        attended = causal_attention(q, k, heads(h, layer.v_proj, layer.v_bias), None)
        x_BTD += attended.reshape(B, T, -1) @ layer.o_proj.T
        h = rms_norm(x_BTD, layer.post_attention_norm, config.rms_norm_eps)
        x_BTD += (jax.nn.silu(h @ layer.gate_proj.T) * (h @ layer.up_proj.T)) @ layer.down_proj.T
    return rms_norm(x_BTD, model.base.final_norm, config.rms_norm_eps) @ model.base.embed.T


def fake_quantized(model: Model) -> Model:
    """The float32 model with the projections' values after NVFP4; gradients pass straight through (Bengio et al. 2013,
    arXiv 1308.3432)."""

    def rounded(layer: Layer, packed: Layer) -> Layer:
        def through(name: str) -> jax.Array:
            dense = getattr(layer, name)
            return dense + jax.lax.stop_gradient(dequantize(getattr(packed, name), dense.dtype) - dense)

        return layer.replace(**{name: through(name) for name in PROJECTIONS})

    packed = quantize(stored(model))
    layers = tuple(map(rounded, model.base.layers, packed.base.layers))
    return model.replace(base=model.base.replace(layers=layers))


def stored(model: Model) -> Model:
    """The weights as the file holds them: everything rounded to bfloat16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)


def dense(model: Model) -> Model:
    """The file read into float32 without quantization: the control for what quantization costs."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), stored(model))


def loaded(model: Model) -> Model:
    """The file as the library loads it: NVFP4 projections, the rest in float32."""
    packed = quantize(stored(model))
    layers = tuple(
        layer.replace(**{name: getattr(quantized, name) for name in PROJECTIONS})
        for layer, quantized in zip(dense(model).base.layers, packed.base.layers, strict=True)
    )
    return model.replace(base=dense(model).base.replace(layers=layers))


def loss(model: Model, parts: tuple[Rows, Rows]) -> jax.Array:
    """Mean cross-entropy over the completion tokens of both parts; prompts are not learned."""
    total, count = jnp.float32(0), jnp.float32(0)
    for tokens_BT, starts_B, ends_B in parts:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(model, tokens_BT[:, :-1]), tokens_BT[:, 1:])
        place = jnp.arange(1, tokens_BT.shape[1])
        mask = (place >= starts_B[:, None]) & (place < ends_B[:, None])
        total, count = total + jnp.sum(losses * mask), count + jnp.sum(mask)
    return total / count


def train(recipe: Recipe, report: Callable[[str], None] = print) -> Model:
    """Runs the recipe and returns the float32 model.

    Raises:
      ValueError: `recipe.steps` is not a multiple of the steps of one call.
    """
    if recipe.steps % STEPS_PER_CALL:
        raise ValueError(f"steps is {recipe.steps}; allowed: a multiple of {STEPS_PER_CALL}, which one call runs")
    tokenizer = build_tokenizer()
    encode = PieceEncoder(tokenizer)
    model = init_model(jax.random.key(recipe.seed), network(recipe, tokenizer.get_vocab_size()))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, min(500, recipe.steps // 10), recipe.steps, 0.01 * recipe.learning_rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule, b2=0.98, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree)
        ),
    )

    def one_step(carry: Any, parts: tuple[Rows, Rows], quantized: bool) -> tuple[Any, jax.Array]:
        model, state = carry

        def objective(model: Model) -> jax.Array:
            return loss(fake_quantized(model) if quantized else model, parts)

        value, gradient = jax.value_and_grad(objective)(model)
        updates, state = optimizer.update(gradient, state, model)
        return (optax.apply_updates(model, updates), state), value

    def many_steps(carry: Any, stacked: Any, quantized: bool) -> tuple[Any, jax.Array]:
        carry, values = jax.lax.scan(lambda c, parts: one_step(c, parts, quantized), carry, stacked)
        return carry, values.mean()

    run = jax.jit(many_steps, donate_argnums=0, static_argnums=2)

    calls = recipe.steps // STEPS_PER_CALL
    first_quantized = round(calls * (1 - recipe.quantized_share))
    model = jax.tree.map(jnp.copy, model)  # its norm scales may share a buffer, which donation forbids
    carry = (model, optimizer.init(model))
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ahead = [pool.submit(batches, encode, recipe, call) for call in range(min(8, calls))]
        for call in range(calls):
            stacked = ahead.pop(0).result()
            if call + 8 < calls:
                ahead.append(pool.submit(batches, encode, recipe, call + 8))
            carry, value = run(carry, stacked, call >= first_quantized)
            if call % 20 == 19 or call == calls - 1:
                done = (call + 1) * STEPS_PER_CALL
                report(f"step {done}/{recipe.steps} loss {float(value):.4f} {time.monotonic() - began:.0f} s")
    return carry[0]


def evaluate(model: Model, split: str = "eval", count: int = 2048, seed: int = 1) -> dict[str, float]:
    """Shares of `count` problems of a split, at temperature 1 and greedy, and with the worked way forced by its first
    token: accuracy, share answered in the worked way, accuracy within each way, share of well-formed completions."""
    tokenizer = build_tokenizer()
    problems = arithmetic.generate(seed, split, np.arange(count))
    arithmetic.check_split(problems.operands, split)
    tokens, lengths = PieceEncoder(tokenizer)(arithmetic.prompt_pieces(problems))
    space = tokenizer.encode(" 1").ids[0]
    tokens = tokens[:, :PROMPT_SLOTS]
    forced = tokens.copy()
    forced[np.arange(count), lengths] = space
    ids = tokenizer.get_vocab()
    sample = jax.jit(generate, static_argnames=("settings",))
    figures: dict[str, float] = {}
    for name, temperature, force in (("t1", 1.0, False), ("greedy", 0.0, False), ("worked_t1", 1.0, True)):
        prompts = Prompts(
            jnp.asarray(forced if force else tokens), jnp.asarray(lengths + force), jnp.arange(count, dtype=jnp.int32)
        )
        settings = SamplingSettings(COMPLETION_SLOTS + 8, (ids[EOS],), ids[PAD], temperature)
        out = sample(model, None, prompts, jax.random.key(seed), settings)
        texts = tokenizer.decode_batch([row[:n] for row, n in zip(out.tokens.tolist(), out.lengths, strict=True)])
        ends = [re.search(r"#### ([0-9]+)$", text) for text in texts]
        well_formed = np.asarray([match is not None for match in ends], bool) & np.asarray(out.terminated)
        answers = [-1 if match is None else int(match[1]) for match in ends]
        right = well_formed & (np.asarray(answers) == problems.answers)
        figures |= {f"{name}/accuracy": right.mean(), f"{name}/well_formed": well_formed.mean()}
        if not force:
            worked = np.asarray(["=" in text for text in texts], bool)
            figures[f"{name}/share_worked"] = worked.mean()
            for way, rows in (("direct", ~worked), ("worked", worked)):
                if rows.any():
                    figures[f"{name}/accuracy_{way}"] = right[rows].mean()
    return {name: round(float(value), 4) for name, value in figures.items()}


def save(model: Model, output: Path, report: dict[str, Any]) -> None:
    """Writes the Hugging Face folder, and `training.json` beside the weights: recipe, machine and measured figures."""
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        companions = Path(scratch)
        save_tokenizer(companions, MAX_POSITIONS)
        ids = {"eos_token_id": tokenizer.token_to_id(EOS), "pad_token_id": tokenizer.token_to_id(PAD)}
        (companions / "generation_config.json").write_text(json.dumps(ids | {"do_sample": True}, indent=2) + "\n")
        save_model(stored(model), output, tokenizer_from=companions)
    (output / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def check_output(folder: Path) -> None:
    """Refuses a folder that `save` could not write, which would be seen only after the training.

    Raises:
      UserError: it is a file or not empty, or what it would lie in is a file or may not be written.
    """
    refuse_no_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; expected an empty folder, or a name that is free")
    if (there := not_writable(folder.parent)) is not None:
        raise UserError(f"{there} may not be written; change its permissions, or choose another name")


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the policy into")
    for field in dataclasses.fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"default {field.default}")
    arguments = vars(parser.parse_args(argv))
    output = where_it_leads(arguments.pop("output"))
    try:
        check_output(output)
    except UserError as error:
        parser.error(f"--output: {error}")
    recipe = Recipe(**arguments)
    began = time.monotonic()
    model = train(recipe, lambda line: print(line, flush=True))
    report = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": parameter_count(model),
        "device": jax.devices()[0].device_kind,
        "versions": {module.__name__: module.__version__ for module in (jax, flax, optax, np)},
        "seconds": round(time.monotonic() - began),
        "evaluation": {"bfloat16": evaluate(dense(model)), "nvfp4": evaluate(loaded(model))},
    }
    print(json.dumps(report, indent=1))
    save(model, output, report)


if __name__ == "__main__":
    main(sys.argv[1:])
