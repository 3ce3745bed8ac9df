"""The case ``hdf5``: its check, its rows, its figures, and the whole command on tiny data."""

from __future__ import annotations

import copy
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from benchmarks.cases import hdf5 as full
from benchmarks.cases.hdf5 import (
    ASKED,
    CELLS,
    TABLE_PEERS,
    InOrder,
    TablePeerRow,
    WindowBatches,
    first_batch_targets,
    made_cells,
    made_chunks,
    memory_target,
    more_specs,
    peers_of,
    rate_targets,
)
from benchmarks.lines import markdown
from benchmarks.peers.children import serve
from benchmarks.peers.children.protocol import Job, TableJob, job_of, table_problem
from benchmarks.peers.children.pyfive import batches
from benchmarks.run import main as measure
from benchmarks.studies import hdf5_first as first
from benchmarks.studies import hdf5_memory as memory
from benchmarks.studies.hdf5_evaluate import FileByFile, Grouped
from benchmarks.studies.hdf5_first import first_batches
from benchmarks.studies.hdf5_memory import memory_of_trees
from fastpipe.bench import hdf5 as case
from fastpipe.bench import hdf5 as rows
from fastpipe.bench.hdf5 import (
    RowByRow,
    RowCheck,
    Table,
    TableRow,
    TableSpec,
    best_workers,
    check_rows,
    digests_of,
    look,
    made_tables,
    specs_of,
)
from fastpipe.bench.plot import draw
from fastpipe.bench.report import print_result, short_markdown
from fastpipe.bench.results import load
from fastpipe.bench.runner import ContenderError, Sample
from fastpipe.cli import main
from fastpipe.errors import OptionError

ROWS, _SIZES = 70, (3, 8, 20)


def specs_on(table: Table, batch_size: int) -> list[TableSpec]:
    """The loaders that are measured on a table with everything."""
    first, *own = specs_of(table, batch_size)
    return [first, own[-1]] if table.key == "cells" else [first, *more_specs(table, batch_size), *own]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up data of these sizes, kept for all tests."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def tables(folder: Path) -> list[Table]:
    cells = made_cells(_SIZES[0], CELLS, "cells", folder)
    return [*made_tables(ROWS, folder), made_chunks(_SIZES[2], folder), cells]


def table_of(tables: list[Table], key: str) -> Table:
    return next(table for table in tables if table.key == key)


def test_the_four_layouts_hold_the_same_rows(tables: list[Table], folder: Path) -> None:
    values = []
    for table in tables[:4]:
        with h5py.File(table.path) as file:
            values.append(file["mels"][:])
    assert all(np.array_equal(values[0], other) for other in values[1:])
    assert [table.chunk for table in tables[:4]] == [(16, 64, 128)] * 3 + [None]
    assert [table.is_packed for table in tables] == [True, True, False, False, True, True]
    assert made_tables(ROWS, folder) == tables[:4]  # made once


def test_cells_are_of_a_kilobyte_and_have_labels(tables: list[Table]) -> None:
    cells = table_of(tables, "cells")
    assert (cells.samples, cells.sample_bytes, cells.labels) == (3 * 200, 1024, "labels")
    sample, label = rows.table_dataset(cells, "off")[599]
    expected, number = RowByRow(cells)[599]
    assert np.array_equal(sample, expected.numpy()) and label == number


