"""Decoded units that threads and processes share: a unit is found as it was put there."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_units import CONTENTS, NBYTES, obtained, put, take

from fastpipe.core import shared_chunks
from fastpipe.core.shared_chunks import UnitFile, joined_memory, private_units

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

KEYS = len(CONTENTS)
Forked = Callable[[Callable[[], object]], int]


@pytest.fixture
def memory() -> Iterator[UnitFile]:
    memory = UnitFile(KEYS, 3, NBYTES)
    yield memory
    memory.close()


@pytest.fixture
def other_process(forked: Forked) -> Callable[..., Any]:
    """A block with the pipe to a forked process, which does some work with its end."""

    @contextmanager
    def begin(work: Callable[[Connection], object]) -> Iterator[Connection]:
        ours, theirs = multiprocessing.Pipe()
        pid = forked(lambda: work(theirs))
        theirs.close()
        try:
            yield ours
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            ours.close()
        assert os.waitpid(pid, 0)[1] == 0

    return begin


@pytest.mark.parametrize("fails", [False, True])
def test_waiting_ends_with_the_unit_or_with_its_failure(memory: UnitFile, fails: bool) -> None:
    slots = memory.opened()
    slot = slots.claim(4)
    refused, found = threading.Event(), list[bool]()

    def want() -> None:
        assert slots.claim(4) is None
        refused.set()
        found.append(obtained(slots, 4))

    thread = threading.Thread(target=want)
    thread.start()
    refused.wait()
    slot.memory[:] = 99 if fails else CONTENTS[4]
    slot.abandon() if fails else slot.publish()
    thread.join()
    assert found == [fails], "whether it decoded"


def test_waiting_for_another_process_leaves_no_lock(memory: UnitFile, other_process: Any) -> None:
    """Waiting is having the slot's lock for a moment."""
    slots, found = memory.opened(), list[bool]()

    def work(pipe: Connection) -> None:
        own = memory.opened()
        slot = own.claim(9)
        assert slot is not None
        pipe.send("claimed")
        pipe.recv()
        slot.memory[:] = CONTENTS[9]
        slot.publish()
        pipe.recv()  # the other one has waited
        claims = [own.claim(key) for key in (10, 11, 12)]
        assert None not in claims, "each slot can be had"

    with other_process(work) as pipe:
        pipe.recv()
        assert slots.find(9) is None
        assert slots.is_coming(9)
        thread = threading.Thread(target=lambda: found.append(obtained(slots, 9)))
        thread.start()
        pipe.send("publish")
        thread.join()
        pipe.send("done")
    assert found == [False]


def test_two_processes_that_wait_for_each_other_s_units_continue(
    memory: UnitFile, other_process: Any
) -> None:
    """To the system that looks like a deadlock: locks are of processes, not of threads."""

    def work(mine: int, pipe: Connection) -> None:
        """Both have a unit, and a thread that wants the other's, before they publish theirs."""
        slots, found = memory.opened(), list[bool]()
        slot = slots.claim(mine)
        assert slot is not None
        thread = threading.Thread(target=lambda: found.append(obtained(slots, 1 - mine)))
        for step in range(2):
            pipe.send(step)
            pipe.recv()
            if not step:
                thread.start()
        slot.memory[:] = CONTENTS[mine]
        slot.publish()
        thread.join()
        assert found == [False]

    with other_process(lambda pipe: work(1, pipe)) as pipe:
        work(0, pipe)


def _is_refused_elsewhere(memory: UnitFile, in_child: Any) -> bool:
    """Whether another process gets no slot, where each is being written here."""

    def work() -> None:
        assert memory.opened().claim(1) is None

    try:
        in_child(work)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("made", ["pickled", "copied", "opened", "joined"])
