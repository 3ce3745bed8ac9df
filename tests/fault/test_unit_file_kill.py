"""Decoded units in shared memory, over which processes are killed and stopped: no byte of it is ever wrong.

Processes are forked, and end by progress, never by time: at one of the writes that a slot is taken by, or in
the middle of the unit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shared_units import CONTENTS, NBYTES, obtained, put, take

from fastpipe.core.shared_chunks import UnitFile

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it on Linux, which has files in memory without names"
)

KEYS, SLOTS = 16, 3
Forked = Callable[[Callable[[], object]], int]


def check_all_can_be_had(memory: UnitFile) -> None:
    slots = memory.opened()
    for key in range(KEYS):
        obtained(slots, key)
        assert take(slots, key)
    for key in range(SLOTS):  # and no slot is lost
        obtained(slots, key)
    assert all(take(slots, key) for key in range(SLOTS))


@pytest.fixture
def memory() -> Iterator[UnitFile]:
    memory = UnitFile(KEYS, SLOTS, NBYTES)
    yield memory
    memory.close()


class Writer:
    """A child that has half written a unit, and goes on when it is told to."""

    def __init__(self, memory: UnitFile, key: int, forked: Forked) -> None:
        self._memory, self._key = memory, key
        self._told, self._tell = os.pipe()
        self._hear, self._said = os.pipe()
        self.pid = forked(self._work)
        assert os.read(self._hear, 1) == b"!"

    def _work(self) -> None:
        slot = self._memory.opened().claim(self._key)
        assert slot is not None
        slot.memory[:] = 99
        slot.memory[: NBYTES // 2] = CONTENTS[self._key][: NBYTES // 2]
        os.write(self._said, b"!")
        os.read(self._told, 1)
        slot.memory[NBYTES // 2 :] = CONTENTS[self._key][NBYTES // 2 :]
        slot.publish()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def go_on(self) -> int:
        """Its exit code."""
        os.kill(self.pid, signal.SIGCONT)
        os.write(self._tell, b"!")
        return self.end()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def end(self) -> int:
        status = os.waitpid(self.pid, 0)[1]
        for descriptor in (self._told, self._tell, self._hear, self._said):
            os.close(descriptor)
        return os.waitstatus_to_exitcode(status)


def test_what_a_killed_process_had_begun_is_for_others(memory: UnitFile, forked: Forked) -> None:
    writer, slots = Writer(memory, 9, forked), memory.opened()
    assert put(slots, 1)
    writer.kill()
    assert not take(slots, 9)
    assert slots.is_coming(9), "nobody has noticed so far"
    slots.wait(9)  # not for what will never come
    assert put(slots, 9)
    assert take(slots, 9)
    assert take(slots, 1)
    check_all_can_be_had(memory)


def test_its_slot_is_for_other_units(memory: UnitFile, forked: Forked) -> None:
    Writer(memory, 9, forked).kill()
    slots = memory.opened()
    for key in range(SLOTS):
        assert put(slots, key)
    assert all(take(slots, key) for key in range(SLOTS))
    assert not take(slots, 9)
    assert not slots.is_coming(9)


def test_who_waits_for_it_goes_on(memory: UnitFile, forked: Forked) -> None:
    writer, slots = Writer(memory, 9, forked), memory.opened()
    refused, found = threading.Event(), list[bool]()

    def want() -> None:
        assert not put(slots, 9)
        refused.set()
        found.append(obtained(slots, 9))

    thread = threading.Thread(target=want)
    thread.start()
    refused.wait()
    writer.kill()
    thread.join()
    assert found == [True]
    assert take(slots, 9)


def test_a_reader_that_found_it_before_notices(memory: UnitFile, forked: Forked) -> None:
    slots = memory.opened()
    for key in range(SLOTS):
        assert put(slots, key)
    found = [slots.find(key) for key in range(SLOTS)]
    Writer(memory, 9, forked).kill()
    assert sum(one.release() for one in found) == SLOTS - 1
    check_all_can_be_had(memory)


def test_killed_again_and_again_while_others_read(forked: Forked) -> None:
    """More units than slots; each victim ends in the middle of a unit, at a different place each time."""
    memory = UnitFile(KEYS, SLOTS, NBYTES)

    def read(seed: int) -> None:
        random, slots = np.random.default_rng(seed), memory.opened()
        for _ in range(1500):
            obtained(slots, int(random.integers(KEYS)))

    def die(seed: int) -> None:
        random, slots = np.random.default_rng(seed), memory.opened()
        left = int(random.integers(1, 40))
        while True:
            key = int(random.integers(KEYS))
            slot = None if take(slots, key) else slots.claim(key)
            if slot is None:
                continue
            left -= 1
            slot.memory[:] = 99
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            slot.memory[:] = CONTENTS[key]
            slot.publish()

    readers = [forked(lambda seed=seed: read(seed)) for seed in range(2)]  # type: ignore[misc]
    for seed in range(20):
        assert os.waitpid(forked(lambda: die(seed)), 0)[1] == signal.SIGKILL
    assert [os.waitpid(pid, 0)[1] for pid in readers] == [0, 0]
    check_all_can_be_had(memory)
    memory.close()


def test_a_stopped_process_is_in_nobody_s_way_but_for_its_unit(memory: UnitFile, forked: Forked) -> None:
    writer, slots = Writer(memory, 9, forked), memory.opened()
    writer.stop()
    others = [key for key in range(KEYS) if key != 9]
    for key in others * 3:
        obtained(slots, key)
    for key in others[: SLOTS - 1]:
        obtained(slots, key)
    assert all(take(slots, key) for key in others[: SLOTS - 1]), "each other slot is in use"
    assert not take(slots, 9)
    assert not put(slots, 9)
    assert writer.go_on() == 0
    assert take(slots, 9), "nobody has taken its slot meanwhile"
    check_all_can_be_had(memory)


def test_a_stopped_reader_notices_what_was_done_meanwhile(memory: UnitFile, forked: Forked) -> None:
    slots = memory.opened()
    assert put(slots, 1)
    assert put(slots, 2)

    def work() -> None:
        own = memory.opened()
        found = [own.find(1), own.find(2)]
        os.kill(os.getpid(), signal.SIGSTOP)
        if [one.release() for one in found] != [False, True]:
            os._exit(3)

    pid = forked(work)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    for key in (5, 2, 6, 2, 7):  # 2 stays where it is, being used
        obtained(slots, key)
    assert not take(slots, 1)
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0


def test_nobody_waits_for_ever_for_a_stopped_process(memory: UnitFile, forked: Forked) -> None:
    writer, slots = Writer(memory, 9, forked), memory.opened()
    writer.stop()
    thread = threading.Thread(target=slots.wait, args=(9,))
    thread.start()
    thread.join(60.0)
    is_over = not thread.is_alive()
    code = writer.go_on()
    thread.join()
    del thread, slots, writer  # a test that fails keeps its names
    assert code == 0
    assert is_over
