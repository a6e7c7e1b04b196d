"""The examples as a reader runs them, each in a program of its own, and what each of them claims."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qerl_jax.config_files import load_config
from qerl_jax.data.dataset import load_dataset
from qerl_jax.rewards.combine import RewardFunctions

pytestmark = pytest.mark.usefixtures("compiled_for_users")

ROOT = Path(__file__).parent.parent
NAMES = ("train", "sampling", "new_loss", "several_updates", "resume", "four_seeds")
WITH_FILES = ("gsm8k_rows",)


def printed(name, folder):
    """The output of an example, run in an empty folder. One after the other, each finds the small programs of those
    before it."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, ROOT / "examples" / f"{name}.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    """The groups of every match of `pattern`, as floats [matches, groups]."""
    return np.asarray([match.groups() for match in re.finditer(pattern, text)], float)


def test_every_example_is_run_here():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == sorted(NAMES + WITH_FILES)


def test_the_readme_shows_the_training_script_as_it_is():
    script = (ROOT / "examples" / "train.py").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks == [script]
    assert 20 < len([line for line in script.splitlines() if line.strip()]) < 35


def test_the_training_script_raises_its_reward_under_noise(tmp_path):
    steps = numbers(r"step +(\d+)  reward ([\d.]+)  entropy ([\d.]+)  sigma ([\d.e+-]+)\n", printed("train", tmp_path))
    assert steps[:, 0].tolist() == list(range(1, 13))
    rewards, sigmas = steps[:, 1], steps[:, 3]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    np.testing.assert_allclose(sigmas, np.repeat([0, 1e-2, 2.2e-3, 5e-4], 3))


def test_sampling_yields_every_completion(tmp_path):
    pattern = r"problem (\d), sample (\d), eos, logp (-[\d.]+): ' #### \d+'\n"
    samples = numbers(pattern, printed("sampling", tmp_path))
    assert sorted(map(tuple, samples[:, :2])) == [(problem, sample) for problem in range(4) for sample in range(2)]
    assert (samples[:, 2] < -0.1).all()


def test_a_new_loss_in_15_lines_learns(tmp_path):
    tree = ast.parse((ROOT / "examples" / "new_loss.py").read_text())
    (loss,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "winners_only")
    assert loss.end_lineno - loss.lineno + 1 <= 15
    steps = numbers(r"step (\d)  equations ([\d.]+)  share of winners' tokens (\d+)%\n", printed("new_loss", tmp_path))
    assert steps[:, 0].tolist() == list(range(1, 9))
    assert np.mean(steps[-2:, 1]) > np.mean(steps[:2, 1]) + 1
    # The metric is the loss's own: those that beat their group have a part of the tokens, never all.
    assert 0 < steps[0, 2] < 100 and len(set(steps[:, 2])) > 1


def test_several_updates_of_a_rollout_clip_all_but_the_first(tmp_path):
    pattern = r"step +(\d+)  equations ([\d.]+)  clipped ([\d.]+)%  refused (\d)\n"
    steps = numbers(pattern, printed("several_updates", tmp_path))
    assert steps[:, 0].tolist() == list(range(1, 13)) and not steps[:, 3].any()
    rewards, clipped = steps[:, 1].reshape(3, 4), steps[:, 2].reshape(3, 4)
    assert (rewards == rewards[:, :1]).all() and rewards[2, 0] > rewards[0, 0] + 0.5
    assert not clipped[:, 0].any() and (clipped[:, 1:] > 0).all()


def test_resuming_from_a_checkpoint_is_exact(tmp_path):
    said = ["from step 0 to 3", "from step 3 to 6", "from step 0 to 6", "bitwise the same as the unbroken run: True"]
    assert printed("resume", tmp_path).splitlines() == said


def test_four_seeds_by_vmap_are_four_runs(tmp_path):
    out = printed("four_seeds", tmp_path)
    by_seed = numbers(r"step \d  equations by seed \[([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+)\]\n", out)
    assert by_seed.shape == (3, 4)
    assert len(set(map(tuple, by_seed.T))) == 4  # the seeds are not copies of one another
    ends = numbers(r"seed (\d)  the adapter moved by ([\d.e-]+); alone and among four it differs by ([\d.e-]+)\n", out)
    assert ends[:, 0].tolist() == [0, 1, 2, 3]
    assert (ends[:, 1] > 1e-3).all()
    assert (ends[:, 2] < 1e-2 * ends[:, 1]).all()


def test_rows_of_gsm8k_are_what_its_recipe_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("gsm8k-7b")
    answer = "Two boxes hold 2*600=<<2*600=1200>>1,200 nails.\n#### 1,200"
    Path("train.jsonl").write_text(
        json.dumps({"question": "A box\u2028holds 600 nails. And two?", "answer": answer}, ensure_ascii=False) + "\n",
        "utf-8",
    )
    command = [sys.executable, ROOT / "examples" / "gsm8k_rows.py", "train.jsonl", config.data.train_dataset]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "gsm8k_train.jsonl: 1 problems\n"
    (row,) = load_dataset(config.data.train_dataset, split="train")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    with RewardFunctions(config.reward) as rewards:
        rewards.check([row], "train")
        scores = rewards([row], ["1200", "It is\n#### 1200", "#### 12", "#### 1,200."], [[1]] * 4, 4)
    np.testing.assert_allclose(scores.total, [0.0, 2.2, 0.2, 2.0])


def test_the_file_of_gsm8k_is_not_written_over(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    command = [sys.executable, ROOT / "examples" / "gsm8k_rows.py", file, tmp_path / "." / "train.jsonl"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
    assert file.read_text() == '{"question": "2 + 2?", "answer": "#### 4"}\n'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "train.jsonl: No such file or directory\n"),
        (b'{"question": "2 + 2?", "answer": "#### 4"}\n{"question"\n', "train.jsonl, line 2: not JSON: Expecting ':'"),
        (b'{"question": "2 + 2?", "answer": 4}\n', "train.jsonl, line 1: expected an object with the texts `question`"),
        (
            b'{"question": "2 + 2?", "answer": "#### 4"}\n\n{"question": "2 + 2?", "answer": "It is 4."}\n',
            "train.jsonl, line 3: expected an answer that ends in such as `#### 72`, found 'It is 4.'\n",
        ),
        (b'{"question": "2 + 2?", "answer": "It is ####"}\n', "train.jsonl, line 1: expected an answer that"),
        (b"\n", "train.jsonl: has no rows; expected one object with the texts `question` and `answer` a line\n"),
        (b'{"question": "\xff"}\n', "train.jsonl, line 1: not JSON: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_no_file_of_gsm8k_is_told_in_one_line(tmp_path, source, message):
    if source is not None:
        (tmp_path / "train.jsonl").write_bytes(source)
    command = [sys.executable, ROOT / "examples" / "gsm8k_rows.py", "train.jsonl", "rows.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert not (tmp_path / "rows.jsonl").exists()
    assert subprocess.run(command[:3], capture_output=True, check=False, cwd=tmp_path).returncode == 2
