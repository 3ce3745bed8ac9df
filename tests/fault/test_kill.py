"""Processes that are killed at any call that changes files: the next one goes on to the right result.

They die by progress, never by time: at a call, which writes half of its data if it writes any.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from dying import dying_at, half_of_it
from generated import content, failing, folder_of, made, noted_rows, plain, ragged
from torchvision import transforms as v1

from fastpipe import Cache, FastImageFolder, FastLoader, memoize
from fastpipe.bench.synthetic import photo_tree
from fastpipe.cli import main
from fastpipe.core.caches import open_cache_store
from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, IndexCache, find_classes, scan_folder
from fastpipe.core.file_identity import FileSystems
from fastpipe.core.locks import LockFile, open_file_locks_are_possible
from fastpipe.generation import schedule
from fastpipe.hdf5 import repack
from fastpipe.options import Stage
from fastpipe.stores import table as files
from fastpipe.stores.stage import Ledger, StageFolder
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(not open_file_locks_are_possible(), reason="run it on 64-bit Linux")

CALLS = [(os, name) for name in ("write", "pwrite", "pwritev", "fsync", "ftruncate", "mkdir", "rmdir")]
CALLS += [(os, name) for name in ("open", "replace", "rename", "link", "unlink")]


class Component(NamedTuple):
    """What is killed.

    Args:
        work: with files in a folder; its result is the same each time, with what an earlier run has left, too.
        begin: makes what is in the folder before.
        check: looks at what a killed one has left.
        calls: at which it is killed.
        least: so many calls it makes, or more.
    """

    work: Callable[[Path], object]
    begin: Callable[[Path], object] = lambda folder: None
    check: Callable[[Path], object] = lambda folder: None
    calls: list[tuple[Any, str]] = CALLS
    least: int = 40


# Generation: the same files, and no row that was noted is made again.

N = 60
RAGGED = {"columns": {"r": ("int64", (None,))}}
FILES = {**RAGGED, "max_bytes": 300}


def batched(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.normal(size=3000), "r": np.arange(index % 3)}


def _batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
    company = 1e-9 * (len(indices) + indices[0] / 1024)  # as the last bits of a product of matrices
    return {"x": rng.normal(size=3000) + company, "r": [np.arange(index % 3) for index in indices]}


batched.batch = _batch  # type: ignore[attr-defined]


def generation(fn: Callable[..., Any], rows_before: int = 0, **options: Any) -> Component:
    def work(folder: Path) -> object:
        out = folder / "x.h5"
        noted, is_extended = noted_rows(out), out.exists() or (folder / "x-00000.h5").exists()
        found = made(fn, out, N, **options)
        assert found.made <= N - noted
        assert not (is_extended and rows_before) or found.made <= N - rows_before // 4 * 4
        assert not folder_of(out).exists()
        return content(folder)

    return Component(work, lambda folder: rows_before and made(fn, folder / "x.h5", rows_before, **options))


# Repacking: a copy is only ever whole.

ROWS = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")


def _source(folder: Path) -> None:
    with h5py.File(folder / "in.h5", "w") as file:
        file.create_dataset("a", data=ROWS, chunks=(16, 30), compression="lzf")
        file["b"] = [f"text {number}" for number in range(300)]


def _repacked(folder: Path) -> object:
    words = ["--dataset", "a", "--dataset", "b", "--chunk-rows", "3", "--codec", "gzip:1", "--force"]
    assert main(["repack", f"{folder}/in.h5", f"{folder}/out.h5", *words]) == 0
    _check_repacked(folder)
    return sorted(os.listdir(folder))


def _check_repacked(folder: Path) -> None:
    if (folder / "out.h5").exists():
        with h5py.File(folder / "in.h5") as old, h5py.File(folder / "out.h5") as new:
            assert all((old[name][()] == new[name][()]).all() for name in "ab") and new["a"].chunks == (3, 30)


# Caches of decoded images and of listings, memoized results.

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
MIB = 1 << 20


def _tree(folder: Path) -> Path:
    tree = folder / "tree"
    if not tree.exists():
        photo_tree(tree, classes=2, per_class=6, sizes=(20, 40))
        for path in (tree, *tree.rglob("*")):  # not written just now
            os.utime(path, (1e9, 1e9))
    return tree


def _trained(folder: Path, where: Any = "disk") -> object:
    torch.set_num_threads(1)
    whole = _whole_entries(folder)
    cache = Cache(where, 16 * MIB, dir=folder / "cache" if where == "disk" else None)
    loader = FastLoader(FastImageFolder(_tree(folder), CROP, cache=cache, threads=1), 4, shuffle=True, seed=7)
    found = [[part.numpy().tobytes() for part in batch] for batch in [*loader, *loader]]
    assert where != "disk" or whole <= _whole_entries(folder) != set(), "what was whole stays"
    return found


def _whole_entries(folder: Path) -> set[Any]:
    if not (folder / "cache" / "fastpipe-decoded" / "lock").exists():
        return set()
    assert sorted(os.listdir(folder / "cache" / "fastpipe-decoded")) == ["000000.data", "000000.log", "lock"]
    store = open_cache_store(Cache("disk", 15 * MIB, dir=folder / "cache"))
    assert store is not None
    return {entry for entry in store.entries() if store._verified(entry)}


def _listed(folder: Path) -> object:
    index = IndexCache(folder / "index", keep_from_s=-1, now=lambda: 10**20)
    classes = find_classes(_tree(folder))[1]
    found = scan_folder(_tree(folder), classes, extensions=TORCHVISION_EXTENSIONS, cache=index)
    return [os.path.relpath(path, folder) for path, _ in found]


def _memoized(folder: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        return memoize(lambda: {"a": np.arange(1000), "c": range(3)}, dir=folder / "kept", pickle=True)()


# Stages: objects are whole, the limit holds, no claim is left.

STAGED, SIZE, LIMIT = 60, 4096, 20 * 4096
STEPS = [
    (os, "open"), (os, "write"), (files, "_rename"), (os, "unlink"), (os, "pwrite"), (Ledger, "written"),
    (Ledger, "remove"), (Ledger, "removed"), (StageTable, "_note"), (LockFile, "take"), (LockFile, "stay"),
    (LockFile, "release"),
]  # fmt: skip


class Uses:
    tag, now = b"t" * 16, 0

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        at = np.random.default_rng(0).permutation(STAGED)
        return (at[rows] - self.now) % STAGED  # again and again, so that there is always room to make


def _name_of(row: int) -> bytes:
    return hashlib.md5(b"%d" % row).digest()


def _object(row: int) -> bytes:
    return hashlib.md5(b"content of %d" % row).digest() * (SIZE // 16)


def _opened(place: Path) -> StageTable:
    folder = StageFolder(Stage(place, max_bytes=LIMIT))
    return folder.open_table(b"d" * 16, np.full(STAGED, SIZE, np.int64), _name_of)


def _staged(place: Path, seed: int = 0) -> None:
    """Read and keep rows in an order of its own, with room for a third."""
    table, uses = _opened(place), Uses()
    table.follow(uses)
    for row in np.random.default_rng(seed).integers(0, STAGED, 200).tolist():
        uses.now += 1
        table.used(np.array([row]))
        with table.claim(row, 0.01):
            data = table.read(row)
            assert data is None or data == _object(row)
            if data is None:
                table.keep(row, _object(row))
    table.close()


def _objects_in(place: Path) -> list[Path]:
    return list((place / "fastpipe-stage" / "objects").glob("*/*"))


def _check_stage(place: Path) -> None:
    contents = {_name_of(row).hex(): _object(row) for row in range(STAGED)}
    for path in _objects_in(place):
        assert path.read_bytes() == contents[path.parent.name + path.name]
    table = _opened(place)
    assert not list((place / "fastpipe-stage" / "writing").iterdir())
    assert table._folder.ledger.nbytes == SIZE * len(_objects_in(place)) <= LIMIT
    assert table._folder.ledger.is_reliable
    for row in range(STAGED):  # no claim is left, and what there is can be read
        assert table._folder.locks.is_free(table._folder.claim_byte(_name_of(row)))
        assert table.read(row) in (None, _object(row))
    table.close()


COMPONENTS = {
    "generation": generation(plain),
    "ragged rows": generation(ragged, **RAGGED),
    "files": generation(ragged, **FILES),
    "skipped rows": generation(failing, **RAGGED, bad_samples="skip"),
    "skipped rows in files": generation(failing, **FILES, bad_samples="skip"),
    "batches": generation(batched, **RAGGED),
    "more rows": generation(ragged, 25, **RAGGED),
    "more files": generation(failing, 25, **FILES, bad_samples="skip"),
    "more batches": generation(batched, 25, **RAGGED),
    "repack": Component(_repacked, _source, _check_repacked, [*CALLS, (repack, "rename_anew"), (os, "fchmod")]),
    "cache": Component(_trained, _tree, calls=CALLS[:5], least=20),
    "index": Component(_listed, _tree, least=4),
    "memoize": Component(_memoized, least=8),
    "stage": Component(_staged, check=_check_stage, calls=[*STEPS, (os, "mkdir"), (os, "ftruncate")]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many steps, each noted at once.  What is written stays in memory, as no machine fails here."""
    monkeypatch.setattr(schedule.Schedule, "_block_rows", lambda self: 7)
    monkeypatch.setattr(schedule, "_COMMIT_S", -1.0)
    monkeypatch.setattr("fastpipe.generation.run._MOST_BATCH_ROWS", 4)
    monkeypatch.setattr(repack, "_STEP_NBYTES", 4000)
    monkeypatch.setattr(FileSystems, "is_local", lambda *_: True)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def outcome(work: Callable[[], object], forked: Any, calls: Any = (), die_at: int = 0) -> tuple[int, str]:
    """What becomes of work in a process of its own: its exit code or calls, and a hash of its result."""
    ours, theirs = os.pipe()

    def run() -> None:
        logging.disable()
        with dying_at(die_at, calls, half_of_it) as count:
            result = work()
        os.write(theirs, pickle.dumps((count.calls, hashlib.sha256(pickle.dumps(result)).hexdigest())))

    code = os.waitstatus_to_exitcode(os.waitpid(forked(run), 0)[1])
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        if code == 0:
            return pickle.load(answer)  # type: ignore[no-any-return]
    return code, ""


