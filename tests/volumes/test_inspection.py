"""What volumes and their patches cost: the model, what is measured, the advice, and the command."""

from __future__ import annotations

import json
import math
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
from fastpipe.errors import VolumeError
from fastpipe.volumes import inspection, repack
from fastpipe.volumes.cost import PatchModel, Stored
from fastpipe.volumes.opening import open_volume
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
def same_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast however it is stored, so that what is found does not depend on the machine."""

    def decode_speed(volume: Any, patch: Any, threads: int, seconds: float, within: Any = None) -> Any:
        nbytes = 100 * volume.unit_nbytes
        return inspection.Speed(threads, 100, nbytes, nbytes / (1e9 * threads))

    monkeypatch.setattr(inspection, "_TRIED_NBYTES", 2 << 20)  # which are soon compressed
    monkeypatch.setattr(inspection, "decode_speed", decode_speed)
    monkeypatch.setattr(inspection, "copy_seconds", lambda *some: 0.0)
    monkeypatch.setattr(inspection, "available_cpus", lambda: 2)


def written(path: Path, array: Any, chunks: tuple[int, ...], **options: Any) -> Path:
    zarr.create_array(path, data=array, chunks=chunks, **options)
    return path


@pytest.fixture
def planes(tmp_path: Path) -> Path:
    """A volume in chunks that suit no patch: whole planes."""
    return written(tmp_path / "planes.zarr", VOXELS, (64, 96, 1), compressors=zarr.codecs.ZstdCodec(level=1))


@pytest.fixture
def slabs(tmp_path: Path) -> Path:
    array = np.random.default_rng(0).integers(0, 9, (64, 512, 512), np.uint8)
    return written(tmp_path / "in.zarr", array, (1, 512, 512))


def output_of(result: tuple[int, str, str]) -> str:
    code, output, errors = result
    assert (code, errors) == (0, "")
    return output


def found(result: tuple[int, str, str]) -> Any:
    return json.loads(output_of(result))


def refused(result: tuple[int, str, str]) -> str:
    code, output, errors = result
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("fastpipe inspect: ")
    return line


def _touched(grid: UnitGrid, start: Sequence[int], patch: Sequence[int]) -> list[int]:
    return grid.touched(tuple(slice(at, at + side) for at, side in zip(start, patch, strict=True))).tolist()


@given(st.data())
def test_a_patch_alone_decodes_what_it_touches_on_average(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    unit = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    patch = tuple(data.draw(st.integers(1, size)) for size in shape)
    lead = data.draw(st.sampled_from([(), (3,), (2, 2)]))
    lead_unit = tuple(data.draw(st.integers(1, size)) for size in lead)
    stored, whole = Stored((*lead, *shape), (*lead_unit, *unit), 2), (*lead, *patch)
    model, grid = PatchModel([stored], patch), UnitGrid(stored.shape, stored.unit)
    places = np.ndindex(*(size - side + 1 for size, side in zip(stored.shape, whole, strict=True)))
    touched = np.mean([len(_touched(grid, at, whole)) for at in places])
    assert model.alone() == pytest.approx(touched * stored.unit_nbytes)
    assert model.uniform(0) * model.patch_nbytes == pytest.approx(model.alone())
    assert model.patch_nbytes == math.prod(whole) * 2
    assert stored.nbytes == grid.count * stored.unit_nbytes and stored.decoded == 2 * math.prod(stored.shape)


@pytest.mark.parametrize("slots", [1, 80, 215])
@pytest.mark.parametrize("patch", [(8, 20, 20), (3, 3, 3), (30, 9, 40)])
def test_the_formula_for_uniform_order_is_near_a_simulation(slots: int, patch: tuple[int, ...]) -> None:
    stored, rng = Stored((48, 60, 66), (8, 10, 11), 1), np.random.default_rng(0)
    model, grid = PatchModel([stored], patch), UnitGrid(stored.shape, stored.unit)
    most = [size - side + 1 for size, side in zip(stored.shape, patch, strict=True)]
    remembered: OrderedDict[int, None] = OrderedDict()
    decoded = 0
    for number in range(2500):
        for unit in _touched(grid, rng.integers(0, most).tolist(), patch):
            decoded += number >= 500 and unit not in remembered
            remembered[unit] = None
            remembered.move_to_end(unit)
            if len(remembered) > slots:
                remembered.popitem(last=False)
    simulated = decoded * stored.unit_nbytes / (2000 * model.patch_nbytes)
    share = math.ceil(slots / grid.count * stored.nbytes)
    assert model.uniform(share) == pytest.approx(simulated, rel=0.05, abs=0.05 * model.uniform(0))


def test_with_room_for_all_of_it_the_first_epoch_decodes_each_unit_once() -> None:
    stored = Stored((100, 100, 100), (10, 10, 10), 4)
    patches = PatchModel([stored], (20, 20, 20))
    assert patches.epoch == 125
    # 125 patches of 8 to 27 units each touch nearly all 1000, and use as much as is in all of them.
    assert 0.85 < patches.uniform(stored.nbytes) <= 1.0
    assert patches.near(stored.nbytes) == patches.uniform(stored.nbytes)
    # With less, more is decoded, and on a tour less than in uniform order.
    model = PatchModel([Stored((200, 256, 256), (1, 256, 256), 1)], (32, 64, 64))
    budgets = [int(share * model.total_nbytes) for share in (0.6, 0.3, 0.1)]
    for costs in (list(map(model.near, budgets)), list(map(model.uniform, budgets))):
        assert costs == sorted(costs)
    assert all(model.near(budget) < model.uniform(budget) for budget in budgets)


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
    patch, threads, limit = (48, 48, 48), 2, 1.2
    array = np.random.default_rng(0).integers(0, 4, (256, 256, 256), np.uint8)
    path = written(tmp_path / "x.zarr", array, (64,) * 3, compressors=zarr.codecs.ZstdCodec(level=1))
    stored = Stored(array.shape, open_volume(path).grid.unit, 1)
    (budget,) = PatchModel([stored], patch, threads).least_budget((limit,))
    assert budget is not None
    found = []
    for seed in range(3):
        cache = Cache("ram", max_bytes=budget)
        dataset = FastPatchDataset(path, patch, seed=seed, threads=threads, cache=cache)
        for _ in FastLoader(dataset, 2, Shuffle(window=1, unit="group")):
            pass
        found.append(dataset.amplification)
    assert np.median(found) <= 1.1 * limit, found


def test_patches_per_second_follow_from_the_measured_speed() -> None:
    model = PatchModel([Stored((64,) * 3, (16,) * 3, itemsize) for itemsize in (1, 2)], (16, 16, 16))
    speeds = [(inspection.Speed(1, 10, 4096 * 1000, 1.0), inspection.Speed(4, 40, 4096 * 3000, 1.0))] * 2
    cost = inspection.Rates(model, speeds, 0.001).cost(2.0)
    assert cost.amplification == 2.0
    # Of each patch 2 × 4 KiB and 2 × 8 KiB at 1,000 × 4 KiB/s, and the copy.
    assert cost.one == pytest.approx(1 / (0.006 + 0.001))
    assert cost.all == pytest.approx(1 / (0.002 + 0.00025))


def test_a_budget_is_for_threads_and_remembered_units(planes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "available_cpus", lambda: 8)
    facts = inspection.volume_facts(str(planes), open_volume(planes), None)
    fit = inspection.fit_of([facts], 10 << 30)
    assert fit.threads == 8 and fit.remembered == (10 << 30) - 8 * fit.thread_nbytes
    each = fit.thread_nbytes
    assert facts.unit_nbytes < each <= 2 * facts.unit_nbytes
    assert inspection.fit_of([facts], 5 * each) == inspection.Fit(2, each, 3 * each)
    assert inspection.fit_of([facts], 1) == inspection.Fit(1, each, 0)
    for thousandths in (1, 999, 1000, 1999, 2500, 7999, 8000, 10**6):
        remembered = thousandths * each // 1000
        assert inspection.fit_of([facts], inspection.budget_for(remembered, each)).remembered == remembered


def test_the_bytes_that_a_volume_takes_on_the_disk_are_counted(
    tmp_path: Path, planes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in planes.rglob("*") if path.is_file())
    assert repack.stored_nbytes(str(planes)) == size
    np.save(tmp_path / "a.npy", VOXELS)
    assert repack.stored_nbytes(str(tmp_path / "a.npy")) == VOXELS.nbytes + 128
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("g/x", data=VOXELS, chunks=(8, 96, 128), compression="gzip")
        stored = file["g/x"].id.get_storage_size()
    assert repack.stored_nbytes(f"{tmp_path}/a.h5/g/x") == stored
    assert [repack.stored_nbytes(name) for name in (f"{tmp_path}/a.h5/g", "gs://bucket/x")] == [None, None]
    monkeypatch.setattr(repack, "_MOST_FILES", 10)
    assert repack.stored_nbytes(str(planes)) is None, "of very many files"
    # What is stored together, of which parts can be read alone.
    path = written(tmp_path / "a.zarr", np.ones((64, 128, 128), "u1"), (32, 128, 128), compressors=None)
    tifffile.imwrite(tmp_path / "a.tif", VOXELS, tile=(32, 64), compression="zlib")
    for name, chunk in (("a.h5/g/x", (8, 96, 128)), ("a.zarr", (32, 128, 128)), ("a.tif", (1, 32, 64))):
        assert repack.chunk_of(open_volume(tmp_path / name)) == chunk
    assert open_volume(path).grid.unit == (8, 128, 128)
    assert math.prod(open_volume(tmp_path / "a.tif").grid.unit) > 32 * 64


@pytest.mark.usefixtures("same_speed")
def test_the_advice_can_be_followed_and_is_better(slabs: Path, inspect: Inspect) -> None:
    some = ("--patch", "8,64,64", "--budget", "1MiB", "--json")
    before = found(inspect(slabs, *some))
    _, command, _, out, *options = shlex.split(before["advice"])
    assert (command, out) == ("repack", "OUT.zarr")
    as_it_is, best, *_ = before["rechunked"]
    assert as_it_is["codec"] == "" and as_it_is["gain"] == 1.0 and best["gain"] >= 1.25
    assert main(["repack", str(slabs), str(slabs.with_name(out)), *options]) == 0
    after = found(inspect(slabs.with_name(out), *some))
    assert after["advice"] is None
    # What was promised by a part of the volume is found in all of it.
    promised = best["tour"]["amplification"]
    assert after["rechunked"][0]["tour"]["amplification"] == pytest.approx(promised, rel=0.2)
    assert promised < as_it_is["tour"]["amplification"]


@pytest.mark.usefixtures("same_speed")
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("1MiB", r"\nAdvice\nChunks of .* would give [\d.]+ times as many patches, .*\n  fastpipe repack "),
        ("6MiB", r"\nFor a tour no .*\nIn uniform order chunks of .* would give .*\n  fastpipe repack .*\nShuffle\("),
        ("1GiB", r"\nOther chunks would change the first epoch only\.\n"),
    ],
)  # fmt: skip
def test_the_advice_is_given_in_words(slabs: Path, inspect: Inspect, budget: str, said: str) -> None:
    assert re.search(said, output_of(inspect(slabs, "--patch", "8,64,64", "--budget", budget)))


@pytest.mark.usefixtures("same_speed")
def test_no_larger_chunks_are_tried_than_file_systems_are_made_for(
    planes: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_LARGEST_CHUNK", 1 << 16)
    tried = found(inspect(planes, "--patch", "32,64,64", "--budget", "1MiB", "--json"))["rechunked"][1:]
    assert tried and all(math.prod(one["chunk"]) <= 1 << 16 for one in tried)


def test_a_package_that_copies_need_is_missed_at_once_if_one_is_tried(
    planes: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "decode_speed", lambda *_: pytest.fail("it measures"))
        code, output, errors = inspect(planes, "--patch", "8,8,8")
        assert (code, output) == (2, "") and "pip install '.[volume]'" in errors
    # Where no copy is tried, it is not needed.
    assert inspect(planes)[0] == 0
    monkeypatch.setattr("fastpipe.volumes.repack.NUMBERS", set())
    content = found(inspect(planes, "--patch", "8,8,8", "--json"))  # of elements that Zarr has not
    assert content["rechunked"] == [] and content["advice"] is None


def test_the_facts_are_printed_for_programs(planes: Path, inspect: Inspect) -> None:
    content = found(inspect(planes, "--patch", "16,32,32", "--budget", "1MiB", "--json"))
    assert set(content) == {"schema", "volumes", "patches", "rechunked", "advice"}
    volume, patches = content["volumes"]["volume"], content["patches"]
    assert volume["shape"] == [64, 96, 128] and volume["dtype"] == "uint8"
    assert volume["chunk"] == [64, 96, 1] and volume["decoded"] == VOXELS.nbytes
    assert volume["stored"] == repack.stored_nbytes(str(planes))
    assert volume["ratio"] == VOXELS.nbytes / volume["stored"]
    assert volume["one"]["threads"] == 1 and volume["one"]["units"] >= 1 and volume["one"]["seconds"] > 0
    assert patches["patch"] == [16, 32, 32] and patches["nbytes"] == 16 * 32 * 32
    assert patches["epoch"] == VOXELS.size // (16 * 32 * 32) and patches["budget"] == 1 << 20
    assert patches["keeps_all"] == (patches["fit"]["remembered"] >= VOXELS.nbytes)
    model = PatchModel([Stored(VOXELS.shape, tuple(volume["unit"]), 1)], (16, 32, 32))
    assert patches["alone"]["amplification"] == pytest.approx(model.alone() / model.patch_nbytes)
    assert set(patches["needed"]) == {"2.0", "1.2"}
    assert [one["chunk"] for one in content["rechunked"]]
    assert all(one["ratio"] > 1 for one in content["rechunked"])


def test_the_facts_are_printed_for_people(planes: Path, tmp_path: Path, inspect: Inspect) -> None:
    output = output_of(inspect(planes, "--patch", "16,32,32", "--budget", "300KiB"))
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
    # Without a patch only the volume is described.
    output = output_of(inspect(planes))
    assert "measured, 1 thread" in output and "order" not in output
    assert found(inspect(planes, "--json"))["patches"] is None
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    output = output_of(inspect(tmp_path / "empty.npy"))
    assert "0×3 float64" in output and "measured" not in output


def test_the_least_budget_that_is_named_is_accepted(planes: Path, tmp_path: Path, inspect: Inspect) -> None:
    some = planes, "--patch", "16,32,32", "--budget"
    least = re.search(r"give at least --budget (\d+)B", refused(inspect(*some, "1B")))
    assert least is not None
    assert "bytes for each that is used" in inspect(*some, f"{least[1]}B")[1]
    assert "is too little" in refused(inspect(*some, f"{int(least[1]) - 1}B"))
    # Where units stick out no budget may be enough.
    array = VOXELS[:40, :50, :61]
    options = written(tmp_path / "in.zarr", array, (16,) * 3), "--patch", "16,16,16", "--budget", "1GiB"
    said = "For a tour to decode at most 1.2 bytes for each that is used, no budget is enough: "
    assert said in inspect(*options)[1]
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


def test_all_arrays_of_a_zarr_group_are_inspected(tmp_path: Path, inspect: Inspect) -> None:
    group = zarr.open_group(store=tmp_path / "scan.zarr", mode="w")
    assert "is a Zarr group without arrays" in refused(inspect(tmp_path / "scan.zarr"))
    for name in ("image", "masks/bone"):
        group.create_array(name, data=np.ones((8, 8, 8), np.uint8))
    out = output_of(inspect(tmp_path / "scan.zarr/"))
    assert [name in out for name in ("scan.zarr/image\n", "scan.zarr/masks/bone\n")] == [True, True]


def test_an_hdf5_file_is_a_volume_by_its_dataset_or_by_a_patch(tmp_path: Path, inspect: Inspect) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=VOXELS, chunks=(16, 96, 128), compression="gzip")
    assert found(inspect(tmp_path / "a.h5", "--json"))["datasets"][0]["path"] == "/x"
    for path, more in ((f"{tmp_path}/a.h5/x", []), (f"{tmp_path}/a.h5", ["--patch", "8,8,8"])):
        content = found(inspect(path, *more, "--json"))
        assert content["volumes"]["volume"]["chunk"] == [16, 96, 128]
    for name, value in (("--labels", tmp_path / "a.h5"), ("--budget", "1GiB")):
        assert f"{name} goes with --patch" in refused(inspect(tmp_path / "a.h5", name, value))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--patch", "8,8,8,8"], "planes.zarr: --patch has 4 numbers, and the volume 3 dimensions"),
        (["--patch", "65,8,8"], "planes.zarr: a patch of (65, 8, 8) does not fit into (64, 96, 128)"),
        (["--budget", "1GiB"], "--labels and --budget go with --patch"),
        (["--patch", "8,8,8", "--budget", "1KiB"], "a budget of 1 KiB is too little: a decoding thread needs "),
        (["--batch-size", "8"], "--batch-size is for HDF5 files"), (["--sample-dims", "2"], "--sample-dims is for HDF5 files"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(
    planes: Path, inspect: Inspect, options: list[str], said: str
) -> None:
    assert said in refused(inspect(planes, *options))


def test_files_that_cannot_be_inspected_are_refused(planes: Path, tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "text").write_text("text")
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    for path in (planes / "c").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    for name, patch, said in (
        ("text", "8,8", "is not an HDF5 file either"), ("none.npy", "8,8", "No such file"),
        ("empty.npy", "1,1", "is empty: there are no patches in it"), ("planes.zarr", "8,8", "the chunk at"),
    ):  # fmt: skip
        assert said in refused(inspect(tmp_path / name, "--patch", patch))
    assert "the chunk at" in refused(inspect(planes))
    with pytest.raises(VolumeError, match="the chunk at"):
        inspection.decode_speed(open_volume(planes), None, 2, 0.0)
