"""Processes, threads, memory and descriptors of ``FastPatchDataset``, and files that change meanwhile."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle, stitch
from fastpipe.errors import VolumeError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform
from fastpipe.volumes import samples

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK, PATCH = (13, 14, 16), (4, 4, 8), (3, 4, 5)
GROUPS = Shuffle(unit="group")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, write_volume: Any, coordinates: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("life")
    kinds = (
        "zarr3 zstd",
        "hdf5 gzip",
        "hdf5 scale-offset",
        "tiff tiles",
        "npy",
        "b2nd",
        "nii",
        "zarr3 sharded",
    )
    array = coordinates(SHAPE).astype(np.int32)
    return {kind: write_volume(kind, folder / kind.replace(" ", "-"), array, CHUNK) for kind in kinds}


def dataset_of(path: Any, **options: Any) -> FastPatchDataset:
    return FastPatchDataset(
        path, PATCH, **{"sampling": Uniform(24), "threads": 2, "cache": Cache("ram", 20_000), **options}
    )


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def memory_files() -> int:
    """Open files in memory."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += "memfd" in os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the listing itself
            continue
    return found


ON_LINUX = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="run it on Linux, which lists descriptors"
)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Uniform(24)}, {"sampling": Grid(stride=4)}, {"sampling": Positions([[0, 0, 0], [1, 2, 3]])},
        {"sampling": Foreground(24), "labels": np.ones(SHAPE, np.uint8)},
        {"sampling": Uniform(24, mask_fraction=0.5), "mask": np.ones(SHAPE, np.uint8)},
        {"padding": ("constant", 1, 2), "nan": 0.0, "bad_samples": "skip", "transform": np.negative},
    ],
)  # fmt: skip
def test_pickled_before_and_after_use(paths: Any, options: Any) -> None:
    dataset = dataset_of(paths["zarr3 zstd"], seed=3, **options)
    before = pickle.dumps(dataset)
    wanted = [[np.asarray(one).tolist() for one in batch] for batch in FastLoader(dataset, 5, shuffle=GROUPS)]
    for data in (before, pickle.dumps(dataset)):
        copy = pickle.loads(data)
        assert repr(copy) == repr(dataset)
        found = [[np.asarray(one).tolist() for one in batch] for batch in FastLoader(copy, 5, shuffle=GROUPS)]
        assert found == wanted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="run it where processes can fork: not on Windows")
def test_forked_after_use(paths: Any, in_child: Callable[[Callable[[], object]], None]) -> None:
    for kind in ("zarr3 zstd", "hdf5 gzip", "hdf5 scale-offset", "tiff tiles", "npy", "b2nd"):
        dataset = dataset_of(paths[kind], sampling=Grid(stride=4))
        wanted = batches_of(FastLoader(dataset, 8))
        running = iter(FastLoader(dataset, 8))
        next(running)

        def child(dataset: Any = dataset, wanted: Any = wanted) -> None:
            assert batches_of(FastLoader(dataset, 8)) == wanted
            assert batches_of(DataLoader(dataset, 8, num_workers=1)) == wanted

        in_child(child)
        assert len(list(running)) == len(wanted) - 1
        assert batches_of(FastLoader(dataset, 8)) == wanted


@ON_LINUX
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", ["zarr3 zstd", "hdf5 gzip", "tiff tiles", "npy", "b2nd", "nii"])
def test_a_dataset_that_is_deleted_frees_its_memory_threads_and_files(paths: Any, kind: str) -> None:
    """At once, without a collection of garbage."""
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    memories = memory_files()
    dataset = dataset_of(paths[kind], cache=Cache("ram", 1 << 20))
    batches_of(FastLoader(dataset, 5))
    batches_of(DataLoader(dataset, 5))
    dataset[0]
    assert memory_files() > memories
    del dataset
    assert memory_files() == memories
    for thread in set(threading.enumerate()) - before[0]:
        thread.join(60)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before[1]


@ON_LINUX
def test_batches_outlive_the_dataset(paths: Any) -> None:
    wanted = batches_of(FastLoader(dataset_of(paths["zarr3 zstd"], sampling=Grid()), 5))
    for workers in (0, 1):
        loader = FastLoader(
            dataset_of(paths["zarr3 zstd"], sampling=Grid()), 5, num_workers=workers, workers="processes"
        )
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        del loader, iterator
        gc.collect()
        assert [batch.tolist() for batch in batches] == wanted[:2]
    samples = dataset_of(paths["zarr3 zstd"], sampling=Grid()).__getitems__(range(5))
    gc.collect()
    assert [sample.tolist() for sample in samples] == wanted[0]


