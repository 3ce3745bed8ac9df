"""What is made once, and libraries that are not there."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastpipe.read.chunks.foreign import address, library_at, library_of, once


def test_threads_at_once_have_the_same() -> None:
    barrier, calls = threading.Barrier(4), []

    @once
    def made() -> object:
        calls.append(1)
        return object()

    def ask(_: int) -> object:
        barrier.wait()
        return made()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(ask, range(4))))) == 1
    assert len(calls) == 1


def test_what_failed_is_tried_again() -> None:
    errors = [ValueError("not yet")]

    @once
    def made() -> int:
        if errors:
            raise errors.pop()
        return 1

    with pytest.raises(ValueError, match="not yet"):
        made()
    assert made() == made() == 1


def test_a_child_of_a_fork_waits_for_no_thread_of_its_parent() -> None:
    begun, may_end = threading.Event(), threading.Event()

    @once
    def made() -> int:
        begun.set()
        may_end.wait(30)
        return 1

    thread = threading.Thread(target=made)
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        may_end.set()
        signal.alarm(20)  # which ends it where it waits for the lock
        os._exit(0 if made() == 1 else 1)
    may_end.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_libraries_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    for path in (tmp_path / "text.so", tmp_path / "none.so"):
        assert library_at(path, {}) is None
    assert library_of("no_such_module", {}) is None
    assert library_of("numpy.linalg._umath_linalg", {"no_such_function": (None, [])}) is None
    assert address(None, "anything") == 0