def test_a_copy_in_this_process_is_the_memory_itself(made: str, in_child: Any) -> None:
    """The system forgets a process's locks of a file as soon as it closes any descriptor of that file."""
    memory = joined_memory("again", KEYS, 1, NBYTES) if made == "joined" else UnitFile(KEYS, 1, NBYTES)
    slot = memory.opened().claim(0)
    assert slot is not None
    copies: dict[str, Callable[[], Any]] = {
        "pickled": lambda: pickle.loads(pickle.dumps(memory)),
        "copied": lambda: copy.deepcopy(memory),
        "opened": memory.opened,
        "joined": lambda: joined_memory("again", KEYS, 1, NBYTES),
    }
    other = copies[made]()
    assert other is (memory.opened() if made == "opened" else memory)
    del other
    gc.collect()
    assert _is_refused_elsewhere(memory, in_child)
    slot.publish()
    memory.close()


def test_a_copy_elsewhere_is_of_the_same_memory_and_outlives_its_maker(other_process: Any) -> None:
    def work(pipe: Connection) -> None:
        made = UnitFile(KEYS, 3, NBYTES)
        slots = made.opened()
        assert put(slots, 6)
        pipe.send((pickle.dumps(made), made.__reduce__()[1]))
        pipe.recv()
        assert take(slots, 2)

    with other_process(work) as pipe:
        pickled, (*place, _) = pipe.recv()
        assert UnitFile.joined(*place, (KEYS, 4, NBYTES)) is None
        memory = pickle.loads(pickled)
        assert UnitFile.joined(*place, (KEYS, 4, NBYTES)) is None, "also of one that is open here"
        slots = memory.opened()
        assert (memory.slots, slots.slot_nbytes) == (3, NBYTES)
        assert take(slots, 6)
        assert put(slots, 2)
        pipe.send("done")
    assert put(slots, 4)
    assert all(take(slots, key) for key in (2, 4, 6))
    del slots
    memory.close()


@pytest.mark.parametrize("made", ["closed", "another memory", "a file", "ended"])
def test_there_is_no_copy_of_memory_that_is_gone(tmp_path: Path, other_process: Any, made: str) -> None:
    """Another memory may have its number, or any file."""

    def work(pipe: Connection) -> None:
        memory, other = UnitFile(KEYS, 3, NBYTES), UnitFile(1, 1, 16)
        pickled, number = pickle.dumps(memory), memory.descriptor
        if made == "closed":
            memory.close()
        elif made != "ended":
            with open(tmp_path / "x", "w") as file:
                os.dup2(other.descriptor if made == "another memory" else file.fileno(), number)
        pipe.send(pickled)
        if made != "ended":
            pipe.recv()

    with other_process(work) as pipe:
        pickled = pipe.recv()
        if made != "ended":
            assert pickle.loads(pickled) is None
            pipe.send("done")
    assert pickle.loads(pickled) is None


def test_memory_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"."):
        UnitFile(1, 1 << 20, 1 << 42).opened()
    with pytest.raises((OSError, ValueError)):
        UnitFile(1, 1 << 30, 1 << 42)
    gc.collect()
    monkeypatch.setattr(shared_chunks, "locks_are_possible", lambda: False)
    with pytest.raises(OSError, match="no locks"):
        UnitFile(1, 1, 16)


@settings(max_examples=60)
@given(
    count=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from(["put", "take", "fail", "hold", "end"]), st.integers(0, 7))),
)
def test_any_sequence_of_uses_gives_right_units(count: int, steps: list[tuple[str, int]]) -> None:
    """Beside a list that says what can be there: the most recently used, as many as slots that are not being written."""
    memory = UnitFile(KEYS, count, NBYTES)
    slots, there, held = memory.opened(), list[int](), dict[int, Any]()

    def claimed(key: int) -> Any:
        slot = slots.claim(key)
        # No slot is given twice, nor for a unit that is there or is coming.
        assert (slot is None) == (key in there or key in held or len(held) == count)
        if slot is not None and len(there) + len(held) == count:
            there.pop(0)
        return slot

    for step, key in steps:
        if step == "take":
            assert take(slots, key) == (key in there)
            if key in there:
                there.append(there.pop(there.index(key)))
        elif step == "end" and key in held:
            slot = held.pop(key)
            slot.memory[:] = CONTENTS[key]
            slot.publish()
            there.append(key)
        elif step in ("put", "fail", "hold") and (slot := claimed(key)) is not None:
            held[key] = slot
            slot.memory[:] = 1
            if step == "put":
                slot.memory[:] = CONTENTS[key]
                slot.publish()
                there.append(key)
            if step == "fail":
                slot.abandon()
            if step != "hold":
                del held[key]
        assert [slots.is_coming(key) for key in range(8)] == [key in held for key in range(8)]
    for slot in held.values():
        slot.abandon()
    memory.close()


