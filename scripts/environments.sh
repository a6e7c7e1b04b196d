# Functions for the scripts that make environments; to be read by them with `.`.
#
#     find_python OLDEST NAME_OF_MINOR...     such as: find_python 12 3.13 3.12
#     path_without FOLDER                     such as: PATH=$(path_without .venv/bin)
#     pip_of_the_environment                  no setting of the user's has pip install elsewhere, or nothing

usable() { # usable OLDEST PYTHON: it really runs (a pyenv shim may exist and fail), is new enough, and makes environments
    "$2" -c "import sys, ensurepip, venv; sys.exit(sys.version_info < (3, $1))" >/dev/null 2>&1
}

find_python() { # prints the first usable Python: of the versions given, in their order, then any
    oldest=$1
    shift
    for name in "$@" 3; do
        if command -v "python$name" >/dev/null 2>&1 && usable "$oldest" "python$name"; then
            command -v "python$name"
            return
        fi
    done
    root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
    for minor in "$@"; do
        for candidate in "$root/versions/$minor".*/bin/python3; do
            if usable "$oldest" "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    done
    for candidate in "$root"/versions/*/bin/python3; do
        if usable "$oldest" "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

path_without() { # prints PATH without a folder, by whatever name it is there
    rest=$PATH:
    kept=
    while [ -n "$rest" ]; do
        entry=${rest%%:*}
        rest=${rest#*:}
        if ! [ "$entry" -ef "$1" ]; then
            kept=$kept${kept:+:}$entry
        fi
    done
    echo "$kept"
}

pip_of_the_environment() {
    unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_DRY_RUN PIP_NO_DEPS PIP_NO_BUILD_ISOLATION PIP_PYTHON PIP_REQUIRE_HASHES
    export PIP_USER=0
}
