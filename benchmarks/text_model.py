"""A language model of 26M parameters trained on Python's own library: for `benchmarks.awq`.

    python -m benchmarks.text_model data text_model        # tokenizer, token rows and calibration text; a minute
    python -m benchmarks.text_model train text_model       # text_model/model; half a minute on an H200

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_model
from qerl_jax.models.params import Model, parameter_count
from qerl_jax.models.saving import save_model
from qerl_jax.policies.train_quickstart import logits, stored

EOS = "<|endoftext|>"
VOCABULARY, LENGTH = 4096, 512
STEPS_PER_CALL = 20
CONFIG = ModelConfig("qwen2", VOCABULARY, 512, 1536, 8, 8, 2, 64, 1e-6, 10000.0, True, True, 2048)
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


def make_data(folder: Path) -> None:
    """Writes the tokenizer, rows.npy (uint16 [rows, LENGTH + 1]) and calibration.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held = library_texts()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = AddedToken(EOS, special=True, normalized=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[special], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(train[::4], trainer)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "pad_token": EOS}))
    ids = np.concatenate([[*encoding.ids, 0] for encoding in tokenizer.encode_batch(train)]).astype(np.uint16)
    rows = (len(ids) - 1) // LENGTH
    starts = np.arange(rows)[:, None] * LENGTH
    np.save(folder / "rows.npy", ids[starts + np.arange(LENGTH + 1)])
    size = CALIBRATION_CHARACTERS
    pieces = [text[i : i + size] for text in held for i in range(0, len(text) - size, size)]
    chosen = [pieces[i * len(pieces) // CALIBRATION_ROWS] for i in range(CALIBRATION_ROWS)]
    (folder / "calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    print(f"{rows} rows of {LENGTH} tokens; {len(pieces)} pieces of held-out text")


def loss(model: Model, rows_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy of every token after the first, computed in bfloat16 but for the softmax."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    predicted = logits(half, rows_BT[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(predicted, rows_BT[:, 1:].astype(jnp.int32)).mean()


def train(folder: Path, steps: int, batch: int, learning_rate: float, seed: int) -> None:
    """Trains the network and writes it to `folder`/model, with training.json beside its weights."""
    rows = np.load(folder / "rows.npy")
    order = (
        np.random.default_rng(seed).permutation(np.arange(steps * batch) % len(rows)).reshape(-1, STEPS_PER_CALL, batch)
    )
    model = jax.tree.map(jnp.copy, init_model(jax.random.key(seed), CONFIG))
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps, 0.02 * learning_rate)
    matrices = lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree)  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    )

    def step(carry: Any, rows_BT: jax.Array) -> tuple[Any, jax.Array]:
        model, state = carry
        value, gradient = jax.value_and_grad(loss)(model, rows_BT)
        updates, state = optimizer.update(gradient, state, model)
        return (optax.apply_updates(model, updates), state), value

    run = jax.jit(lambda carry, stacked: jax.lax.scan(step, carry, stacked), donate_argnums=0)
    carry = model, jax.jit(optimizer.init)(model)
    began, values = time.monotonic(), jnp.zeros(1)
    for call, places in enumerate(order.reshape(-1, STEPS_PER_CALL, batch), start=1):
        carry, values = run(carry, rows[places])
        seconds = time.monotonic() - began
        print(f"step {call * STEPS_PER_CALL}  loss {values.mean():.3f}  {seconds:.1f}s", flush=True)
    save_model(stored(carry[0]), folder / "model", folder / "tokenizer")
    report = {
        "parameters": parameter_count(carry[0]),
        "steps": steps,
        "rows_per_step": batch,
        "learning_rate": learning_rate,
        "seed": seed,
        "tokens": steps * batch * LENGTH,
        "distinct_tokens": int(rows.size),
        "last_loss": round(float(values.mean()), 4),
        "seconds": round(time.monotonic() - began, 1),
        "device": jax.devices()[0].device_kind,
    }
    (folder / "model" / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("data", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows-per-step", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.stage == "data":
        make_data(arguments.folder)
    else:
        train(arguments.folder, arguments.steps, arguments.rows_per_step, arguments.learning_rate, arguments.seed)


if __name__ == "__main__":
    main()
