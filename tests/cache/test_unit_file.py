"""Memory for decoded units: what is found is what was put there, in all processes, whoever is killed."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.cache import unit_file as module
from fastpipe.cache.unit_file import UnitFile, private_units
from fastpipe.core.native import native

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

NBYTES, KEYS, SLOTS = 1000, 16, 3
Forked = Callable[[Callable[[], object]], int]

CONTENTS = [np.random.default_rng(key).integers(0, 256, NBYTES, np.uint8) for key in range(KEYS)]


def put(units: Any, key: int, left: int = -1) -> bool:
    claimed = units.claim(key)
    if claimed is None:
        return False
    half = NBYTES // 2
    claimed.memory[:half] = CONTENTS[key][:half]
    claimed.memory[half:NBYTES] = CONTENTS[key][half:]
    return bool(claimed.publish(left))


def take(units: Any, key: int) -> bool:
    found = units.find(key)
    if found is None:
        return False
    copied = found.memory[:NBYTES].copy()
    if not found.release():
        return False
    np.testing.assert_array_equal(copied, CONTENTS[key])
    units.used(np.array([key]))
    return True


def obtained(units: Any, key: int) -> bool:
    """As a reader does it: whether it had to decode."""
    while not take(units, key):
        if put(units, key):
            return True
        if units.is_coming(key):
            units.wait(key)
    return False


def check_all_can_be_had(file: UnitFile) -> None:
    units = file.opened()
    for key in range(KEYS):
        obtained(units, key)
        assert take(units, key)
    for key in range(SLOTS):  # and no slot is lost
        obtained(units, key)
    assert all(take(units, key) for key in range(SLOTS))


@pytest.fixture
def file() -> Iterator[UnitFile]:
    file = UnitFile(KEYS, SLOTS, NBYTES)
    yield file
    file.close()


# ---- in one process ------------------------------------------------------------------------------


KINDS = pytest.mark.parametrize("kind", ["private", "shared"])


def units_of(kind: str) -> Any:
    shape = KEYS, SLOTS, NBYTES
    return private_units(*shape) if kind == "private" else UnitFile(*shape).opened()


@KINDS
def test_what_was_put_there_is_found(kind: str) -> None:
    units = units_of(kind)
    assert (units.slots, units.slot_nbytes) == (SLOTS, 1024)
    assert units.find(0) is None
    for key in (0, 7, 15):
        assert put(units, key)
    assert units.are_there(np.array([0, 1, 7, 15])).tolist() == [True, False, True, True]
    assert all(take(units, key) for key in (0, 7, 15))
    assert not take(units, 1)
    for key in (-1, KEYS, 1 << 40):
        assert units.find(key) is None
        assert units.claim(key) is None


@KINDS
def test_first_goes_what_will_not_be_used_again(kind: str) -> None:
    units = units_of(kind)
    for key in range(3):
        assert put(units, key, left=2)
    assert take(units, 1)
    assert take(units, 1)
    assert put(units, 3)
    assert [take(units, key) for key in range(4)] == [True, False, True, True]


@KINDS
def test_then_what_was_not_used_for_longest(kind: str) -> None:
    units = units_of(kind)
    for key in range(3):
        assert put(units, key)
    assert take(units, 0)
    assert put(units, 3)
    assert [take(units, key) for key in range(4)] == [True, False, True, True]


@KINDS
def test_what_is_read_or_written_is_in_use(kind: str) -> None:
    units = units_of(kind)
    for key in range(3):
        assert put(units, key)
    found = [units.find(key) for key in range(3)]
    assert units.claim(5) is None
    assert found[1].release()
    claimed = units.claim(5)
    assert claimed is not None
    assert units.claim(6) is None
    del found, claimed  # which gives all of them back
    assert put(units, 6)


@KINDS
def test_what_failed_is_not_there(kind: str) -> None:
    units = units_of(kind)
    claimed = units.claim(4)
    claimed.memory[:] = 99
    assert units.is_coming(4)
    assert units.claim(4) is None
    claimed.abandon()
    assert not units.is_coming(4)
    assert not take(units, 4)
    del claimed
    claimed = units.claim(4)
    del claimed
    assert put(units, 4)
    assert take(units, 4)


@KINDS
def test_a_unit_is_let_go_of_once(kind: str) -> None:
    units = units_of(kind)
    claimed = units.claim(4)
    assert claimed.publish()
    found = units.find(4)
    assert found.release()
    for again in (claimed.publish, claimed.abandon, found.release):
        with pytest.raises(ValueError, match="was let go of"):
            again()


def test_memory_that_is_too_small_is_refused() -> None:
    nbytes = native.UnitMemory.nbytes(KEYS, SLOTS, 1024)
    for memory, shape in (
        (np.zeros(nbytes - 1, np.uint8), (KEYS, SLOTS, 1024)),
        (np.zeros(nbytes, np.uint8), (KEYS, SLOTS, 1000)),
        (np.zeros(nbytes, np.uint8), (KEYS, 0, 1024)),
        (np.zeros(nbytes, np.uint8), (-1, SLOTS, 1024)),
    ):
        with pytest.raises(ValueError, match=r"slots|memory"):
            native.UnitMemory(memory, -1, *shape)


# ---- in several ----------------------------------------------------------------------------------


def test_others_see_it(file: UnitFile, in_child: Callable[[Callable[[], object]], None]) -> None:
    assert put(file.opened(), 2)
    in_child(lambda: (put(file.opened(), 5), take(file.opened(), 2)))
    assert take(file.opened(), 5)


def test_it_is_opened_once_in_a_process(
    file: UnitFile, in_child: Callable[[Callable[[], object]], None]
) -> None:
    units = file.opened()
    assert file.opened() is units

    def child() -> None:
        own = file.opened()
        assert own is not units
        assert file.opened() is own
        assert put(own, 1)

    in_child(child)
    assert take(units, 1)


def test_a_copy_in_this_process_is_the_same(file: UnitFile) -> None:
    assert pickle.loads(pickle.dumps(file)) is file


def test_a_copy_in_another_process_is_of_the_same_memory(
    file: UnitFile, in_child: Callable[[Callable[[], object]], None]
) -> None:
    """As in a process that was spawned, which has no descriptor of it."""
    assert put(file.opened(), 6)
    pickled = pickle.dumps(file)

    def child() -> None:
        os.close(file.descriptor)
        module._files.clear()
        copy = pickle.loads(pickled)
        assert copy is not file
        assert pickle.loads(pickled) is copy
        assert take(copy.opened(), 6)
        assert put(copy.opened(), 2)

    in_child(child)
    assert take(file.opened(), 2)


def test_there_is_no_copy_of_what_is_gone(file: UnitFile, tmp_path: Path) -> None:
    pickled, other = pickle.dumps(file), UnitFile(1, 1, 10)
    module._files.clear()
    os.dup2(other.descriptor, file.descriptor)  # another file has its number now
    assert pickle.loads(pickled) is None
    with open(tmp_path / "x", "w") as plain:
        os.dup2(plain.fileno(), file.descriptor)
    assert pickle.loads(pickled) is None
    other.close()


def test_it_goes_with_the_last_that_refers_to_it(no_gc: None) -> None:
    file = UnitFile(KEYS, 2, NBYTES)
    descriptor, units = file.descriptor, file.opened()
    del file
    os.fstat(descriptor)
    assert put(units, 1)
    claimed = units.claim(2)
    del units
    os.fstat(descriptor)
    del claimed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_without_locks_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "locks_are_possible", lambda: False)
    with pytest.raises(OSError, match="no locks"):
        UnitFile(1, 1, 10)


def test_memory_is_taken_when_it_is_written() -> None:
    large = UnitFile(KEYS, 1 << 10, 1 << 30)  # a terabyte
    assert put(large.opened(), 1)
    assert os.fstat(large.descriptor).st_blocks * 512 < 1 << 20
    large.close()


# ---- processes that are killed and stopped ---------------------------------------------------------


class Writer:
    """A child that has half written a unit, and goes on when it is told to."""

    def __init__(self, file: UnitFile, key: int, forked: Forked) -> None:
        self._file, self._key = file, key
        self._told, self._tell = os.pipe()
        self._hear, self._said = os.pipe()
        self.pid = forked(self._work)
        assert os.read(self._hear, 1) == b"!"

    def _work(self) -> None:
        claimed = self._file.opened().claim(self._key)
        assert claimed is not None
        claimed.memory[:] = 99
        claimed.memory[: NBYTES // 2] = CONTENTS[self._key][: NBYTES // 2]
        os.write(self._said, b"!")
        os.read(self._told, 1)
        claimed.memory[NBYTES // 2 : NBYTES] = CONTENTS[self._key][NBYTES // 2 :]
        assert claimed.publish()

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


def test_who_wants_what_another_process_decodes_waits(file: UnitFile, forked: Forked) -> None:
    writer, units = Writer(file, 9, forked), file.opened()
    assert units.is_coming(9)
    assert units.find(9) is None
    assert units.claim(9) is None
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(obtained(units, 9)))
    thread.start()
    assert writer.go_on() == 0
    thread.join()
    assert found == [False]


def test_what_a_killed_process_had_begun_is_for_others(file: UnitFile, forked: Forked) -> None:
    writer, units = Writer(file, 9, forked), file.opened()
    assert put(units, 1)
    writer.kill()
    assert not take(units, 9)
    assert units.is_coming(9), "nobody has noticed so far"
    units.wait(9)  # not for what will never come
    assert put(units, 9)
    assert take(units, 9)
    assert take(units, 1)
    check_all_can_be_had(file)


def test_its_slot_is_for_other_units(file: UnitFile, forked: Forked) -> None:
    Writer(file, 9, forked).kill()
    units = file.opened()
    for key in range(SLOTS):
        assert put(units, key)
    assert all(take(units, key) for key in range(SLOTS))
    assert not take(units, 9)
    assert not units.is_coming(9)


def test_who_waits_for_it_goes_on(file: UnitFile, forked: Forked) -> None:
    writer, units = Writer(file, 9, forked), file.opened()
    refused, found = threading.Event(), list[bool]()

    def want() -> None:
        assert not put(units, 9)
        refused.set()
        found.append(obtained(units, 9))

    thread = threading.Thread(target=want)
    thread.start()
    refused.wait()
    writer.kill()
    thread.join()
    assert found == [True]
    assert take(units, 9)


def test_a_reader_that_found_it_before_notices(file: UnitFile, forked: Forked) -> None:
    units = file.opened()
    for key in range(SLOTS):
        assert put(units, key)
    found = [units.find(key) for key in range(SLOTS)]
    Writer(file, 9, forked).kill()
    assert [one.release() for one in found].count(True) == SLOTS - 1
    check_all_can_be_had(file)


def test_killed_again_and_again_while_others_read(file: UnitFile, forked: Forked) -> None:
    """More units than slots; each victim ends in the middle of a unit, at a different place each time."""

    def read(seed: int) -> None:
        random, units = np.random.default_rng(seed), file.opened()
        for _ in range(1500):
            obtained(units, int(random.integers(KEYS)))

    def die(seed: int) -> None:
        random, units = np.random.default_rng(seed), file.opened()
        left = int(random.integers(1, 40))
        while True:
            key = int(random.integers(KEYS))
            claimed = None if take(units, key) else units.claim(key)
            if claimed is None:
                continue
            left -= 1
            claimed.memory[:] = 99
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            claimed.memory[:NBYTES] = CONTENTS[key]
            claimed.publish()

    readers = [forked(lambda seed=seed: read(seed)) for seed in range(2)]  # type: ignore[misc]
    for seed in range(20):
        assert os.waitpid(forked(lambda: die(seed)), 0)[1] == signal.SIGKILL
    assert [os.waitpid(pid, 0)[1] for pid in readers] == [0, 0]
    check_all_can_be_had(file)


def test_killed_at_any_time_while_others_read(file: UnitFile, forked: Forked) -> None:
    """By the clock, so in the core's own writes to the table as well."""

    def work(seed: int, rounds: int) -> None:
        random, units = np.random.default_rng(seed), file.opened()
        while rounds:
            obtained(units, int(random.integers(KEYS)))
            rounds -= 1

    reader = forked(lambda: work(0, 3000))
    random = np.random.default_rng(1)
    for seed in range(15):
        pid = forked(lambda: work(seed, -1))
        threading.Event().wait(float(random.uniform(0.001, 0.02)))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert os.waitpid(reader, 0)[1] == 0
    check_all_can_be_had(file)


