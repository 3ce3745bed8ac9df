"""The case ``generate``: its functions, its check, its rows, its figures, and the whole command for a moment."""

from __future__ import annotations

import importlib.util
import io
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from rich.console import Console

from benchmarks.cases import generate as peers
from benchmarks.cases.generate import (
    PEERS,
    SECTIONS,
    BareRow,
    DatasetsRow,
    JoblibRow,
    Peer,
    PoolRow,
    asked,
    specs,
    targets,
    write_rows,
)
from benchmarks.lines import markdown
from benchmarks.run import main as measure
from benchmarks.studies import generate_memory as memory
from benchmarks.studies import generate_predicted as predicted
from benchmarks.studies.made_rows import Generators, counted, made_of, motion, wide
from fastpipe.bench import generate as case
from fastpipe.bench import samples as functions
from fastpipe.bench.generate import (
    FastRow,
    LoopRow,
    MadeRow,
    Section,
    StoredCheck,
    check_stored,
    difference,
    spec_of,
)
from fastpipe.bench.generate import row_of as own_row
from fastpipe.bench.report import print_result, short_markdown
from fastpipe.bench.results import load
from fastpipe.bench.runner import ContenderError, Sample
from fastpipe.bench.samples import SEED, made, quick, rows_of, slow, waves, waves_alone
from fastpipe.cli import main

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
_SECTION = {one.key: one for one in SECTIONS}


@pytest.fixture(autouse=True, scope="module")
def folder_of_joblib(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not the shared memory, in which tests beside this one would find what is not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOBLIB_TEMP_FOLDER", str(tmp_path_factory.mktemp("joblib")))
        yield


def row_of(key: str, folder: Path, cores: int = 2) -> MadeRow:
    """A row without peers, by its key."""
    section = _SECTION[key.split("-")[0]]
    if key == "batch-bare":
        return BareRow(spec_of(section, "bare", "fn.batch alone", "peer"), folder)
    return next(own_row(spec, folder) for spec in specs(section, cores) if spec.key == key)


def peer_row(kind: str, section: Section, folder: Path) -> Any:
    peer = next(one for one in PEERS if one.kind == kind)
    return peer.row(peer.spec(section, 2), folder)


# ---- functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [slow, quick, wide, motion, waves, counted])
def test_a_row_is_a_function_of_its_number(function: Any) -> None:
    first, again, other = made(function, 3), function(3, np.random.default_rng([SEED, 3])), made(function, 4)
    name, *_ = first
    assert set(first) == set(again) and all(np.array_equal(first[one], again[one]) for one in first)
    assert not np.array_equal(first[name], other[name])


def test_rows_have_the_shapes_that_tables_tell() -> None:
    assert {name: (value.dtype, value.shape) for name, value in rows_of(quick, 2).items()} == {
        "x": (np.float32, (2, 1024)), "y": (np.int64, (2,)),
    }  # fmt: skip
    assert made(motion, 0)["motion"].shape == (250, 25, 3) and made(motion, 0)["motion"].nbytes == 75_000
    assert made(waves, 0)["wave"].nbytes == 1024 and np.asarray(made(counted, 0)["number"]).nbytes == 8


@pytest.mark.parametrize(("function", "seconds"), [(slow, 5e-3), (quick, 1e-4)])
def test_a_row_uses_the_processor_for_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch, function: Any, seconds: float
) -> None:
    """By a thread's clock that goes on by a microsecond each time that it is asked."""
    ticks = itertools.count()
    monkeypatch.setattr(functions, "time", SimpleNamespace(thread_time=lambda: next(ticks) * 1e-6))
    made(function, 0)
    assert seconds <= next(ticks) * 1e-6 < seconds + 1e-5


@pytest.mark.parametrize("count", [1, 2, 7, 256])
def test_a_batch_has_the_rows_of_the_function(count: int) -> None:
    batch: Any = waves.batch  # type: ignore[attr-defined]
    found = batch(np.arange(count), Generators(range(count)))["wave"]
    assert found.shape == (count, 256) and found.dtype == np.float32
    assert np.array_equal(found, rows_of(waves_alone, count)["wave"])
    assert not hasattr(waves_alone, "batch")


def test_shards_come_one_after_the_other() -> None:
    found = list(made_of(waves, [range(2), range(4, 5)]))
    assert [
        np.array_equal(row["wave"], made(waves, i)["wave"]) for row, i in zip(found, (0, 1, 4), strict=True)
    ]


