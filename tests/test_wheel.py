"""The built wheel, alone in a fresh environment and away from the checkout: `pytest -m slow tests/test_wheel.py`."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import qerl_jax

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as `pip install .` builds it; takes the build backend from the package registry."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (path,) = folder.glob("qerl_jax-*.whl")
    return path


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    """The bin folder of a new environment with the wheel, which borrows every other package from this one."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    # A .pth line adds the folder, and not what .pth files in it would add: an editable install stays out.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    return environment / "bin"


def run(words, folder):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel_of_an_sdist(tmp_path_factory):
    """Built as from a registry's archive, by the build backend."""
    folder = tmp_path_factory.mktemp("sdist")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "hatchling>=1.27"], check=True)
    build = "import sys, hatchling.build; print(hatchling.build.build_sdist(sys.argv[1]))"
    subprocess.run([environment / "bin" / "python", "-c", build, folder], cwd=ROOT, check=True)
    (archive,) = folder.glob("qerl_jax-*.tar.gz")
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, archive], check=True)
    (path,) = folder.glob("qerl_jax-*.whl")
    return path


def test_the_version_is_kept_in_one_place(wheel):
    assert wheel.name.startswith(f"qerl_jax-{qerl_jax.__version__}-")


def test_an_sdists_wheel_holds_the_same(wheel, wheel_of_an_sdist):
    both = (sorted(zipfile.ZipFile(path).namelist()) for path in (wheel, wheel_of_an_sdist))
    assert next(both) == next(both)


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"qerl_jax", "pallas_kernels"}
    for data in (
        "qerl_jax/py.typed",
        "qerl_jax/configs/quickstart.yaml",
        "qerl_jax/policies/quickstart/model.safetensors",
        "qerl_jax/policies/quickstart/tokenizer.json",
    ):
        assert data in names
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    in_checkout = {str(path.relative_to(ROOT)) for path in (ROOT / "qerl_jax").rglob("*.py")}
    assert in_checkout == {name for name in names if name.startswith("qerl_jax/") and name.endswith(".py")}


def test_the_installed_command_trains_and_evaluates_from_another_folder(scripts, tmp_path):
    where = run([scripts / "python", "-c", "import qerl_jax; print(qerl_jax.__file__)"], tmp_path)
    assert where.startswith(str(scripts.parent))
    assert run([scripts / "qerl", "--version"], tmp_path) == f"qerl-jax {qerl_jax.__version__}\n"
    words = (
        "optimizer.max_steps=2", "optimizer.per_device_train_batch_size=8", "optimizer.gradient_accumulation_steps=1",
        "noise.num_stages=2", "run.save_steps=1", "evaluation.num_problems=8",
    )  # fmt: skip
    out = run([scripts / "qerl", "train", "quickstart", *words], tmp_path)
    assert "step 2/2" in out and f"{scripts / 'qerl'} evaluate runs/quickstart --seed 1" in out
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    measured = run([scripts / "qerl", "evaluate", "runs/quickstart"], tmp_path)
    assert f"greedy/accuracy: {summary['after']['greedy']['accuracy']:.4g}\n" in measured