def _read_at_random(memory: UnitFile, seed: int, steps: int) -> None:
    """Two threads that read any units, each of which must be as it was put; some decodings fail."""
    slots = memory.opened()

    def work(number: int) -> None:
        random = np.random.default_rng([seed, number])
        for step in range(steps):
            key = int(random.integers(8))
            if step % 7 == 0 and (slot := slots.claim(key)) is not None:
                slot.memory[:] = 99
                slot.abandon()
            obtained(slots, key)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.parametrize(
    ("count", "processes", "steps"),
    [(1, 2, 700), (5, 2, 700), *(pytest.param(n, 5, 5000, marks=pytest.mark.slow) for n in (1, 2, 3, 7))],
)
def test_threads_of_processes_read_right_units(
    count: int, processes: int, steps: int, forked: Forked
) -> None:
    """They want more units than there are slots, in orders of their own."""
    memory = UnitFile(KEYS, count, NBYTES)
    seeds = range(processes)
    pids = [forked(lambda seed=seed: _read_at_random(memory, seed, steps)) for seed in seeds]  # type: ignore[misc]
    _read_at_random(memory, 9, steps)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    slots = memory.opened()
    for key in range(count):
        obtained(slots, key)
    assert all(take(slots, key) for key in range(count)), "no slot is lost"
    memory.close()


def test_an_inherited_runtime_goes_without_a_child_s_locks(other_process: Any) -> None:
    """A worker has the parent's runtime until it has made its own."""
    memory = UnitFile(KEYS, 1, NBYTES)
    inherited = [memory.opened()]

    def work(pipe: Connection) -> None:
        slot = memory.opened().claim(0)
        assert slot is not None
        inherited.clear()
        gc.collect()
        pipe.send("claimed")
        pipe.recv()
        slot.publish()

    with other_process(work) as pipe:
        pipe.recv()
        refused = inherited[0].claim(1)
        pipe.send("done")
        assert refused is None
    inherited.clear()
    memory.close()


def test_processes_that_ask_for_the_same_share_it(other_process: Any) -> None:
    """As ranks of a job do, which one another have not started."""

    def work(pipe: Connection) -> None:
        slots = joined_memory("x", KEYS, 3, NBYTES).opened()
        assert put(slots, 5)
        pipe.send("put")
        pipe.recv()
        assert take(slots, 6)

    with other_process(work) as pipe:
        pipe.recv()
        memory = joined_memory("x", KEYS, 7, NBYTES)
        assert memory.slots == 3, "as many as its maker asked for"
        slots = memory.opened()
        assert take(slots, 5)
        assert put(slots, 6)
        for some in (("y", KEYS, 3, NBYTES), ("x", KEYS, 3, 16), ("x", 9, 3, NBYTES)):
            assert not take(joined_memory(*some).opened(), 5)
        pipe.send("done")
    memory.close()


def test_memory_of_one_process_is_like_that_of_many() -> None:
    units = private_units(KEYS, 2, NBYTES - 3)
    assert (units.slots, units.slot_nbytes) == (2, NBYTES)
    assert [put(units, key) for key in range(3)] == [True] * 3
    assert [take(units, key) for key in range(3)] == [False, True, True]
