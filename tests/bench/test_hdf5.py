"""The cases ``hdf5`` and ``volume``: their data, their rows, their checks, their figures."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from benchmarks.cases.hdf5 import CELLS, made_cells, made_chunks
from benchmarks.cases.volume import MemoryPatches, specs
from benchmarks.studies.hdf5_first import first_batches as hdf5_first
from benchmarks.studies.hdf5_memory import memory_of_trees
from benchmarks.studies.volume_first import first_batches as volume_first
from benchmarks.studies.volume_memory import Topology, memory_of_topologies
from fastpipe.bench import hdf5 as case
from fastpipe.bench import volume as rows
from fastpipe.bench.synthetic import scroll_slabs
from fastpipe.bench.volume import Scroll, Sizes, SlicedRow, WholeEpochs
from fastpipe.errors import OptionError

_SIZES = Sizes((32, 64, 64), (16, 32, 32), (10, 20, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up data of tiny sizes, kept for all tests."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, case.Table]:
    cells = made_cells(3, CELLS, "cells", folder)
    return {table.key: table for table in (*case.made_tables(70, folder), made_chunks(20, folder), cells)}


@pytest.fixture(scope="module")
def scroll(folder: Path) -> Scroll:
    return rows.made_scroll(_SIZES, folder)


def test_tables_are_made_once_in_four_layouts_of_the_same_rows(tables: Any, folder: Path) -> None:
    four = list(tables.values())[:4]
    with ExitStack() as stack:
        first, *others = (stack.enter_context(h5py.File(table.path))["mels"][:] for table in four)
    assert all(np.array_equal(first, other) for other in others)
    assert [table.chunk for table in four] == [(16, 64, 128)] * 3 + [None]
    assert [table.is_packed for table in tables.values()] == [True, True, False, False, True, True]
    assert case.made_tables(70, folder) == four
    cells = tables["cells"]
    assert (cells.samples, cells.sample_bytes, cells.labels) == (3 * 200, 1024, "labels")
    (sample, label), (expected, number) = case.table_dataset(cells, "off")[599], case.RowByRow(cells)[599]
    assert np.array_equal(sample, expected.numpy()) and label == number


def test_a_dataset_that_is_no_table_is_refused_and_nan_is_a_number(tables: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no dataset 'nothing'; it has: mels"):
        case.look(tables["gzip"].path, "nothing", "file")
    with h5py.File(tmp_path / "own.h5", "w") as file:
        file["words"] = ["a", "b"]
        file["scalars"] = np.arange(3.0)
        file["big"] = np.ones((3, 2), ">f4")
        file.create_dataset("x", data=np.full((20, 3), np.nan, np.float32), chunks=(4, 3), compression="gzip")
    for name in ("words", "scalars", "big"):
        with pytest.raises(OptionError, match="rows of numbers"):
            case.look(tmp_path / "own.h5", name, "file")
    table = case.look(tmp_path / "own.h5", "x", "file")
    assert case.check_rows((table, spec) for spec in case.specs_of(table, 4) if spec.group == "fastpipe").ok


@pytest.mark.parametrize("spoil", [
    lambda batches: batches[1][0].view(-1).__setitem__(0, 7), lambda batches: batches[1][1].view(-1)[:1].add_(1),
    lambda batches: batches.append(batches[0]), lambda batches: batches.pop(),
], ids=["value", "label", "double", "short"])  # fmt: skip
def test_both_checks_find_a_wrong_value_label_or_number(tables: Any, scroll: Scroll, spoil: Any) -> None:
    cells, check = tables["cells"], case.RowCheck()
    good = list(case.loader_of(case.specs_of(cells, 100)[-1], cells))
    bad = copy.deepcopy(good)
    spoil(bad)
    check.add("these", case.digests_of(cells), good)
    assert check.ok
    check.add("these", case.digests_of(cells), bad)
    assert not check.ok and check.as_json()["problems"][0].startswith("these: ")
    (row,) = own_rows(scroll, "warm-slices")
    bad = [[values.clone(), labels.clone()] for values, labels in row.batches(scroll.epoch)]
    spoil(bad)
    row.batches = lambda count: bad
    found = rows.check_patches(scroll, [row])
    assert not found.ok and "outputs differ from the source's slices: warm: slices" in found.sentence()
    row.close()


def test_the_volume_on_disk_is_what_was_made_and_is_made_once(scroll: Scroll, folder: Path) -> None:
    made = map(np.concatenate, zip(*scroll_slabs(_SIZES.shape, _SIZES.chunk[0]), strict=True))
    assert all(map(np.array_equal, scroll.arrays, made))
    assert rows.made_scroll(_SIZES, folder, pytest.fail) == scroll
    assert scroll.nbytes == 32 * 64 * 64 * 3 and scroll.patch_nbytes == 10 * 20 * 20 * 3
    assert scroll.epoch == 32 and scroll.epoch * scroll.patch_nbytes <= scroll.nbytes
    described = scroll.described
    assert described["samples"] == 32 and "patches of 10×20×20" in described["text"]
    assert 1.1 < described["volume_bytes"] / described["bytes"] < 4  # as hard to compress as a real one


def own_rows(scroll: Scroll, *keys: str) -> list[Any]:
    """Rows of fastpipe's, and those that slice what is in memory."""
    return [
        WholeEpochs(spec, scroll, 2) if spec.group == "fastpipe"
        else SlicedRow(spec, rows.sliced_loader(spec, scroll, 2, MemoryPatches(scroll)))
        for spec in specs() if spec.key in keys
    ]  # fmt: skip


def test_a_cold_row_remembers_nothing_at_first_and_a_warm_one_all(
    scroll: Scroll, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    make = rows.patch_dataset

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(rows, "patch_dataset", noted)
    cold, warm = own_rows(scroll, "cold-tour", "warm-uniform")
    assert cold.measure(2 * cold.chunk) > 0
    assert len(made) == len(cold.made_s) == 2 and all(one.amplification > 0 for one in made)
    assert not np.array_equal(made[0].places()[1], made[1].places()[1])
    assert cold.budget == scroll.nbytes // 4
    made.clear()
    warm.measure(warm.chunk)
    once = made[0].amplification
    warm.measure(3 * warm.chunk)
    assert len(made) == 1 and made[0].amplification < once / 2
    for row in (cold, warm):
        row.close()
        row.close()


@pytest.mark.slow  # many processes that import torch
def test_start_up_and_memory_are_measured_in_new_processes(folder: Path, tables: Any, scroll: Scroll) -> None:
    found = hdf5_first(made_chunks(20, folder), 4, runs=1)
    assert found["chunks"] == 20
    assert all(found[name]["median_s"] > 0 for name in ("replaced", "cold", "kept"))
    assert found["cold"]["import_s"] > found["replaced"]["import_s"]
    used = memory_of_trees(tables["gzip"], 8, 1 << 20, workers=(1,))["rows"]
    assert [row["budget_mb"] for row in used] == [0.0, 1.0]
    plain = rows.made_scroll(_SIZES, folder, compressed=False)
    assert plain.described["bytes"] > scroll.nbytes > scroll.described["bytes"]
    found = volume_first(scroll, plain, 2, runs=1)
    assert all(one["median_s"] > 0 for one in found.values())
    for row in (*used, *memory_of_topologies(scroll, 2, [Topology(1, 2)])["rows"]):
        assert row["above_mb"] == pytest.approx(row["mb"] - row["nothing_mb"], abs=0.2)
        assert row["mb"] > row["stock_mb"] > 50
