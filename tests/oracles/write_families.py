"""What this library writes for each network of `transformers_logits.py`, the model and an adapter, with the logits that
it finds, for transformers and PEFT to read:

    python tests/oracles/write_families.py FOLDER
    oracle/bin/python tests/oracles/transformers_logits.py check FOLDER
"""

import sys
from pathlib import Path

import jax
import numpy as np

from qerl_jax.models.init import init_adapter
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS
from qerl_jax.models.peft import save_adapter
from qerl_jax.models.saving import save_model
from qerl_jax.models.transformer import logits

HERE = Path(__file__).parent.resolve()
ALL = {"target_modules": PROJECTIONS}
OPTIONS = {
    "qwen2_tied": ALL | {"use_rslora": True},
    "qwen2_untied": {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")},
    "qwen3_sharded": ALL | {"use_rslora": True, "train_norms": True},
    "qwen3_yarn": {"target_modules": ("gate_proj", "up_proj", "down_proj"), "train_norms": True},
    "llama3": ALL | {"train_norms": True},
    "llama_biased": ALL | {"use_rslora": True},
}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(0, 61, (3, 12), dtype=np.int32)
    for place, (name, options) in enumerate(OPTIONS.items()):
        model = load_model(HERE / name, dtype="float32")
        fresh = init_adapter(jax.random.key(place), model, lora_r=3 + place, lora_alpha=8.0, **options)
        leaves, structure = jax.tree.flatten(fresh)
        keys = jax.random.split(jax.random.key(100 + place), len(leaves))
        moved = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
        adapter = jax.tree.unflatten(structure, moved)
        save_adapter(adapter, folder / name, name)
        saved = (folder / f"{name}_model").resolve()
        save_model(model, saved)
        found = np.asarray(logits(model, ids, adapter=adapter))
        np.savez(folder / f"{name}.npz", model=str(saved), input_ids=ids, logits=found)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
