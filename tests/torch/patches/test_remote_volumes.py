"""``FastPatchDataset`` over URLs of Zarr arrays: the samples of the same array in a folder, and few requests."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zarr
from failure import raising
from same import same
from streams import BY_PROCESSES
from torch.utils.data import DataLoader
from volume_kinds import random_array, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle, Stage, ZScore
from fastpipe.errors import BadSampleError, OptionError, StageError, StoreAccessError, StoreError, VolumeError
from fastpipe.sampling import Foreground, Grid, Uniform
from fastpipe.stores.filesystems import FilesystemStore, FolderStore

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK, PATCH = (20, 33, 50), (8, 16, 16), (9, 12, 17)
ARRAY, GRID = random_array(SHAPE, "u2"), Grid((7, 9, 11))
KINDS: dict[str, str] = {
    "zarr3 blosc": "blosc", "zarr3 bitshuffle": "blosc", "zarr3 zstd": "zstd", "zarr3 gzip": "gzip",
    "zarr3 none": "not compressed", "zarr3 big-endian": "zstd", "zarr2 blosc": "blosc", "zarr2 zstd": "zstd",
    "zarr2 zlib": "zlib", "zarr2 none": "not compressed",
}  # fmt: skip


class Far:
    """Volumes in folders and in memory, which is far away; datasets over them, and what was asked for."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.memory, self.stage = folder, fsspec.filesystem("memory"), Stage(folder / "stage")
        self.made: list[FastPatchDataset] = []
        self._log = folder / "asked"
        self._log.touch()
        for kind in (FilesystemStore, FolderStore):

            def get(store: Any, key: str, version: str = "", got: Any = kind.get) -> Any:
                with open(self._log, "a") as file:
                    file.write(f"{key}\n")
                return got(store, key, version)

            patch.setattr(kind, "get", get)

    def write(
        self, kind: str = "zarr3 blosc", name: str = "scan", array: Any = ARRAY, chunk: Any = CHUNK
    ) -> str:
        return write_volume(kind, self.folder / name, array, chunk)  # type: ignore[no-any-return]

    def upload(self, folder: str) -> str:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                self.memory.pipe(f"/bucket/{Path(folder).name}/{path.relative_to(folder)}", path.read_bytes())
        return f"memory://bucket/{Path(folder).name}"

    def make(self, volume: Any, patch: Any = PATCH, **options: Any) -> FastPatchDataset:
        self.made.append(FastPatchDataset(volume, patch, **{"sampling": GRID, **options}))
        return self.made[-1]

    def asked(self) -> Counter[str]:
        """How often each object was asked for since the last call, in all processes that were forked."""
        keys = self._log.read_text().splitlines()
        self._log.write_text("")
        return Counter(keys)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    made = Far(tmp_path, monkeypatch)
    yield made
    while made.made:  # and none is kept by the fixture
        made.made.pop().close()
    if made.memory.exists("/bucket"):
        made.memory.rm("/bucket", recursive=True)


@pytest.fixture(params=["ahead", "staged"])
def near(request: pytest.FixtureRequest, far: Far) -> dict[str, Any]:
    """Options of a dataset: without a stage, and with one."""
    return {"stage": far.stage} if request.param == "staged" else {}


