"""Decoded units that threads and processes share: what is found is what was put there."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_units import CONTENTS, NBYTES, obtained, put, take

from fastpipe.core import shared_chunks as unit_file
from fastpipe.core.shared_chunks import UnitFile, joined_memory, private_units

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

KEYS = len(CONTENTS)
Forked = Callable[[Callable[[], object]], int]
InChild = Callable[[Callable[[], object]], None]

# What a process that was not forked does with the memory that it is sent.
ELSEWHERE = """
import numpy as np
slots = memory.opened()
assert slots.are_there(np.array([1, 2])).tolist() == [True, False]
found = slots.find(1)
assert found.memory.tobytes() == expected and found.release()
slot = slots.claim(2)
slot.memory[:] = 7
slot.publish()
"""


@contextmanager
def given_back(slot: Any) -> Iterator[None]:
    """A block after which a slot that was not published is given back."""
    try:
        yield
    finally:
        with suppress(ValueError):  # it was published
            slot.abandon()


@pytest.fixture
def memory() -> Iterator[UnitFile]:
    memory = UnitFile(KEYS, 3, NBYTES)
    yield memory
    memory.close()


def test_at_first_nothing_is_there(memory: UnitFile) -> None:
    slots = memory.opened()
    assert not slots.are_there(np.array([0, 1, KEYS - 1])).any()
    assert [slots.find(key) for key in (0, 1, KEYS - 1, -1, KEYS)] == [None] * 5
    assert not slots.is_coming(0)
    slots.wait(0)  # for nothing


def test_what_was_put_there_is_found(memory: UnitFile) -> None:
    slots = memory.opened()
    for key in (0, 7, KEYS - 1):
        assert put(slots, key)
    for key in (0, 7, KEYS - 1):
        assert take(slots, key)
    assert not take(slots, 1)


def test_what_was_not_used_for_the_longest_time_makes_room(memory: UnitFile) -> None:
    slots = memory.opened()
    for key in range(3):
        assert put(slots, key)
    assert take(slots, 0)  # which is a use
    assert put(slots, 3)
    assert [take(slots, key) for key in range(4)] == [True, False, True, True]


def take_any(slots: Any, key: int) -> bool:
    return slots.find(key) is not None


def test_of_many_slots_those_in_use_stay() -> None:
    """The oldest is looked for among some of them only."""
    memory = UnitFile(4000, 600, 16)
    slots = memory.opened()
    hot = np.arange(40)
    for key in range(3000):
        slot = slots.claim(key)
        assert slot is not None
        slot.memory[:] = key % 251
        slot.publish()
        if key >= len(hot) and key % 10 == 0:
            assert all(take_any(slots, one) for one in hot.tolist())
    there = np.flatnonzero(slots.are_there(np.arange(4000)))
    assert len(there) == 600, "every slot is in use"
    for key in there.tolist():
        assert slots.find(key).memory.tobytes() == bytes([key % 251] * 64)
    memory.close()


def test_what_failed_is_not_there(memory: UnitFile) -> None:
    slots = memory.opened()
    slot = slots.claim(4)
    assert slot is not None
    with pytest.raises(RuntimeError, match="damaged"), given_back(slot):
        slot.memory[:] = 99
        raise RuntimeError("damaged")
    assert not take(slots, 4)
    assert not slots.is_coming(4)
    assert put(slots, 4)
    assert take(slots, 4)


def test_a_unit_is_claimed_once(memory: UnitFile) -> None:
    slots = memory.opened()
    slot = slots.claim(4)
    assert slot is not None
    assert slots.claim(4) is None, "somebody is decoding it"
    assert slots.is_coming(4)
    assert slots.find(4) is None
    slot.publish()
    assert slots.claim(4) is None, "somebody has just done so"
    assert not slots.is_coming(4)


def test_without_room_there_is_no_slot(memory: UnitFile) -> None:
    slots = memory.opened()
    claims = [slots.claim(key) for key in range(5)]
    assert [claim is not None for claim in claims] == [True] * 3 + [False] * 2
    assert slots.claim(5) is None
    for claim in claims[:3]:
        claim.abandon()
    assert put(slots, 5)


@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_goes_on_when_it_is_there_and_decodes_it_when_it_failed(
    memory: UnitFile, fails: bool
) -> None:
    slots = memory.opened()
    slot = slots.claim(4)
    assert slot is not None
    refused, found = threading.Event(), list[bool]()

    def want() -> None:
        assert slots.claim(4) is None
        refused.set()
        found.append(obtained(slots, 4))

    thread = threading.Thread(target=want)
    thread.start()
    refused.wait()
    with given_back(slot):
        slot.memory[:] = 99 if fails else CONTENTS[4]
        if not fails:
            slot.publish()
    thread.join()
    assert found == [fails], "whether it decoded"


def test_of_threads_that_want_the_same_one_decodes(memory: UnitFile) -> None:
    slots = memory.opened()
    count = 8
    barrier, decoded = threading.Barrier(count), list[bool]()

    def work() -> None:
        for key in range(KEYS):
            barrier.wait()  # all are done with the one before: it is not needed any more
            decoded.append(obtained(slots, key))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoded) == count * KEYS
    assert sum(decoded) == KEYS


def test_others_see_it(memory: UnitFile, in_child: InChild) -> None:
    slots = memory.opened()
    assert put(slots, 5)

    def work() -> None:
        own = memory.opened()
        assert take(own, 5)
        assert put(own, 6)

    in_child(work)
    assert take(slots, 6)


def test_a_process_that_was_spawned_sees_it(memory: UnitFile) -> None:
    slots = memory.opened()
    assert put(slots, 1)
    names = {"memory": memory, "expected": CONTENTS[1].tobytes()}
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(ELSEWHERE, names))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    found = slots.find(2)
    assert found.memory.tobytes() == bytes([7] * NBYTES)
    assert found.release()


def test_who_wants_what_another_process_decodes_waits(memory: UnitFile, forked: Forked) -> None:
    slots = memory.opened()
    told, tell = os.pipe()
    hear, said = os.pipe()

    def work() -> None:
        slot = memory.opened().claim(9)
        assert slot is not None
        os.write(said, b"!")
        os.read(told, 1)
        slot.memory[:] = CONTENTS[9]
        slot.publish()

    pid = forked(work)
    os.read(hear, 1)
    assert slots.find(9) is None
    assert slots.is_coming(9)
    assert slots.claim(9) is None
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(obtained(slots, 9)))
    thread.start()
    os.write(tell, b"!")
    thread.join()
    assert found == [False]
    assert os.waitpid(pid, 0)[1] == 0
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)


def test_who_waited_leaves_no_lock_behind(memory: UnitFile, forked: Forked) -> None:
    """Waiting is having the slot's lock for a moment."""
    slots = memory.opened()
    told, tell = os.pipe()
    hear, said = os.pipe()

    def work() -> None:
        own = memory.opened()
        slot = own.claim(9)
        os.write(said, b"!")
        os.read(told, 1)
        assert slot is not None
        slot.publish()
        os.read(told, 1)  # the other one has waited
        claims = [own.claim(key) for key in (10, 11, 12)]
        assert None not in claims, "each slot can be had"

    pid = forked(work)
    os.read(hear, 1)
    thread = threading.Thread(target=slots.wait, args=(9,))
    thread.start()
    os.write(tell, b"!")
    thread.join()
    os.write(tell, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)


