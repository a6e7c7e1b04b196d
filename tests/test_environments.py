"""The scripts that make environments, beside stand-ins for Python: which one is taken, what interruptions leave."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A Python of version 3.MINOR: it says whether it is new enough, and makes environments whose pip fails while the file
# `broken` exists.
STAND_IN = """#!/bin/sh
case "$*" in
    *"version_info < (3, "*) wanted=${{2##*(3, }}; [ {minor} -ge "${{wanted%%)*}}" ] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip install"*) [ ! -e broken ] && touch "$(dirname "$0")/package" ;;
    *) echo "Python 3.{minor}" ;;
esac
"""
SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def stand_in(path, minor):
    program(path, STAND_IN.format(minor=minor))


@pytest.fixture
def repository(tmp_path):
    """A copy with nothing on its PATH but the shell's own commands."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / "bin").mkdir()
    for name in ("sh", "dirname", "mkdir", "rm", "cp", "touch"):
        (copy / "bin" / name).symlink_to(shutil.which(name))
    return copy


def run(repository, *words):
    environment = {"PATH": str(repository / "bin"), "PYENV_ROOT": str(repository / "pyenv"), "HOME": os.devnull}
    return subprocess.run(["sh", *words], cwd=repository, env=environment, capture_output=True, text=True, check=False)


def found(repository, *words):
    done = run(repository, "-euc", f". scripts/environments.sh; find_python {' '.join(words)}")
    return str(Path(done.stdout.strip()).relative_to(repository)) if done.stdout else ""


def test_the_first_python_that_runs_and_is_new_enough_is_taken(repository):
    assert found(repository, "12", "3.13", "3.12") == ""
    stand_in(repository / "pyenv" / "versions" / "3.14.1" / "bin" / "python3", 14)
    stand_in(repository / "pyenv" / "versions" / "3.11.7" / "bin" / "python3", 11)
    assert found(repository, "12", "3.13", "3.12") == "pyenv/versions/3.14.1/bin/python3"
    stand_in(repository / "pyenv" / "versions" / "3.12.1" / "bin" / "python3", 12)
    assert found(repository, "12", "3.13", "3.12") == "pyenv/versions/3.12.1/bin/python3"
    stand_in(repository / "bin" / "python3", 11)
    program(repository / "bin" / "python3.13", SHIM)
    program(repository / "bin" / "python3.12", SHIM)
    assert found(repository, "12", "3.13", "3.12") == "pyenv/versions/3.12.1/bin/python3"
    assert found(repository, "11", "3.11", "3.12") == "bin/python3"
    stand_in(repository / "bin" / "python3.12", 12)
    assert found(repository, "12", "3.13", "3.12") == "bin/python3.12"


@pytest.mark.parametrize(
    ("script", "environment"), [("make_venv.sh", ".venv"), ("make_interop_venv.sh", ".venv-interop")]
)
def test_an_unfinished_environment_is_made_anew(repository, script, environment):
    script, made = f"scripts/{script}", repository / environment
    done = run(repository, script)
    assert done.returncode == 1 and "found: install" in done.stderr and not made.exists()
    stand_in(repository / "bin" / "python3", 12)
    (repository / "broken").touch()
    assert run(repository, script).returncode != 0
    assert (made / "bin" / "python").exists() and not (made / ".installed").exists()
    (made / "half").touch()
    (repository / "broken").unlink()
    done = run(repository, script)
    assert done.returncode == 0, done.stderr
    assert (made / "bin" / "package").exists() and (made / ".installed").exists() and not (made / "half").exists()


def test_a_whole_environment_is_brought_up_to_date_in_place(repository):
    stand_in(repository / "bin" / "python3", 12)
    assert run(repository, "scripts/make_venv.sh").returncode == 0
    (repository / ".venv" / "kept").touch()
    (repository / ".venv" / "bin" / "package").unlink()
    assert run(repository, "scripts/make_venv.sh").returncode == 0
    assert (repository / ".venv" / "kept").exists() and (repository / ".venv" / "bin" / "package").exists()


@pytest.mark.parametrize(
    ("script", "folder", "oldest"), [("make_venv", ".venv", "3.12"), ("make_interop_venv", ".venv-interop", "3.11")]
)
def test_an_environment_is_kept_until_another_can_be_made(repository, script, folder, oldest):
    (repository / folder).mkdir()
    (repository / folder / ".unfinished").touch()
    stand_in(repository / folder / "bin" / "python3", 12)  # of an active environment
    done = run(repository, "-c", f'PATH="$PWD/{folder}/bin:$PATH" sh scripts/{script}.sh')
    assert done.returncode == 1 and f"no Python >= {oldest} " in done.stderr
    assert (repository / folder / ".unfinished").exists()


@pytest.mark.parametrize("marker", [None, ".installed"])
def test_another_programs_environment_is_never_removed(repository, marker):
    stand_in(repository / "bin" / "python3", 12)
    stand_in(repository / ".venv" / "bin" / "python", 11)
    if marker is not None:
        (repository / ".venv" / marker).touch()
    (repository / ".venv" / "mine").touch()
    done = run(repository, "scripts/make_venv.sh")
    if marker is None:
        assert done.returncode == 1 and ".venv is another program's" in done.stderr
        assert "move it away or remove it, and run this again" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
    assert (repository / ".venv" / "mine").exists() == (marker is None)
