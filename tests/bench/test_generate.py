"""The case ``generate``: its functions, its rows, its check, its figures; the figures of ``scaling``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from bench_results import Run, checked_result, rated
from same import same

from benchmarks.cases import generate as peers
from benchmarks.studies import generate_memory as memory
from benchmarks.studies.made_rows import counted, motion, wide
from fastpipe.bench.generate import MadeRow, Section, StoredCheck, check_stored, difference, spec_of
from fastpipe.bench.generate import row_of as own_row
from fastpipe.bench.report import changes, scaling_lines
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.samples import SEED, made, quick, rows_of, slow, waves
from fastpipe.bench.scaling import scaling_of

_SECTION = {one.key: one for one in peers.SECTIONS}


@pytest.fixture(autouse=True, scope="module")
def folder_of_joblib(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not the shared memory, in which tests beside this one would find what is not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOBLIB_TEMP_FOLDER", str(tmp_path_factory.mktemp("joblib")))
        yield


def row_of(key: str, folder: Path) -> Any:
    """A row by its key: fastpipe's or a script's, of ``fn.batch`` alone, or a peer's."""
    section, kind = _SECTION[key.split("-")[0]], key.split("-")[1]
    if kind == "bare":
        return peers.BareRow(spec_of(section, "bare", "fn.batch alone", "peer"), folder)
    for peer in peers.PEERS:
        if peer.kind == kind:
            return peer.row(peer.spec(section, 2), folder)
    return next(own_row(spec, folder) for spec in peers.specs(section, 2) if spec.key == key)


@pytest.mark.parametrize("function", [slow, quick, wide, motion, waves, counted])
def test_a_row_is_a_function_of_its_number(function: Any) -> None:
    first, again, other = made(function, 3), function(3, np.random.default_rng([SEED, 3])), made(function, 4)
    name, *_ = first
    assert same(first, again) and not same(first[name], other[name])


# A process of joblib's stays, which watches what others leave.
@pytest.mark.leaks("joblib's resource tracker")
@pytest.mark.parametrize(
    "key", ["quick-replaced", "quick-alone", "motion-threads", "batch-bare", "quick-pool", "motion-joblib"]
)
def test_a_row_stores_what_the_function_returns_and_leaves_nothing(key: str, tmp_path: Path) -> None:
    row = row_of(key, tmp_path)
    count = 600 if key == "batch-bare" else 40
    assert difference(rows_of(row.spec.of.function, count), row.stored(count)) is None
    assert row.measure(count) > 0
    row.close()
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_fails_or_is_not_there_says_why(tmp_path: Path) -> None:
    def broken(index: int, rng: Any) -> Any:
        raise ValueError("no rows today")

    spec = spec_of(Section("own", "own", broken, 1e-3, 1, 1), "pool", "a pool", "peer", 1)
    row = peers.PoolRow(spec, tmp_path)
    with pytest.raises(ContenderError, match=r"AttributeError|PicklingError"):
        row.measure(3)  # a function within another cannot be sent
    row.close()
    assert list(tmp_path.iterdir()) == []
    peer = peers.Peer("none", "None({cores})", peers.PoolRow, "", ("json", "no_such_package"))
    assert peer.missing == "not installed: pip install no_such_package"
    assert peer.spec(peers.SECTIONS[0], 3).label == "None(3)"


def test_the_check_compares_every_row_in_its_place(tmp_path: Path) -> None:
    rows: list[MadeRow] = [row_of(key, tmp_path) for key in ("quick-replaced", "quick-alone", "batch-alone")]
    check = check_stored(rows)
    assert check.ok and (check.files, check.rows) == (3, 300 + 300 + 600) and StoredCheck().ok
    assert "1,200 rows that were made in 3 ways" in check.sentence()
    assert check.as_json()["ok"] and check.as_json()["text"] == check.sentence()


def _one_bit(rows: Any) -> Any:
    rows[17, 1000] = np.nextafter(rows[17, 1000], 2, dtype=np.float32)
    return rows


