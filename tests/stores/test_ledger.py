"""How many bytes a stage holds: never too few are counted, and it shows when there are too many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core.locks import LockFile, open_file_locks_are_possible
from fastpipe.stores import stage as module
from fastpipe.stores.stage import Ledger

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)


def opened(folder: Path) -> Ledger:
    return Ledger(LockFile(str(folder / "locks")))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    lock = LockFile(str(tmp_path / "locks"))
    ledger = Ledger(lock)
    assert not ledger.is_reliable
    assert ledger.reserve(1, 100) < 0, "nobody has counted what is there"
    ledger.reset(0)
    yield ledger
    lock.close()


def test_bytes_are_reserved_as_far_as_there_is_room(ledger: Ledger, tmp_path: Path) -> None:
    other = opened(tmp_path)
    first, second = ledger.reserve(60, 100), other.reserve(40, 100)
    assert first >= 0
    assert second > first
    assert ledger.reserve(1, 100) < 0
    ledger.written()
    other.written(40)
    assert ledger.nbytes == 60
    assert ledger.is_reliable
    ledger.remove()
    ledger.removed(60)
    assert (ledger.nbytes, ledger.is_reliable) == (0, True)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["reserve", "keep", "free", "remove"]),
                  st.integers(0, 3000)),
        max_size=60,
    )
)  # fmt: skip
def test_in_the_end_what_is_there_is_counted(steps: list[tuple[int, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledgers = [opened(Path(folder)) for _ in range(2)]
        ledgers[0].reset(0)
        writing: tuple[list[int], list[int]] = ([], [])
        kept: list[int] = []
        for which, step, nbytes in steps:
            ledger, mine = ledgers[which], writing[which]
            if step == "reserve" and ledger.reserve(nbytes, 20_000) >= 0:
                mine.append(nbytes)
            elif step == "keep" and mine:
                kept.append(mine.pop())
                ledger.written()
            elif step == "free" and mine:
                ledger.written(mine.pop())
            elif step == "remove" and kept:
                ledger.remove()
                ledger.removed(kept.pop())
            assert ledger.nbytes == sum(kept) + sum(map(sum, writing)) <= 20_000
        for ledger, mine in zip(ledgers, writing, strict=True):
            while mine:
                ledger.written(mine.pop())
        assert (ledgers[0].nbytes, ledgers[0].is_reliable) == (sum(kept), True)
        for ledger in ledgers:
            ledger._lock.close()


@pytest.mark.parametrize("step", [lambda it: it.reserve(1, 100), Ledger.remove, Ledger.mark_uncertain])
def test_what_was_not_counted_to_the_end_shows(ledger: Ledger, step: Callable[[Ledger], object]) -> None:
    step(ledger)
    assert not ledger.is_reliable
    ledger.reset(5)
    assert (ledger.nbytes, ledger.is_reliable) == (5, True)


def test_what_a_fallen_machine_has_counted_is_counted_anew(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_boot", lambda: 1)
    assert not ledger.is_reliable


@pytest.mark.parametrize("left", [0, 20])
def test_a_file_that_was_cut_ends_nothing_but_keeping(ledger: Ledger, tmp_path: Path, left: int) -> None:
    ledger.reset(50)
    os.truncate(tmp_path / "locks", left)
    assert ledger.reserve(1, 100) < 0
    ledger.removed(1)
    ledger.mark_uncertain()
    assert ledger.nbytes == 0
    assert not ledger.is_reliable


def test_processes_count_together(ledger: Ledger, forked: Callable[[Callable[[], object]], int]) -> None:
    def count() -> None:
        for _ in range(300):
            assert ledger.reserve(3, 1 << 30) >= 0
            ledger.written(1)
            ledger.remove()
            ledger.removed(1)

    for process in [forked(count) for _ in range(4)]:
        assert os.waitpid(process, 0)[1] == 0
    assert ledger.nbytes == 4 * 300
    assert ledger.is_reliable
    assert ledger.reserve(0, 1 << 30) >= 4 * 300, "no number was given twice"


@given(steps=st.lists(st.tuples(st.sampled_from(["write", "fail", "remove"]), st.integers(0, 60))))
def test_it_is_the_sum_and_never_above_the_limit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    ledger, held = opened(tmp_path_factory.mktemp("ledger")), list[int]()
    ledger.reset(0)
    for step, nbytes in steps:
        if step == "remove":
            ledger.remove()
            ledger.removed(held.pop() if held else 0)
        elif ledger.reserve(nbytes, 100) >= 0:
            ledger.written(nbytes if step == "fail" else 0)
            held += [] if step == "fail" else [nbytes]
        else:
            assert sum(held) + nbytes > 100
        assert ledger.nbytes == sum(held) <= 100
        assert ledger.is_reliable
