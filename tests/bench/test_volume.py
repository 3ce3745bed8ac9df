"""The case ``volume``: its data, its check, its rows, its figures, and the whole command on tiny data."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.cases.volume import (
    ASKED,
    COLD_PEERS,
    VOLUME_PEERS,
    WARM_PEERS,
    MemoryPatches,
    VolumePeerRow,
    differing,
    row_info,
    specs,
    targets,
)
from benchmarks.lines import first_batch_lines, markdown
from benchmarks.peers import rows as bench_peers
from benchmarks.peers.children import serve
from benchmarks.peers.children.protocol import Stream, VolumeJob, job_of, volume_problem
from benchmarks.run import main as measure
from benchmarks.studies import volume_first as first
from benchmarks.studies import volume_memory as memory
from benchmarks.studies.volume_amplification import amplifications
from benchmarks.studies.volume_first import first_batches
from benchmarks.studies.volume_memory import Topology, memory_of_topologies
from fastpipe.bench import volume as case
from fastpipe.bench import volume as rows
from fastpipe.bench.report import print_result, short_markdown
from fastpipe.bench.results import load
from fastpipe.bench.runner import ContenderError, Sample
from fastpipe.bench.samples import ZarrPatches, box_at, start_of
from fastpipe.bench.synthetic import scroll_slabs
from fastpipe.bench.volume import (
    PatchSpec,
    Scroll,
    Sizes,
    SlicedRow,
    WholeEpochs,
    check_patches,
    made_scroll,
    sliced_loader,
)
from fastpipe.cli import main

pytest.importorskip("tensorstore", reason="needs tensorstore: pip install 'fastpipe[volume]'")

_SIZES = Sizes((32, 64, 64), (16, 32, 32), (10, 20, 20))
_needs_zarr = pytest.mark.skipif(
    bench_peers.interpreter(COLD_PEERS[0]) is None, reason="needs zarr-python: pip install zarr"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up data, kept for all tests."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def scroll(folder: Path) -> Scroll:
    return made_scroll(_SIZES, folder)


def spec_of(key: str) -> PatchSpec:
    return next(spec for spec in specs() if spec.key == key)


# ---- data --------------------------------------------------------------------------------------


def test_a_scroll_is_a_function_of_its_seed_in_levels_of_a_detector() -> None:
    first, again, other = (list(scroll_slabs((20, 40, 50), 8, seed)) for seed in (1, 1, 2))
    assert [values.shape for values, _ in first] == [(8, 40, 50), (8, 40, 50), (4, 40, 50)]
    assert all(
        np.array_equal(a, b)
        for one, two in zip(first, again, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    assert not np.array_equal(first[0][0], other[0][0])
    values, labels = (np.concatenate(parts) for parts in zip(*first, strict=True))
    assert (values.dtype, labels.dtype) == (np.uint16, np.uint8)
    assert not (values % 32).any() and len(np.unique(values)) > 100
    assert set(np.unique(labels)) == {0, 1} and 0.1 < labels.mean() < 0.5
    assert values[labels == 1].mean() > values[labels == 0].mean() + 10_000  # labels are of the sheets


def test_the_volume_on_disk_is_what_was_made_and_is_made_once(scroll: Scroll, folder: Path) -> None:
    made = scroll_slabs(_SIZES.shape, _SIZES.chunk[0])
    values, labels = (np.concatenate(parts) for parts in zip(*made, strict=True))
    assert np.array_equal(scroll.arrays[0], values) and np.array_equal(scroll.arrays[1], labels)
    assert made_scroll(_SIZES, folder, pytest.fail) == scroll
    written = json.loads((scroll.folder / "values.zarr" / "zarr.json").read_text())
    assert (written["zarr_format"], written["data_type"]) == (3, "uint16")
    assert written["chunk_grid"]["configuration"]["chunk_shape"] == list(_SIZES.chunk)
    blosc = written["codecs"][1]["configuration"]
    assert (blosc["cname"], blosc["clevel"], blosc["shuffle"], blosc["typesize"]) == ("zstd", 5, "shuffle", 2)
    scroll.warm()


def test_an_epoch_has_as_many_patches_as_have_the_volumes_size(scroll: Scroll) -> None:
    assert scroll.nbytes == 32 * 64 * 64 * 3 and scroll.patch_nbytes == 10 * 20 * 20 * 3
    assert scroll.epoch == 32 and scroll.epoch * scroll.patch_nbytes <= scroll.nbytes
    told = scroll.described
    assert told["samples"] == 32 and "patches of 10×20×20" in told["text"]
    assert 1.1 < told["volume_bytes"] / told["bytes"] < 4  # as hard to compress as a real one


def test_places_are_a_function_of_the_number_and_reach_both_ends() -> None:
    starts = np.array([start_of((4, 9), (3, 3), index) for index in range(300)])
    assert np.array_equal(starts[7], start_of((4, 9), (3, 3), 7))
    assert starts.min(0).tolist() == [0, 0] and starts.max(0).tolist() == [1, 6]
    assert box_at(starts[0], (3, 3)) == tuple(slice(one, one + 3) for one in starts[0])


@_needs_zarr
def test_patches_cut_with_zarr_are_slices(scroll: Scroll) -> None:
    patches = ZarrPatches(scroll.paths, _SIZES.shape, _SIZES.patch, 5)
    assert len(patches) == 5
    box = box_at(start_of(_SIZES.shape, _SIZES.patch, 3), _SIZES.patch)
    assert all(np.array_equal(got, array[box]) for got, array in zip(patches[3], scroll.arrays, strict=True))


# ---- rows and their check ----------------------------------------------------------------------


def own_rows(scroll: Scroll, *keys: str) -> list[WholeEpochs | SlicedRow]:
    """Rows of this process, without those that slice Zarr in a worker."""
    found: list[WholeEpochs | SlicedRow] = []
    for spec in specs():
        if spec.group == "fastpipe" and (not keys or spec.key in keys):
            found.append(WholeEpochs(spec, scroll, 2))
        elif spec.kind == "slices" and (not keys or spec.key in keys):
            found.append(SlicedRow(spec, sliced_loader(spec, scroll, 2, MemoryPatches(scroll))))
    return found


def test_every_row_has_its_own_key_and_is_asked_for_by_it() -> None:
    keys = [spec.key for spec in specs()] + [peer.key for peer in VOLUME_PEERS]
    assert len(set(keys)) == len(keys) == 12
    assert {spec.section for spec in specs()} == {"cold", "warm"}
    assert [row_info(peer).section for peer in VOLUME_PEERS] == ["cold"] * 4 + ["warm"] * 2
    assert {one.row for one in ASKED} <= set(keys)
    for one in ASKED:
        assert (
            {one.against} <= set(keys)
            if isinstance(one.against, str)
            else set(one.against or ()) <= set(keys)
        )


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
    assert isinstance(cold, WholeEpochs) and isinstance(warm, WholeEpochs)
    assert cold.measure(2 * cold.chunk) > 0
    assert len(made) == len(cold.made_s) == 2
    assert made[0].amplification > 0 and made[1].amplification > 0
    assert not np.array_equal(made[0].places()[1], made[1].places()[1])
    assert cold.budget == scroll.nbytes // 4
    made.clear()
    warm.measure(warm.chunk)
    once = made[0].amplification
    warm.measure(3 * warm.chunk)
    assert len(made) == 1 and made[0].amplification < once / 2
    assert set(cold.stage_seconds()) >= {"decode", "wait"}
    assert str(scroll.folder) not in cold.plan() and "patches of 10×20×20" in cold.plan()
    for row in (cold, warm):
        row.close()
        row.close()


def test_a_row_of_slices_gives_as_many_as_are_asked_for(scroll: Scroll) -> None:
    (row,) = own_rows(scroll, "warm-slices")
    assert row.chunk == 2
    assert row.measure(6) > 0 and row.measure(80) > 0
    row.close()


def test_the_check_sees_every_patch_of_each_row(scroll: Scroll) -> None:
    mine = own_rows(scroll)
    said: list[str] = []
    check = check_patches(scroll, mine, said.append)
    assert check.ok, check.problems
    assert (check.epochs, check.samples) == (2 * 3 + 1, 7 * 32)
    assert len(said) == 4 and "equal the source's slices bit for bit" in check.sentence()
    for row in mine:
        row.close()


@pytest.mark.parametrize("spoil", ["value", "label", "double", "short"])
def test_the_check_fails_for_a_wrong_voxel_and_a_patch_too_many(scroll: Scroll, spoil: str) -> None:
    (row,) = own_rows(scroll, "warm-slices")
    assert isinstance(row, SlicedRow)
    batches = copy.deepcopy(list(row.batches(scroll.epoch)))
    if spoil == "value":
        batches[3][0][1, 2, 3, 4] = 7  # no multiple of 32
    elif spoil == "label":
        batches[3][1][1, 2, 3, 4] = 9
    elif spoil == "double":
        batches.append(batches[0])
    else:
        del batches[-1]
    row.batches = lambda count: batches  # type: ignore[method-assign]
    check = check_patches(scroll, [row])
    assert not check.ok and "outputs differ from the source's slices: warm: slices" in check.sentence()
    row.close()


# ---- peers -------------------------------------------------------------------------------------


def volume_job(scroll: Scroll) -> VolumeJob:
    values, labels = scroll.paths
    return VolumeJob(values, labels, [32, 64, 64], [10, 20, 20], 2, 1, 32, 1000, False, "", {})


def test_a_volume_job_survives_the_pipe_and_its_batches_are_looked_at(scroll: Scroll) -> None:
    job = volume_job(scroll)
    assert job_of(json.loads(json.dumps(dataclasses.asdict(job)))) == job
    good = np.zeros((2, 10, 20, 20), np.uint16)
    assert volume_problem(job, good, good) is None
    assert "values of (1, 10, 20, 20)" in str(volume_problem(job, good[:1], good))
    assert "labels of (2, 10, 20, 19)" in str(volume_problem(job, good, good[..., 1:]))


def test_what_a_peer_told_is_compared_with_the_volume(scroll: Scroll) -> None:
    def told(start: list[int], values: Any, labels: Any) -> dict[str, Any]:
        stream = Stream(iter(()), 0, ())  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "_COMPARED", 1)
            return serve._some_patches(stream, values[None], (labels[None], [np.array(start)]))[0]

    box = box_at((3, 4, 5), _SIZES.patch)
    values, labels = (array[box] for array in scroll.arrays)
    good = told([3, 4, 5], values, labels)
    assert differing(scroll, [good, good]) == 0
    moved = told([3, 4, 6], values, labels)
    assert differing(scroll, [good, moved, told([3, 4, 5], values, labels + 1)]) == 2


def test_what_remembers_begins_anew_before_each_measurement_and_rests_after_it(
    scroll: Scroll, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    at_work: list[int] = []

    class Answers(io.StringIO):
        def write(self, text: str) -> int:
            assert not at_work
            return super().write(text)

    def batches() -> Iterator[Any]:
        begun.append(0)
        at_work.append(0)
        patch = np.zeros((2, 10, 20, 20), np.uint16)
        try:
            while True:
                begun[-1] += 1
                yield patch, (patch, np.zeros((2, 3), int))
        finally:
            at_work.pop()

    monkeypatch.setitem(serve.SOURCES, "own", lambda job: Stream(batches(), 0, (), renewed=batches))
    job = json.dumps(dataclasses.asdict(volume_job(scroll)))
    answers = Answers()
    serve.serve("own", io.StringIO(f'{job}\n{{"batches": 5}}\n{{"batches": 6}}\n'), answers, lambda s: None)
    assert begun == [4, 5, 6]  # what is compared first, then two measurements
    first, *others = map(json.loads, answers.getvalue().splitlines())
    assert len(first["patches"]) == 8 and [list(one) for one in others] == [["seconds"]] * 2


@pytest.mark.parametrize(
    "key",
    [
        "cold-tensorstore",
        "warm-tensorstore",
        "cold-zarrs",
        # Each imports torch, and MONAI twice as much.
        pytest.param("cold-process", marks=pytest.mark.slow),
        pytest.param("cold-monai", marks=pytest.mark.slow),
        pytest.param("warm-monai", marks=pytest.mark.slow),
    ],
)
def test_a_peer_cuts_patches_of_the_volume_where_it_is_installed(key: str, scroll: Scroll) -> None:
    peer = next(peer for peer in VOLUME_PEERS if peer.key == key)
    python = bench_peers.interpreter(peer)
    if python is None:
        pytest.skip(f"needs {peer.module}: {peer.install}")
    row = VolumePeerRow(peer, python, scroll, 2, 2)
    assert row.info.versions and peer.module in row.info.versions
    assert row.chunk == (32 if key == "cold-tensorstore" else 4)
    assert row.measure(2 * row.chunk) > 0
    row.close()


def test_a_peer_that_cuts_other_patches_is_not_measured(
    scroll: Scroll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(
        "import json, sys\n"
        "job = json.loads(sys.stdin.readline())\n"
        "assert job['memory_bytes'] == 98304 and not job['keeps_all'] and job['epoch'] == 32\n"
        "patch = {'start': [0, 0, 0], 'digests': ['00', '00']}\n"
        "print(json.dumps({'patches': [patch], 'versions': {}, 'note': ''}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setattr(bench_peers, "CHILD", tmp_path / "child.py")
    with pytest.raises(ContenderError, match="1 of its first 1 patches are not those of the volume"):
        VolumePeerRow(COLD_PEERS[2], sys.executable, scroll, 2, 2)


def test_a_peer_that_cannot_read_says_so(scroll: Scroll, tmp_path: Path) -> None:
    with pytest.raises(
        ContenderError, match="TensorStore, cache_pool for everything: cannot read the arrays"
    ):
        VolumePeerRow(WARM_PEERS[0], sys.executable, dataclasses.replace(scroll, folder=tmp_path), 2, 2)


# ---- figures -----------------------------------------------------------------------------------


def test_bytes_decoded_are_counted_for_both_orders(scroll: Scroll) -> None:
    told = amplifications(scroll, 2, seeds=2)
    assert told["budget_mb"] == round(scroll.nbytes / 10 / 1e6, 1)
    for kind in ("tour", "uniform"):
        assert len(told[kind]["raw"]) == 2 and min(told[kind]["raw"]) > 0.3
        assert told[kind]["median"] == pytest.approx(np.mean(told[kind]["raw"]))


@_needs_zarr
@pytest.mark.slow
def test_start_up_is_measured_with_and_without_compression(
    scroll: Scroll, folder: Path, in_this_process: Callable[..., None]
) -> None:
    in_this_process(first)
    plain = made_scroll(_SIZES, folder, compressed=False)
    assert np.array_equal(plain.arrays[0], scroll.arrays[0])
    assert plain.described["bytes"] > scroll.nbytes > scroll.described["bytes"]
    told = first_batches(scroll, plain, 2, runs=2)
    assert {name: len(one["raw_s"]) for name, one in told.items()} == {"replaced": 2, "blosc": 2, "plain": 2}
    assert [line.split(": ")[1] for line in first_batch_lines({"first_batch": told})] == [
        "zarr-python + DataLoader(num_workers=0), Blosc",
        "FastPatchDataset + FastLoader, Blosc",
        "FastPatchDataset + FastLoader, uncompressed",
    ]


@_needs_zarr
@pytest.mark.slow  # six processes that import torch
def test_start_up_is_measured_in_new_processes(scroll: Scroll) -> None:
    told = first_batches(scroll, scroll, 2, runs=1)
    assert all(one["median_s"] > 0 for one in told.values())
    assert told["blosc"]["import_s"] > told["replaced"]["import_s"]


@pytest.mark.slow
def test_memory_is_measured_by_threads(scroll: Scroll, in_this_process: Callable[..., None]) -> None:
    in_this_process(memory)
    told = memory_of_topologies(scroll, 2, [Topology(1, 0), Topology(2, 0)])["rows"]
    assert [(row["threads"], row["workers"], row["budget_mb"]) for row in told] == [(1, 0, 0.1), (2, 0, 0.1)]
    assert told[0]["nothing_mb"] == told[1]["nothing_mb"]  # measured once
    assert all(row["above_mb"] == pytest.approx(row["mb"] - row["nothing_mb"], abs=0.2) for row in told)


@pytest.mark.slow  # nine processes that import torch
def test_memory_is_measured_in_new_processes_and_workers(scroll: Scroll) -> None:
    (row,) = memory_of_topologies(scroll, 2, [Topology(1, 2)])["rows"]
    assert row["workers"] == 2 and row["mb"] > row["stock_mb"] > 100


def test_what_was_asked_is_judged_by_the_median_and_the_best_peer() -> None:
    def at(*rates: float) -> list[Sample]:
        return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]

    samples = {
        "cold-tour": at(100, 90), "cold-replaced": at(10, 10), "cold-tensorstore": at(50, 10),
        "cold-monai": at(10, 30), "warm-uniform": at(80, 80), "warm-slices": at(100, 100),
    }  # fmt: skip
    raw = {"tour": {"raw": [1.5, 2.4, 1.9]}}
    used = {"rows": [{"above_mb": 300, "budget_mb": 100}, {"above_mb": 410, "budget_mb": 100}]}
    cold, any_order, warm, peer, slices, decoded, most = targets(samples, raw, used)
    assert (cold["is_met"], cold["got"]["median"], cold["row"]) == (True, 9.5, "cold-tour")
    assert any_order["got"] is None and warm["got"] is None and warm["is_met"] is None
    # In each round the best of those that were measured.
    assert (peer["is_met"], peer["got"]) == (True, {"median": 2.5, "low": 2.0, "high": 3.0})
    assert (slices["is_met"], slices["got"]["median"]) == (False, 0.8)
    assert (decoded["is_met"], decoded["got"]["median"]) == (True, 1.9)
    assert (most["is_met"], most["got"]["median"]) == (False, 310)  # the worst counts
    assert [one["is_met"] for one in targets({}, None, None)] == [None] * 7


# ---- the whole command -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """What a quick run in a process of its own wrote, and what it printed."""
    if bench_peers.interpreter(COLD_PEERS[0]) is None:
        pytest.skip("needs zarr-python: pip install zarr")
    path = folder / "result.json"
    run = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
    command = [sys.executable, str(run), "volume", "--quick", "--rounds", "1"]
    command += ["--folder", str(folder), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check: " in done.stderr and "equal the source's slices bit for bit" in done.stderr
    return {**load(path), "printed": done.stdout, "text": path.read_text()}


@pytest.mark.slow
def test_a_quick_run_gives_table_and_json(result: dict[str, Any], folder: Path) -> None:
    printed = " ".join(result["printed"].split())
    assert result["verdict"] in printed and result["main"] == "cold-tour"
    assert printed.count("asked: ") == len(result["targets"]) == 7
    assert result["best"] == {"cold": "cold-replaced", "warm": "warm-replaced"}
    assert [row["key"] for row in result["rows"]] == [spec.key for spec in specs()]
    assert all(row["patches_per_s"]["median"] > 0 and len(row["samples"]) == 1 for row in result["rows"])
    assert result["check"]["ok"] and result["check"]["epochs"] == 2 * 3 + 3
    made = next(row for row in result["rows"] if row["key"] == "cold-tour")
    assert "opened in " in made["note"]
    assert set(result["stages"]["seconds"]) >= {"decode", "wait"}
    assert str(folder) not in result["text"] and str(Path.home()) not in result["text"]


@pytest.mark.slow
def test_a_result_is_printed_and_written(result: dict[str, Any]) -> None:
    result = {name: value for name, value in result.items() if name not in ("printed", "text")}
    row = {"threads": 4, "workers": 2, "budget_mb": 170.0, "mb": 9.0, "nothing_mb": 5.0}
    result["memory"] = {"rows": [{**row, "above_mb": 4.0, "stock_mb": 3.0}]}
    text = markdown(result)
    assert text.count("| patches/s, median") == 2
    assert "- memory with 4 threads and 2 workers, cache of 170 MB: 4 MB above" in text
    assert "- bytes decoded for each that is used, cache of 0 MB: tour " in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    assert short_markdown(result).count("FastPatchDataset") == 3
    for width in (80, 160):
        output = io.StringIO()
        print_result(result, Console(file=output, width=width))
        assert max(map(len, output.getvalue().splitlines()[:20])) <= width


@pytest.fixture
def small_and_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on a tiny volume, without worker processes: zarr's slices are those of arrays in memory."""
    kind = spec_of("warm-slices")
    make = rows.sliced_loader
    monkeypatch.setattr(case, "QUICK", _SIZES)
    real = case.require
    monkeypatch.setattr(case, "require", lambda name, extra: name == "zarr" or real(name, extra=extra))
    monkeypatch.setattr(
        case, "sliced_loader", lambda spec, scroll, size: make(kind, scroll, size, MemoryPatches(scroll))
    )


