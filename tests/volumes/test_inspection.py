"""What volumes and their patches cost: the model, what is measured, the advice, and the command."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given
from hypothesis import strategies as st

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle
from fastpipe.cli import main
from fastpipe.errors import OptionError, VolumeError
from fastpipe.volumes import inspection, repack
from fastpipe.volumes.cost import PatchModel, Stored
from fastpipe.volumes.inspection import Rates, Speed, decode_speed, fit_of, volume_facts
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.repack import chunk_of, stored_nbytes
from fastpipe.volumes.volume import UnitGrid

VOXELS = np.random.default_rng(0).integers(0, 9, (64, 96, 128), np.uint8)
Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each thread decodes a little and no more; zarr-python's threads end with the test."""
    monkeypatch.setattr(inspection, "_SECONDS", 0.0)
    monkeypatch.setattr(inspection, "_TRIED_SECONDS", 0.0)
    yield
    zarr.core.sync.cleanup_resources()


@pytest.fixture
def planes(tmp_path: Path) -> Path:
    """A volume in chunks that suit no patch: whole planes."""
    codecs = zarr.codecs.ZstdCodec(level=1)
    array = zarr.create_array(
        tmp_path / "planes.zarr", shape=VOXELS.shape, dtype="u1", chunks=(64, 96, 1), compressors=codecs
    )
    array[:] = VOXELS
    return tmp_path / "planes.zarr"


def found(result: tuple[int, str, str]) -> Any:
    code, output, errors = result
    assert (code, errors) == (0, "")
    return json.loads(output)


def refused(result: tuple[int, str, str]) -> str:
    code, output, errors = result
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("fastpipe inspect: ")
    return line


# ---- the model --------------------------------------------------------------------------------


def _all_places(shape: Sequence[int], patch: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size - side + 1) for size, side in zip(shape, patch, strict=True)))


def _units(grid: UnitGrid, start: Sequence[int], patch: Sequence[int]) -> list[int]:
    stop = [at + side for at, side in zip(start, patch, strict=True)]
    return grid.touched(tuple(map(slice, start, stop))).tolist()