def test_two_processes_that_wait_for_each_other_s_units_go_on(memory: UnitFile, forked: Forked) -> None:
    """To the system that looks as if neither ever would: locks are of processes, not of threads."""
    pipes = [os.pipe() for _ in range(2)]

    def work(mine: int) -> None:
        """Both have a unit, and a thread that wants the other's, before they publish theirs."""
        slots, found = memory.opened(), list[bool]()
        slot = slots.claim(mine)
        assert slot is not None
        for step in range(2):
            os.write(pipes[mine][1], b"!")
            os.read(pipes[1 - mine][0], 1)
            if not step:
                thread = threading.Thread(target=lambda: found.append(obtained(slots, 1 - mine)))
                thread.start()
        slot.memory[:] = CONTENTS[mine]
        slot.publish()
        thread.join()
        assert found == [False]

    pid = forked(lambda: work(1))
    work(0)
    assert os.waitpid(pid, 0)[1] == 0
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


def test_a_copy_in_this_process_is_the_memory_itself(memory: UnitFile) -> None:
    """The system forgets a process's locks of a file as soon as it closes any descriptor of that file."""
    assert pickle.loads(pickle.dumps(memory)) is memory
    assert copy.deepcopy(memory) is memory
    assert memory.opened() is memory.opened()


def test_a_copy_elsewhere_is_of_the_same_memory(forked: Forked) -> None:
    hear, said = os.pipe()
    told, tell = os.pipe()

    def work() -> None:
        made = UnitFile(KEYS, 3, NBYTES)
        slots = made.opened()
        assert put(slots, 6)
        os.write(said, pickle.dumps(made))
        os.read(told, 1)
        assert take(slots, 2)

    pid = forked(work)
    other = pickle.loads(os.read(hear, 1 << 16))
    assert (other.slots, other.opened().slot_nbytes) == (3, NBYTES)
    assert take(other.opened(), 6)
    assert put(other.opened(), 2)
    os.write(tell, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    other.close()
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)


