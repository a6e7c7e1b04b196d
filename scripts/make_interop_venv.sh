#!/bin/sh
# Makes .venv-interop, the environment of the programs that `make test-interop` exchanges folders with: the pinned
# packages of tests/interop/requirements.txt, PyTorch among them, and nothing of this library:
#
#     sh scripts/make_interop_venv.sh
#
# .venv-interop/.installed says that it is whole; what is there is always made anew, so that no package is half installed.
# Python 3.11 is looked for first: it is what those versions were tested with.
set -eu
cd "$(dirname "$0")/.."

. scripts/environments.sh
pip_of_the_environment

PATH=$(path_without .venv-interop/bin)
python=$(find_python 11 3.11 3.12 3.13)
if [ -z "$python" ] && ! command -v uv >/dev/null 2>&1; then
    echo "make_interop_venv: no Python >= 3.11 (with its venv module) found: install one, or uv, and run this again" >&2
    exit 1
fi
rm -f .venv-interop/.installed
rm -rf .venv-interop
if [ -n "$python" ]; then
    echo "make_interop_venv: making .venv-interop with $python ($("$python" --version))"
    "$python" -m venv .venv-interop
else
    echo "make_interop_venv: making .venv-interop with uv"
    uv venv --quiet --seed --python '>=3.11' .venv-interop
fi
.venv-interop/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --requirement tests/interop/requirements.txt
touch .venv-interop/.installed
echo "make_interop_venv: .venv-interop is ready"
