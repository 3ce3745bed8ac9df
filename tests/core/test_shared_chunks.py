"""Decoded units that threads and processes share: a unit is found as it was put there."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from answering import Answering
from shared_units import CONTENTS, NBYTES, obtained, put, take

from fastpipe.core import shared_chunks
from fastpipe.core.shared_chunks import UnitFile, joined_memory, private_units

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

KEYS = len(CONTENTS)


def _user(memory: UnitFile) -> dict[str, Callable[..., Any]]:
    """Use units in another process."""
    slots, held = memory.opened(), dict[int, Any]()

    def claim(key: int) -> bool:
        held[key] = slots.claim(key)
        return held[key] is not None

    def publish(key: int) -> None:
        held[key].memory[:] = CONTENTS[key]
        held.pop(key).publish()

    return {
        "claim": claim, "publish": publish, "put": partial(put, slots), "take": partial(take, slots),
        "pickled": lambda: (pickle.dumps(memory), memory.__reduce__()[1]),
    }  # fmt: skip


def test_waiting_for_another_process_leaves_no_lock() -> None:
    """Waiting is having the slot's lock for a moment."""
    memory = UnitFile(KEYS, 3, NBYTES)
    slots, other = memory.opened(), Answering(lambda: _user(memory))
    assert other("claim", 9)
    assert slots.find(9) is None
    assert slots.is_coming(9)
    with ThreadPoolExecutor(1) as pool:
        is_made_here = pool.submit(obtained, slots, 9)
        other("publish", 9)
        assert not is_made_here.result()
    assert all(other("claim", key) for key in (10, 11, 12)), "each slot can be had"
    other.end()
    memory.close()


def test_two_processes_that_wait_for_each_others_units_continue() -> None:
    """To the system that looks like a deadlock: locks are of processes, not of threads."""
    memory = UnitFile(KEYS, 3, NBYTES)

    def with_thread(mine: int) -> dict[str, Callable[[], Any]]:
        user, found = _user(memory), list[bool]()
        assert user["claim"](mine)
        thread = threading.Thread(target=lambda: found.append(obtained(memory.opened(), 1 - mine)))
        return {
            "want the other's": thread.start, "publish": lambda: user["publish"](mine),
            "found": lambda: thread.join() or found,
        }  # fmt: skip

    other, own = Answering(lambda: with_thread(1)), with_thread(0)
    for step in ("want the other's", "publish"):
        other(step)
        own[step]()
    assert own["found"]() == other("found") == [False]
    other.end()
    memory.close()


@pytest.mark.parametrize("made", ["pickled", "copied", "opened", "joined"])
def test_a_copy_in_this_process_is_the_memory_itself(made: str, in_child: Any) -> None:
    """The system forgets a process's locks of a file as soon as it closes any descriptor of that file."""
    memory = joined_memory("again", KEYS, 1, NBYTES) if made == "joined" else UnitFile(KEYS, 1, NBYTES)
    slot: Any = memory.opened().claim(0)
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

    def work() -> None:
        assert memory.opened().claim(1) is None, "another process gets no slot: the only one is being written"

    in_child(work)
    slot.publish()
    memory.close()


def test_a_copy_elsewhere_is_of_the_same_memory_and_outlives_its_maker() -> None:
    other = Answering(lambda: _user(UnitFile(KEYS, 3, NBYTES)))
    assert other("put", 6)
    pickled, (*place, _) = other("pickled")
    assert UnitFile.joined(*place, (KEYS, 4, NBYTES)) is None
    memory = pickle.loads(pickled)
    assert UnitFile.joined(*place, (KEYS, 4, NBYTES)) is None, "also of one that is open here"
    slots = memory.opened()
    assert (memory.slots, slots.slot_nbytes) == (3, NBYTES)
    assert take(slots, 6)
    assert put(slots, 2)
    assert other("take", 2)
    other.end()
    assert put(slots, 4)
    assert all(take(slots, key) for key in (2, 4, 6))
    del slots
    memory.close()


@pytest.mark.parametrize("made", ["closed", "another memory", "a file", "ended"])
def test_there_is_no_copy_of_memory_that_is_gone(tmp_path: Path, made: str) -> None:
    """Another memory may have its number, or any file."""

    def begin() -> dict[str, Callable[[], bytes]]:
        memory, another = UnitFile(KEYS, 3, NBYTES), UnitFile(1, 1, 16)
        pickled, number = pickle.dumps(memory), memory.descriptor
        if made == "closed":
            memory.close()
        elif made != "ended":
            with open(tmp_path / "x", "w") as file:
                os.dup2(another.descriptor if made == "another memory" else file.fileno(), number)
        return {"pickled": lambda: (pickled, memory, another)[0]}

    other = Answering(begin)
    pickled = other("pickled")
    if made != "ended":
        assert pickle.loads(pickled) is None
    other.end()
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


def test_an_inherited_runtime_goes_without_a_child_s_locks() -> None:
    """A worker has the parent's runtime until it has made its own."""
    memory = UnitFile(KEYS, 1, NBYTES)
    inherited = [memory.opened()]

    def begin() -> dict[str, Callable[..., Any]]:
        user = _user(memory)
        assert user["claim"](0)
        inherited.clear()
        gc.collect()
        return user

    other = Answering(begin)
    assert not other("take", 0)
    assert inherited[0].claim(1) is None
    other("publish", 0)
    other.end()
    inherited.clear()
    memory.close()


def test_processes_that_ask_for_the_same_share_it() -> None:
    """As ranks of a job do, which one another have not started."""
    other = Answering(lambda: _user(joined_memory("x", KEYS, 3, NBYTES)))
    assert other("put", 5)
    memory = joined_memory("x", KEYS, 7, NBYTES)
    assert memory.slots == 3, "as many as its maker asked for"
    slots = memory.opened()
    assert take(slots, 5)
    assert put(slots, 6)
    for some in (("y", KEYS, 3, NBYTES), ("x", KEYS, 3, 16), ("x", 9, 3, NBYTES)):
        assert not take(joined_memory(*some).opened(), 5)
    assert other("take", 6)
    other.end()
    memory.close()


def test_memory_of_one_process_is_like_that_of_many() -> None:
    units = private_units(KEYS, 2, NBYTES - 3)
    assert (units.slots, units.slot_nbytes) == (2, NBYTES)
    assert [put(units, key) for key in range(3)] == [True] * 3
    assert [take(units, key) for key in range(3)] == [False, True, True]
