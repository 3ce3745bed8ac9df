"""Decoded units in shared memory, over which processes are killed and stopped: no byte of it is ever wrong.

Processes are forked, and end by progress, never by time: in the middle of a unit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from shared_units import CONTENTS, NBYTES, obtained, put, take

from fastpipe.core.shared_chunks import UnitFile

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="run it on Linux")

KEYS, SLOTS = 16, 3


def check_all_can_be_had(memory: UnitFile) -> None:
    slots = memory.opened()
    for key in [*range(KEYS), *range(SLOTS)]:
        obtained(slots, key)
        assert take(slots, key)
    assert all(take(slots, key) for key in range(SLOTS)), "no slot is lost"


@pytest.fixture
def memory() -> Iterator[UnitFile]:
    memory = UnitFile(KEYS, SLOTS, NBYTES)
    yield memory
    memory.close()


class Writer:
    """A child that has written half of unit 9 and is stopped."""

    def __init__(self, memory: UnitFile, forked: Any) -> None:
        self._memory = memory
        self.pid = forked(self._work)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def _work(self) -> None:
        slot = self._memory.opened().claim(9)
        assert slot is not None
        slot.memory[:] = 99
        slot.memory[: NBYTES // 2] = CONTENTS[9][: NBYTES // 2]
        os.kill(os.getpid(), signal.SIGSTOP)
        slot.memory[NBYTES // 2 :] = CONTENTS[9][NBYTES // 2 :]
        slot.publish()

    def end(self, number: signal.Signals) -> None:
        """With SIGCONT it goes on to its end."""
        os.kill(self.pid, number)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == (0 if number == signal.SIGCONT else -number)


@pytest.mark.parametrize("want", ["the same unit", "other units", "a unit that was found before"])
def test_a_slot_of_a_killed_process_is_free(memory: UnitFile, forked: Any, want: str) -> None:
    slots = memory.opened()
    if want == "a unit that was found before":
        assert all(put(slots, key) for key in range(SLOTS))
        found: list[Any] = [slots.find(key) for key in range(SLOTS)]
    writer = Writer(memory, forked)
    if want == "the same unit":
        assert put(slots, 1)
    writer.end(signal.SIGKILL)
    if want == "the same unit":
        assert not take(slots, 9)
        assert slots.is_coming(9), "no process has noticed so far"
        slots.wait(9)  # not for what will never come
        assert put(slots, 9) and take(slots, 9) and take(slots, 1)
    elif want == "other units":
        assert all(put(slots, key) for key in range(SLOTS)) and all(take(slots, key) for key in range(SLOTS))
        assert not take(slots, 9) and not slots.is_coming(9)
    else:
        assert sum(one.release() for one in found) == SLOTS - 1, "a reader notices that its unit is gone"
    check_all_can_be_had(memory)


@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_no_process_waits_for_ever_for_another(memory: UnitFile, forked: Any, end: Any) -> None:
    """For one that is killed or stopped meanwhile."""
    writer, slots, refused = Writer(memory, forked), memory.opened(), threading.Event()

    def want() -> bool | None:
        assert not put(slots, 9)
        refused.set()
        return obtained(slots, 9) if end else slots.wait(9)

    with ThreadPoolExecutor(1) as pool:
        wanted = pool.submit(want)
        refused.wait(60)
        if end:
            writer.end(end)
        found = wanted.result(60)
    if not end:
        writer.end(signal.SIGCONT)
    assert take(slots, 9) and (found or not end)


def test_processes_that_are_killed_again_and_again_disturb_no_readers(memory: UnitFile, forked: Any) -> None:
    """More units than slots; each victim ends in the middle of a unit, at a different place each time."""

    def read(seed: int) -> None:
        random, slots = np.random.default_rng(seed), memory.opened()
        for _ in range(1000):
            obtained(slots, int(random.integers(KEYS)))

    def die(seed: int) -> None:
        random, slots = np.random.default_rng(seed), memory.opened()
        left = int(random.integers(1, 40))
        while True:
            key = int(random.integers(KEYS))
            if take(slots, key) or (slot := slots.claim(key)) is None:
                continue
            left -= 1
            slot.memory[:] = 99
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            slot.memory[:] = CONTENTS[key]
            slot.publish()

    readers = [forked(partial(read, seed)) for seed in range(2)]
    for seed in range(15):
        assert os.waitpid(forked(partial(die, seed)), 0)[1] == signal.SIGKILL
    assert [os.waitpid(pid, 0)[1] for pid in readers] == [0, 0]
    check_all_can_be_had(memory)


def test_a_stopped_writer_keeps_its_slot_and_no_others(memory: UnitFile, forked: Any) -> None:
    writer, slots = Writer(memory, forked), memory.opened()
    others = [key for key in range(KEYS) if key != 9]
    for key in [*others * 3, *others[: SLOTS - 1]]:
        obtained(slots, key)
    assert all(take(slots, key) for key in others[: SLOTS - 1]), "each other slot is in use"
    assert not take(slots, 9) and not put(slots, 9)
    writer.end(signal.SIGCONT)
    assert take(slots, 9), "its slot was not taken meanwhile"
    check_all_can_be_had(memory)


def test_a_stopped_reader_notices_that_its_unit_has_gone(memory: UnitFile, forked: Any) -> None:
    slots = memory.opened()
    assert put(slots, 1) and put(slots, 2)

    def work() -> None:
        own = memory.opened()
        found = [own.find(1), own.find(2)]
        os.kill(os.getpid(), signal.SIGSTOP)
        assert [one.release() for one in found] == [False, True]

    pid = forked(work)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    for key in (5, 2, 6, 2, 7):  # 2 stays where it is, being used
        obtained(slots, key)
    assert not take(slots, 1)
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0
