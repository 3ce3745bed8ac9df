"""Forked processes that do what they are asked."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Answering"]


class Answering:
    """A forked process that calls functions by their names, and sends back what they return.

    Args:
        make: is called in that process; returns the functions.

    >>> process = Answering(lambda: {"double": lambda number: 2 * number})
    >>> process("double", 21)
    42
    >>> process.end()
    """

    def __init__(self, make: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._pipe.close()
                _answer(theirs, make())
                gc.collect()
                code = 0
            except BaseException:  # pytest's part of the process is the parent's: no error may get there
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        theirs.close()

    def __call__(self, name: str, *given: Any) -> Any:
        self._pipe.send((name, given))
        return self._pipe.recv()

    def end(self, *, kill: bool = False) -> None:
        """Let it end, or kill it; unless it has ended."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL) if kill else self._pipe.send(None)
            assert os.waitpid(self.pid, 0)[1] == (signal.SIGKILL if kill else 0)
            self._pipe.close()
            self.pid = 0


def _answer(pipe: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
    while (asked := pipe.recv()) is not None:
        pipe.send(functions[asked[0]](*asked[1]))