@pytest.mark.parametrize("what", ["closed", "another memory", "a file"])
def test_there_is_no_copy_of_what_is_gone(tmp_path: Path, forked: Forked, what: str) -> None:
    """Another memory may have its number, or any file."""
    hear, said = os.pipe()
    told, tell = os.pipe()

    def work() -> None:
        memory, other = UnitFile(KEYS, 3, NBYTES), UnitFile(1, 1, 16)
        pickled, number = pickle.dumps(memory), memory.descriptor
        if what == "closed":
            memory.close()
        else:
            with open(tmp_path / "x", "w") as file:
                os.dup2(other.descriptor if what == "another memory" else file.fileno(), number)
        os.write(said, pickled)
        os.read(told, 1)

    pid = forked(work)
    assert pickle.loads(os.read(hear, 1 << 16)) is None
    os.write(tell, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)


def test_there_is_no_copy_from_a_process_that_has_ended(forked: Forked) -> None:
    hear, said = os.pipe()
    pid = forked(lambda: os.write(said, pickle.dumps(UnitFile(KEYS, 3, NBYTES))))
    assert os.waitpid(pid, 0)[1] == 0
    pickled = os.read(hear, 1 << 16)
    assert pickle.loads(pickled) is None
    os.close(hear)
    os.close(said)


def test_it_outlives_the_process_that_made_it(forked: Forked) -> None:
    hear, said = os.pipe()
    told, tell = os.pipe()

    def work() -> None:
        memory = UnitFile(KEYS, 3, NBYTES)
        assert put(memory.opened(), 3)
        os.write(said, pickle.dumps(memory))
        os.read(told, 1)

    pid = forked(work)
    memory = pickle.loads(os.read(hear, 1 << 16))
    os.write(tell, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    slots = memory.opened()
    assert take(slots, 3)
    assert put(slots, 4)
    assert take(slots, 4)
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)


def test_it_goes_with_the_last_who_refers_to_it() -> None:
    memory = UnitFile(KEYS, 2, NBYTES)
    descriptor, slots = memory.descriptor, memory.opened()
    del memory
    gc.collect()
    os.fstat(descriptor)
    assert put(slots, 1)
    del slots
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_closed_twice_is_closed_once(memory: UnitFile) -> None:
    memory.close()
    with open(os.devnull, "rb") as file:
        numbers = {file.fileno(), memory.descriptor}
        memory.close()
        assert len(numbers) < 1 + len({os.fstat(file.fileno()).st_ino} | numbers)
        os.fstat(file.fileno())


def test_without_locks_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_file, "locks_are_possible", lambda: False)
    with pytest.raises(OSError, match="no locks"):
        UnitFile(1, 1, 16)


def test_memory_is_taken_when_it_is_written() -> None:
    large = UnitFile(1 << 10, 1 << 10, 1 << 30)  # a terabyte
    slot = large.opened().claim(1)
    assert slot is not None
    slot.memory[:16] = 1
    slot.publish()
    assert os.fstat(large.descriptor).st_blocks * 512 < 1 << 20
    large.close()


