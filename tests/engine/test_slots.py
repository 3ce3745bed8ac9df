from __future__ import annotations

import gc
import itertools
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core import slots
from fastpipe.core.slots import SlotPool


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_an_array_as_asked_for() -> None:
    pool = SlotPool(2)
    for shape, dtype in [((3, 5), np.float32), ((7,), np.uint8), ((2, 3, 4), np.uint16), ((1, 1), np.uint64)]:
        array = pool.take(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.c_contiguous
        assert array.flags.writeable
        array[...] = 3
        assert (array == 3).all()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
def test_an_empty_array(shape: tuple[int, ...]) -> None:
    pool = SlotPool(2)
    assert pool.take(shape, np.float32).shape == shape
    assert pool.take(shape, np.float32).shape == shape


@pytest.mark.usefixtures("no_gc")
def test_memory_is_used_again_as_soon_as_nobody_sees_it() -> None:
    pool = SlotPool(2)
    array = pool.take((4, 4), np.float32)
    address = _address(array)
    del array
    for _ in range(50):
        array = pool.take((4, 4), np.float32)
        assert _address(array) == address
        del array


@pytest.mark.usefixtures("no_gc")
def test_a_view_keeps_the_memory_when_the_array_is_gone() -> None:
    pool = SlotPool(2)
    array = pool.take((4, 4), np.float32)
    address, row = _address(array), array[1:3].reshape(-1)[::2].view(np.uint32)
    del array
    other = pool.take((4, 4), np.float32)
    assert _address(other) != address
    del row
    assert _address(pool.take((4, 4), np.float32)) == address


@pytest.mark.usefixtures("no_gc")
def test_no_more_slots_are_kept_than_asked_for() -> None:
    pool = SlotPool(3)
    arrays = [pool.take((8,), np.uint8) for _ in range(10)]
    del arrays
    assert len(pool._free) == 3
    pool.clear()
    assert len(pool._free) == 0


@pytest.mark.usefixtures("no_gc")
def test_a_larger_size_drops_the_slots_of_the_old_one() -> None:
    pool = SlotPool(3)
    small, held = pool.take((8,), np.uint8), pool.take((8,), np.uint8)
    held[:] = 9
    del small
    large = pool.take((80,), np.uint8)
    assert len(pool._free) == 0
    assert large.nbytes == 80
    del large
    assert (held == 9).all()
    del held  # of a size that is not wanted any more
    assert [slot.memory.size for slot in pool._free] == [80]


@pytest.mark.usefixtures("no_gc")
def test_a_short_last_batch_uses_the_large_slots_and_leaves_them() -> None:
    pool = SlotPool(3)
    address = _address(pool.take((8, 10), np.float32))
    for _ in range(50):
        short = pool.take((3, 10), np.float32)
        assert (_address(short), short.nbytes, torch.from_numpy(short).untyped_storage().nbytes()) == (
            address, 120, 120,
        )  # fmt: skip
        del short
        for _ in range(3):
            assert _address(pool.take((8, 10), np.float32)) == address


@pytest.mark.usefixtures("no_gc")
def test_large_slots_are_dropped_once_only_small_batches_come() -> None:
    pool = SlotPool(3)
    pool.take((800,), np.uint8)
    for size in itertools.islice(itertools.cycle([6, 8, 7]), 20):
        pool.take((size,), np.uint8)
    assert [slot.memory.size for slot in pool._free] == [8]
    pool.take((800,), np.uint8)
    assert [slot.memory.size for slot in pool._free] == [800]


@pytest.mark.usefixtures("no_gc")
def test_the_same_size_in_another_shape_and_type_uses_the_slot_again() -> None:
    pool = SlotPool(3)
    address = _address(pool.take((8, 2), np.uint8))
    assert _address(pool.take((4,), np.float32)) == address


def test_a_slot_put_back_while_the_size_changes_is_dropped() -> None:
    pool = SlotPool(3)
    pool.take((8,), np.uint8)
    pool.take((16,), np.uint8)
    pool._free.append(slots._new_slot(8))  # as another thread can, between a check and its act
    assert pool.take((16,), np.uint8).nbytes == 16


def test_the_pool_may_go_before_its_arrays() -> None:
    pool = SlotPool(3)
    array = pool.take((8,), np.uint8)
    array[:] = 5
    del pool
    assert (array == 5).all()
    del array


def test_a_pickled_pool_is_an_empty_one() -> None:
    pool = SlotPool(3)
    del_me = pool.take((8,), np.uint8)
    del del_me
    copy = pickle.loads(pickle.dumps(pool))
    assert (copy.keep, len(copy._free)) == (3, 0)
    array = pool.take((8,), np.uint8)
    array[:] = 1
    loaded = pickle.loads(pickle.dumps(array))
    del array
    pool.take((8,), np.uint8)[:] = 2
    assert (loaded == 1).all()


def test_the_garbage_collector_may_run_during_take() -> None:
    pool, before = SlotPool(4), gc.get_threshold()
    held: list[tuple[int, Any]] = []
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(300):
            array = pool.take((16,), np.int64)
            array[:] = number
            cycle: list[Any] = [array]
            cycle.append(cycle)  # only the collector can free this one
            if number % 7 == 0:
                held.append((number, array))
            del array, cycle
    finally:
        gc.set_threshold(*before)
    assert all((array == number).all() for number, array in held)


def test_ctrl_c_during_take_is_all_that_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any line: what is half made goes without another error."""
    heard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    pool = SlotPool(2)

    def interrupted(at: int) -> bool:
        lines = itertools.count()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != slots.__file__ or frame.f_code.co_name in ("__del__", "_put"):
                return None  # where Python only shows it
            if event == "line" and next(lines) == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pool.take((3, 4), np.float32)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    count = next(at for at in itertools.count() if not interrupted(at))
    assert count > 10
    assert not heard
    assert pool.take((3, 4), np.float32).shape == (3, 4)


def test_many_threads_never_share_memory() -> None:
    pool, wrong = SlotPool(4), []

    def work(me: int) -> None:
        rng = np.random.default_rng(me)
        held: list[tuple[int, Any]] = []
        for number in range(400):
            value = me * 1000 + number
            array = pool.take((int(rng.choice([16, 16, 32])),), np.int64)
            array[:] = value
            held.append((value, array))
            del array
            if rng.random() < 0.6:
                held.pop(int(rng.integers(len(held))))
            if len(held) > 6:
                del held[:3]
            wrong.extend(value for value, kept in held if not (kept == value).all())

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# What a user may do with a batch, as functions of the array: each result sees its memory, or is a copy.
def _in_torch(array: Any) -> Any:
    return pytest.importorskip("torch", reason="pip install 'fastpipe[torch]'").from_numpy(array)


_VIEWS = {
    "itself": lambda a: a,
    "row": lambda a: a[1],
    "slice": lambda a: a[1:, ::2],
    "transposed": lambda a: a.T,
    "memoryview": memoryview,
    "tensor": _in_torch,
    "tensor row": lambda a: _in_torch(a)[2],
    "tensor rows": lambda a: list(_in_torch(a).unbind(0)),
    "detached": lambda a: _in_torch(a).detach().view(-1),
    "numpy of a tensor": lambda a: _in_torch(a)[0].numpy(),
    "dlpack": lambda a: np.from_dlpack(_in_torch(a)),
    "dlpack both ways": lambda a: np.from_dlpack(_in_torch(np.from_dlpack(_in_torch(a)[1:]))),
    "pickled": lambda a: pickle.loads(pickle.dumps(_in_torch(a))),
    "storage": lambda a: _in_torch(a).untyped_storage(),
}


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, list):
        return b"".join(map(_bytes_of, value))
    if hasattr(value, "nbytes") and callable(value.nbytes):  # a torch storage
        return bytes(value)
    return bytes(np.ascontiguousarray(np.asarray(value)).tobytes())


_action = st.one_of(
    st.tuples(st.just("take"), st.sampled_from(sorted(_VIEWS))),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("resize"), st.sampled_from([1, 3, 4])),
)


@settings(max_examples=60)
@given(st.lists(_action, max_size=25), st.integers(0, 3))
def test_what_the_user_keeps_is_never_overwritten(actions: list[tuple[str, Any]], keep: int) -> None:
    pool, rows, held = SlotPool(keep), 3, []
    for number, (action, argument) in enumerate(actions):
        if action == "take":
            array = pool.take((rows, 4), np.float32)
            array[...] = number + 1
            value = _VIEWS[argument](array)
            held.append((value, _bytes_of(value)))
            del array, value
        elif action == "drop" and held:
            del held[argument % len(held)]
        elif action == "resize":
            rows = argument
        assert all(_bytes_of(value) == before for value, before in held)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("name", sorted(_VIEWS))
def test_dropping_the_last_view_frees_the_memory(name: str) -> None:
    pool = SlotPool(2)
    array = pool.take((3, 4), np.float32)
    array[...] = 1
    address = _address(array)
    value = _VIEWS[name](array)
    del array
    del value
    assert _address(pool.take((3, 4), np.float32)) == address