# ---- rows --------------------------------------------------------------------------------------


def test_every_row_has_its_own_key_and_is_asked_for_by_it() -> None:
    keys = [spec.key for section in SECTIONS for spec in specs(section, 2)]
    keys += [peer.spec(one, 2).key for peer in PEERS for one in SECTIONS if one.key != "batch"]
    assert len(set(keys)) == len(keys) == 29
    for section in SECTIONS:
        spec = specs(section, 2)[0]
        assert spec.key == f"{section.key}-replaced" and spec.unit == "rows"
    for one in asked(2):
        assert {one.row, *(one.against or ())} <= set(keys)
    assert [one.least for one in asked(2)] == [1.85, 0.97, 1.5, 1.5] and asked(8)[0].least == 7.4


@pytest.mark.parametrize("key", ["quick-replaced", "quick-alone", "motion-threads"])
def test_a_row_stores_what_the_function_returns_and_leaves_nothing(key: str, tmp_path: Path) -> None:
    row = row_of(key, tmp_path)
    assert isinstance(row, LoopRow if key.endswith("replaced") else FastRow)
    section = row.spec.of
    assert difference(rows_of(section.function, 40), row.stored(40)) is None
    assert row.workers == 0 and row.measure(40) >= 40 * section.row_s / 2
    row.close()
    assert list(tmp_path.iterdir()) == []


def test_fastpipe_is_called_with_and_without_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, int, str]] = []
    monkeypatch.setattr(
        "fastpipe.generate",
        lambda fn, n, out, *, workers, executor, **_: calls.append((fn, workers, executor)),
        raising=False,
    )
    for key in ("batch-single", "batch-alone", "batch-workers", "motion-threads"):
        row = row_of(key, tmp_path)
        assert isinstance(row, FastRow)
        row.measure(1)
    assert calls == [
        (waves_alone, 0, "processes"), (waves, 0, "processes"), (waves, 2, "processes"), (motion, 2, "threads"),
    ]  # fmt: skip


def test_of_a_batch_alone_only_the_batch_is_timed(tmp_path: Path) -> None:
    row = row_of("batch-bare", tmp_path)
    assert isinstance(row, BareRow) and row.chunk % 256 == 0
    begun = time.perf_counter()
    seconds = row.measure(600)
    assert 0 < seconds < time.perf_counter() - begun
    assert difference(rows_of(waves, 600), row.stored(600)) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 255, 256, 600])
def test_rows_are_written_as_they_come(count: int, tmp_path: Path) -> None:
    rows = ({"x": np.full(1024, index, np.float32), "y": index} for index in range(count))
    write_rows(tmp_path / "rows.h5", count, rows)
    with h5py.File(tmp_path / "rows.h5") as file:
        assert file["x"].shape == (count, 1024) and file["x"].dtype == np.float32
        assert np.array_equal(file["x"][:, 5], np.arange(count)) and np.array_equal(
            file["y"], np.arange(count)
        )


# ---- peers -------------------------------------------------------------------------------------


def test_a_pool_makes_the_same_rows(tmp_path: Path) -> None:
    row = peer_row("pool", _SECTION["quick"], tmp_path)
    assert isinstance(row, PoolRow) and row.workers == 2
    assert difference(rows_of(quick, 300), row.stored(300)) is None
    assert list(tmp_path.iterdir()) == []


# A process of joblib's stays, which watches what others leave.
@pytest.mark.leaks("joblib's resource tracker")
def test_joblib_makes_the_same_rows(tmp_path: Path) -> None:
    row = peer_row("joblib", _SECTION["motion"], tmp_path)
    assert isinstance(row, JoblibRow) and row.sizes == ["auto", 5, 20, 80] and row.size == "auto"
    assert difference(rows_of(motion, 30), row.stored(30)) is None
    assert list(tmp_path.iterdir()) == []


