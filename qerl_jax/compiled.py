"""Programs compiled side by side before they are called, and kept with a run: a restart starts at once, and on a GPU
meets the same autotuned kernels, without which it would not be bitwise the same."""

import concurrent.futures
import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_ZLIB = 0x78  # first byte of what zlib wrote, which is what JAX uses unless another compressor is installed


def compiled_together(*groups: Iterable[jax.stages.Lowered]) -> list[list[jax.stages.Compiled]]:
    """Compiles programs of jitted functions in threads, while further ones are traced; most of XLA's work on one is one
    thread's. The functions find theirs when they are called with arguments of the same kinds.

    Returns:
      The compiled programs of each group.

    Raises:
      Whatever tracing or compiling raised first; what has not begun by then is left.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            started = [[pool.submit(program.compile) for program in group] for group in groups]
            return [[future.result() for future in group] for group in started]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        compilation_cache.reset_cache()  # it would go on with the folder that it has opened


def remove_torn(folder: Path) -> None:
    """Removes the programs whose compressed stream does not end."""
    for path in folder.glob("*-cache"):
        data = path.read_bytes()
        if data and data[0] != _ZLIB:
            continue
        stream = zlib.decompressobj()
        try:
            stream.decompress(data)
        except zlib.error:
            path.unlink()
            continue
        if not stream.eof:
            path.unlink()
