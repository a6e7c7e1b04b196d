"""`python -m qerl_jax`, the command line where `qerl` is not on the path."""

import sys

from qerl_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