def test_how_many_rows_make_a_task_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = peer_row("pool", _SECTION["slow"], tmp_path)
    assert row.sizes == [1, 4, 16] and row.size == 4
    times = iter([3.0, 2.0, 9.0, 9.0, 2.5, 1.0])
    counts: list[int] = []
    monkeypatch.setattr(row, "measure", lambda count: counts.append(count) or next(times))
    assert row.tune(50) == "rows a task: 16, the fastest of 1, 4 and 16"
    assert row.size == 16 and counts == [50] * 6


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    def broken(index: int, rng: Any) -> Any:
        raise ValueError("no rows today")

    section = Section("own", "own", broken, 1e-3, 1, 1)
    row = PoolRow(spec_of(section, "pool", "a pool", "peer", 1), tmp_path)
    with pytest.raises(ContenderError, match=r"AttributeError|PicklingError"):
        row.measure(3)  # a function within another cannot be sent
    row.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_told() -> None:
    peer = Peer("none", "None({cores})", PoolRow, "", ("json", "no_such_package"))
    assert peer.missing == "not installed: pip install no_such_package"
    assert peer.spec(SECTIONS[0], 3).label == "None(3)"
    assert Peer("own", "", PoolRow, "").missing is None and Peer("own", "", PoolRow, "").versions is None


def test_datasets_that_cannot_be_imported_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ContenderError, match="pip install"):
        DatasetsRow(PEERS[2].spec(_SECTION["slow"], 2), tmp_path)


# ---- the check ---------------------------------------------------------------------------------


def test_the_check_compares_every_row_in_its_place(tmp_path: Path) -> None:
    said: list[str] = []
    rows = [row_of(key, tmp_path) for key in ("quick-replaced", "quick-alone", "batch-alone", "batch-bare")]
    check = check_stored(rows, said.append)
    assert check.ok and (check.files, check.rows) == (4, 300 + 300 + 600 + 600)
    assert "1,800 rows that were made in 4 ways" in check.sentence() and len(said) == 4
    assert check.as_json()["ok"] and check.as_json()["text"] == check.sentence()


