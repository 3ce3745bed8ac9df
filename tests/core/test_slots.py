"""Memory of batches that is used again once nothing refers to the batch."""

from __future__ import annotations

import itertools
import pickle
import sys
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


def _kept(pool: SlotPool) -> list[int]:
    return [slot.memory.size for slot in pool._free]


@pytest.mark.usefixtures("no_gc")
def test_as_many_slots_are_kept_as_asked_for_of_the_size_in_use() -> None:
    pool = SlotPool(3)
    arrays = [pool.take((8,), np.uint8) for _ in range(10)]
    held = arrays[0]
    held[:] = 9
    del arrays
    assert _kept(pool) == [8] * 3
    assert pool.take((80,), np.uint8).nbytes == 80
    assert _kept(pool) == [80], "slots of the old size are dropped"
    assert (held == 9).all()
    del held
    assert _kept(pool) == [80]
    for size in itertools.islice(itertools.cycle([6, 8, 7]), 20):
        pool.take((size,), np.uint8)
    assert _kept(pool) == [8], "only small batches came"
    pool._free.append(slots._new_slot(6))  # as another thread can, between a check and its act
    assert pool.take((16,), np.uint8).nbytes == 16
    pool.clear()
    assert _kept(pool) == []


def test_ctrl_c_during_take_is_the_only_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any line: what is half made goes without another error."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
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

    assert next(at for at in itertools.count() if not interrupted(at)) > 10
    assert not errors
    assert pool.take((3, 4), np.float32).shape == (3, 4)


# A user's views of a batch, as functions of the array: each result sees its memory, or is a copy.
_tensor = torch.from_numpy
_VIEWS: dict[str, Any] = {
    "itself": lambda a: a,
    "row": lambda a: a[1],
    "slice": lambda a: a[1:, ::2],
    "transposed": lambda a: a.T,
    "memoryview": memoryview,
    "tensor": _tensor,
    "tensor row": lambda a: _tensor(a)[2],
    "tensor rows": lambda a: list(_tensor(a).unbind(0)),
    "detached": lambda a: _tensor(a).detach().view(-1),
    "numpy of a tensor": lambda a: _tensor(a)[0].numpy(),
    "dlpack": lambda a: np.from_dlpack(_tensor(a)),
    "dlpack both ways": lambda a: np.from_dlpack(_tensor(np.from_dlpack(_tensor(a)[1:]))),
    "pickled": lambda a: pickle.loads(pickle.dumps(_tensor(a))),
    "storage": lambda a: _tensor(a).untyped_storage(),
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
    st.tuples(st.just("resize"), st.sampled_from([3, 4, 6])),
)


@settings(max_examples=60)
@given(st.lists(_action, max_size=25), st.integers(0, 3))
def test_no_view_that_the_user_keeps_is_overwritten(actions: list[tuple[str, Any]], keep: int) -> None:
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
def test_dropping_the_last_view_frees_the_memory() -> None:
    pool = SlotPool(1)
    address = _address(pool.take((3, 4), np.float32))
    for name, view in _VIEWS.items():
        array = pool.take((3, 4), np.float32)
        assert _address(array) == address, f"the view before {name!r}"
        array[...] = 1
        value = view(array)
        del array
        del value
    assert _address(pool.take((3, 4), np.float32)) == address