@given(st.data())
def test_a_patch_alone_decodes_what_it_touches_on_average(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    unit = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    patch = tuple(data.draw(st.integers(1, size)) for size in shape)
    lead = data.draw(st.sampled_from([(), (3,), (2, 2)]))
    lead_unit = tuple(data.draw(st.integers(1, size)) for size in lead)
    stored = Stored((*lead, *shape), (*lead_unit, *unit), 2)
    model = PatchModel([stored], patch)
    grid = UnitGrid(stored.shape, stored.unit)
    touched = [
        len(_units(grid, (*[0] * len(lead), *at), (*lead, *patch))) for at in _all_places(shape, patch)
    ]
    assert model.alone() == pytest.approx(np.mean(touched) * stored.unit_nbytes)
    assert model.uniform(0) * model.patch_nbytes == pytest.approx(model.alone())
    assert model.patch_nbytes == math.prod((*lead, *patch)) * 2
    assert stored.nbytes == grid.count * stored.unit_nbytes and stored.decoded == 2 * math.prod(stored.shape)


@pytest.mark.parametrize("slots", [1, 80, 215])
@pytest.mark.parametrize("patch", [(8, 20, 20), (3, 3, 3), (30, 9, 40)])
def test_the_formula_for_uniform_order_is_near_a_simulation(slots: int, patch: tuple[int, ...]) -> None:
    stored = Stored((48, 60, 66), (8, 10, 11), 1)
    model = PatchModel([stored], patch)
    grid = UnitGrid(stored.shape, stored.unit)
    rng = np.random.default_rng(0)
    most = [size - side + 1 for size, side in zip(stored.shape, patch, strict=True)]
    remembered: OrderedDict[int, None] = OrderedDict()
    decoded = count = 0
    for number in range(2500):
        for unit in _units(grid, rng.integers(0, most).tolist(), patch):
            if unit not in remembered:
                decoded += number >= 500
            remembered[unit] = None
            remembered.move_to_end(unit)
            if len(remembered) > slots:
                remembered.popitem(last=False)
        count += number >= 500
    simulated = decoded * stored.unit_nbytes / (count * model.patch_nbytes)
    share = math.ceil(slots / grid.count * stored.nbytes)
    assert model.uniform(share) == pytest.approx(simulated, rel=0.05, abs=0.05 * model.uniform(0))


def test_with_room_for_all_of_it_the_first_epoch_decodes_each_unit_once() -> None:
    stored = Stored((100, 100, 100), (10, 10, 10), 4)
    patches = PatchModel([stored], (20, 20, 20))
    assert patches.epoch == 125
    # 125 patches of 8 to 27 units each touch nearly all 1000, and use as much as is in all of them.
    assert 0.85 < patches.uniform(stored.nbytes) <= 1.0
    assert patches.near(stored.nbytes) == patches.uniform(stored.nbytes)
    small = PatchModel([Stored((20, 20, 20), (10, 10, 10), 1)], (10, 10, 10))
    assert small.tour(8000).amplification == small.uniform(8000)


def test_more_memory_never_decodes_more() -> None:
    model = PatchModel([Stored((200, 256, 256), (1, 256, 256), 1)], (32, 64, 64))
    times = [model.uniform(int(share * model.total_nbytes)) for share in np.linspace(0, 0.99, 12)]
    assert times == sorted(times, reverse=True) and times[0] == pytest.approx(16)
    tours = [model.tour(int(share * model.total_nbytes), 1).amplification for share in (0.1, 0.3, 0.6)]
    assert tours == sorted(tours, reverse=True)
    for share, times_of_tour in zip((0.1, 0.3, 0.6), tours, strict=True):
        assert times_of_tour < model.uniform(int(share * model.total_nbytes))


@pytest.mark.parametrize("unit", [(16, 16, 16), (1, 128, 128), (64, 8, 128)])
def test_the_memory_that_is_needed_is_enough_and_a_fifth_less_is_not(unit: tuple[int, ...]) -> None:
    model = PatchModel([Stored((128, 128, 128), unit, 2)], (32, 32, 32))
    for share in (0.01, 0.1, 0.5):
        budget = int(share * model.total_nbytes)
        assert model.near(budget) == pytest.approx(model.tour(budget, 1).amplification)
    assert model.near(model.total_nbytes) == model.uniform(model.total_nbytes)
    two, less, impossible = model.least_budget((2.0, 1.5, 0.01))
    assert two is not None and less is not None and impossible is None
    assert two <= less <= model.total_nbytes
    for limit, budget in ((2.0, two), (1.5, less)):
        assert all(model.near(int(more * budget)) <= 1.02 * limit for more in (1, 1.5, 2, 4))
        assert model.near(int(0.84 * budget)) > limit
    of_one_unit = PatchModel([Stored((64, 256, 256), (64, 256, 256), 2)], (32, 64, 64))
    assert of_one_unit.least_budget((2.0, 1.2)) == [None, None]


def test_real_epochs_decode_no_more_than_was_promised(tmp_path: Path) -> None:
    """Those of the dataset, in threads, at the budget that was said to be enough."""
    shape, chunk, patch, threads, limit = (256, 256, 256), (64, 64, 64), (48, 48, 48), 2, 1.2
    path = str(tmp_path / "x.zarr")
    zarr.create_array(
        path, shape=shape, dtype=np.uint8, chunks=chunk, compressors=[zarr.codecs.ZstdCodec(level=1)]
    )[...] = np.random.default_rng(0).integers(0, 4, shape, np.uint8)
    unit = open_volume(path).grid.unit
    (budget,) = PatchModel([Stored(shape, unit, 1)], patch, threads).least_budget((limit,))
    assert budget is not None
    found = []
    for seed in range(3):
        dataset = FastPatchDataset(
            path, patch, seed=seed, threads=threads, cache=Cache("ram", max_bytes=budget)
        )
        for _ in FastLoader(dataset, 2, Shuffle(window=1, unit="group")):
            pass
        found.append(dataset.amplification)
    assert np.median(found) <= 1.1 * limit, found


def test_labels_are_decoded_beside_the_volume() -> None:
    volume, labels = Stored((64, 64, 64), (16, 16, 16), 1), Stored((64, 64, 64), (64, 64, 64), 8)
    both = PatchModel([volume, labels], (16, 16, 16))
    alone = PatchModel([volume], (16, 16, 16)), PatchModel([labels], (16, 16, 16))
    assert both.patch_nbytes == 9 * 16**3
    assert both.alone() == pytest.approx(alone[0].alone() + alone[1].alone())
    assert both.total_nbytes == 9 * 64**3
    with pytest.raises(
        OptionError, match=r"--labels has \(64, 64, 32\) voxels, and the volume \(64, 64, 64\)"
    ):
        PatchModel([volume, Stored((64, 64, 32), (8, 8, 8), 1)], (16, 16, 16))


# ---- what is measured -------------------------------------------------------------------------


def test_a_damaged_chunk_is_an_error(planes: Path, inspect: Inspect) -> None:
    for path in (planes / "c").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    with pytest.raises(VolumeError, match="the chunk at"):
        decode_speed(open_volume(planes), None, 2, 0.0)
    assert "the chunk at" in refused(inspect(planes))


def test_patches_per_second_follow_from_the_measured_speed() -> None:
    volume, labels = Stored((64, 64, 64), (16, 16, 16), 1), Stored((64, 64, 64), (16, 16, 16), 2)
    model = PatchModel([volume, labels], (16, 16, 16))
    speeds = [(Speed(1, 10, 4096 * 1000, 1.0), Speed(4, 40, 4096 * 3000, 1.0))] * 2
    cost = Rates(model, speeds, 0.001).cost(2.0)
    assert cost.amplification == 2.0
    # Of each patch 2 × 4 KiB and 2 × 8 KiB at 1,000 × 4 KiB/s, and the copy.
    assert cost.one == pytest.approx(1 / (0.006 + 0.001))
    assert cost.all == pytest.approx(1 / (0.002 + 0.00025))


def test_a_budget_is_for_threads_and_for_remembered_units(
    planes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "available_cpus", lambda: 8)
    facts = volume_facts(str(planes), open_volume(planes), None)
    fit = fit_of([facts], 10 << 30)
    assert fit.threads == 8 and fit.remembered == (10 << 30) - 8 * fit.thread_nbytes
    assert facts.unit_nbytes < fit.thread_nbytes <= 2 * facts.unit_nbytes
    fit = fit_of([facts], 5 * fit.thread_nbytes)
    assert fit.threads == 2 and fit.remembered == 3 * fit.thread_nbytes
    assert fit_of([facts], 1) == inspection.Fit(1, fit.thread_nbytes, 0)
    each = fit_of([facts], 1).thread_nbytes
    for thousandths in (1, 999, 1000, 1999, 2500, 7999, 8000, 10**6):
        remembered = thousandths * each // 1000
        assert fit_of([facts], inspection.budget_for(remembered, each)).remembered == remembered


def test_the_bytes_that_a_volume_takes_on_the_disk_are_counted(
    tmp_path: Path, planes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in planes.rglob("*") if path.is_file())
    assert stored_nbytes(str(planes)) == size
    np.save(tmp_path / "a.npy", VOXELS)
    assert stored_nbytes(str(tmp_path / "a.npy")) == VOXELS.nbytes + 128
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("g/x", data=VOXELS, chunks=(8, 96, 128), compression="gzip")
        stored = file["g/x"].id.get_storage_size()
    assert stored_nbytes(f"{tmp_path}/a.h5/g/x") == stored
    assert stored_nbytes(f"{tmp_path}/a.h5/g") is None and stored_nbytes("gs://bucket/x") is None
    assert chunk_of(open_volume(f"{tmp_path}/a.h5/g/x")) == (8, 96, 128)
    monkeypatch.setattr(repack, "_MOST_FILES", 10)
    assert stored_nbytes(str(planes)) is None, "of very many files"


def test_the_chunk_of_a_volume_is_what_is_stored_together(tmp_path: Path) -> None:
    path, options = tmp_path / "a.zarr", {"shape": (64, 128, 128), "chunks": (32, 128, 128), "dtype": "u1"}
    zarr.create_array(path, compressors=None, **options)[:] = 1
    volume = open_volume(path)
    assert volume.grid.unit == (8, 128, 128) and chunk_of(volume) == (32, 128, 128)
    tifffile.imwrite(tmp_path / "a.tif", VOXELS, tile=(32, 64), compression="zlib")
    volume = open_volume(tmp_path / "a.tif")
    assert chunk_of(volume) == (1, 32, 64) and math.prod(volume.grid.unit) > 32 * 64


# ---- the advice -------------------------------------------------------------------------------


def _same_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast however it is stored, so that what is found does not depend on the machine."""

    def decode_speed(volume: Any, patch: Any, threads: int, seconds: float, within: Any = None) -> Speed:
        return Speed(threads, 100, 100 * volume.unit_nbytes, 100 * volume.unit_nbytes / (1e9 * threads))

    monkeypatch.setattr(inspection, "_TRIED_NBYTES", 2 << 20)  # which are soon compressed
    monkeypatch.setattr(inspection, "decode_speed", decode_speed)
    monkeypatch.setattr(inspection, "copy_seconds", lambda *some: 0.0)
    monkeypatch.setattr(inspection, "available_cpus", lambda: 2)


def test_no_larger_chunks_are_tried_than_file_systems_are_made_for(
    planes: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    _same_speed(monkeypatch)
    monkeypatch.setattr(inspection, "_LARGEST_CHUNK", 1 << 16)
    tried = found(inspect(planes, "--patch", "32,64,64", "--budget", "1MiB", "--json"))["rechunked"][1:]
    assert tried and all(math.prod(one["chunk"]) <= 1 << 16 for one in tried)


def test_the_advice_can_be_followed_and_is_better(
    tmp_path: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    _same_speed(monkeypatch)
    source = tmp_path / "in.zarr"
    array = zarr.create_array(source, shape=(64, 512, 512), dtype="u1", chunks=(1, 512, 512))
    array[:] = np.random.default_rng(0).integers(0, 9, array.shape, np.uint8)
    some = ("--patch", "8,64,64", "--budget", "1MiB", "--json")
    before = found(inspect(source, *some))
    _, command, _, out, *options = shlex.split(before["advice"])
    assert (command, out) == ("repack", "OUT.zarr")
    as_it_is, best, *_ = before["rechunked"]
    assert as_it_is["codec"] == "" and as_it_is["gain"] == 1.0 and best["gain"] >= 1.25
    assert main(["repack", str(source), str(tmp_path / out), *options]) == 0
    after = found(inspect(tmp_path / out, *some))
    assert after["advice"] is None
    # What was promised by a part of the volume is found in all of it.
    promised = best["tour"]["amplification"]
    assert after["rechunked"][0]["tour"]["amplification"] == pytest.approx(promised, rel=0.2)
    assert promised < as_it_is["tour"]["amplification"]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("1MiB", r"\nAdvice\nChunks of .* would give [\d.]+ times as many patches, .*\n  fastpipe repack "),
        (
            "6MiB",
            r"\nFor a tour no .*\nIn uniform order chunks of .* would give .*\n  fastpipe repack .*\nShuffle\(",
        ),
        ("1GiB", r"\nOther chunks would change the first epoch only\.\n"),
    ],
)
def test_the_advice_is_given_in_words(
    tmp_path: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch, budget: str, said: str
) -> None:
    _same_speed(monkeypatch)
    array = zarr.create_array(tmp_path / "in.zarr", shape=(64, 512, 512), dtype="u1", chunks=(1, 512, 512))
    array[:] = np.random.default_rng(0).integers(0, 9, array.shape, np.uint8)
    code, output, errors = inspect(tmp_path / "in.zarr", "--patch", "8,64,64", "--budget", budget)
    assert (code, errors) == (0, "") and re.search(said, output)


def test_a_package_that_copies_need_is_missed_at_once_if_one_is_tried(
    planes: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "decode_speed", lambda *_: pytest.fail("it measures"))
        code, output, errors = inspect(planes, "--patch", "8,8,8")
        assert (code, output) == (2, "") and "pip install 'fastpipe[volume]'" in errors
    # Where no copy is tried, it is not needed.
    assert inspect(planes)[0] == 0
    monkeypatch.setattr("fastpipe.volumes.repack.NUMBERS", set())
    content = found(inspect(planes, "--patch", "8,8,8", "--json"))  # of elements that Zarr has not
    assert content["rechunked"] == [] and content["advice"] is None


# ---- the command ------------------------------------------------------------------------------


def test_the_facts_are_printed_for_programs(planes: Path, inspect: Inspect) -> None:
    content = found(inspect(planes, "--patch", "16,32,32", "--budget", "1MiB", "--json"))
    assert set(content) == {"schema", "volumes", "patches", "rechunked", "advice"}
    volume = content["volumes"]["volume"]
    assert volume["shape"] == [64, 96, 128] and volume["dtype"] == "uint8"
    assert volume["chunk"] == [64, 96, 1] and volume["decoded"] == VOXELS.nbytes
    assert (
        volume["stored"] == stored_nbytes(str(planes)) and volume["ratio"] == VOXELS.nbytes / volume["stored"]
    )
    assert volume["one"]["threads"] == 1 and volume["one"]["units"] >= 1 and volume["one"]["seconds"] > 0
    patches = content["patches"]
    assert patches["patch"] == [16, 32, 32] and patches["nbytes"] == 16 * 32 * 32
    assert patches["epoch"] == VOXELS.size // (16 * 32 * 32) and patches["budget"] == 1 << 20
    assert patches["keeps_all"] == (patches["fit"]["remembered"] >= VOXELS.nbytes)
    model = PatchModel([Stored(VOXELS.shape, tuple(volume["unit"]), 1)], (16, 32, 32))
    assert patches["alone"]["amplification"] == pytest.approx(model.alone() / model.patch_nbytes)
    assert set(patches["needed"]) == {"2.0", "1.2"}
    assert [one["chunk"] for one in content["rechunked"]] and all(
        one["ratio"] > 1 for one in content["rechunked"]
    )


def test_the_facts_are_printed_for_people(planes: Path, inspect: Inspect) -> None:
    code, output, errors = inspect(planes, "--patch", "16,32,32", "--budget", "300KiB")
    assert (code, errors) == (0, "")
    for said in (
        r"array +64×96×128 uint8, 768 KiB decoded",
        r"stored +\d+ KiB, ratio \d\.\d\d: Zarr, chunks of 64×96×1 \(6 KiB; zstd\)",
        r"measured, 1 thread +[\d,]+ units/s, [\d.]+ [KMG]iB/s",
        r"patches of 16×32×32: 16 KiB each, 48 have the volume's size",
        r"one alone +nothing",
        r"a tour from \d+ places? at a time",
        r"to decode at most 2\.0 bytes for each that is used, ",
        r"In 300 KiB: 1 thread of \d+ KiB each while they decode, and [\d.]+ KiB for what is remembered\.",
        r"other chunks, tried on a part of the volume",
        r"64×96×1 +as it is",
    ):
        assert re.search(said, output), said


def test_only_the_volume_is_described_without_a_patch(planes: Path, tmp_path: Path, inspect: Inspect) -> None:
    code, output, errors = inspect(planes)
    assert (code, errors) == (0, "") and "measured, 1 thread" in output and "order" not in output
    assert found(inspect(planes, "--json"))["patches"] is None
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    code, output, errors = inspect(tmp_path / "empty.npy")
    assert (code, errors) == (0, "") and "0×3 float64" in output and "measured" not in output


def test_the_least_budget_that_is_named_is_accepted(planes: Path, inspect: Inspect) -> None:
    line = refused(inspect(planes, "--patch", "16,32,32", "--budget", "1B"))
    least = re.search(r"give at least --budget (\d+)B", line)
    assert least is not None
    assert (
        "bytes for each that is used" in inspect(planes, "--patch", "16,32,32", "--budget", f"{least[1]}B")[1]
    )
    assert "is too little" in refused(
        inspect(planes, "--patch", "16,32,32", "--budget", f"{int(least[1]) - 1}B")
    )


def test_where_units_stick_out_no_budget_may_be_enough(tmp_path: Path, inspect: Inspect) -> None:
    array = zarr.create_array(tmp_path / "in.zarr", shape=(40, 50, 61), dtype="u1", chunks=(16, 16, 16))
    array[:] = VOXELS[:40, :50, :61]
    options = (tmp_path / "in.zarr", "--patch", "16,16,16", "--budget", "1GiB")
    _, output, _ = inspect(*options)
    assert "For a tour to decode at most 1.2 bytes for each that is used, no budget is enough: " in output
    assert found(inspect(*options, "--json"))["patches"]["least"] > 1.2


def test_labels_are_inspected_beside_the_volume(planes: Path, tmp_path: Path, inspect: Inspect) -> None:
    np.save(tmp_path / "labels.npy", VOXELS.astype("u4"))
    some = ("--patch", "16,32,32", "--budget", "1MiB", "--json")
    content = found(inspect(planes, "--labels", tmp_path / "labels.npy", *some))
    assert list(content["volumes"]) == ["volume", "labels"]
    assert content["patches"]["nbytes"] == 5 * 16 * 32 * 32
    np.save(tmp_path / "labels.npy", VOXELS[1:])
    line = refused(inspect(planes, "--labels", tmp_path / "labels.npy", *some))
    assert "--labels has (63, 96, 128) voxels, and the volume (64, 96, 128)" in line


def test_an_hdf5_file_is_a_volume_by_its_dataset_or_by_a_patch(tmp_path: Path, inspect: Inspect) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=VOXELS, chunks=(16, 96, 128), compression="gzip")
    assert found(inspect(tmp_path / "a.h5", "--json"))["datasets"][0]["path"] == "/x"
    for path, more in ((f"{tmp_path}/a.h5/x", []), (f"{tmp_path}/a.h5", ["--patch", "8,8,8"])):
        content = found(inspect(path, *more, "--json"))
        assert content["volumes"]["volume"]["chunk"] == [16, 96, 128]
    for name in ("--labels", "--budget"):
        value = "1GiB" if name == "--budget" else tmp_path / "a.h5"
        assert f"{name} goes with --patch" in refused(inspect(tmp_path / "a.h5", name, value))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--patch", "8,8,8,8"], "planes.zarr: --patch has 4 numbers, and the volume 3 dimensions"),
        (["--patch", "65,8,8"], "planes.zarr: a patch of (65, 8, 8) does not fit into (64, 96, 128)"),
        (["--budget", "1GiB"], "--labels and --budget go with --patch"),
        (
            ["--patch", "8,8,8", "--budget", "1KiB"],
            "a budget of 1 KiB is too little: a decoding thread needs ",
        ),
        (["--batch-size", "8"], "--batch-size is for HDF5 files"),
        (["--sample-dims", "2"], "--sample-dims is for HDF5 files"),
    ],
)
def test_options_that_cannot_work_are_refused(
    planes: Path, inspect: Inspect, options: list[str], said: str
) -> None:
    assert said in refused(inspect(planes, *options))


def test_files_that_are_no_volumes_are_refused(tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "text").write_text("text")
    assert "is not an HDF5 file either" in refused(inspect(tmp_path / "text", "--patch", "8,8"))
    assert "No such file" in refused(inspect(tmp_path / "none.npy", "--patch", "8,8"))
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    assert "is empty: there are no patches in it" in refused(
        inspect(tmp_path / "empty.npy", "--patch", "1,1")
    )


def test_tried_copies_are_removed(
    planes: Path, tmp_path: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    seen, real = [], inspection.open_volume
    monkeypatch.setattr(inspection, "open_volume", lambda path: (seen.append(path), real(path))[1])
    assert found(inspect(planes, "--patch", "16,32,32", "--json"))["rechunked"]
    assert seen and all(str(path).startswith(str(tmp_path / "tmp")) for path in seen)
    assert not os.listdir(tmp_path / "tmp")