@pytest.mark.parametrize("spoil", ["value", "order", "short", "type", "name"])
def test_the_check_finds_a_wrong_row(spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of("quick-replaced", tmp_path)
    make = row.make  # type: ignore[attr-defined]

    def spoilt(count: int, out: Path, later: ExitStack) -> None:
        make(count, out, later)
        with h5py.File(out, "r+") as file:
            found = file["x"][...]
            if spoil == "value":
                found[17, 1000] = np.nextafter(found[17, 1000], 2, dtype=np.float32)
            elif spoil == "order":
                found[[4, 5]] = found[[5, 4]]
            elif spoil == "short":
                found = found[:-1]
            elif spoil == "type":
                found = found.astype(np.float64)
            del file["x"]
            file["z" if spoil == "name" else "x"] = found

    monkeypatch.setattr(row, "make", spoilt)
    check = check_stored([row])
    assert not check.ok and check.files == 0
    told = {
        "value": "x differs in 1 of 300 rows, row 17 is the first", "short": "x is float32 (299, 1024)",
        "order": "x differs in 2 of 300 rows, row 4 is the first", "type": "x is float64", "name": "columns are",
    }  # fmt: skip
    assert "quick: for loop, np.stack, h5py: " + told[spoil] in check.sentence()


# ---- figures -----------------------------------------------------------------------------------


def test_memory_is_measured_by_rows(tmp_path: Path, in_this_process: Callable[..., None]) -> None:
    in_this_process(memory)
    told = memory.peaks(tmp_path, 0, counts=(300, 3000), times=2)["rows"]
    assert [(row["rows"], len(row["mb"])) for row in told] == [(300, 2), (3000, 2)]
    assert all(mb > 10 for row in told for mb in row["mb"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # a million rows
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    few, many = memory.peaks(tmp_path, 2, times=1)["rows"]
    assert many["mb"][0] - few["mb"][0] < 60


def test_predictions_are_compared_with_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        seconds = 2.0

    asked_for: list[tuple[Any, ...]] = []

    def probed(fn: Any, n: int, out: Path, **options: Any) -> Any:
        asked_for.append((fn, n, options["workers"]))
        return Report()

    clock = iter([0.0, 1.6, 10.0, 12.5, 20.0, 22.0, 30.0, 34.0])
    monkeypatch.setattr(predicted, "probe", probed)
    monkeypatch.setattr(predicted.fastpipe, "generate", lambda *args, **options: None, raising=False)
    monkeypatch.setattr(predicted.time, "perf_counter", lambda: next(clock))
    first, second = predicted.predictions(
        [(_SECTION["slow"], 400), (_SECTION["quick"], 9000)], tmp_path, workers=2, times=2
    )
    assert asked_for == [(slow, 400, 2), (quick, 9000, 2)] * 2
    assert first.as_json() == {
        "section": "slow", "label": first.section.label, "rows": 400, "predicted_s": [2.0, 2.0],
        "seconds": [1.6, 2.0], "error": [25.0, 0.0],
    }  # fmt: skip
    assert second.as_json()["error"] == [-20.0, -50.0]


def test_what_was_asked_is_judged_by_the_median_and_the_best_peer() -> None:
    def at(*rates: float) -> list[Sample]:
        return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]

    samples = {
        "slow-workers": at(380, 370, 350), "slow-replaced": at(200, 180, 200), "slow-alone": at(190, 190, 190),
        "slow-pool": at(390, 300, 300), "slow-joblib": at(300, 380, 100), "quick-workers": at(9000, 9000, 9000),
        "batch-alone": at(20_000, 25_000, 10_000), "batch-bare": at(40_000, 40_000, 40_000),
    }  # fmt: skip
    told = [
        {"section": "slow", "error": [-16.0, 2.0, 12.0]},
        {"section": "quick", "error": [-16.0, 20.0, 1.0]},
    ]
    used = {"rows": [{"rows": 10, "mb": [50.0, 52.0, 51.0]}, {"rows": 99, "mb": [60.0, 75.0, 61.0]}]}
    every = [one.key for one in SECTIONS]
    cores, slow_peer, quick_peer, wide_peer, over, first, second, more = targets(
        samples, 2, told, used, every
    )
    assert (cores["is_met"], cores["asked"]) == (True, 1.85)
    assert cores["got"] == pytest.approx({"median": 1.9, "low": 1.75, "high": 370 / 190}, abs=1e-4)
    assert slow_peer["got"]["low"] == pytest.approx(370 / 380, abs=1e-4) and slow_peer["is_met"]
    assert wide_peer["got"] is None and quick_peer["got"] is None and quick_peer["is_met"] is None
    assert over["got"] == {"median": 25.0, "low": 15.0, "high": 75.0} and over["is_met"] is False
    assert (first["got"]["median"], first["is_met"]) == (12.0, True)
    assert (second["got"]["median"], second["is_met"]) == (16.0, False)
    assert (more["got"], more["is_met"]) == ({"median": 10.0, "low": 10.0, "high": 23.0}, True)
    assert [one["is_met"] for one in targets({}, 2, [], None, every)] == [None] * 8
    assert len(targets({}, 2, [], None, ["motion"])) == 1


# ---- the whole command -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run in a process of its own wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("generated")
    path = folder / "out" / "result.json"
    command = [sys.executable, str(RUN), "generate", "--quick", "--rounds", "1", "--peers"]
    command += ["--section", "slow", "--folder", str(folder), "--json", str(path)]
    command += ["--plot", str(path.with_suffix(".png"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check: " in done.stderr and "bit for bit, each in its place" in done.stderr
    assert [one.name for one in folder.iterdir()] == ["out"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    return {**load(path), "printed": done.stdout, "text": path.read_text(), "folder": str(folder)}


@pytest.mark.slow
def test_a_quick_run_gives_table_and_json(result: dict[str, Any]) -> None:
    printed = " ".join(result["printed"].split())
    assert result["verdict"] in printed and result["main"] == "slow-workers"
    assert printed.count("asked: ") == len(result["targets"]) == 4
    assert result["best"] == {"slow": "slow-replaced"}
    installed = [peer for peer in PEERS if peer.missing is None]
    keys = [spec.key for spec in specs(_SECTION["slow"], result["machine"]["cores"])]
    keys += [f"slow-{peer.kind}" for peer in installed]
    assert [row["key"] for row in result["rows"]] == keys
    assert all(row["rows_per_s"]["median"] > 0 and len(row["samples"]) == 1 for row in result["rows"])
    assert result["check"]["files"] == len(keys) - len(installed) and len(result["missing"]) == len(
        PEERS
    ) - len(installed)
    assert [one["section"] for one in result["predicted"]["rows"]] == ["slow"] and result["peak"] == {}
    assert "predicted, 5 ms a row" in printed and "rows will take" in result["plan"]
    assert result["folder"] not in result["text"] and str(Path.home()) not in result["text"]
    versions = {row["key"]: row.get("versions") for row in result["rows"]}
    assert versions["slow-pool"] is None and "joblib" in versions["slow-joblib"]
    if importlib.util.find_spec("datasets"):
        assert "pyarrow" in versions["slow-datasets"]


def test_a_result_is_printed_and_written(result: dict[str, Any]) -> None:
    result = {name: value for name, value in result.items() if name not in ("printed", "text", "folder")}
    result["peak"] = {"rows": [{"rows": 10_000, "mb": [60.0, 62.0]}, {"rows": 1_000_000, "mb": [64.5, 65.5]}]}
    text = markdown(result)
    assert text.count("| rows/s, median (range) | × best replaced script") == 1
    assert (
        "- most memory of the process that calls, rows of 8 bytes: 61.0 MB for 10,000 rows, 65.0 MB" in text
    )
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    assert short_markdown(result).count("fastpipe.generate") == 2
    for width in (80, 160):
        output = io.StringIO()
        print_result(result, Console(file=output, width=width))
        assert max(map(len, output.getvalue().splitlines()[:20])) <= width


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without what takes seconds: workers, predictions."""
    monkeypatch.setattr(case.Bench, "quick_s", 0.02)
    monkeypatch.setattr(peers, "PREDICTED", ())
    monkeypatch.setattr(peers, "specs", lambda section, cores: specs(section, 0))


def test_a_wrong_row_ends_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], briefly: None
) -> None:
    stored = FastRow.stored

    def spoilt(self: FastRow, count: int) -> Any:
        found = stored(self, count)
        found["x"][2, 2] += 1
        return found

    monkeypatch.setattr(FastRow, "stored", spoilt)
    json_file = tmp_path / "never.json"
    assert main(["bench", "generate", "--quick", "--section", "quick", "--json", str(json_file)]) == 1
    captured = capsys.readouterr()
    assert "quick: fastpipe.generate(workers=0): x differs in 1 of 300 rows, row 2" in captured.err
    assert captured.out == "" and not json_file.exists()


def test_peers_that_are_not_there_or_wrong_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], briefly: None
) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(PoolRow, "stored", lambda self, count: {})
    assert measure(["generate", "--quick", "--peers", "--rounds", "1", "--section", "quick"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not measured: quick: datasets.Dataset.from_generator(num_proc=" in out
    assert "not installed: pip install datasets" in out and "not installed: pip install joblib" in out
    assert "rows differ from what the function returns: columns are []" in out

    def fails(self: PoolRow, count: int) -> Any:
        raise ContenderError("it broke")

    monkeypatch.setattr(PoolRow, "stored", fails)
    assert measure(["generate", "--quick", "--peers", "--rounds", "1", "--section", "quick"]) == 0
    assert "it broke" in capsys.readouterr().out


def test_several_functions_in_one_run(tmp_path: Path, briefly: None) -> None:
    path = tmp_path / "result.json"
    arguments = ["--quick", "--rounds", "1", "--section", "quick", "--section", "batch", "--json", str(path)]
    assert measure(["generate", *arguments]) == 0
    result = load(path)
    assert list(result["sections"]) == ["quick", "batch"] and result["main"] == "quick-workers"
    assert "--section quick --section batch" in result["command"] and result["plan"] == ""
    overhead = next(one for one in result["targets"] if one["unit"] == "µs")
    assert overhead["got"]["median"] > 0
    assert markdown(result).count("| × best replaced script") == 2


def test_a_folder_that_is_none_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "--quick", "--folder", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_without_h5py_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert main(["bench", "generate", "--quick"]) == 2
    error = capsys.readouterr().err
    assert "fastpipe[generation]" in error and len(error.splitlines()) == 1


def test_help_and_workers_load_no_framework() -> None:
    code = (
        "import sys, contextlib\n"
        "import fastpipe.bench.samples\n"
        "assert not {'rich', 'h5py', 'fastpipe.generation'} & set(sys.modules), 'workers load too much'\n"
        "from fastpipe.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['bench', 'generate', '--help'])\n"
        "heavy = {'torch', 'h5py', 'joblib', 'datasets', 'cloudpickle'}\n"
        "assert not heavy & set(sys.modules), 'loaded too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--section" in done.stdout


def test_an_empty_check_is_well() -> None:
    assert StoredCheck().ok
