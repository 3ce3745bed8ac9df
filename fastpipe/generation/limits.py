"""Libraries' own threads, kept out of rows: workers are enough, and sums come out the same anywhere."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from fastpipe.core.extras import require_threadpoolctl
from fastpipe.core.machine import available_cpus

__all__ = ["ONE_THREAD", "OneThreadEach", "limit_this_thread"]

# What libraries look at when they are loaded.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
     "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"), "1",
)  # fmt: skip


class OneThreadEach(AbstractContextManager["OneThreadEach"]):
    """While it lasts, libraries such as NumPy's BLAS have one thread each; those that are loaded then, too.

    It begins when it is made.  What is the process's is set by the first of several, in threads of somebody's
    executor, and put back by the last; what is a thread's, by each.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _count: ClassVar[int] = 0
    _limits: ClassVar[Any] = None
    _known: ClassVar[set[str]] = set()  # libraries that were there
    _environment: ClassVar[dict[str, str | None]] = {}

    def __init__(self) -> None:
        self._thread, self._own = threading.get_ident(), limit_this_thread()
        with OneThreadEach._lock:
            if not OneThreadEach._count:
                OneThreadEach._begin()
            OneThreadEach._count += 1

    def lift(self) -> None:
        """Give libraries their threads again."""
        with OneThreadEach._lock:
            OneThreadEach._count -= 1
            if not OneThreadEach._count:
                OneThreadEach._end()
        if threading.get_ident() == self._thread:
            self._own.restore_original_limits()

    def __exit__(self, *_: object) -> None:
        self.lift()

    @classmethod
    def _begin(cls) -> None:
        cls._environment = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)
        _let_this_thread_set_limits()
        blas = _libraries("blas")
        cls._known = {library.filepath for library in blas.lib_controllers}
        cls._limits = blas.limit(limits=1)

    @classmethod
    def _end(cls) -> None:
        for name, value in cls._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _let_this_thread_set_limits()
        cls._limits.restore_original_limits()
        for library in _libraries("blas").lib_controllers:
            if library.filepath not in cls._known:  # loaded meanwhile: as it would have been without this
                library.set_num_threads(_default_threads(cls._environment))
        _let_this_thread_set_limits()
        cls._limits = None


def limit_this_thread() -> Any:
    """Have OpenMP's libraries work in this thread alone, whose own setting that is; what undoes it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # sets this thread's default, which would else come later
    return _libraries("openmp").limit(limits=1)


def _let_this_thread_set_limits() -> None:
    """Of OpenBLAS only the thread that set a limit may set others, and the last to leave may be another."""
    controller = getattr(_threadpoolctl(), "OpenBLASController", None)
    clear = getattr(controller, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


def _libraries(kind: str) -> Any:
    """Those of a kind that are loaded.  Whoever limits them puts back these alone."""
    return _threadpoolctl().ThreadpoolController().select(user_api=kind)


def _default_threads(environment: dict[str, str | None]) -> int:
    """How many threads a library would have taken."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if (environment.get(name) or "").isdigit():
            return int(environment[name] or 1)
    return available_cpus()


def _threadpoolctl() -> Any:
    return require_threadpoolctl("generation")
