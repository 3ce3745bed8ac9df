"""``FastPatchDataset`` over URLs of Zarr arrays: the samples of the same array in a folder, and few requests."""

from __future__ import annotations

import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zarr
from same import same
from torch.utils.data import DataLoader
from volume_kinds import random_array, write_volume

from fastpipe import FastLoader, FastPatchDataset, Shuffle, Stage
from fastpipe.errors import BadSampleError, OptionError, StageError, StoreAccessError, StoreError, VolumeError
from fastpipe.sampling import Grid, Uniform
from fastpipe.stores.filesystems import FilesystemStore, FolderStore

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK, PATCH = (20, 33, 50), (8, 16, 16), (9, 12, 17)
KINDS: dict[str, str] = {
    "zarr3 blosc": "blosc", "zarr3 bitshuffle": "blosc", "zarr3 zstd": "zstd", "zarr3 gzip": "gzip",
    "zarr3 none": "not compressed", "zarr3 big-endian": "zstd", "zarr2 blosc": "blosc", "zarr2 zstd": "zstd",
    "zarr2 zlib": "zlib", "zarr2 none": "not compressed",
}  # fmt: skip
CHUNKS = 3 * 3 * 4
SAMPLINGS = {"uniform": Uniform(23), "grid": Grid((7, 9, 11))}


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty again after the test."""
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


@pytest.fixture
def upload(memory: Any) -> Callable[[str], str]:
    """Puts a folder's files into memory; the URL of them."""

    def put(folder: str) -> str:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                memory.pipe(f"/bucket/{Path(folder).name}/{path.relative_to(folder)}", path.read_bytes())
        return f"memory://bucket/{Path(folder).name}"

    return put


@pytest.fixture
def make() -> Iterator[Callable[..., FastPatchDataset]]:
    """Makes datasets that are closed after the test."""
    made = []

    def dataset(volume: Any, **options: Any) -> FastPatchDataset:
        made.append(FastPatchDataset(volume, options.pop("patch", PATCH), **options))
        return made[-1]

    yield dataset
    while made:  # and none is kept by the fixture
        made.pop().close()


@pytest.fixture
def volume(tmp_path: Path) -> str:
    """A Zarr array in a folder."""
    path: str = write_volume("zarr3 blosc", tmp_path / "scan", random_array(SHAPE, "u2"), CHUNK)
    return path