@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_kept_are_never_overwritten(kind: Any, workers: int) -> None:
    """Of a size at which a batch's memory is used again."""
    volume = np.random.default_rng(0).integers(0, 255, (6, 300, 400)).astype(np.uint8)
    dataset = FastPatchDataset(volume, (2, 200, 300), sampling=Grid(), threads=2)
    loader = kind(dataset, 3, num_workers=workers)
    _, starts = dataset.places()
    kept = [batch for _ in range(3) for batch in loader]
    for number, batch in enumerate(kept):
        for row, patch in enumerate(batch.numpy()):
            z, y, x = starts[number % (len(kept) // 3) * 3 + row]
            assert np.array_equal(patch, volume[z : z + 2, y : y + 200, x : x + 300])
    assert len({batch.data_ptr() for batch in kept}) == len(kept)


@ON_LINUX
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_broken_off(paths: Any, workers: int) -> None:
    dataset = dataset_of(paths["zarr3 zstd"], sampling=Grid(stride=3))
    for shuffle in (False, True, GROUPS):
        loader = FastLoader(dataset, 2, shuffle=shuffle, num_workers=workers, workers="processes")
        next(iter(loader))
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(2 if workers else 20):
            next(iter(loader))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        found = Counter(patch.numpy().tobytes() for batch in loader for patch in batch)
        assert found == Counter(dataset[index].tobytes() for index in range(len(dataset)))


LOADERS: dict[str, Any] = {
    "threads": lambda path: FastLoader(dataset_of(path), 5),
    "not remembered": lambda path: FastLoader(dataset_of(path, cache="off"), 5, shuffle=True, seed=1),
    "tour": lambda path: FastLoader(dataset_of(path), 5, shuffle=GROUPS),
    "padded": lambda path: FastLoader(dataset_of(path, padding="reflect", labels=path), 5),
    "transform": lambda path: FastLoader(dataset_of(path, transform=np.copy), 5),
    "stock": lambda path: DataLoader(dataset_of(path), 5),
    "no batches": lambda path: FastLoader(dataset_of(path), None),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LOADERS)
def test_nothing_piles_up(paths: Any, grown_in_epochs: Any, name: str) -> None:
    loader = LOADERS[name](paths["zarr3 zstd"])
    list(loader)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert grown_in_epochs(loader) == {}
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_bad_patches_leave_no_objects(
    tmp_path: Any, write_volume: Any, coordinates: Any, grown_in_epochs: Any, policy: Any
) -> None:
    path = write_volume("zarr3 zstd", tmp_path / "x", coordinates(SHAPE), CHUNK)
    (tmp_path / "x.zarr" / "c" / "1" / "1" / "1").write_bytes(b"damaged")
    loader = FastLoader(dataset_of(path, sampling=Grid(), bad_samples=policy), 5)
    assert grown_in_epochs(loader) == {}


def test_errors_that_were_not_due_yet_leave_nothing(
    tmp_path: Any, write_volume: Any, coordinates: Any
) -> None:
    path = write_volume("npy", tmp_path / "x", coordinates(SHAPE), CHUNK)
    dataset = dataset_of(path, cache="off")
    refer = weakref.ref(dataset)
    dataset[0]
    os.truncate(path, os.stat(path).st_size + 1)
    with pytest.raises(OSError, match="has changed"):
        list(FastLoader(dataset, 2))
    dataset._running().pool.close()  # a thread may be inside a task of a batch that was given up
    del dataset
    gc.collect()
    assert refer() is None


def test_more_volumes_than_may_be_open(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_OPEN", 3)
    paths = []
    for number in range(12):
        np.save(tmp_path / f"{number}.npy", np.full((6, 6), number))
        paths.append(tmp_path / f"{number}.npy")
    dataset = FastPatchDataset(paths, (3, 3), sampling=Grid(), threads=3, cache="off")
    order = torch.randperm(len(dataset)).tolist()
    found = [int(patch[0, 0]) for batch in FastLoader(dataset, 10, sampler=order) for patch in batch]
    assert found == [index // 4 for index in order]
    assert len(dataset._running()._open) <= 3
    assert dataset._places_in_files() is not None


def test_options_that_are_changed_take_effect(paths: Any) -> None:
    dataset = dataset_of(paths["zarr3 zstd"], sampling=Grid())
    first = dataset._running()
    dataset.threads = 1
    assert dataset[0].shape == PATCH
    assert dataset._running() is not first
    assert dataset._running().pool.threads == 1


def test_stitching_that_fails_closes_its_file(paths: Any, tmp_path: Any) -> None:
    dataset = dataset_of(paths["npy"], sampling=Grid(stride=2))

    def predictions() -> Any:
        yield np.zeros((3, *PATCH), np.float32)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        stitch(predictions(), dataset, tmp_path / "x.npy", max_bytes=0)
    assert os.listdir(tmp_path) == []


# ---- files that change --------------------------------------------------------------------------


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "kind", ["hdf5 gzip", "hdf5 contiguous", "hdf5 scale-offset", "tiff tiles", "npy", "nii", "b2nd"]
)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_changes_is_an_error_and_not_values(
    tmp_path: Path, write_volume: Any, random_array: Any, kind: str, is_open: bool
) -> None:
    array = random_array((4, 32, 48), "i2")
    path = write_volume(kind, tmp_path / "x", array, (2, 16, 16))
    dataset = FastPatchDataset(path, (2, 16, 16), sampling=Grid(), cache="off")
    if is_open:
        dataset[0]
    file = path.removesuffix("/raw")
    data = Path(file).read_bytes()
    with open(file, "r+b") as target:
        target.write(data[:1])
        target.truncate(len(data) + 1)
    with pytest.raises(VolumeError, match=r"has changed since it was opened"):
        dataset[5]
    skipping = FastPatchDataset(path, (2, 16, 16), sampling=Grid(), cache="off", bad_samples="skip")
    os.truncate(file, len(data) + 2)
    with pytest.raises(VolumeError, match=r"has changed since it was opened"):  # whatever the policy
        skipping.__getitems__([5])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind",
    ["hdf5 gzip", "hdf5 contiguous", "hdf5 scale-offset", "tiff tiles", "npy", "nii", "nii.gz", "b2nd"],
)
def test_what_is_remembered_of_a_file_is_not_given_once_it_has_changed(
    tmp_path: Path, write_volume: Any, random_array: Any, kind: str
) -> None:
    array = random_array((4, 32, 48), "i2")
    path = write_volume(kind, tmp_path / "x", array, (2, 16, 16))
    dataset = FastPatchDataset(path, (2, 16, 16), sampling=Grid(), cache="ram")
    for _ in range(2):
        np.testing.assert_array_equal(dataset[5], array[:2, 16:32, 32:48])
    with open(path.removesuffix("/raw"), "ab") as target:
        target.write(b" ")
    with pytest.raises(VolumeError, match=r"has changed since it was opened"):
        dataset[5]
