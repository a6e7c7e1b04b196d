"""How this program is called, for the commands that it prints."""

import contextlib
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
    # It may lie elsewhere, and the current folder may have been deleted.
    with contextlib.suppress(ValueError, FileNotFoundError):
        script = script.relative_to(Path.cwd())
    return shlex.quote(str(script))
