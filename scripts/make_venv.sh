#!/bin/sh
# Makes .venv with the pinned packages of constraints.txt, or brings it up to date:
#
#     sh scripts/make_venv.sh
#
# .venv/.installed says that the environment is whole, .venv/.unfinished that this script is (or was, when it was
# interrupted) at work on it. An unfinished environment is made anew: pip may have stopped halfway through a package.
set -eu
cd "$(dirname "$0")/.."

usable() { # a Python that really runs (a pyenv shim may exist and fail), is new enough, and can make environments
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    for name in python3.13 python3.12 python3; do
        if command -v "$name" >/dev/null 2>&1 && usable "$name"; then
            command -v "$name"
            return
        fi
    done
    root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
    for minor in 3.13 3.12; do
        for candidate in "$root/versions/$minor".*/bin/python3; do
            if usable "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    done
    for candidate in "$root"/versions/*/bin/python3; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

if [ -d .venv ] && { [ -e .venv/.unfinished ] || ! usable .venv/bin/python || ! .venv/bin/python -c 'import pip'; }; then
    echo "make_venv: .venv is unfinished, too old or does not run; making it anew"
    rm -rf .venv
fi

if [ ! -d .venv ]; then
    python=$(find_python)
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
rm .venv/.unfinished
touch .venv/.installed
echo "make_venv: .venv is ready"