def test_a_stopped_process_is_in_nobody_s_way_but_for_its_unit(file: UnitFile, forked: Forked) -> None:
    writer, units = Writer(file, 9, forked), file.opened()
    writer.stop()
    others = [key for key in range(KEYS) if key != 9]
    for key in others * 3:
        obtained(units, key)
    for key in others[: SLOTS - 1]:
        obtained(units, key)
    assert all(take(units, key) for key in others[: SLOTS - 1]), "each other slot is in use"
    assert not take(units, 9)
    assert not put(units, 9)
    assert writer.go_on() == 0
    assert take(units, 9), "nobody has taken its slot meanwhile"
    check_all_can_be_had(file)


def test_a_stopped_reader_notices_what_was_done_meanwhile(file: UnitFile, forked: Forked) -> None:
    units = file.opened()
    assert put(units, 1)
    assert put(units, 2)

    def work() -> None:
        own = file.opened()
        found = [own.find(key) for key in (1, 2)]
        os.kill(os.getpid(), signal.SIGSTOP)
        if [one.release() for one in found] != [False, True]:
            os._exit(3)

    pid = forked(work)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    for key in (5, 2, 6, 2, 7):  # 2 stays where it is, being used
        obtained(units, key)
    assert not take(units, 1)
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0


def test_nobody_waits_for_ever_for_a_stopped_process(file: UnitFile, forked: Forked) -> None:
    writer, units = Writer(file, 9, forked), file.opened()
    writer.stop()
    thread = threading.Thread(target=units.wait, args=(9,))
    thread.start()
    thread.join(60.0)
    is_over = not thread.is_alive()
    code = writer.go_on()
    thread.join()
    del thread, units, writer  # a test that fails keeps its names
    assert code == 0
    assert is_over


def test_closing_another_descriptor_of_a_process_ends_no_lock(file: UnitFile, forked: Forked) -> None:
    """A mapping, or a copy, that goes must not free the slots that this process is writing."""
    units = file.opened()
    claimed = units.claim(9)
    del units
    again = file.opened()
    gc.collect()

    def others() -> None:
        own = file.opened()
        assert own.claim(9) is None
        for key in range(SLOTS - 1):
            assert put(own, key)
        assert own.claim(5) is not None
        assert put(own, 6)
        assert own.claim(9) is None

    assert os.waitpid(forked(others), 0)[1] == 0
    claimed.memory[:NBYTES] = CONTENTS[9]
    assert claimed.publish()
    assert take(again, 9)


def test_what_a_child_drops_of_its_parent_s_stays_the_parent_s(
    file: UnitFile, in_child: Callable[[Callable[[], object]], None]
) -> None:
    units = file.opened()
    held = [units.claim(9)]
    in_child(held.clear)
    held[0].memory[:NBYTES] = CONTENTS[9]
    assert held[0].publish()
    assert take(units, 9)