def test_a_dataset_that_is_not_there_is_told(tables: list[Table], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no dataset 'nothing'; it has: mels"):
        look(tables[0].path, "nothing", "file")
    with pytest.raises(OptionError, match="cannot be read as HDF5"):
        look(tmp_path / "none.h5", "mels", "file")
    with h5py.File(tmp_path / "words.h5", "w") as file:
        file["words"] = ["a", "b"]
        file["scalars"] = np.arange(3.0)
        file["big"] = np.ones((3, 2), ">f4")
    for name in ("words", "scalars", "big"):
        with pytest.raises(OptionError, match="rows of numbers"):
            look(tmp_path / "words.h5", name, "file")


def test_rows_may_hold_what_is_no_number(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "own.h5", "w") as file:
        file.create_dataset("x", data=np.full((20, 3), np.nan, np.float32), chunks=(4, 3), compression="gzip")
    table = look(tmp_path / "own.h5", "x", "file")
    assert check_rows((table, spec) for spec in specs_of(table, 4) if spec.group == "fastpipe").ok
    row = TableRow(specs_of(table, 4)[0], table)
    assert row.measure(4) > 0
    row.close()


@pytest.mark.slow
def test_every_row_has_its_own_key_and_goes_through_all_rows(tables: list[Table]) -> None:
    keys = []
    for table in tables:
        for spec in specs_on(table, 8):
            keys.append(spec.key)
            row = TableRow(spec, table)
            assert row.measure(row.chunk) > 0
            assert row.measure(2 * row.chunk) > 0
            row.close()
        order = InOrder(table, "order")
        assert order.measure(5 * table.shape[0] // 2) > 0
    assert len(keys) == len(set(keys)) == 2 * 7 + 4 + 3 + 3 + 2
    assert {one.row for one in ASKED if not one.row.startswith(("files-", "bitshuffle-"))} <= set(keys)


def test_nobody_else_has_the_file_open_while_a_row_is_measured(tables: list[Table]) -> None:
    # The library would give it the other's cache of chunks.
    specs = [spec for table in tables for spec in specs_on(table, 8) if spec.group in ("replaced", "peer")]
    assert {spec.kind for spec in specs} == {"rows", "named", "ordered"}
    for spec in specs:
        table = next(table for table in tables if spec.key.startswith(f"{table.key}-"))
        row = TableRow(spec, table)
        row.measure(row.chunk)
        assert row.loader.dataset._values is None
        row.close()


def test_windows_of_chunks_take_each_row_once(tables: list[Table]) -> None:
    numbers = list(WindowBatches(tables[0], 16, 2))
    assert sorted(sum(numbers, [])) == list(range(70))
    assert len(numbers) == len(WindowBatches(tables[0], 16, 2))
    assert {number // 16 for number in numbers[0]} != set(range(5))


def test_the_number_of_workers_is_chosen_and_told(tables: list[Table]) -> None:
    said: list[str] = []
    spec = specs_of(tables[0], 8)[0]
    chosen = best_workers(spec, tables[0], (0, 1), 0.01, said.append)
    assert chosen.num_workers in (0, 1)
    assert f"taken: {chosen.num_workers}" in said[0]
    assert chosen.label.endswith(f"(num_workers={chosen.num_workers})")
    assert "the best of 0, 1" in chosen.note


def test_the_check_sees_every_row_of_ours(tables: list[Table]) -> None:
    ours = [(table, spec) for table in tables for spec in specs_on(table, 8) if spec.group != "peer"]
    fast = [(table, spec) for table, spec in ours if spec.group != "replaced"]
    check = check_rows(fast)
    assert check.ok, check.problems
    assert check.epochs == len(fast) + 4  # twice where chunks are kept
    assert "each sample comes once" in check.sentence()


def test_the_check_fails_for_a_wrong_value_a_wrong_label_and_a_row_too_many(tables: list[Table]) -> None:
    cells = table_of(tables, "cells")
    loader = rows.loader_of(specs_on(cells, 100)[1], cells)
    good = list(loader)
    for spoil in ("value", "label", "double", "short"):
        batches = copy.deepcopy(good)
        if spoil == "value":
            batches[1][0][3, 2, 1] += 1e-6
        elif spoil == "label":
            batches[1][1][3] += 1
        elif spoil == "double":
            batches.append(batches[0])
        else:
            del batches[-1]
        check = RowCheck()
        check.add("these", digests_of(cells), batches)
        assert not check.ok, spoil
        assert check.as_json()["problems"][0].startswith("these: ")
    check = RowCheck()
    check.add("these", digests_of(cells), good)
    assert check.ok


def test_both_evaluations_find_the_same(tables: list[Table]) -> None:
    cells = table_of(tables, "cells")
    one, grouped = FileByFile(cells), Grouped(cells)
    assert one.measure(3) > 0 and grouped.measure(6) > 0
    assert (one.votes == grouped.votes).all() and (one.votes >= 0).all()
    one.close()
    grouped.close()


@pytest.mark.slow
def test_start_up_and_memory_are_measured(
    folder: Path, tables: list[Table], in_this_process: Callable[..., None]
) -> None:
    in_this_process(first, memory)
    told = first_batches(made_chunks(_SIZES[2], folder), 4, runs=2)
    assert [len(told[name]["raw_s"]) for name in ("replaced", "cold", "kept")] == [2, 2, 2]
    used = memory_of_trees(tables[0], 8, 1 << 20, workers=(0,))
    assert [(row["workers"], row["budget_mb"]) for row in used["rows"]] == [(0, 0.0), (0, 1.0)]


@pytest.mark.slow  # six processes that import torch
def test_start_up_is_measured_in_new_processes(folder: Path) -> None:
    told = first_batches(made_chunks(_SIZES[2], folder), 4, runs=1)
    assert told["chunks"] == 20
    assert all(told[name]["median_s"] > 0 for name in ("replaced", "cold", "kept"))
    assert told["cold"]["import_s"] > told["replaced"]["import_s"]
    assert [target["is_met"] is None for target in first_batch_targets(told)] == [False, False]


@pytest.mark.slow  # eight of them
def test_memory_is_measured_in_new_processes(tables: list[Table]) -> None:
    told = memory_of_trees(tables[0], 8, 1 << 20, workers=(1,))
    assert [row["budget_mb"] for row in told["rows"]] == [0.0, 1.0]
    for row in told["rows"]:
        assert row["above_mb"] == pytest.approx(row["mb"] - row["nothing_mb"], abs=0.2)
        assert row["mb"] > row["stock_mb"] > 50
    assert memory_target(told)[0]["is_met"] is not None


def test_what_was_asked_is_judged_by_the_median() -> None:
    def at(*rates: float) -> list[Sample]:
        return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]

    samples = {"gzip-window": at(270, 250, 280), "gzip-replaced": at(10, 10, 10), "cells-ram": at(3e5)}
    one, other, *_ = rate_targets(samples)
    assert (one["is_met"], one["got"]) == (True, {"median": 27.0, "low": 25.0, "high": 28.0})
    assert (other["is_met"], other["got"]) == (None, None)
    cells = next(one for one in rate_targets(samples) if one["unit"] == "samples/s")
    assert cells["is_met"] is False
    figures = {"cold": {"raw_s": [0.5, 0.9]}, "kept": {"raw_s": [0.4]}}
    assert [one["is_met"] for one in first_batch_targets(figures)] == [True, False]
    told = {"rows": [{"above_mb": 300, "budget_mb": 256}, {"above_mb": 151, "budget_mb": 0}]}
    assert memory_target(told)[0]["is_met"] is False  # the worst counts
    assert memory_target(None)[0]["got"] is None


# ---- peers -------------------------------------------------------------------------------------


def job_on(table: Table, **changes: Any) -> TableJob:
    return TableJob(str(table.path), table.dataset, table.shape, table.dtype, 16, 2, 8, 2, "", **changes)


def test_windows_of_a_threaded_reader_hold_the_rows_they_say(tables: list[Table]) -> None:
    with h5py.File(tables[0].path) as file:
        expected = file["mels"][:]
    stream = batches(job_on(tables[0]), lambda first, last: expected[first:last])
    seen: list[int] = []
    while len(seen) < 2 * 70 - 8:
        values, numbers = next(stream)
        assert np.array_equal(values, expected[numbers])
        seen += numbers.tolist()
    stream.close()
    assert set(seen) == set(range(70))


def test_a_table_job_survives_the_pipe_and_its_batches_are_looked_at(tables: list[Table]) -> None:
    from dataclasses import asdict

    job = job_on(tables[0])
    assert job_of(asdict(job)) == job
    assert not isinstance(job, Job)
    assert table_problem(job, np.zeros((8, 64, 128), np.float32)) is None
    assert "float64" in str(table_problem(job, np.zeros((8, 64, 128))))
    assert "(7, 64, 128)" in str(table_problem(job, np.zeros((7, 64, 128), np.float32)))


def test_every_peer_has_a_source_and_a_key_of_its_section(tables: list[Table]) -> None:
    assert {peer.source for peer in TABLE_PEERS} <= set(serve.SOURCES)
    assert [peer.key for peer in peers_of(tables[1])] == ["lzf-pyfive", "lzf-hidefix"]


@pytest.mark.parametrize("name", ["pyfive", "hidefix"])
def test_a_peer_reads_where_it_is_installed(name: str, tables: list[Table]) -> None:
    pytest.importorskip(name, reason=f"needs {name}: make peers")
    peer = next(peer for peer in peers_of(tables[0]) if peer.source == name)
    row = TablePeerRow(peer, sys.executable, tables[0], 8, 2)
    assert row.info.versions and row.info.versions[name]
    assert row.measure(row.chunk) > 0
    row.close()


def test_a_peer_that_cannot_read_a_file_says_so(tmp_path: Path, tables: list[Table]) -> None:
    pytest.importorskip("pyfive", reason="needs pyfive: make peers")
    (tmp_path / "none.h5").write_bytes(b"no HDF5")
    with pytest.raises(ContenderError, match="cannot read the file"):
        TablePeerRow(TABLE_PEERS[0], sys.executable, replace(tables[0], path=tmp_path / "none.h5"), 8, 2)


# ---- the whole command -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(folder: Path) -> Iterator[dict[str, Any]]:
    """What a quick run wrote and printed, with as many workers as come first."""
    path = folder / "result.json"
    command = ["hdf5", "--quick", "--rounds", "1", "--samples", "70"]
    command += ["--batch-size", "16", "--folder", str(folder), "--json", str(path)]
    out, said = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(said):
        patch.setattr(full, "QUICK", _SIZES)
        patch.setattr(case, "best_workers", lambda spec, *others: spec)
        assert measure(command) == 0, said.getvalue()
    assert "check: " in said.getvalue() and "equal h5py's bit for bit" in said.getvalue()
    yield {**load(path), "printed": out.getvalue(), "text": path.read_text()}


@pytest.mark.slow
def test_a_quick_run_gives_table_and_json(result: dict[str, Any], folder: Path) -> None:
    printed = " ".join(result["printed"].split())
    assert result["verdict"] in printed
    for section in result["sections"].values():
        assert section["label"] in printed
    assert printed.count("asked: ") == len(result["targets"]) == len(ASKED) + 3
    bitshuffle = {"bitshuffle"} if importlib.util.find_spec("hdf5plugin") else set()
    sections = {"gzip", "lzf", "plain", "contiguous", "rows", "cells", "files-12", "files-200"}
    assert set(result["best"]) == sections | bitshuffle
    by_key = {row["key"]: row for row in result["rows"]}
    assert by_key["gzip-window"]["samples_per_s"]["median"] > 0
    assert by_key["files-12-grouped"]["files_per_s"]["median"] > 0
    assert all(len(row["samples"]) == 1 for row in result["rows"])
    assert result["check"]["ok"] and result["check"]["epochs"] == (25 if bitshuffle else 19)
    assert str(folder) not in result["text"] and str(Path.home()) not in result["text"]


@pytest.mark.slow
@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_result_is_printed_written_and_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    result = {name: value for name, value in result.items() if name not in ("printed", "text")}
    result["first_batch"] = {
        "chunks": 20,
        **{
            name: {"label": name, "median_s": 0.2, "raw_s": [0.2], "import_s": 1.0}
            for name in ("replaced", "cold", "kept")
        },
    }
    result["memory"] = {
        "rows": [
            {"workers": 1, "budget_mb": 256.0, "mb": 9.0, "nothing_mb": 5.0, "above_mb": 4.0, "stock_mb": 3.0}
        ]
    }
    text = markdown(result)
    assert text.count("| samples/s, median") == len(result["sections"]) - 2
    assert text.count("| files/s, median") == 2
    assert "- memory with 1 workers, cache of 256 MB: 4 MB above" in text
    assert "- first batch of 20 chunks: kept: 0.200 s" in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    short = short_markdown(result).split("\n\n")[0].splitlines()
    assert len(short) == 2 + sum(row["group"] == "fastpipe" for row in result["rows"])
    assert len({line.count("|") for line in short}) == 1
    for width in (80, 160):
        output = io.StringIO()
        print_result(result, Console(file=output, width=width))
        assert max(map(len, output.getvalue().splitlines())) <= width
    draw(result, tmp_path / "picture.png")
    pixels = np.asarray(Image.open(tmp_path / "picture.png").convert("L"))
    edges = [pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]]
    assert min(edge.min() for edge in edges) == 255


def test_a_wrong_value_ends_the_command_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tables: list[Table]
) -> None:
    made = rows.loader_of

    def spoilt(spec: TableSpec, table: Table, draws: Any = None) -> Any:
        loader = made(spec, table, draws)
        if spec.kind != "window":
            return loader
        return ((batch + (torch.arange(len(batch)) == 0)[:, None, None] * 1e-3) for batch in loader)

    monkeypatch.setattr("fastpipe.bench.hdf5.loader_of", spoilt)
    monkeypatch.setattr(full, "QUICK", _SIZES)
    monkeypatch.setattr(case, "best_workers", lambda spec, *others: spec)
    json_file = folder / "never.json"
    arguments = ["--quick", "--samples", "70", "--folder", str(folder), "--json", str(json_file)]
    assert main(["bench", "hdf5", *arguments]) == 1
    assert "samples are not in the file" in capsys.readouterr().err
    assert not json_file.exists()


