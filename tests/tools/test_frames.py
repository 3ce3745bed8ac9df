"""The frames of all threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from fastpipe.tools.stacks import current_stacks, native_ids

# Garbage whose callbacks let other threads run is made and collected wherever that is possible.
LOCKS_UP = """
import gc, sys, threading, time, weakref
from fastpipe.tools.stacks import current_stacks, native_ids

class Cycle: pass

left, references = [200], []

def gone(reference):
    if left[0] > 0:
        left[0] -= 1
        time.sleep(0.001)

def look():
    while left[0] > 0:
        cycle = Cycle()
        cycle.itself = cycle
        references.append(weakref.ref(cycle, gone))
        del cycle
        {asked}

gc.set_threshold(3)
threads = [threading.Thread(target=look, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def ends(asked: str, timeout: float) -> bool:
    """Whether threads that ask for frames all come to an end."""
    try:
        subprocess.run(
            [sys.executable, "-c", LOCKS_UP.replace("{asked}", asked)], check=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return False
    return True


def test_threads_that_ask_while_garbage_is_collected_do_not_lock_up() -> None:
    assert ends("current_stacks()", 60)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions do not: run it with Python 3.11")
def test_it_is_this_that_locks_up() -> None:
    assert not ends("sys._current_frames()", 5)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collecting_stays_as_it_was(is_enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        current_stacks()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here: run it on Linux")
def test_a_child_forked_while_others_ask_collects_garbage_and_can_ask() -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            current_stacks()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(50):
            child = os.fork()
            if not child:
                os._exit(0 if gc.isenabled() and current_stacks([threading.get_ident()]) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        is_over.set()
        looking.join()


@pytest.mark.skipif(
    sys.platform != "linux", reason="run it on Linux, where threads have numbers of the kernel's"
)
def test_threads_numbers_are_those_of_the_kernel_also_while_others_begin_and_end() -> None:
    over = threading.Event()

    def begin_and_end() -> None:
        while not over.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    threads = [threading.Thread(target=begin_and_end) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3000):
            found = native_ids()
            assert [found[thread.ident or 0] for thread in threads] == [one.native_id for one in threads]
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_stacks_that_were_looked_at_keep_nothing(no_gc: None) -> None:
    class Kept:
        pass

    def look() -> weakref.ref[Kept]:
        kept = Kept()
        thread = threading.Thread(target=current_stacks)
        thread.start()
        thread.join()
        return weakref.ref(kept)

    assert look()() is None