def test_a_wrong_voxel_ends_the_command_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_and_here: None
) -> None:
    made = rows.patch_loader

    def spoilt(dataset: Any, size: int, kind: str) -> Any:
        loader = made(dataset, size, kind)
        if kind == "uniform":
            return loader
        return ((torch.from_numpy(values.numpy() + np.uint16(1)), labels) for values, labels in loader)

    monkeypatch.setattr(rows, "patch_loader", spoilt)
    json_file = folder / "never.json"
    assert main(["bench", "volume", "--quick", "--folder", str(folder), "--json", str(json_file)]) == 1
    captured = capsys.readouterr()
    assert "cold: FastPatchDataset" in captured.err and "samples are not in the file" in captured.err
    assert captured.out == "" and not json_file.exists()


@pytest.mark.slow
def test_peers_that_are_not_there_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_and_here: None
) -> None:
    monkeypatch.setattr("benchmarks.lines.interpreter", lambda peer: None)
    arguments = ["--quick", "--peers", "--rounds", "1", "--batch-size", "4", "--folder", str(folder)]
    assert measure(["volume", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not measured: cold: TensorStore, cache_pool of the same size: not installed: pip install" in out
    assert out.count("not installed: ") == len(VOLUME_PEERS) == 6


def test_without_zarr_python_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    assert main(["bench", "volume", "--quick"]) == 2
    error = capsys.readouterr().err
    assert "zarr" in error and "pip install" in error and len(error.splitlines()) == 1


def test_help_loads_no_framework() -> None:
    code = (
        "import sys, contextlib\n"
        "from fastpipe.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['bench', 'volume', '--help'])\n"
        "heavy = {'torch', 'zarr', 'tensorstore'}\n"
        "assert not heavy & set(sys.modules), 'loaded too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--peers" in done.stdout