@pytest.mark.parametrize(("spoil", "name", "words"), [
    (_one_bit, "x", "x differs in 1 of 300 rows, row 17 is the first"),
    (lambda rows: rows[[0, 1, 2, 3, 5, 4, *range(6, 300)]], "x", "x differs in 2 of 300 rows, row 4 is the first"),
    (lambda rows: rows[:-1], "x", "x is float32 (299, 1024)"),
    (lambda rows: rows.astype(np.float64), "x", "x is float64"),
    (lambda rows: rows, "z", "columns are"),
], ids=["value", "order", "short", "type", "name"])  # fmt: skip
def test_the_check_finds_a_wrong_row(
    spoil: Callable[..., Any], name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_of("quick-replaced", tmp_path)
    make = row.make

    def spoilt(count: int, out: Path, later: ExitStack) -> None:
        make(count, out, later)
        with h5py.File(out, "r+") as file:
            found = file["x"][...]
            del file["x"]
            file[name] = spoil(found)

    monkeypatch.setattr(row, "make", spoilt)
    check = check_stored([row])
    assert not check.ok and check.files == 0
    assert f"quick: for loop, np.stack, h5py: {words}" in check.sentence()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "counts"), [(0, (300, 3000)), (2, (10_000, 1_000_000))], ids=["few", "many"]
)
def test_memory_does_not_grow_with_rows(tmp_path: Path, workers: int, counts: Any) -> None:
    few, many = memory.peaks(tmp_path, workers, counts=counts, times=1)["rows"]
    assert (few["rows"], many["rows"]) == counts
    assert few["mb"][0] > 10 and many["mb"][0] - few["mb"][0] < 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.leaks("joblib's resource tracker")
def test_a_run_with_peers_and_predictions(tmp_path: Path, run: Callable[..., Run]) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    command = ["generate", "--quick", "--rounds", "1", "--peers", "--section", "slow", "--folder", folder]
    found = run(command, True)
    result = checked_result(found, folder)
    keys = [spec.key for spec in peers.specs(_SECTION["slow"], result["machine"]["cores"])]
    keys += [f"slow-{peer.kind}" for peer in peers.PEERS if peer.missing is None]
    assert [row["key"] for row in result["rows"]] == keys and not list(folder.iterdir())
    assert [one["section"] for one in result["predicted"]["rows"]] == ["slow"]
    assert "predicted, 5 ms a row" in found.printed and "rows will take" in result["plan"]


def test_scaling_is_a_ratio_within_a_round_and_to_the_best_of_all_loaders() -> None:
    rates = {
        "replaced-1": 100, "threads-1": 300, "floor-1": 400, "replaced-4": 80, "threads-4": 900, "floor-4": 1600,
    }  # fmt: skip
    samples = {key: rated(rate, rate / 2) for key, rate in rates.items()}
    one, four = scaling_of((1, 4), samples)["rows"]
    assert (one["threads"], four["threads"]) == (1, 4)
    assert four["times_best"] == {"median": 9.0, "low": 9.0, "high": 9.0}
    assert four["linear"]["median"] == 0.75 and one["linear"]["median"] == 1
    assert four["floor_share"]["median"] == 0.5625 and four["floor_linear"]["median"] == 1
    del samples["floor-4"]
    best = "the best replaced loader of any number of workers"
    lines = scaling_lines({"scaling": {"rows": scaling_of((1, 4), samples)["rows"][1:]}})
    assert lines == [f"4 threads: 9.00× (9.00 to 9.00) {best}, 75% of linear"]


@pytest.mark.slow
@pytest.mark.leaks("matplotlib keeps its fonts open")
@pytest.mark.parametrize(
    ("job", "label", "unit"),
    [("hdf5", "row by row + DataLoader", "samples"), ("volume", "zarr-python + DataLoader", "patches")],
)
def test_rows_and_patches_scale_with_threads(
    job: str, label: str, unit: str, tmp_path: Path, run: Callable[..., Run]
) -> None:
    folder = tmp_path / "made"
    found = run(["scaling", job, "--quick", "--rounds", "1", "--threads", "1,2", "--folder", folder], True)
    result = checked_result(found, folder)
    assert "bit for bit" in found.said and result["floor_share"] is None
    assert result["command"].startswith(f"python benchmarks/run.py scaling {job} --threads 1,2")
    rows = {row["key"]: row for row in result["rows"]}
    assert set(rows) == {"replaced-1", "threads-1", "replaced-2", "threads-2"}
    assert rows["replaced-2"]["label"] == f"{label}(num_workers=2)"
    images = json.loads(json.dumps(result).replace(f'"{unit}"', '"images"'))
    assert len(changes(result, result)) == 2 and changes(images, result) == []
