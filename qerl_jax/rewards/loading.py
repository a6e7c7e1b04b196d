"""From the name of a reward function in a config to the function.

A name is one of `BUILTIN` (they run in this process), `package.module:function`, or `path/to/file.py:function` (they
run in a worker program, see `qerl_jax.rewards.pool`). Modules are looked for where Python looks, the standard library
and installed packages included, and then in the current folder. What a file imports is looked for where Python looks,
then beside the file (of a link: beside the file that it leads to), then in the current folder. Each function has a
worker of its own, so files in different folders each find what lies beside them, under equal names too.

The source of a named module or file is compiled anew, whatever bytecode of it there is: Python takes a file that was
rewritten within a second and to the same length for the one that it compiled before.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from qerl_jax.errors import UserError, nearest
from qerl_jax.rewards.functions import BUILTIN, RewardFunction

_being_imported: list[str] = []  # the name of a function, in its worker


@dataclasses.dataclass(frozen=True)
class RewardName:
    """A reward function as the config names it.

    Attributes:
      spec: the whole name, as given.
      location: module or file; empty for a built-in function.
      function: the function's own name (see `titles` for what metrics show).
    """

    spec: str
    location: str
    function: str

    @property
    def builtin(self) -> bool:
        return not self.location

    @property
    def shipped(self) -> bool:
        """Whether it comes with this package, built in or in a module of its own."""
        return self.builtin or self.location.startswith(f"{__package__}.")


def parse_name(spec: str) -> RewardName:
    """Splits the name of a reward function.

    Raises:
      UserError: neither built in nor of the form `module:function` or `file.py:function`, of `__main__`, or the file
        does not exist.
    """
    if spec in BUILTIN:
        return RewardName(spec, "", spec)
    location, colon, function = spec.rpartition(":")
    if not colon or not location or not function.isidentifier():
        raise UserError(
            f"reward function {spec!r} is unknown{nearest(spec, BUILTIN)}; allowed: {', '.join(BUILTIN)}, "
            "package.module:function or path/to/file.py:function"
        )
    if location == "__main__":
        raise UserError(
            f"reward function {spec!r}: it would run in a program of its own, which has another __main__; write it "
            "into a file (in a notebook by %%writefile), and name it path/to/file.py:function"
        )
    if _is_file(location) and not Path(location).is_file():
        raise UserError(f"reward function {spec!r}: there is no file {Path(location).absolute()}")
    return RewardName(spec, location, function)


def titles(specs: Sequence[str]) -> list[str]:
    """The names that metrics show, one for each name in a config. Each is the shortest that no other has: the
    function's own, that with its module or file's name before it, or with as many folders as it takes."""
    found = [spec.rpartition(":")[2] for spec in specs]
    for parts in range(1, max((spec.count("/") for spec in specs), default=0) + 2):
        longer = ["/".join(spec.split("/")[-parts:]) for spec in specs]
        found = [long if found.count(name) > 1 else name for long, name in zip(longer, found, strict=True)]
    return found


def from_anywhere(spec: str) -> str:
    """The name of the same function that holds in any working folder; modules are looked for where Python looks."""
    location, colon, function = spec.rpartition(":")
    return f"{os.path.abspath(location)}{colon}{function}" if _is_file(location) else spec


def without_place(spec: str) -> str:
    """The name without what says where a file lies: `*.py:function` of every function in a file."""
    location, colon, function = spec.rpartition(":")
    return f"*.py{colon}{function}" if _is_file(location) else spec


def own_file(name: RewardName) -> str | None:
    """The path of the function's file; None for a module."""
    return os.path.abspath(name.location) if _is_file(name.location) else None


def _is_file(location: str) -> bool:
    return location.endswith(".py") or "/" in location or os.sep in location


def _module_name(location: str) -> str:
    # A file gets one of its own, so that `math.py` beside the user's config does not replace Python's math; behind a
    # dot would be a module of a package that there is not.
    return f"qerl_reward_file_{Path(location).stem.replace('.', '_')}" if _is_file(location) else location


class _SourceLoader(SourceFileLoader):
    """Runs the source that it reads; `digest` is that source's sha256."""

    digest: str

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self.digest = hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, self.path)


def _read_by_source(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _SourceLoader(spec.loader.name, spec.loader.path)
    return spec


def _file_spec(file: str) -> ModuleSpec | None:
    return _read_by_source(importlib.util.spec_from_file_location(_module_name(file), file))


class FileFinder(MetaPathFinder):
    """Finds the file of a worker's function, which the environment names, in the processes that the function starts:
    those of `spawn` and `forkserver` import its module by name."""

    VARIABLE = "QERL_REWARD_FILE"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = os.environ.get(self.VARIABLE)
        return _file_spec(file) if file is not None and fullname == _module_name(file) else None


class _Finder(MetaPathFinder):
    """Finds the module `name` where Python does, and has it read by its source."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        found = (find(fullname, path, target) for find in finders if find is not None)
        return _read_by_source(next((spec for spec in found if spec is not None), None))


def _import_module(name: str) -> ModuleType:
    finder = _Finder(name)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)


def source_digest(name: RewardName) -> str | None:
    """sha256 of the source that `load_function` has run to get the function, without what that imports; where it had no
    source to run (a compiled module, or one imported before), of the file; None where there is no such file (a module
    inside Python or an archive)."""
    module = sys.modules.get(_module_name(name.location))
    loader = getattr(module, "__loader__", None)
    if isinstance(loader, _SourceLoader):
        return loader.digest
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@contextlib.contextmanager
def _importing(name: RewardName) -> Iterator[None]:
    _being_imported.append(name.spec)
    try:
        yield
    finally:
        _being_imported.remove(name.spec)


def refuse_while_importing() -> None:
    """For what starts workers, or a run, which does.

    Raises:
      UserError: this is a worker that imports its function's file. What that starts would start the next worker, which
        imports the file again, and so on without end.
    """
    if _being_imported:
        raise UserError(
            f"reward function {_being_imported[0]!r}: its file starts a run, or a worker, whenever it is imported, as "
            "it is to get the function; put what starts it under `if __name__ == '__main__':`"
        )


def load_function(name: RewardName) -> RewardFunction:
    """Imports a function that is not built in; exceptions of the user's module pass through.

    Raises:
      UserError: no such module or function, or it cannot be called.
    """
    if _is_file(name.location):
        module_name = _module_name(name.location)
        spec = _file_spec(name.location)
        if spec is None or spec.loader is None:
            raise UserError(f"reward function {name.spec!r}: {name.location} is not a Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        with _importing(name):
            spec.loader.exec_module(module)
    else:
        try:
            with _importing(name):
                module = _import_module(name.location)
        except ModuleNotFoundError as error:
            parents = [name.location.rsplit(".", n)[0] for n in range(name.location.count(".") + 1)]
            if error.name not in parents:
                raise  # the module exists, and one that it imports does not
            raise UserError(
                f"reward function {name.spec!r}: there is no module {error.name!r} on Python's path or in {Path.cwd()}"
            ) from error
    function = getattr(module, name.function, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UserError(
            f"reward function {name.spec!r}: {name.location} has no {name.function!r}{nearest(name.function, known)}"
        )
    if not callable(function):
        raise UserError(
            f"reward function {name.spec!r}: {name.function} is of type {type(function).__name__}, not a function"
        )
    return function