@pytest.fixture(params=["ahead", "staged"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a dataset: without a stage, and with one."""
    return {"stage": Stage(tmp_path / "stage")} if request.param == "staged" else {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Counter[str]]:
    """How often each object was asked for since the last call, in all processes that were forked."""
    log = tmp_path / "asked"
    log.touch()

    for kind in (FilesystemStore, FolderStore):

        def get(self: Any, key: str, version: str = "", got: Any = kind.get) -> Any:
            with open(log, "a") as file:
                file.write(f"{key}\n")
            return got(self, key, version)

        monkeypatch.setattr(kind, "get", get)

    def counted() -> Counter[str]:
        keys = log.read_text().splitlines()
        log.write_text("")
        return Counter(keys)

    return counted


def _batches(loader: Any) -> list[Any]:
    torch.manual_seed(1)
    return [batch if isinstance(batch, torch.Tensor) else list(batch) for batch in loader]


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_read_as_from_a_folder(
    kind: str, upload: Any, make: Any, tmp_path: Path
) -> None:
    near = {"stage": tmp_path / "stage"} if kind.startswith("zarr2") else {}
    path = write_volume(kind, tmp_path / "scan", random_array(SHAPE, "i2"), CHUNK)
    ours, theirs = (
        make(upload(path), sampling=Grid((7, 9, 11)), **near),
        make(path, sampling=Grid((7, 9, 11))),
    )
    assert same(_batches(FastLoader(ours, 5)), _batches(FastLoader(theirs, 5)))
    assert ours[3].tobytes() == theirs[3].tobytes()
    how = "staged in '" if near else "fetched ahead"
    assert f"Zarr, chunks of 8×16×16 (4 KiB; {KINDS[kind]}), by fsspec, {how}" in repr(ours)


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_were_never_written_are_not_fetched(
    version: int, upload: Any, make: Any, near: Any, asked: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "scan.zarr")
    array = zarr.create_array(
        path, shape=SHAPE, chunks=CHUNK, dtype="i4", fill_value=-7, zarr_format=version,
        chunk_key_encoding={"name": "v2", "separator": "/"} if version == 2 else None,
    )  # fmt: skip
    array[3:9, :20, 5:30] = 4
    ours = make(upload(path), sampling=Grid((7, 9, 11)), **near)
    asked()
    assert same(_batches(FastLoader(ours, 5)), _batches(FastLoader(make(path, sampling=Grid((7, 9, 11))), 5)))
    written = [key for key in asked() if "zarr.json" not in key and ".z" not in key.rpartition("/")[2]]
    assert len(written) == 2 * 2 * 2


@pytest.mark.parametrize(("shuffle", "workers"), [(True, 2), (Shuffle(unit="group"), 0)])
def test_a_seed_gives_the_patches_of_the_local_array(
    shuffle: Any, workers: int, volume: str, upload: Any, make: Any, near: Any
) -> None:
    def run(what: str, **options: Any) -> list[Any]:
        dataset = make(what, sampling=Uniform(23), seed=5, **options)
        made = FastLoader(dataset, 4, shuffle=shuffle, num_workers=workers, workers="processes")
        return [batch for _ in range(3) for batch in _batches(made)]

    theirs = run(volume)
    if shuffle is True:
        assert same(run(upload(volume), **near), theirs)
    else:  # tours go by what is decoded at once, which is another thing here
        assert same(run(upload(volume), **near), run(upload(volume)))


@pytest.mark.parametrize(("kind", "stages"), [(DataLoader, True), (FastLoader, False)])
def test_workers_that_get_a_pickle_have_the_same_patches(
    kind: Any, stages: bool, volume: str, make: Any, tmp_path: Path
) -> None:
    # What is in memory is in one process alone.
    stage = tmp_path / "stage" if stages else None
    ours = make(f"file://{volume}", sampling=Grid((7, 9, 11)), stage=stage)
    loader = kind(ours, batch_size=5, num_workers=1, multiprocessing_context="forkserver")
    assert same(_batches(loader), _batches(FastLoader(make(volume, sampling=Grid((7, 9, 11))), 5)))


@pytest.mark.parametrize("padding", ["reflect", "wrap"])
def test_padded_patches_are_those_of_the_local_array(
    padding: str, volume: str, upload: Any, make: Any
) -> None:
    def run(what: str) -> list[Any]:
        dataset = make(what, patch=(24, 35, 20), sampling=Uniform(7), padding=padding)
        return _batches(FastLoader(dataset, 3, seed=1, shuffle=True))

    assert same(run(upload(volume)), run(volume))


def test_labels_and_several_volumes_are_read_as_local_ones(
    upload: Any, make: Any, near: Any, asked: Any, tmp_path: Path
) -> None:
    images, labels = [], []
    for case, shape in enumerate([(20, 33, 50), (17, 40, 21)]):
        array = random_array((2, *shape), "f4", case)
        images.append(write_volume("zarr3 zstd", tmp_path / f"image{case}", array, (1, *CHUNK)))
        labels.append(write_volume("zarr2 blosc", tmp_path / f"label{case}", array[0].astype("u1"), CHUNK))
    options = {"sampling": Uniform(30), "seed": 3}
    theirs = make(images, labels=labels, **options)
    ours = make(
        [upload(path) for path in images], labels=[upload(path) for path in labels], **options, **near
    )
    asked()
    for _ in range(2):
        assert same(
            _batches(FastLoader(ours, 4, shuffle=True)), _batches(FastLoader(theirs, 4, shuffle=True))
        )
    assert max(asked().values()) == 1
    # What is in memory beside what is far away.
    some = make(upload(images[0]), labels=zarr.open_array(labels[0])[:], **options, **near)
    assert same(
        _batches(FastLoader(some, 4)), _batches(FastLoader(make(images[0], labels=labels[0], **options), 4))
    )


@pytest.mark.parametrize(
    ("seed", "sampling", "workers"), [(3, "uniform", 0), (None, "uniform", 2), (3, "grid", 2)]
)
def test_each_chunk_is_fetched_once(
    seed: int | None, sampling: str, workers: int, volume: str, upload: Any, make: Any, asked: Any,
    tmp_path: Path
) -> None:  # fmt: skip
    stage = Stage(tmp_path / "stage")
    ours = make(upload(volume), sampling=SAMPLINGS[sampling], seed=seed, stage=stage)
    asked()
    loader = FastLoader(ours, 4, shuffle=True, num_workers=workers, workers="processes")
    _batches(loader), _batches(loader), _batches(DataLoader(ours, 3))
    assert set(asked().values()) == {1}
    ours.close()
    again = make(upload(volume), sampling=Grid((7, 9, 11)), stage=stage, cache="off")
    _batches(FastLoader(again, 4))
    asked()
    _batches(FastLoader(again, 4, shuffle=True))
    assert not asked()


@pytest.mark.parametrize(("kind", "sampling"), [(DataLoader, "grid"), (FastLoader, "uniform")])
def test_without_a_stage_a_chunk_is_fetched_once_while_it_is_remembered(
    sampling: str, kind: Any, volume: str, upload: Any, make: Any, asked: Any
) -> None:
    ours = make(upload(volume), sampling=SAMPLINGS[sampling], seed=3, threads=3)
    asked()
    for _ in range(3):
        _batches(kind(ours, 4, shuffle=True))
    assert set(asked().values()) == {1}
    _nothing_is_held(ours)


def _nothing_is_held(dataset: FastPatchDataset) -> None:
    """Whether all that was said to be needed was taken, or let go of."""
    assert dataset._remote is not None
    for store in dataset._remote.stores:
        store.settle()
        assert not store._living
        assert not [slot for slot in store.reader().prefetcher.slots.values() if slot.wants]


def test_one_patch_fetches_its_chunks_side_by_side(
    volume: str, upload: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each waits until as many are under way.
    meeting, get = threading.Barrier(4), FilesystemStore.get
    ours = make(upload(volume), patch=(8, 32, 32), sampling=Grid((8, 33, 50)), stage=None)

    def met(self: Any, key: str, version: str = "") -> Any:
        meeting.wait(30)
        return get(self, key, version)

    monkeypatch.setattr(FilesystemStore, "get", met)
    assert ours[0].tobytes() == make(volume, patch=(8, 32, 32), sampling=Grid((8, 33, 50)))[0].tobytes()


@pytest.mark.parametrize(
    ("damage", "policy", "stages"),
    [
        ("missing", "raise", False), ("missing", "skip", True), ("missing", "replace", False),
        ("damaged", "raise", True), ("damaged", "skip", False), ("short", "raise", False),
    ],
)  # fmt: skip
def test_a_bad_chunk_follows_the_policy(
    damage: str, policy: str, stages: bool, volume: str, upload: Any, make: Any, memory: Any, tmp_path: Path
) -> None:
    near = {"stage": tmp_path / "stage"} if stages else {}
    ours = make(upload(volume), sampling=Grid(CHUNK), patch=CHUNK, bad_samples=policy, seed=1, **near)
    key = "/bucket/scan.zarr/c/1/0/1"
    data = memory.cat_file(key)
    if damage == "missing":
        memory.rm(key)
    else:  # of the same size it has another version, and is used as it is now
        memory.pipe(key, data[:-9] if damage == "short" else data[:40] + bytes(len(data) - 40))
    theirs = make(volume, sampling=Grid(CHUNK), patch=CHUNK)
    bad = np.flatnonzero((theirs.places()[1] // CHUNK == [1, 0, 1]).all(axis=1)).tolist()
    if policy == "raise":
        with pytest.raises(BadSampleError, match=r"scan\.zarr/c/1/0/1.*8:16, 0:16, 16:32") as caught:
            _batches(FastLoader(ours, 3))
        assert caught.value.index == bad[0]
        with pytest.raises(BadSampleError, match=r"memory://bucket/scan\.zarr/c/1/0/1"):
            ours[bad[0]]
        return
    found = torch.cat(_batches(FastLoader(ours, 3)))
    good = [index for index in range(len(theirs)) if index not in bad]
    if policy == "replace":
        assert len(found) == len(theirs)
        found = found[good]
    assert found.numpy().tobytes() == np.stack([theirs[index] for index in good]).tobytes()


def test_other_arrays_are_left_to_tensorstore(make: Any, tmp_path: Path) -> None:
    array = random_array(SHAPE, "u2")
    for kind in ("zarr3 sharded", "n5 gzip", "zarr2 fortran"):
        path = write_volume(kind, tmp_path / kind.replace(" ", "-"), array, CHUNK)
        ours = make(f"file://{path}/", sampling=Grid())
        assert "tensorstore" in repr(ours) and ours.downloaded == (0, 0)
        assert ours[1].tobytes() == make(path, sampling=Grid())[1].tobytes()
        for url in (f"file://{path}", path):
            with pytest.raises((VolumeError, OptionError, FileNotFoundError)) as caught:
                make(url, stage=tmp_path / "stage")
            assert Path(path).name in str(caught.value)


def test_volumes_that_cannot_be_remote_are_named(volume: str, upload: Any, make: Any, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    np.save(tmp_path / "x.npy", np.zeros(SHAPE))
    with pytest.raises(OptionError, match=r"storage_options= is for a volume that is a URL"):
        make(volume, storage_options={"key": "x"})
    with pytest.raises(OptionError, match=r"stage= is for Zarr arrays.*x\.npy.*fastpipe repack"):
        make(tmp_path / "x.npy", stage=stage)
    with pytest.raises(OptionError, match=r"stage= is for Zarr arrays.*an array"):
        make(np.zeros(SHAPE), stage=stage)
    with pytest.raises(VolumeError, match=r"over HTTP"):
        make("http://127.0.0.1:1/scan.zarr", stage=stage)
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/nothing\.zarr"):
        make("memory://bucket/nothing.zarr", stage=stage)
    upload(volume)
    with pytest.raises(VolumeError, match=r"memory://bucket is no Zarr array; name .* it has scan\.zarr"):
        make("memory://bucket", stage=stage)
    with pytest.raises(StageError):
        make(upload(volume), stage=Path("/proc/nowhere"))


@pytest.fixture
def in_bucket(s3: Any, volume: str) -> str:
    """The array in a bucket of a server."""
    name: str = s3.bucket()
    for path in sorted(Path(volume).rglob("*")):
        if path.is_file():
            s3.put(name, f"scans/scan.zarr/{path.relative_to(volume)}", path.read_bytes())
    return f"s3://{name}/scans/scan.zarr"


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "stages"), [(0, True), (2, False), (2, True)])
def test_patches_come_from_a_bucket(
    workers: int, stages: bool, s3: Any, in_bucket: str, volume: str, make: Any, tmp_path: Path
) -> None:
    near = {"stage": tmp_path / "stage"} if stages else {}

    def run(what: str, **options: Any) -> list[Any]:
        made = FastLoader(
            make(what, sampling=Uniform(30), seed=3, **options), 4, num_workers=workers, workers="processes"
        )
        return _batches(made) + _batches(made)

    assert same(run(in_bucket, storage_options=s3.options, **near), run(volume))


def test_secrets_are_shown_nowhere(s3: Any, in_bucket: str, make: Any, tmp_path: Path) -> None:
    ours = make(in_bucket, storage_options=s3.options, stage=tmp_path / "stage")
    next(iter(FastLoader(ours, 4)))
    for text in (repr(ours), repr(ours.plan), repr(vars(ours)), repr(vars(ours._remote))):
        assert s3.options["secret"] not in text
    assert s3.options["secret"].encode() not in pickle.dumps(ours)


def test_wrong_credentials_are_an_access_error(s3: Any, in_bucket: str, make: Any) -> None:
    with pytest.raises(StoreAccessError, match=r"scan\.zarr") as caught:
        make(in_bucket, storage_options={**s3.options, "secret": "hush-this-is-wrong"})
    assert "hush" not in str(caught.value)
    with pytest.raises((StoreError, FileNotFoundError), match="no-such-bucket-of-ours"):
        make("s3://no-such-bucket-of-ours/scan.zarr", storage_options=s3.options)


def test_credentials_that_end_are_no_bad_sample(
    s3: Any, in_bucket: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make(in_bucket, storage_options=s3.options, bad_samples="skip")

    def refuse(*_: Any) -> Any:
        raise StoreAccessError("not any more")

    assert ours._remote is not None
    monkeypatch.setattr(type(ours._remote.stores[0].bare), "get", refuse)
    with pytest.raises(StoreAccessError, match="not any more"):
        _batches(FastLoader(ours, 4))
    assert os.path.basename(in_bucket) in repr(ours)