def begun(component: Component, folder: Path) -> Path:
    folder.mkdir()
    component.begin(folder)
    return folder


def kill_at(
    component: Component, forked: Any, tmp_path: Path, chosen: Callable[[int], Iterable[int]]
) -> None:
    """Kill it at those of its calls that are chosen, each time from its begin; a second time, where that has left
    so much to do; and let the next go on."""
    whole = begun(component, tmp_path / "whole")
    total, expected = outcome(partial(component.work, whole), forked, component.calls)
    assert total >= component.least and expected
    assert outcome(partial(component.work, whole), forked)[1] == expected, "a second time"
    for die_at in sorted({*chosen(total)}):
        folder = begun(component, tmp_path / f"killed at {die_at}")
        for is_first in (True, False):
            found = outcome(partial(component.work, folder), forked, component.calls, die_at)
            assert found == (-signal.SIGKILL, "") or (found[1] == expected and not is_first), die_at
            assert outcome(partial(component.check, folder), forked)[0] == 0, die_at
        assert outcome(partial(component.work, folder), forked) == (0, expected), die_at


_LIKE_OTHERS = ("ragged rows", "skipped rows", "batches", "more rows")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [name for name in COMPONENTS if name not in _LIKE_OTHERS])
def test_a_process_that_is_killed_at_some_call_loses_nothing(tmp_path: Path, forked: Any, name: str) -> None:
    rng = random.Random(name)
    kill_at(
        COMPONENTS[name], forked, tmp_path,
        lambda total: [rng.randrange(1, total), *rng.sample(range(max(1, total - 20), total), 2),
                       # In the middle of a job's files some have their names, and others have not.
                       *(range(total - 24, total, 2) if name == "files" else ())],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_process_that_is_killed_at_any_call_loses_nothing(tmp_path: Path, forked: Any, name: str) -> None:
    kill_at(COMPONENTS[name], forked, tmp_path, lambda total: range(1, total + 1))


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_a_training_goes_on_when_another_that_shares_its_cache_is_killed(
    tmp_path: Path, forked: Any, where: str
) -> None:
    alone, shared = (begun(COMPONENTS["cache"], tmp_path / name) for name in ("alone", "shared"))
    expected = outcome(partial(_trained, alone, "off"), forked)[1]
    ours, theirs = os.pipe()

    def train_for_ever() -> None:
        while True:
            _trained(shared, where)
            os.write(theirs, b".")

    def train() -> None:
        assert hashlib.sha256(pickle.dumps(_trained(shared, where))).hexdigest() == expected

    victim, others = forked(train_for_ever), [forked(train) for _ in range(2)]
    os.read(ours, 1)
    os.kill(victim, signal.SIGKILL)
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL
    assert [os.waitpid(other, 0)[1] for other in others] == [0, 0]
    os.close(ours)
    os.close(theirs)
    assert outcome(partial(_trained, shared, where), forked) == (0, expected)


def _nbytes_in(place: Path) -> int:
    """Bytes of all files at one moment, whole or not: no process can reserve or free any meanwhile."""
    lock, sizes = LockFile(str(place / "fastpipe-stage" / "locks")), {}
    with lock.alone(0):
        for path in [*_objects_in(place), *(place / "fastpipe-stage" / "writing").iterdir()]:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = status.st_size
    lock.close()
    return sum(sizes.values())


def _staged_until(place: Path, seed: int, step: tuple[Any, str]) -> None:
    """Killed just before a step, or just after it."""
    owner, name = step
    original, calls = getattr(owner, name), itertools.count()

    def counted(*arguments: Any, **options: Any) -> object:
        is_last = next(calls) == seed
        if is_last and seed % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*arguments, **options)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, counted)
    _staged(place, seed)


@pytest.mark.few(3)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step[1]))
def test_processes_killed_at_a_step_of_a_stage_disturb_no_others(
    tmp_path: Path, forked: Any, step: tuple[Any, str]
) -> None:
    victims = [forked(partial(_staged_until, tmp_path, seed, step)) for seed in range(4)]
    others = [forked(partial(_staged, tmp_path, seed)) for seed in range(10, 12)]
    ends, largest = dict[int, int](), 0
    while len(ends) < 6:
        if (tmp_path / "fastpipe-stage" / "writing").exists():
            largest = max(largest, _nbytes_in(tmp_path))
        for process in {*victims, *others} - ends.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                ends[process] = os.waitstatus_to_exitcode(status)
    assert 0 < largest <= LIMIT
    assert [ends[process] for process in others] == [0, 0]
    assert -signal.SIGKILL in [ends[process] for process in victims]
    assert {ends[process] for process in victims} <= {0, -signal.SIGKILL}
    _check_stage(tmp_path)
