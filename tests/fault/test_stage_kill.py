"""Processes that are killed while they keep, read and make room in a stage: no object is ever half there.

They end by progress, never by time: at one of the steps that keeping an object has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.core.locks import LockFile, open_file_locks_are_possible
from fastpipe.options import Stage
from fastpipe.stores import table as files
from fastpipe.stores.stage import Ledger, StageFolder
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)

ROWS, SIZE, LIMIT = 60, 4096, 20 * 4096
STEPS = [
    (os, "open"), (os, "write"), (files, "_rename"), (os, "unlink"), (os, "pwrite"), (Ledger, "written"),
    (Ledger, "remove"), (Ledger, "removed"), (StageTable, "_note"), (LockFile, "take"), (LockFile, "stay"),
    (LockFile, "release"),
]  # fmt: skip


class Uses:
    tag = b"t" * 16

    def __init__(self, seed: int) -> None:
        self._at = np.random.default_rng(seed).permutation(ROWS)
        self.now = 0

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (self._at[rows] - self.now) % ROWS  # again and again, so that there is always room to make


def name_of(row: int) -> bytes:
    return hashlib.md5(b"%d" % row).digest()


def content(row: int) -> bytes:
    return hashlib.md5(b"content of %d" % row).digest() * (SIZE // 16)


def opened(place: Path) -> StageTable:
    folder = StageFolder(Stage(place, max_bytes=LIMIT))
    return folder.open_table(b"d" * 16, np.full(ROWS, SIZE, np.int64), name_of)


def objects_in(place: Path) -> list[Path]:
    return list((place / "fastpipe-stage" / "objects").glob("*/*"))


def nbytes_in(place: Path) -> int:
    """Bytes of all files at one moment, whole or not: nobody can reserve or free any meanwhile."""
    lock = LockFile(str(place / "fastpipe-stage" / "locks"))
    sizes = {}
    with lock.alone(0):
        for path in [*objects_in(place), *(place / "fastpipe-stage" / "writing").iterdir()]:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = status.st_size
    lock.close()
    return sum(sizes.values())


def use(place: Path, seed: int) -> None:
    """Read and keep rows in an order of its own, with room for a third."""
    table = opened(place)
    uses = Uses(0)
    table.follow(uses)
    for row in np.random.default_rng(seed).integers(0, ROWS, 200).tolist():
        uses.now += 1
        table.used(np.array([row]))
        with table.claim(row, 0.01):
            data = table.read(row)
            assert data is None or data == content(row)
            if data is None:
                table.keep(row, content(row))
    table.close()


def forked(work: Callable[[], object]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def dying(place: Path, seed: int, step: tuple[Any, str], after: int) -> None:
    """Use it until a step was done a number of times; then be killed, just before it or just after."""
    owner, name = step
    original, left = getattr(owner, name), after

    def counted(*arguments: Any, **options: Any) -> object:
        nonlocal left
        left -= 1
        if left == 0 and seed % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*arguments, **options)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, counted)
    use(place, seed)


@pytest.mark.few(4)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step[1]))
def test_nothing_is_half_there_and_the_limit_holds(tmp_path: Path, step: tuple[Any, str]) -> None:
    victims = [
        forked(lambda seed=seed: dying(tmp_path, seed, step, 1 + seed))  # type: ignore[misc]
        for seed in range(4)
    ]
    others = [forked(lambda seed=seed: use(tmp_path, seed)) for seed in range(10, 12)]  # type: ignore[misc]
    ends, largest = dict[int, int](), 0
    while len(ends) < 6:
        if (tmp_path / "fastpipe-stage" / "writing").exists():
            largest = max(largest, nbytes_in(tmp_path))
        for process in {*victims, *others} - ends.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                ends[process] = os.waitstatus_to_exitcode(status)
    assert 0 < largest <= LIMIT
    assert [ends[process] for process in others] == [0, 0]
    assert -signal.SIGKILL in [ends[process] for process in victims]
    assert {ends[process] for process in victims} <= {0, -signal.SIGKILL}

    contents = {name_of(row).hex(): content(row) for row in range(ROWS)}
    for path in objects_in(tmp_path):
        assert path.read_bytes() == contents[path.parent.name + path.name]
    table = opened(tmp_path)
    assert not list((tmp_path / "fastpipe-stage" / "writing").iterdir())
    assert table._folder.ledger.nbytes == SIZE * len(objects_in(tmp_path)) <= LIMIT
    assert table._folder.ledger.is_reliable
    for row in range(ROWS):  # no claim is left, and what there is can be read
        assert table._folder.locks.is_free(table._folder.claim_byte(name_of(row)))
        assert table.read(row) in (None, content(row))
    table.close()
