"""How this program is called, for the commands that it prints."""

import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """What to type for this program: `qerl` where PATH finds this installation's, else the way to it."""
    script = Path(sys.executable).with_name("qerl")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m qerl_jax"
    if shutil.which("qerl") == str(script):
        return "qerl"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))
