"""How far recorded log-probabilities are from the learner's, for networks that have been trained.

    python -m benchmarks.agreement --output benchmarks/results/cpu/agreement.json
    python -m benchmarks.agreement --text runs/3M --output benchmarks/results/cpu/agreement.json

A network with NVFP4 weights samples completions, and the learner's forward pass goes over the same tokens. Printed, in
nats and averaged over tokens: how far they are apart, and for scale what AQN's noise of sigma 0.01 changes. The network
is the quickstart's policy with held-out problems, and with --text also those of folders that `benchmarks.text_model`
made, with the beginnings of their held-out texts. For random weights at the size of real models see
`benchmarks.rollout`, for where differences come from `benchmarks.roundings`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qerl_jax as qerl
from benchmarks.report import versions, write
from benchmarks.rollout import with_norms
from qerl_jax.models.dtypes import DTYPES, DtypeName
from qerl_jax.models.params import norms_of
from qerl_jax.noise import perturb_norms
from qerl_jax.option_names import KV_CACHE_DTYPES, KVCacheDtype
from qerl_jax.policy import load_policy
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rollout import Engine

_POLICY, _PROMPTS, _NEW, _G, _SIGMA = "builtin:quickstart", 64, 48, 8, 1e-2


def prompts_of(folder: Path | None) -> tuple[str, list[str]]:
    """Where a network is, and texts to go on from."""
    if folder is None:
        data = qerl.load_dataset("arithmetic", split="eval")
        return _POLICY, [data[i]["prompt"] for i in range(_PROMPTS)]
    rows = (folder / "calibration.jsonl").read_text().splitlines()[:_PROMPTS]
    return str(folder / "model"), [json.loads(row)["text"][:100] for row in rows]


def measure(path: str, texts: list[str], dtype: DtypeName, kv_cache_dtype: KVCacheDtype) -> dict[str, Any]:
    """The row of one network, compute dtype and dtype of the cache."""
    policy = load_policy(path, "nvfp4", dtype)
    model = policy.model
    tokens, lengths = qerl.encode_prompts(policy.tokenizer, texts, max_prompt_length=100)
    prompts = qerl.Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(len(texts)))
    adapter = qerl.init_adapter(jax.random.key(0), model, lora_r=16, lora_alpha=32)
    settings = qerl.SamplingSettings(_NEW, policy.eos_token_ids, policy.pad_token_id, kv_cache_dtype=kv_cache_dtype)
    engine = Engine(model, settings, max_prompt_length=tokens.shape[1])
    out = engine.rollout(adapter, prompts, jax.random.key(1), _G)
    row_of = np.arange(len(texts) * _G) // _G
    at = prompts.tokens[row_of], prompts.lengths[row_of], out.tokens, out.lengths, 1.0
    learner = jax.jit(completion_logps)
    clean, _ = learner(model, adapter, *at)
    noise = perturb_norms(norms_of(model, adapter), _SIGMA, jax.random.key(2))
    noisy, _ = learner(with_norms(model, noise), adapter, *at)
    mask = np.arange(_NEW) < np.asarray(out.lengths)[:, None]

    def mean(change: jax.Array) -> float:
        return float(np.abs(np.asarray(change))[mask].mean())

    return {
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "tokens": int(mask.sum()),
        "logp_difference": mean(clean - out.logps),
        "aqn": mean(clean - noisy),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="folders of benchmarks.text_model")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="that networks are computed in")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, nargs="+", default=["auto", "fp8_values"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    result = {
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "numpy"),
        "settings": {"prompts": _PROMPTS, "num_generations": _G, "new": _NEW, "sigma": _SIGMA},
        "rows": [
            {"network": "quickstart" if folder is None else f"text model {folder.name}"}
            | measure(*prompts_of(folder), dtype, kv_cache_dtype)
            for folder in (None, *arguments.text)
            for dtype in arguments.dtype
            for kv_cache_dtype in arguments.kv_cache_dtype
        ],
    }
    print(json.dumps(result, indent=1))
    write(arguments.output, result)


if __name__ == "__main__":
    sys.exit(main())