def test_what_no_machine_has_is_an_error() -> None:
    with pytest.raises(OSError, match=r"."):
        UnitFile(1, 1 << 20, 1 << 42).opened()
    with pytest.raises((OSError, ValueError)):
        UnitFile(1, 1 << 30, 1 << 42)
    gc.collect()


@settings(max_examples=60)
@given(
    count=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from(["put", "take", "fail", "hold", "end"]), st.integers(0, 7))),
)
def test_any_sequence_of_uses_gives_what_was_put(count: int, steps: list[tuple[str, int]]) -> None:
    """Beside a list that says what can be there: the most recently used, as many as slots that nobody writes."""
    memory = UnitFile(KEYS, count, NBYTES)
    slots, there, held = memory.opened(), list[int](), dict[int, Any]()

    def claimed(key: int) -> Any:
        slot = slots.claim(key)
        # A slot is had by nobody twice, and not for what is there or is coming.
        assert (slot is None) == (key in there or key in held or len(held) == count)
        if slot is not None and len(there) + len(held) == count:
            there.pop(0)
        return slot

    for what, key in steps:
        if what == "take":
            assert take(slots, key) == (key in there)
            if key in there:
                there.append(there.pop(there.index(key)))
        elif what == "end" and key in held:
            slot = held.pop(key)
            slot.memory[:] = CONTENTS[key]
            slot.publish()
            there.append(key)
        elif what in ("put", "fail", "hold") and (slot := claimed(key)) is not None:
            held[key] = slot
            slot.memory[:] = 1
            if what == "put":
                slot.memory[:] = CONTENTS[key]
                slot.publish()
                there.append(key)
            if what == "fail":
                slot.abandon()
            if what != "hold":
                del held[key]
        assert [slots.is_coming(key) for key in range(8)] == [key in held for key in range(8)]
    for slot in held.values():
        slot.abandon()
    memory.close()


def _read_at_random(memory: UnitFile, seed: int, steps: int) -> None:
    """Two threads that read any units, each of which must be as it was put; some decodings fail."""
    slots, errors = memory.opened(), list[BaseException]()

    def work(number: int) -> None:
        random = np.random.default_rng([seed, number])
        try:
            for step in range(steps):
                key = int(random.integers(8))
                if step % 7 == 0:
                    slot = slots.claim(key)
                    if slot is not None:
                        with given_back(slot):
                            slot.memory[:] = 99
                obtained(slots, key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("count", [1, 2, 5])
def test_whatever_is_taken_is_right(count: int, forked: Forked) -> None:
    """Threads of processes that want more units than there are slots, in orders of their own."""
    memory = UnitFile(KEYS, count, NBYTES)
    pids = [forked(lambda seed=seed: _read_at_random(memory, seed, 1500)) for seed in range(2)]  # type: ignore[misc]
    _read_at_random(memory, 9, 1500)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    slots = memory.opened()
    for key in range(count):
        obtained(slots, key)
    assert all(take(slots, key) for key in range(count)), "no slot is lost"
    memory.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_whatever_is_taken_is_right_for_long(count: int, forked: Forked) -> None:
    memory = UnitFile(KEYS, count, NBYTES)
    pids = [forked(lambda seed=seed: _read_at_random(memory, seed, 5000)) for seed in range(5)]  # type: ignore[misc]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 5
    memory.close()


def _is_refused_elsewhere(memory: UnitFile, forked: Forked) -> bool:
    """Whether another process gets no slot, where each is being written here."""

    def work() -> None:
        if memory.opened().claim(1) is not None:
            os._exit(3)

    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == 0


@pytest.mark.parametrize("made", ["pickled", "copied", "opened"])
def test_a_copy_that_goes_leaves_slots_to_those_who_write_them(made: str, forked: Forked) -> None:
    memory = UnitFile(KEYS, 1, NBYTES)
    slots = memory.opened()
    slot = slots.claim(0)
    assert slot is not None
    other: Any = {
        "pickled": lambda: pickle.loads(pickle.dumps(memory)),
        "copied": lambda: copy.deepcopy(memory),
        "opened": memory.opened,
    }[made]()
    assert other.claim(1) is None if made == "opened" else other is memory
    del other
    gc.collect()
    assert _is_refused_elsewhere(memory, forked)
    slot.publish()
    memory.close()


def test_what_a_child_was_given_by_its_parent_goes_without_a_child_s_locks(forked: Forked) -> None:
    """A worker has the parent's runtime until it has made its own."""
    memory = UnitFile(KEYS, 1, NBYTES)
    inherited = [memory.opened()]
    told, tell = os.pipe()
    hear, said = os.pipe()

    def work() -> None:
        slot = memory.opened().claim(0)
        assert slot is not None
        inherited.clear()
        gc.collect()
        os.write(said, b"!")
        os.read(told, 1)
        slot.publish()

    pid = forked(work)
    os.read(hear, 1)
    refused = inherited[0].claim(1)
    is_refused = refused is None
    if refused is not None:
        refused.abandon()
    os.write(tell, b"!")
    code = os.waitpid(pid, 0)[1]
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)
    inherited.clear()
    del refused
    memory.close()
    assert is_refused
    assert code == 0