def batches(dataset: Any, loader: Any = FastLoader, **options: Any) -> list[Any]:
    torch.manual_seed(1)
    return list(loader(dataset, 4, **options))


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_read_as_from_a_folder(kind: str, far: Far) -> None:
    near = {"stage": far.stage} if kind.startswith("zarr2") else {}
    path = far.write(kind)
    ours, theirs = far.make(far.upload(path), **near), far.make(path)
    assert same(batches(ours), batches(theirs))
    assert same(ours[3], theirs[3])
    how = "staged in '" if near else "fetched ahead"
    assert f"Zarr, chunks of 8×16×16 (4 KiB; {KINDS[kind]}), by fsspec, {how}" in repr(ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_normalised_patches_are_those_of_the_local_array(workers: int, far: Far, near: Any) -> None:
    """Each chunk is fetched once for the statistics, and at most once by each process for the patches."""

    def run(what: str, **more: Any) -> list[Any]:
        options: Any = {"normalize": ZScore(), "sampling": Uniform(23), "seed": 5, "padding": "constant"}
        dataset = far.make(what, **options, **more)
        loader = FastLoader(dataset, 4, num_workers=workers, workers="processes")
        return [list(loader) for _ in range(2)]

    path = far.write()
    url = far.upload(path)
    expected = run(path)
    far.asked()
    assert same(run(url, **near), expected)
    assert max(count for key, count in far.asked().items() if "/c/" in key) <= 1 + max(1, workers)


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_were_never_written_are_not_fetched(version: int, far: Far, near: Any) -> None:
    path = str(far.folder / "scan.zarr")
    keys = {"name": "v2", "separator": "/"} if version == 2 else None
    array = zarr.create_array(
        path, shape=SHAPE, chunks=CHUNK, dtype="i4", fill_value=-7, zarr_format=version, chunk_key_encoding=keys
    )  # fmt: skip
    ours = far.make(far.upload(path), **near)
    assert ours[1].tolist() == np.full(PATCH, -7).tolist() and ours.downloaded == (0, 0)
    array[3:9, :20, 5:30] = 4
    ours = far.make(far.upload(path), **near)
    far.asked()
    assert same(batches(ours), batches(far.make(path)))
    asked = [key.rpartition("/")[2] for key in far.asked()]
    assert len([name for name in asked if name != "zarr.json" and not name.startswith(".z")]) == 8


@pytest.mark.few(2)
@pytest.mark.parametrize(("shuffle", "workers"), [(True, 2), (Shuffle(unit="group"), 0)])
def test_a_seed_gives_the_patches_of_the_local_array(shuffle: Any, workers: int, far: Far, near: Any) -> None:
    def run(what: str, **options: Any) -> list[Any]:
        dataset = far.make(what, sampling=Uniform(23), seed=5, **options)
        loader = FastLoader(dataset, 4, shuffle=shuffle, num_workers=workers, workers="processes")
        return [list(loader) for _ in range(3)]

    path = far.write()
    url = far.upload(path)
    # Tours go by what is decoded at once, which is another thing here.
    assert same(run(url, **near), run(path) if shuffle is True else run(url))


@pytest.mark.parametrize(("kind", "stages"), [(DataLoader, True), (BY_PROCESSES, False)])
def test_workers_that_get_a_pickle_have_the_same_patches(kind: Any, stages: bool, far: Far) -> None:
    path = far.write()  # in memory it would be in one process alone
    ours = far.make(f"file://{path}", stage=far.stage if stages else None)
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    assert same(batches(ours, kind, **options), batches(far.make(path)))


def test_nothing_is_fetched_ahead_for_an_epoch_that_is_not_drawn_yet(far: Far) -> None:
    ours = far.make(far.upload(far.write()), (1, 1, 1), sampling=Uniform(6))
    far.asked()
    batches(ours)
    assert 0 < far.asked().total() <= 6


def test_padded_patches_are_those_of_the_local_array(far: Far) -> None:
    path = far.write()
    url = far.upload(path)
    for padding in ("reflect", "wrap", "constant"):
        options = {"patch": (24, 35, 20), "sampling": Uniform(7), "padding": padding, "seed": 1}
        ours, theirs = (batches(far.make(one, **options), shuffle=True) for one in (url, path))
        assert same(ours, theirs)


def test_labels_and_several_volumes_are_read_as_local_ones(far: Far, near: Any) -> None:
    images, labels = [], []
    for case, shape in enumerate([(20, 33, 50), (17, 40, 21)]):
        array = random_array((2, *shape), "f4", case)
        images.append(far.write("zarr3 zstd", f"image{case}", array, (1, *CHUNK)))
        labels.append(far.write("zarr2 blosc", f"label{case}", array[0].astype("u1")))
    options: Any = {"sampling": Uniform(30), "seed": 3}
    theirs = far.make(images, labels=labels, **options)
    ours = far.make([*map(far.upload, images)], labels=[*map(far.upload, labels)], **options, **near)
    far.asked()
    for _ in range(2):
        assert same(batches(ours, shuffle=True), batches(theirs, shuffle=True))
    assert max(far.asked().values()) == 1
    some = far.make(far.upload(images[0]), labels=zarr.open_array(labels[0])[:], **options, **near)
    assert same(batches(some), batches(far.make(images[0], labels=labels[0], **options)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("seed", "sampling", "workers"), [(3, Uniform(23), 0), (None, Uniform(23), 2), (3, GRID, 2)]
)
def test_each_chunk_is_fetched_once(seed: int | None, sampling: Any, workers: int, far: Far) -> None:
    ours = far.make(far.upload(far.write()), sampling=sampling, seed=seed, stage=far.stage)
    far.asked()
    loader = FastLoader(ours, 4, shuffle=True, num_workers=workers, workers="processes")
    list(loader), list(loader), batches(ours, DataLoader)
    assert set(far.asked().values()) == {1}
    ours.close()
    again = far.make("memory://bucket/scan.zarr", stage=far.stage, cache="off")
    batches(again)
    far.asked()
    batches(again, shuffle=True)
    assert not far.asked()


@pytest.mark.parametrize(("kind", "sampling"), [(DataLoader, GRID), (FastLoader, Uniform(23))])
def test_without_a_stage_chunks_are_fetched_once_and_not_held(kind: Any, sampling: Any, far: Far) -> None:
    ours: Any = far.make(far.upload(far.write()), sampling=sampling, seed=3, threads=3)
    far.asked()
    for _ in range(3):
        batches(ours, kind, shuffle=True)
    assert set(far.asked().values()) == {1}
    for store in ours._remote.stores:
        store.settle()
        assert not store._living
        assert not [slot for slot in store.reader().prefetcher.slots.values() if slot.wants]


@pytest.mark.slow
def test_small_stages_and_budgets_are_enough(far: Far) -> None:
    path, few = far.write(), Cache("ram", max_bytes=8 * 4096)
    theirs, stage = (
        far.make(path, sampling=Uniform(60), seed=3),
        Stage(far.folder / "small", max_bytes=40_000),
    )
    for options in ({"stage": stage, "cache": few}, {"cache": "off"}, {"cache": few}):
        ours = far.make(far.upload(path), sampling=Uniform(60), seed=3, **options)
        for workers in (0, 2):
            loaders = (
                FastLoader(one, 4, seed=3, num_workers=workers, workers="processes") for one in (ours, theirs)
            )
            assert same(*map(list, loaders))
        next(iter(FastLoader(ours, 4)))  # given up in the middle
    held = sum(one.stat().st_size for one in (far.folder / "small").rglob("objects/*/*"))
    assert 0 < held <= 40_000


def test_a_tour_reads_ahead(far: Far) -> None:
    cache = Cache("ram", max_bytes=20 * 4096)
    ours = far.make(far.upload(far.write()), sampling=Uniform(60), seed=3, cache=cache)
    far.asked()
    batches(ours, shuffle=Shuffle(unit="group"))
    assert far.asked().total() < 2 * 3 * 3 * 4  # so many chunks


def test_one_patch_fetches_its_chunks_side_by_side(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, get, path = threading.Barrier(4), FilesystemStore.get, far.write()  # each waits for four of them
    options: Any = {"patch": (8, 32, 32), "sampling": Grid((8, 33, 50))}
    ours = far.make(far.upload(path), **options)

    def met(self: Any, key: str, version: str = "") -> Any:
        meeting.wait(30)
        return get(self, key, version)

    monkeypatch.setattr(FilesystemStore, "get", met)
    assert same(ours[0], far.make(path, **options)[0])


@pytest.mark.parametrize(
    ("damage", "policy", "stages"),
    [
        ("missing", "raise", False), ("missing", "skip", True), ("missing", "replace", False),
        ("damaged", "raise", True), ("damaged", "skip", False), ("short", "raise", False),
    ],
)  # fmt: skip
def test_a_bad_chunk_follows_the_policy(damage: str, policy: str, stages: bool, far: Far) -> None:
    path, options = far.write(), {"sampling": Grid(CHUNK), "patch": CHUNK}
    stage = far.stage if stages else None
    ours = far.make(far.upload(path), bad_samples=policy, seed=1, stage=stage, **options)
    key = "/bucket/scan.zarr/c/1/0/1"
    data = far.memory.cat_file(key)
    if damage == "missing":
        far.memory.rm(key)
    else:  # of the same size it has another version, and is used as it is now
        far.memory.pipe(key, data[:-9] if damage == "short" else data[:40] + bytes(len(data) - 40))
    theirs = far.make(path, **options)
    bad = np.flatnonzero((theirs.places()[1] // CHUNK == [1, 0, 1]).all(axis=1)).tolist()
    if policy == "raise":
        with pytest.raises(BadSampleError, match=r"scan\.zarr/c/1/0/1.*8:16, 0:16, 16:32") as caught:
            batches(ours)
        assert caught.value.index == bad[0]
        with pytest.raises(BadSampleError, match=r"memory://bucket/scan\.zarr/c/1/0/1"):
            ours[bad[0]]
        return
    found = torch.cat(batches(ours)).numpy()
    good = [index for index in range(len(theirs)) if index not in bad]
    assert len(found) == len(theirs if policy == "replace" else good)
    assert np.array_equal(found[good] if policy == "replace" else found, [theirs[index] for index in good])


def test_places_of_remote_labels_are_kept_until_they_change(far: Far, later: None) -> None:
    array = random_array(SHAPE, "u1")
    paths = [far.write("zarr3 zstd", name, array) for name in ("scan", "labels")]
    options: Any = {"sampling": Foreground(20, voxels=50), "seed": 2}
    local, urls = far.make(paths[0], labels=paths[1], **options), [*map(far.upload, paths)]

    def looks() -> bool:
        far.asked()
        places.append(far.make(urls[0], labels=urls[1], **options).places()[1])
        return any(key.startswith("labels.zarr/c/") for key in far.asked())

    places: list[Any] = [local.places()[1]]
    assert looks() and not looks()
    assert same(places[1], places[0]) and same(places[2], places[0])
    array[0, 0, 0] += 1
    far.upload(far.write("zarr3 zstd", "new/labels", array))
    assert looks()


def test_other_arrays_are_left_to_tensorstore(far: Far) -> None:
    for kind in ("zarr3 sharded", "n5 gzip", "zarr2 fortran"):
        path = far.write(kind, kind.replace(" ", "-"))
        ours = far.make(f"file://{path}/", sampling=Grid())
        assert "tensorstore" in repr(ours) and ours.downloaded == (0, 0)
        assert same(ours[1], far.make(path, sampling=Grid())[1])
        for url in (f"file://{path}", path):
            with pytest.raises((VolumeError, OptionError, FileNotFoundError), match=Path(path).name):
                far.make(url, stage=far.stage)


def test_volumes_that_cannot_be_remote_are_named(far: Far) -> None:
    path, stage = far.write(), far.stage
    np.save(far.folder / "x.npy", np.zeros(SHAPE))
    zarr.create_group(far.folder / "scans.zarr").create_array("raw", data=ARRAY, chunks=CHUNK)
    url, group = far.upload(path), far.upload(str(far.folder / "scans.zarr"))
    for volume, options, error, message in (
        (path, {"storage_options": {"key": "x"}}, OptionError, "storage_options= is for a volume that is a URL"),
        (far.folder / "x.npy", {"stage": stage}, OptionError, r"stage= is for Zarr arrays.*x\.npy.*fastpipe repack"),
        (np.zeros(SHAPE), {"stage": stage}, OptionError, "stage= is for Zarr arrays.*an array"),
        ("http://127.0.0.1:1/scan.zarr", {"stage": stage}, VolumeError, "over HTTP"),
        ("memory://bucket/none.zarr", {"stage": stage}, FileNotFoundError, r"memory://bucket/none\.zarr"),
        ("memory://bucket", {"stage": stage}, VolumeError, r"memory://bucket is no Zarr array; name .* it has scan\.zarr"),
        (group, {"storage_options": {}}, VolumeError, "is a Zarr group; name an array in it .* it has raw"),
        (url, {"stage": Path("/proc/nowhere")}, StageError, "nowhere"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            far.make(volume, **options)
    ours, theirs = far.make(f"{group}/raw"), far.make(far.folder / "scans.zarr/raw", stage=stage)
    assert same(ours[2], theirs[2])


@pytest.fixture
def bucket(s3: Any, far: Far) -> str:
    """The array in a bucket of a server."""
    name, path = s3.bucket(), Path(far.write())
    for file in path.rglob("*"):
        if file.is_file():
            s3.put(name, f"scans/scan.zarr/{file.relative_to(path)}", file.read_bytes())
    return f"s3://{name}/scans/scan.zarr"


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "stages"), [(0, True), (2, False), (2, True)])
def test_patches_come_from_a_bucket(workers: int, stages: bool, s3: Any, bucket: str, far: Far) -> None:
    options: Any = {"sampling": Uniform(30), "seed": 3}
    stage = far.stage if stages else None
    ours = far.make(bucket, storage_options=s3.options, stage=stage, **options)
    theirs = far.make(str(far.folder / "scan.zarr"), **options)
    loaders = [FastLoader(one, 4, num_workers=workers, workers="processes") for one in (ours, theirs)]
    for _ in range(2):
        assert same(*map(list, loaders))
    for text in (repr(ours), repr(ours.plan), repr(vars(ours)), repr(vars(ours._remote))):
        assert s3.options["secret"] not in text
    assert s3.options["secret"].encode() not in pickle.dumps(ours)


def test_wrong_credentials_are_an_access_error(s3: Any, bucket: str, far: Far) -> None:
    with pytest.raises(StoreAccessError, match=r"scan\.zarr") as caught:
        far.make(bucket, storage_options={**s3.options, "secret": "hush-this-is-wrong"})
    assert "hush" not in str(caught.value)
    with pytest.raises((StoreError, FileNotFoundError), match="no-such-bucket-of-ours"):
        far.make("s3://no-such-bucket-of-ours/scan.zarr", storage_options=s3.options)


def test_credentials_may_end(s3: Any, bucket: str, far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = far.make(bucket, storage_options=s3.options, bad_samples="skip")
    monkeypatch.setattr(type(ours._remote.stores[0].bare), "get", raising(StoreAccessError("not any more")))
    with pytest.raises(StoreAccessError, match="not any more"):
        batches(ours)
