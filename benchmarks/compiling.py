"""Programs compiled in threads while others are traced: most of a kernel's compilation runs outside Python."""

import concurrent.futures
import os
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax


class Programs:
    """Compiled programs by key, each made once; `seconds` is what tracing and waiting for them has taken, and
    `compile_seconds` what each took in its thread, beside the others.

    A key says everything that its program depends on; `start` does nothing where the key is known.
    """

    def __init__(self, threads: int | None = None):
        self.seconds = 0.0
        self.compile_seconds: dict[Hashable, float] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count())
        self._started: dict[Hashable, concurrent.futures.Future] = {}

    def __len__(self) -> int:
        return len(self._started)

    def start(
        self,
        key: Hashable,
        f: Callable,
        *shapes: Any,
        options: dict[str, Any] | None = None,
        jit: Callable[..., Any] = jax.jit,
    ) -> None:
        """Trace f for arguments of these shapes (arrays or ShapeDtypeStructs) and let a thread compile it, with XLA's
        `options` where there are some."""
        if key not in self._started:
            begin = time.perf_counter()
            lowered = jit(f).lower(*shapes)
            self._started[key] = self._pool.submit(self._compiled, key, lowered, options)
            self.seconds += time.perf_counter() - begin

    def _compiled(
        self, key: Hashable, lowered: jax.stages.Lowered, options: dict[str, Any] | None
    ) -> jax.stages.Compiled:
        begin = time.perf_counter()
        compiled = lowered.compile(compiler_options=options)
        self.compile_seconds[key] = time.perf_counter() - begin
        return compiled

    def get(self, key: Hashable) -> jax.stages.Compiled:
        """Raises what compiling raised."""
        begin = time.perf_counter()
        try:
            return self._started[key].result()
        finally:
            self.seconds += time.perf_counter() - begin

    def wait(self) -> None:
        """Until all are compiled: XLA's autotuning runs kernels, which would lie between those that are timed."""
        begin = time.perf_counter()
        concurrent.futures.wait(self._started.values())
        self.seconds += time.perf_counter() - begin

    def close(self) -> None:
        """Compile nothing more that has not begun."""
        self._pool.shutdown(cancel_futures=True)
