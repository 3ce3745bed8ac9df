"""Decoded chunks that processes share: what is found is what was put there, whoever is killed."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fastpipe.cache import window as window_module
from fastpipe.cache.window import SharedWindow, WindowSlots

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

NBYTES = 1000
Forked = Callable[[Callable[[], object]], int]


def content(chunk: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(chunk).integers(0, 256, NBYTES, np.uint8)


def put(slots: WindowSlots, chunk: int, left: int = 3) -> bool:
    claimed = slots.claim(chunk, NBYTES)
    if claimed is None:
        return False
    with claimed:
        claimed.memory[:] = content(chunk)
        return claimed.publish(left)


def take(slots: WindowSlots, chunk: int, samples: int = 1) -> bool:
    place, version = slots.find(chunk, waits=True)
    if place < 0:
        return False
    copied = slots.memory[place : place + NBYTES].copy()
    if not slots.took(place, version, samples):
        return False
    np.testing.assert_array_equal(copied, content(chunk))
    return True


@pytest.fixture
def window() -> Iterator[SharedWindow]:
    window = SharedWindow(3, NBYTES)
    yield window
    window.close()


def test_what_was_put_there_is_found(window: SharedWindow) -> None:
    slots = WindowSlots(window)
    assert slots.find(0, waits=True) == (-1, 0)
    for chunk in (0, 7, 1 << 41):
        assert put(slots, chunk)
    for chunk in (0, 7, 1 << 41):
        assert take(slots, chunk)
    assert not take(slots, 1)


def test_others_see_it(window: SharedWindow, in_child: Callable[[Callable[[], object]], None]) -> None:
    in_child(lambda: put(WindowSlots(window), 5))
    assert take(WindowSlots(window), 5)


def test_first_goes_what_nobody_wants(window: SharedWindow) -> None:
    slots = WindowSlots(window)
    for chunk in range(3):
        assert put(slots, chunk, left=2)
    assert take(slots, 1, samples=2)
    assert put(slots, 3)
    assert [take(slots, chunk) for chunk in range(4)] == [True, False, True, True]


def test_then_what_was_not_used_for_longest(window: SharedWindow) -> None:
    slots = WindowSlots(window)
    for chunk in range(3):
        assert put(slots, chunk)
    assert take(slots, 0)
    assert put(slots, 3)
    assert [take(slots, chunk) for chunk in range(4)] == [True, False, True, True]


def test_what_was_written_over_meanwhile_is_told(window: SharedWindow) -> None:
    slots = WindowSlots(window)
    for chunk in range(3):
        assert put(slots, chunk, left=1)
    found = [slots.find(chunk, waits=False) for chunk in range(3)]
    claimed = [slots.claim(chunk, NBYTES) for chunk in (10, 11, 12)]
    assert all(claimed)
    assert [slots.took(place, version, 1) for place, version in found] == [False] * 3
    assert slots.claim(13, NBYTES) is None  # each is being written
    for one in claimed:
        assert one is not None
        assert one.publish(1)
    assert [slots.took(place, version, 1) for place, version in found] == [False] * 3


def test_what_failed_is_not_there(window: SharedWindow) -> None:
    slots = WindowSlots(window)
    claimed = slots.claim(4, NBYTES)
    assert claimed is not None
    with pytest.raises(RuntimeError, match="damaged"), claimed:
        raise RuntimeError("damaged")
    assert not take(slots, 4)
    assert put(slots, 4)
    assert take(slots, 4)


def test_a_thread_does_not_wait_for_one_of_its_own_process(window: SharedWindow) -> None:
    slots = WindowSlots(window)
    claimed = slots.claim(4, NBYTES)
    assert claimed is not None
    assert slots.find(4, waits=True) == (-1, 0)
    assert slots.claim(4, NBYTES) is None
    claimed.memory[:] = content(4)
    assert claimed.publish(1)
    assert take(slots, 4)


def test_too_large_a_chunk_is_not_shared(window: SharedWindow) -> None:
    assert WindowSlots(window).claim(0, NBYTES + 1) is None


class Halted:
    """A child that has claimed a chunk and goes on when it is told to."""

    def __init__(self, window: SharedWindow, chunk: int, forked: Forked) -> None:
        self._window, self._chunk = window, chunk
        self._told, self._tell = os.pipe()
        self._hear, self._said = os.pipe()
        self.pid = forked(self._work)
        assert os.read(self._hear, 1) == b"!"

    def _work(self) -> None:
        claimed = WindowSlots(self._window).claim(self._chunk, NBYTES)
        assert claimed is not None
        os.write(self._said, b"!")
        os.read(self._told, 1)
        claimed.memory[:] = content(self._chunk)
        assert claimed.publish(3)

    def go_on(self) -> None:
        os.write(self._tell, b"!")

    def close(self) -> None:
        self.go_on()
        os.waitpid(self.pid, 0)
        for descriptor in (self._told, self._tell, self._hear, self._said):
            os.close(descriptor)


@pytest.fixture
def halted(window: SharedWindow, forked: Forked) -> Iterator[Halted]:
    one = Halted(window, 9, forked)
    yield one
    one.close()


def test_who_wants_what_another_process_decodes_waits(window: SharedWindow, halted: Halted) -> None:
    slots = WindowSlots(window)
    assert slots.find(9, waits=False) == (-1, 0)
    assert slots.claim(9, NBYTES) is None
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(take(slots, 9)))
    thread.start()
    halted.go_on()
    thread.join()
    assert found == [True]


def test_what_a_killed_process_had_begun_is_for_others(window: SharedWindow, halted: Halted) -> None:
    slots = WindowSlots(window)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(take(slots, 9)))
    thread.start()
    os.kill(halted.pid, signal.SIGKILL)
    thread.join()  # it does not wait for what will never come
    assert found == [False]
    assert put(slots, 9)
    assert take(slots, 9)
    for chunk in range(3):  # and no slot is lost
        assert put(slots, chunk)
    assert all(take(slots, chunk) for chunk in range(3))


@pytest.mark.parametrize("killed", [False, True])
def test_whatever_is_taken_is_right(window: SharedWindow, forked: Forked, killed: bool) -> None:
    """Processes that want more chunks than there are slots, in orders of their own."""
    ready, go = os.pipe()

    def work(seed: int) -> None:
        random, slots = np.random.default_rng(seed), WindowSlots(window, seed / 4)
        for step in range(300):
            chunk = int(random.integers(8))
            if not take(slots, chunk):
                put(slots, chunk, left=int(random.integers(4)))
            if step == 100:
                os.write(go, b"!")

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    if killed:
        os.read(ready, 1)
        os.kill(pids[0], signal.SIGKILL)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    assert ends[1:] == [0] * 3
    assert ends[0] == 0 or killed
    work(9)
    os.close(ready)
    os.close(go)


def test_a_copy_is_of_the_same_memory(window: SharedWindow) -> None:
    assert put(WindowSlots(window), 6)
    copy = pickle.loads(pickle.dumps(window))
    assert take(WindowSlots(copy), 6)
    assert put(WindowSlots(copy), 2)
    assert take(WindowSlots(window), 2)


def test_there_is_no_copy_of_what_is_gone(window: SharedWindow) -> None:
    pickled, other = pickle.dumps(window), SharedWindow(1, 10)
    descriptor = window.descriptor
    os.dup2(other.descriptor, descriptor)  # another file has its number now
    assert pickle.loads(pickled) is None


def test_it_goes_with_the_last_who_refers_to_it(window: SharedWindow) -> None:
    other = SharedWindow(2, NBYTES)
    descriptor, slots = other.descriptor, WindowSlots(other)
    del other
    gc.collect()
    os.fstat(descriptor)
    assert put(slots, 1)
    del slots
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_without_locks_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "locks_are_possible", lambda: False)
    with pytest.raises(OSError, match="no locks"):
        SharedWindow(1, 10)


def test_memory_is_taken_when_it_is_written(window: SharedWindow) -> None:
    large = SharedWindow(1 << 10, 1 << 30)  # a terabyte
    assert put(WindowSlots(large), 1)
    assert os.fstat(large.descriptor).st_blocks * 512 < 1 << 20


def test_the_file_of_another_is_not_taken_for_it(window: SharedWindow, tmp_path: Path) -> None:
    pickled = pickle.dumps(window)
    with open(tmp_path / "x", "w") as file:
        os.dup2(file.fileno(), window.descriptor)
    assert pickle.loads(pickled) is None
