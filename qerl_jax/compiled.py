"""Programs compiled side by side before they are called, and kept with a run: a restart begins at once, and on a GPU
gets the same autotuned kernels. (Others would add their sums in another order.)"""

import concurrent.futures
import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.mosaic_kernels import alone, mosaic_kernels

_ZSTD = b"\x28\xb5\x2f\xfd"  # with which zstd's streams begin; JAX uses it where Python has it, or else zlib


def compiled_together(*groups: Iterable[jax.stages.Lowered]) -> list[list[jax.stages.Compiled]]:
    """Compiles programs of jitted functions. A later call with arguments of the same kinds finds its program ready.

    On a GPU most of XLA's work on a program is done by one thread, so each program gets one, while further ones are
    traced, and so does each different Mosaic kernel in them (see `pallas_kernels.mosaic_kernels`). What may lie in a
    compilation cache is left to this thread, and programs to the end: reading them in threads is not known to be safe.
    On a CPU compiling takes all cores anyway, and nothing is done in threads.

    Returns:
      The compiled programs of each group.

    Raises:
      Whatever tracing or compiling raised first; what has not begun by then is left.
    """
    if not _in_threads():
        return [[one.compile() for one in group] for group in groups]
    kept, found = _kept_names(), []
    kernels: set[str] = set()
    begun: list[concurrent.futures.Future[jax.stages.Compiled]] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:

        def begin(one: jax.stages.Lowered) -> concurrent.futures.Future[jax.stages.Compiled] | None:
            if kept(_module_name(one)):
                return None
            for name, told in mosaic_kernels(one).items():
                if name in kernels:
                    continue
                kernels.add(name)
                kernel = alone(name, told)
                if kept(_module_name(kernel)):
                    kernel.compile()
                else:
                    begun.append(pool.submit(kernel.compile))
            begun.append(pool.submit(one.compile))
            return begun[-1]

        try:
            for group in groups:
                found.append([(one, begin(one)) for one in group])
            for future in begun:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [[one.compile() if future is None else future.result() for one, future in group] for group in found]


def _in_threads() -> bool:
    return jax.default_backend() != "cpu"


def _module_name(program: jax.stages.Lowered) -> str:
    """XLA's name of a program, with which its file in a compilation cache begins."""
    module: Any = program.compiler_ir()
    return str(module.operation.attributes["sym_name"]).strip('"')


def _kept_names() -> Callable[[str], bool]:
    """A function that says whether the compilation cache in use now has, or might have, a program of a name."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or not jax.config.jax_enable_compilation_cache:
        return lambda name: False
    if "://" in folder:  # of a bucket, which is not looked into
        return lambda name: True
    files = [path.name for path in Path(folder).glob("*-cache")]
    return lambda name: any(file.startswith(f"{name}-") for file in files)


@contextlib.contextmanager
def compiled_programs(folder: Path) -> Iterator[None]:
    """Keeps what is compiled inside in `folder`, and uses what it holds; does nothing where the user has set a
    compilation cache of his own.

    A file that a kill tore is removed first: JAX would compile that program at every start, and never write it again.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    remove_torn(folder)
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()  # a folder that was opened before would still be used
    try:
        # Whatever is compiled first opens the folder and makes it if need be: now, since it may be moved soon.
        jax.jit(lambda: 0)()
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        compilation_cache.reset_cache()  # or it would go on with the folder that it has opened


def remove_torn(folder: Path) -> None:
    """Removes the programs whose compressed stream does not end."""
    for path in folder.glob("*-cache"):
        data = path.read_bytes()
        if not (_zstd_ends(data) if data.startswith(_ZSTD) else _zlib_ends(data)):
            path.unlink()


def _zlib_ends(data: bytes) -> bool:
    stream = zlib.decompressobj()
    try:
        stream.decompress(data)
    except zlib.error:
        return False
    return stream.eof


def _zstd_ends(data: bytes) -> bool:
    """Whether it is a whole frame (RFC 8878, 3.1.1): a header, blocks up to the last one, perhaps a checksum. By their
    lengths alone, since what wrote it need not be installed now."""
    flags = int.from_bytes(data[4:5])
    single, checksum = flags >> 5 & 1, flags >> 2 & 1
    place = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
    is_last = 0
    while not is_last and place < len(data):
        block = int.from_bytes(data[place : place + 3], "little")
        is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
        place += 3 + (1 if kind == 1 else size)  # a run has its byte once
    return bool(is_last) and place + 4 * checksum == len(data)