@pytest.mark.slow
def test_an_own_file_has_one_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "own.h5", "w") as file:
        values = np.arange(40 * 6, dtype=np.int32).reshape(40, 6)
        file.create_dataset("deep/x", data=values, chunks=(4, 6), compression="lzf")
    monkeypatch.setattr(case, "best_workers", lambda spec, *others: spec)
    json_file = tmp_path / "own.json"
    arguments = ["--data", str(tmp_path / "own.h5"), "--key", "deep/x", "--quick", "--rounds", "1"]
    assert main(["bench", "hdf5", *arguments, "--batch-size", "8", "--json", str(json_file)]) == 0
    result = load(json_file)
    assert list(result["sections"]) == ["file"] and "targets" not in result
    assert result["data"]["name"] == "own.h5" and result["main"] == "file-window"
    assert {row["group"] for row in result["rows"]} == {"replaced", "stock", "fastpipe"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "x.h5"], "--data and --key go together"),
        (["--data", "none.h5", "--key", "x"], "cannot be read as HDF5"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "hdf5", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and len(captured.err.splitlines()) == 1


@pytest.mark.slow
def test_peers_that_are_not_there_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tables: list[Table]
) -> None:
    monkeypatch.setattr("benchmarks.lines.interpreter", lambda peer: None)
    monkeypatch.setattr(full, "QUICK", _SIZES)
    monkeypatch.setattr(case, "made_tables", lambda *others: tables[3:4])
    monkeypatch.setattr(full, "made_tables", lambda *others: [])
    monkeypatch.setattr(case, "best_workers", lambda spec, *others: spec)
    arguments = ["--quick", "--peers", "--rounds", "1", "--batch-size", "8", "--folder", str(folder)]
    assert measure(["hdf5", *arguments]) == 0
    assert "not installed: pip install pyfive" in capsys.readouterr().out
