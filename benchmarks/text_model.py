"""Language models trained on Python's own library, small and not so small: for `benchmarks.awq` and `.agreement`.

    python -m benchmarks.text_model 26M runs/26M    # for a GPU: text about a minute, training 28 s on an H200
    python -m benchmarks.text_model 3M runs/3M      # for two CPU cores: 5 minutes, 17 beside other work
    python -m benchmarks.text_model 9M runs/9M      # the same, three times as deep and less trained: 8 minutes

FOLDER/model is the network, FOLDER/calibration.jsonl the text to quantize it with. What a folder has already is kept.

The text is every .py file of the standard library of the Python that runs this. One file in 16 (by the hash of its
name) is not trained on; calibration.jsonl is cut from those. The network is a Qwen2 with tied embeddings and the
vocabulary of a byte-level BPE trained on the same text.
"""

import argparse
import hashlib
import json
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.report import versions
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_model
from qerl_jax.models.params import Model, parameter_count
from qerl_jax.models.saving import save_model
from qerl_jax.policies.train_quickstart import logits, stored


class Size(NamedTuple):
    """A network, the tokens of a training row, the rows of a step, and how long and how fast it learns."""

    config: ModelConfig
    length: int
    rows: int
    steps: int
    learning_rate: float


SIZES = {
    "26M": Size(ModelConfig("qwen2", 4096, 512, 1536, 8, 8, 2, 64, 1e-6, 1e4, True, True, 2048), 512, 64, 500, 2e-3),
    "9M": Size(ModelConfig("qwen2", 1024, 256, 640, 12, 4, 2, 64, 1e-6, 1e4, True, True, 1024), 256, 16, 240, 3e-3),
    "3M": Size(ModelConfig("qwen2", 1024, 256, 640, 4, 4, 2, 64, 1e-6, 1e4, True, True, 1024), 256, 16, 400, 3e-3),
}
EOS = "<|endoftext|>"
STEPS_PER_CALL = 20  # one program runs so many, with no word to Python between them
CALIBRATION_ROWS, CALIBRATION_CHARACTERS = 768, 1600


def library_texts() -> tuple[list[str], list[str]]:
    """The files of the standard library: those to train on, and the one in 16 that is not."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[str], list[str]] = ([], [])
    for file in sorted(root.rglob("*.py")):
        name = str(file.relative_to(root))
        if "site-packages" in name or "dist-packages" in name:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # the tests of Python's own codecs hold other encodings
            continue
        parts[hashlib.sha256(name.encode()).digest()[0] % 16 == 0].append(text)
    return parts


def make_data(size: Size, folder: Path) -> None:
    """Writes the tokenizer, calibration.jsonl and, last, rows.npy (uint16 [rows, length + 1])."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held = library_texts()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = AddedToken(EOS, special=True, normalized=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = size.config.vocab_size
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[special], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(train[::4], trainer)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "pad_token": EOS}))
    characters = CALIBRATION_CHARACTERS
    pieces = [text[i : i + characters] for text in held for i in range(0, len(text) - characters, characters)]
    chosen = [pieces[i * len(pieces) // CALIBRATION_ROWS] for i in range(min(CALIBRATION_ROWS, len(pieces)))]
    (folder / "calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    ids = np.concatenate([[*encoding.ids, 0] for encoding in tokenizer.encode_batch(train)]).astype(np.uint16)
    rows = (len(ids) - 1) // size.length
    np.save(folder / "rows.npy", ids[np.arange(rows)[:, None] * size.length + np.arange(size.length + 1)])
    print(f"{rows} rows of {size.length} tokens; {len(pieces)} pieces of held-out text", flush=True)


def loss(model: Model, rows_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Mean cross-entropy of every token after the first, computed in `dtype` but for the softmax."""
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    predicted = logits(cast, rows_BT[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(predicted, rows_BT[:, 1:].astype(jnp.int32)).mean()


def train(size: Size, folder: Path, seed: int) -> None:
    """Trains the network on rows.npy and writes `folder`/model, with training.json beside its weights."""
    rows = np.load(folder / "rows.npy")
    count = size.steps * size.rows
    # Every row as often as any other; where there are more rows than places, evenly over the whole library.
    used = np.arange(count) % len(rows) if count >= len(rows) else np.arange(count) * len(rows) // count
    order = np.random.default_rng(seed).permutation(used).reshape(-1, STEPS_PER_CALL, size.rows)
    model = jax.tree.map(jnp.copy, init_model(jax.random.key(seed), size.config))
    peak, dtype = size.learning_rate, jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, size.steps // 10, size.steps, 0.02 * peak)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule, b2=0.95, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree)
        ),
    )

    def step(carry: Any, rows_BT: jax.Array) -> tuple[Any, jax.Array]:
        model, state = carry
        value, gradient = jax.value_and_grad(loss)(model, rows_BT, dtype)
        updates, state = optimizer.update(gradient, state, model)
        return (optax.apply_updates(model, updates), state), value

    run = jax.jit(lambda carry, stacked: jax.lax.scan(step, carry, stacked), donate_argnums=0)
    carry = model, jax.jit(optimizer.init)(model)
    began, last = time.monotonic(), float("nan")
    for call, places in enumerate(order, start=1):
        carry, values = run(carry, rows[places])
        last = float(values.mean())  # waits for the call
        print(f"step {call * STEPS_PER_CALL}  loss {last:.3f}  {time.monotonic() - began:.1f}s", flush=True)
    report = {
        "parameters": parameter_count(carry[0]),
        "steps": size.steps,
        "rows_per_step": size.rows,
        "learning_rate": size.learning_rate,
        "seed": seed,
        "tokens": count * size.length,
        "distinct_tokens": np.unique(used).size * rows.shape[1],
        "last_loss": round(last, 4),
        "seconds": round(time.monotonic() - began, 1),
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "optax", "tokenizers"),
    }
    save_model(stored(carry[0]), folder / "model", tokenizer_from=folder / "tokenizer")
    (folder / "model" / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def make_model(size: Size, folder: Path, seed: int = 0) -> None:
    """Makes what the folder lacks of text and trained network."""
    if not (folder / "rows.npy").is_file():
        make_data(size, folder)
    if not (folder / "model" / "training.json").is_file():
        train(size, folder, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_model(SIZES[arguments.size], arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
