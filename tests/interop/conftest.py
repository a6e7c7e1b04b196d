"""The other programs, run where INTEROP_PYTHON says, and what they write."""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOKENIZERS = HERE.parent / "oracles" / "tokenizers"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 360,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
NETWORKS = {
    "qwen2": ({"tie_word_embeddings": False}, "qwen2"),
    "qwen3": ({"tie_word_embeddings": True}, "qwen3"),
    "llama": ({"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}, "llama31"),
}


def run(verb: str, jobs: object, folder: Path) -> None:
    """Runs other_programs.py; what it cannot do is a failure of the test that asked, and so is its absence."""
    python = os.environ.get("INTEROP_PYTHON")
    assert python, "INTEROP_PYTHON is not set: run `make test-interop`"
    file = folder / f"{verb}.json"
    file.write_text(json.dumps(jobs))
    command = [python, HERE / "other_programs.py", verb, file]
    # Bytecode is kept in their environment: without it each start takes 9 seconds longer.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def other_programs():
    return run


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """The folder of what they write, for each name of NETWORKS."""
    folder = tmp_path_factory.mktemp("theirs")
    networks = {
        name: {"config": SIZES | config | {"model_type": name}, "tokenizer": str(TOKENIZERS / tokenizer)}
        for name, (config, tokenizer) in NETWORKS.items()
    }
    run("write", {"output": str(folder), "networks": networks}, folder)
    return folder