def test_processes_that_ask_for_the_same_share_it(forked: Forked) -> None:
    """As ranks of a job do, which one another have not started."""
    hear, said = os.pipe()
    told, tell = os.pipe()

    def work() -> None:
        slots = joined_memory("x", KEYS, 3, NBYTES).opened()
        assert put(slots, 5)
        os.write(said, b"!")
        os.read(told, 1)
        assert take(slots, 6)

    pid = forked(work)
    os.read(hear, 1)
    memory = joined_memory("x", KEYS, 7, NBYTES)
    assert memory.slots == 3, "as many as the one had who made it"
    slots = memory.opened()
    assert take(slots, 5)
    assert put(slots, 6)
    others = [
        joined_memory(*some) for some in (("y", KEYS, 3, NBYTES), ("x", KEYS, 3, 16), ("x", 9, 3, NBYTES))
    ]
    assert not any(take(other.opened(), 5) for other in others)
    os.write(tell, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    assert joined_memory("x", KEYS, 3, NBYTES) is memory
    del others
    memory.close()
    for descriptor in (told, tell, hear, said):
        os.close(descriptor)


def test_who_asks_for_it_again_leaves_slots_to_those_who_write_them(forked: Forked) -> None:
    memory = joined_memory("again", KEYS, 1, NBYTES)
    slot = memory.opened().claim(0)
    assert slot is not None
    again = joined_memory("again", KEYS, 1, NBYTES)
    is_same, is_refused = again is memory, _is_refused_elsewhere(memory, forked)
    slot.publish()
    del again, slot
    memory.close()
    assert is_same
    assert is_refused


def test_what_will_not_be_used_again_makes_room_first(memory: UnitFile) -> None:
    slots = memory.opened()
    slots.expect(1, np.repeat(np.arange(4), [1, 3, 3, 3]))
    for key in (2, 1, 0):
        assert put(slots, key)
    slots.used(np.array([0, 1]))
    assert put(slots, 3)  # in the place of the one used last
    assert [take(slots, key) for key in range(4)] == [False, True, True, True]
    slots.used(np.array([1, 2]))
    slots.used(np.array([1]))
    assert put(slots, 4)
    assert [take(slots, key) for key in range(5)] == [False, False, True, True, True]


def test_uses_that_were_said_are_known_to_all_processes(memory: UnitFile, forked: Forked) -> None:
    slots = memory.opened()
    slots.used(np.array([1]))  # of which nobody has said anything
    assert (slots.expected, put(slots, 1)) == (0, True)
    slots.expect(7, np.arange(KEYS))
    assert not slots.is_over

    def work() -> None:
        own = memory.opened()
        if own.expected != 7 or own.is_over:
            os._exit(3)
        own.used(np.arange(KEYS))

    assert os.waitpid(forked(work), 0)[1] == 0
    assert slots.is_over


def test_memory_of_a_process_alone_is_as_that_of_many() -> None:
    units = private_units(KEYS, 2, NBYTES - 3)
    assert (units.slots, units.slot_nbytes) == (2, NBYTES)
    assert [put(units, key) for key in range(3)] == [True] * 3
    assert [take(units, key) for key in range(3)] == [False, True, True]
