#!/bin/sh
# Makes .venv with the pinned packages of constraints.txt, or brings it up to date:
#
#     sh scripts/make_venv.sh
#
# .venv/.installed says that the environment is whole, .venv/.unfinished that this script is (or was, when it was
# interrupted) at work on it. An unfinished environment is made anew: pip may have stopped halfway through a package.
set -eu
cd "$(dirname "$0")/.."

. scripts/environments.sh
pip_of_the_environment

# One at a time, where there is flock: two would delete each other's work.
if [ -z "${MAKE_VENV_ALONE:-}" ] && command -v flock >/dev/null 2>&1; then
    MAKE_VENV_ALONE=yes exec flock . sh scripts/make_venv.sh
fi

if [ -d .venv ] && { [ -e .venv/.unfinished ] || ! usable 12 .venv/bin/python || ! .venv/bin/python -c 'import pip'; }; then
    echo "make_venv: .venv is unfinished, too old or does not run; making it anew"
    rm -rf .venv
fi

if [ ! -d .venv ]; then
    python=$(find_python 12 3.13 3.12)
    if [ -n "$python" ]; then
        echo "make_venv: making .venv with $python ($("$python" --version))"
        mkdir .venv
        touch .venv/.unfinished
        "$python" -m venv .venv
    elif command -v uv >/dev/null 2>&1; then
        echo "make_venv: making .venv with uv"
        uv venv --quiet --seed --python '>=3.12' .venv
        touch .venv/.unfinished
    else
        echo "make_venv: no Python >= 3.12 (with its venv module) found: install Python 3.12 or 3.13, or uv, and run this again" >&2
        exit 1
    fi
fi

touch .venv/.unfinished
rm -f .venv/.installed
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
.venv/bin/python -P -c 'import importlib.metadata, pytest; importlib.metadata.version("qerl-jax")'
rm .venv/.unfinished
touch .venv/.installed
echo "make_venv: .venv is ready"
