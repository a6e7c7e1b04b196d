#!/bin/sh
# Makes .venv with the pinned packages of constraints.txt, or brings it up to date:
#
#     sh scripts/make_venv.sh
#
# .venv/.installed says that the environment is whole, .venv/.unfinished that this script is (or was, when it was
# interrupted) at work on it. An unfinished environment is made anew: pip may have stopped halfway through a package.
# One that has neither file is another program's, and never removed.
set -eu
cd "$(dirname "$0")/.."

. scripts/environments.sh
pip_of_the_environment
PATH=$(path_without .venv/bin) # what makes an environment lies outside it, be it active

# One at a time, where there is flock: two would delete each other's work.
if [ -z "${MAKE_VENV_ALONE:-}" ] && command -v flock >/dev/null 2>&1; then
    MAKE_VENV_ALONE=yes exec flock . sh scripts/make_venv.sh
fi

if [ ! -d .venv ] || [ -e .venv/.unfinished ] || ! usable 12 .venv/bin/python || ! .venv/bin/python -c 'import pip'; then
    # Nothing is removed before it is known what makes another.
    python=$(find_python 12 3.13 3.12)
    if [ -z "$python" ] && ! command -v uv >/dev/null 2>&1; then
        echo "make_venv: no Python >= 3.12 (with its venv module) found: install Python 3.12 or 3.13, or uv, and run this again" >&2
        exit 1
    fi
    if [ -d .venv ]; then
        if [ ! -e .venv/.unfinished ] && [ ! -e .venv/.installed ]; then
            echo "make_venv: .venv is another program's, and without pip, too old or does not run: move it away or remove it, and run this again" >&2
            exit 1
        fi
        echo "make_venv: .venv is unfinished, too old or does not run; making it anew"
        rm -rf .venv
    fi
    mkdir .venv
    touch .venv/.unfinished
    if [ -n "$python" ]; then
        echo "make_venv: making .venv with $python ($("$python" --version))"
        "$python" -m venv .venv
    else
        echo "make_venv: making .venv with uv"
        uv venv --quiet --seed --allow-existing --python '>=3.12' .venv
    fi
fi

touch .venv/.unfinished
rm -f .venv/.installed
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
.venv/bin/python -P -c 'import importlib.metadata, pytest; importlib.metadata.version("qerl-jax")'
rm .venv/.unfinished
touch .venv/.installed
echo "make_venv: .venv is ready"
