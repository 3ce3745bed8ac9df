"""Keeping lines that C code writes to the terminal away from it."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["quiet_stderr"]

_stderr_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock held, or descriptor 2 turned
    os.register_at_fork(
        before=_stderr_lock.acquire,
        after_in_parent=_stderr_lock.release,
        after_in_child=_stderr_lock.release,
    )


@contextmanager
def quiet_stderr(is_noise: Callable[[bytes], bool]) -> Iterator[None]:
    """Keep lines that C code writes to descriptor 2 from the terminal when they are noise.

    Everything else that any thread writes meanwhile is passed on when the block ends.
    """
    with _stderr_lock:
        try:
            sys.stderr.flush()
            saved = os.dup(2)
        except (OSError, AttributeError, ValueError):  # no usable stderr: nothing to keep quiet
            yield
            return
        memory = _anonymous_file()
        os.dup2(memory, 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.lseek(memory, 0, os.SEEK_SET)
            while block := os.read(memory, 1 << 20):
                kept = b"".join(line for line in block.splitlines(keepends=True) if not is_noise(line))
                if kept:
                    os.write(2, kept)
            os.close(memory)
            os.close(saved)


def _anonymous_file() -> int:
    """A descriptor of a file without a name, which cannot be left behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fastpipe-stderr", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
