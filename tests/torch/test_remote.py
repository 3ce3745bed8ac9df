"""Datasets over URLs, buckets and mounted buckets: the samples of the same folder on a disk."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
from dataset_kinds import KINDS
from delay_proxy import Faults
from mounts import Mount, missing_for_mounts, rclone_mount, s3fs_mount
from same import same
from streams import BY_PROCESSES, plain, stream
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

import fastpipe
from fastpipe import Cache, FastHDF5Dataset, FastImageFolder, FastLoader, Stage
from fastpipe.core import archives
from fastpipe.core.archive_paths import ChangedArchiveError
from fastpipe.errors import BadSampleError, OptionError, StageError, StoreAccessError, StoreError

pytestmark = pytest.mark.usefixtures("same_generators", "own_cache_folder")

STEADY = v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
ROOT = "memory://bucket/train"
SECRET = "hush-this-is-wrong"
ODD_KEYS = [
    "one/a.jpg", "one/a/b.jpg", "one/a.jpg/b.jpg", "one/A.jpg", "one/a.JPG", "one/with space.jpg", "one/100%.jpg",
    "one/100%25.jpg", "one/what?.jpg", "one/a#b.jpg", "one/a+b.jpg", "one/ü.jpg", "one/u\u0308.jpg",
    "two/" + "k" * 986 + ".jpg",
]  # fmt: skip

Make = Callable[..., FastImageFolder]


@pytest.fixture
def objects(photo_tree: Path) -> Iterator[Any]:
    """The tree's files as objects of fsspec's file system in memory."""
    system = fsspec.filesystem("memory")
    for path in sorted(photo_tree.rglob("*.jpg")):
        system.pipe(f"/bucket/train/{path.relative_to(photo_tree)}", path.read_bytes())
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


def _key(path: str) -> str:
    return path.split("memory:/")[1]


@pytest.fixture
def make(objects: Any) -> Make:
    return lambda transform=STEADY, **options: FastImageFolder(ROOT, transform, **options)


@pytest.fixture(params=["ahead", "staged"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a dataset: without a stage, and with one."""
    return {"stage": Stage(tmp_path / "stage")} if request.param == "staged" else {}


def _epochs(loader: Any) -> list[Any]:
    torch.manual_seed(1)
    return [*stream(loader), *stream(loader)]


def test_samples_and_classes_are_those_of_the_folder(make: Make, near: Any, photo_tree: Path) -> None:
    ours, theirs = make(None, **near), ImageFolder(photo_tree)
    assert (ours.root, ours.classes, ours.class_to_idx) == (ROOT, theirs.classes, theirs.class_to_idx)
    assert list(ours.samples) == [(path.replace(str(photo_tree), ROOT), n) for path, n in theirs.samples]
    assert ours.targets == theirs.targets and ours.imgs is ours.samples and isinstance(ours, ImageFolder)
    for index in (0, 5, -1):
        assert same(ours[index], theirs[index])
    text = repr(ours.plan) + repr(FastLoader(ours, 2).plan)
    assert ROOT in text and ("stage" in repr(ours)) == bool(near) == ("staged in" in text)
    names, drawn = theirs.classes, fastpipe.Subset(num=2, seed=42)
    for classes, expected in ((names[2:0:-1], names[2:0:-1]), (lambda found: found[1:], names[1:])):
        assert make(classes=classes).classes == expected
    assert make(classes=drawn).classes == drawn.select(names)
    assert set(make(classes=drawn).targets) == {0, 1}


def test_changed_samples_are_those_of_the_folder(make: Make, near: Any, photo_tree: Path) -> None:
    ours, local = make(**near), FastImageFolder(photo_tree, STEADY)
    for dataset in (ours, local):
        dataset.samples = dataset.samples[4:12]
        dataset.samples.reverse()
    assert stream(FastLoader(ours, 3)) == stream(FastLoader(local, 3))


@pytest.mark.parametrize("transform", [RANDOM, STEADY], ids=["random", "steady"])
def test_decoded_images_are_kept(make: Make, near: Any, photo_tree: Path, transform: Any) -> None:
    dataset = make(transform, cache=Cache("ram", 64 << 20), seed=1, **near)
    theirs = FastImageFolder(photo_tree, transform, seed=1, cache="off")
    assert _epochs(FastLoader(dataset, 5)) == _epochs(FastLoader(theirs, 5))
    assert len(dataset._running().cache.store) == len(dataset)


def test_a_mounted_folder_is_staged_once(photo_tree: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    shutil.copytree(photo_tree, mount)
    theirs = stream(FastLoader(FastImageFolder(photo_tree, STEADY), 5))
    dataset = FastImageFolder(mount, STEADY, stage=tmp_path / "stage")
    assert list(dataset.samples) == ImageFolder(mount).samples
    assert _epochs(FastLoader(dataset, 5)) == theirs * 2
    assert dataset.downloaded[0] == len(dataset)
    dataset.close()
    again = FastImageFolder(mount, STEADY, stage=tmp_path / "stage")
    mount.rename(tmp_path / "away")
    assert stream(FastLoader(again, 5)) == theirs


def test_images_and_folders_of_a_mount_that_is_gone_are_named(
    near: Any, photo_tree: Path, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    shutil.copytree(photo_tree, mount)
    dataset = FastImageFolder(mount, STEADY, cache="off", **near)
    mount.rename(tmp_path / "away")
    # With a stage it is known that each was there: then none of them is a bad sample.
    kind, words = (StoreError, "Is it still mounted") if near else (BadSampleError, "FileNotFoundError")
    with pytest.raises(kind, match=words) as error:
        stream(FastLoader(dataset, 5))
    assert str(dataset.samples[0][0]) in str(error.value)
    (tmp_path / "empty").mkdir()
    for root in (mount, tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match=str(root)):
            FastImageFolder(root, STEADY, **near)


@pytest.mark.parametrize("root", ["train", "train/", "./train", "~/train", Path("train"), Path("../x/train")])
def test_a_staged_folder_has_the_paths_that_torchvision_gives(
    root: Any, photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train").symlink_to(photo_tree)
    monkeypatch.chdir(tmp_path / "x")
    monkeypatch.setenv("HOME", str(tmp_path / "x"))
    theirs, ours = ImageFolder(root), FastImageFolder(root, stage=tmp_path / "stage")
    assert (ours.root, list(ours.samples), ours.classes) == (theirs.root, theirs.samples, theirs.classes)
    assert ours[3][0].tobytes() == theirs[3][0].tobytes()


def test_an_epoch_after_the_first_downloads_nothing(make: Make, objects: Any, tmp_path: Path) -> None:
    dataset = make(stage=tmp_path / "stage")
    loader = FastLoader(dataset, 5, shuffle=True, seed=1)
    size = sum(objects.size(_key(path)) for path, _ in dataset.samples)
    for _ in range(2):
        assert sorted(label for _, labels in loader for label in labels.tolist()) == dataset.targets
        assert dataset.downloaded == (len(dataset), size)
    again = make(stage=tmp_path / "stage")  # as another run of the script
    stream(FastLoader(again, 5))
    assert again.downloaded == (0, 0)


def test_all_of_it_can_be_staged_before_training(make: Make, objects: Any, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="max_bytes"):
        make(stage=Stage(tmp_path / "small", max_bytes=20_000)).stage_all()
    with pytest.raises(OptionError, match="stage="):
        make().stage_all()
    dataset = make(stage=tmp_path / "stage")
    gone = dataset.samples[3][0]
    objects.rm(_key(gone))
    progress: list[tuple[int, int]] = []
    (failed,) = dataset.stage_all(lambda count, nbytes: progress.append((count, nbytes)))
    assert failed[0] == gone and isinstance(failed[1], FileNotFoundError)
    assert dataset.downloaded[0] == len(dataset) - 1 and progress == sorted(progress)
    objects.rm("/bucket", recursive=True)
    again = make(stage=tmp_path / "stage", bad_samples="skip")
    assert sum(len(labels) for _, labels in FastLoader(again, 5)) == len(dataset) - 1


def test_a_mirror_is_filled_while_the_first_batches_are_used(make: Make, tmp_path: Path) -> None:
    dataset = make(stage=Stage(tmp_path / "stage", mode="mirror", read_ahead=1 << 14))
    batches = iter(FastLoader(dataset, 2, shuffle=True, seed=1))
    next(batches)
    staged = dataset._remote.reader()._staged  # type: ignore[union-attr]
    while not all(map(staged.has, range(len(dataset)))):
        torch.empty(0)
    assert sum(1 for _ in batches) == len(dataset) // 2 - 1
    assert dataset.downloaded[0] == len(dataset)


def test_the_next_epoch_is_fetched_ahead_of_it(make: Make) -> None:
    dataset = make()
    stream(FastLoader(dataset, 5, shuffle=True, seed=1))
    remote: Any = dataset._remote
    while remote.reader().prefetcher.ahead < int(remote.listing.sizes.sum()):
        torch.empty(0)
    assert dataset.downloaded[0] == len(dataset)  # as all of them fit


def test_a_listing_is_kept_until_it_is_refreshed(make: Make, objects: Any, caplog: Any) -> None:
    dataset = make()
    objects.pipe(f"/bucket/train/{dataset.classes[0]}/zzz.jpg", b"new")
    with caplog.at_level(logging.INFO, logger="fastpipe.index"):
        assert len(make()) == len(dataset)
    assert "refresh=True" in caplog.text
    for options in ({"refresh": True}, {}, {"cache": "off"}):
        assert len(make(**options)) == len(dataset) + 1


@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_a_missing_object_is_a_bad_sample(policy: str, make: Make, objects: Any, near: Any) -> None:
    dataset = make(bad_samples=policy, **near)
    gone = dataset.samples[3][0]
    objects.rm(_key(gone))
    if policy == "raise":
        with pytest.raises(BadSampleError, match=gone):
            stream(FastLoader(dataset, 4))
    else:
        assert sum(len(labels) for _, labels in FastLoader(dataset, 4)) == len(dataset) - (policy == "skip")


def test_new_and_replaced_objects_are_read_as_now(make: Make, objects: Any, near: Any, caplog: Any) -> None:
    dataset = make(**near)
    first, second = (_key(dataset.samples[index][0]) for index in (0, 1))
    objects.pipe(first, objects.cat(second))
    for _ in range(2):
        images = torch.cat([images for images, _ in FastLoader(dataset, 4)])
        assert torch.equal(images[0], images[1])
    assert "refresh=True" in caplog.text
    objects.pipe("/bucket/elsewhere.jpg", objects.cat(second))
    dataset.samples = [("memory://bucket/elsewhere.jpg", 0), *dataset.samples]
    images = next(iter(FastLoader(dataset, 3)))[0]
    assert torch.equal(images[0], images[2])


def test_options_and_roots_that_cannot_work_are_refused(photo_tree: Path, objects: Any) -> None:
    for options in ({"storage_options": {}}, {"refresh": True}):
        with pytest.raises(OptionError, match="URL"):
            FastImageFolder(photo_tree, **options)
    with pytest.raises(OptionError, match="loader"):
        FastImageFolder(ROOT, loader=lambda path: path)
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder in memory://bucket/none"):
        FastImageFolder("memory://bucket/none")


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_a_bucket_has_the_batches_of_the_folder(
    kind: Any, workers: int, s3: Any, bucket: str, near: Any, photo_tree: Path
) -> None:
    """The secret is shown nowhere."""
    root = f"s3://{bucket}/train"
    ours = FastImageFolder(root, RANDOM, storage_options=s3.options, **near)
    theirs = FastImageFolder(photo_tree, RANDOM)
    assert (ours.classes, ours.targets) == (theirs.classes, theirs.targets)
    assert [path for path, _ in ours.samples] == [
        path.replace(str(photo_tree), root) for path, _ in theirs.samples
    ]
    options = {"batch_size": 5, "shuffle": True, "num_workers": workers}
    assert _epochs(kind(ours, **options)) == _epochs(kind(theirs, **options))
    if workers:
        ours.transform = theirs.transform = STEADY
        with_pickle = kind(ours, 5, num_workers=1, multiprocessing_context="forkserver")
        assert stream(with_pickle) == stream(FastLoader(theirs, 5))
    shown = (repr(ours) + repr(ours.plan) + repr(vars(ours))).encode() + pickle.dumps(ours)
    assert s3.options["secret"].encode() not in shown


def test_every_key_is_read(s3: Any, near: Any, photo_tree: Path, tmp_path: Path) -> None:
    """Also one that climbs, which stays in its bucket and in the stage."""
    names, local, images = (s3.bucket(), s3.bucket()), FastImageFolder(photo_tree, STEADY), {}
    for name, keys in zip(names, (ODD_KEYS, ["one/x.jpg", "one/../../x.jpg"]), strict=True):
        for index, key in enumerate(keys):
            s3.put(name, f"train/{key}", Path(local.samples[index][0]).read_bytes())
            images[f"s3://{name}/train/{key}"] = local[index][0]
    assert sorted(s3.keys(names[1])) == ["train/one/../../x.jpg", "train/one/x.jpg"]
    before = set(tmp_path.rglob("*.jpg"))
    for name, classes in zip(names, (["one", "two"], None), strict=True):
        dataset = FastImageFolder(f"s3://{name}/train", STEADY, storage_options=s3.options, **near)
        assert classes in (None, dataset.classes)
        assert {path for path, _ in dataset.samples} <= images.keys()
        assert len(dataset) == len(ODD_KEYS) or name == names[1]
        for _ in range(2):
            loaded = torch.cat([batch for batch, _ in FastLoader(dataset, 4)])
            for image, (path, _) in zip(loaded, dataset.samples, strict=True):
                assert torch.equal(image, images[path]), path
    assert set(tmp_path.rglob("*.jpg")) == before


def test_errors_of_a_bucket_name_it_and_no_secret(s3: Any, bucket: str) -> None:
    options = {**s3.options, "secret": SECRET}
    with pytest.raises(StoreAccessError, match=bucket) as caught:
        FastImageFolder(f"s3://{bucket}/train", STEADY, storage_options=options, refresh=True)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error) + repr(error) + repr(vars(error))
        error = error.__cause__ or error.__context__
    assert SECRET.encode() not in pickle.dumps(caught.value)
    with pytest.raises((StoreError, FileNotFoundError), match="no-such-bucket-of-ours") as caught:
        FastImageFolder("s3://no-such-bucket-of-ours/train", STEADY, storage_options=s3.options)
    assert s3.options["secret"] not in str(caught.value)


@pytest.fixture
def shards(s3: Any, tmp_path: Path) -> str:
    """The URL of shards in a bucket, which also lie in ``tmp_path``."""
    name = s3.bucket()
    KINDS["images in shards"].write(tmp_path)
    for path in sorted(tmp_path.glob("*.tar")):
        s3.put(name, f"of/{path.name}", path.read_bytes())
    return f"s3://{name}/of/shard-{{0..2}}.tar"


def _of_shards(url: str, s3: Any, target: Any = ("cls", "json"), **options: Any) -> FastImageFolder:
    options = {"storage_options": s3.options, **options}
    return FastImageFolder.from_samples(url, RANDOM, image="jpg", target=target, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_shards_in_a_bucket_have_the_batches_of_the_files(
    kind: Any, workers: int, s3: Any, shards: str, near: Any, tmp_path: Path
) -> None:
    ours, theirs = _of_shards(shards, s3, **near), KINDS["images in shards"].fast(tmp_path, transform=RANDOM)
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    assert _epochs(kind(ours, **options)) == _epochs(kind(theirs, **options))
    assert ours.samples[3][0].startswith(f"{shards.partition('shard')[0]}shard-0.tar/@")
    classes = _of_shards(shards.replace("{0..2}", "*"), s3, "cls", **near)
    assert classes.targets == [target for target, _ in theirs.targets]
    assert s3.options["secret"].encode() not in pickle.dumps(classes)


def test_shards_are_listed_once_and_a_busy_server_is_asked_again(
    s3: Any, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "_KEEP_FROM_S", -1.0)
    theirs = KINDS["images in shards"].fast(tmp_path, transform=RANDOM)
    with s3.proxy(Faults(delay_ms=0, jitter_ms=0)) as proxy:
        made = []
        for _ in range(2):
            made.append(proxy.counts().requests)
            assert _of_shards(shards, s3, storage_options=proxy.options).targets == theirs.targets
        made.append(proxy.counts().requests)
        assert made[2] - made[1] == made[1] - made[0] - 3  # each shard is read in one request
        proxy.change(busy=0.3, cut=0.2, cut_after=300)
        ours = _of_shards(shards, s3, storage_options=proxy.options, cache="off")
        assert _epochs(FastLoader(ours, 5)) == _epochs(FastLoader(theirs, 5))
        assert proxy.counts().busy and proxy.counts().cut


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_a_shard_that_changes_in_the_bucket_is_an_error(s3: Any, shards: str, near: Any, policy: Any) -> None:
    bucket = shards.split("/")[2]
    ours = _of_shards(shards, s3, bad_samples=policy, **near)
    s3.put(bucket, "of/shard-1.tar", bytes(20480))
    with pytest.raises(ChangedArchiveError, match="the archive has changed since it was listed"):
        list(FastLoader(ours, 5))
    with pytest.raises(FileNotFoundError, match="shard-3"):
        _of_shards(shards.replace("0..2", "0..3"), s3)
    with pytest.raises(FileNotFoundError, match=r"no object matches .*of/x-\*"):
        _of_shards(shards.replace("shard-{0..2}", "x-*"), s3)


_PROGRAMS = {"s3fs": s3fs_mount, "rclone": rclone_mount}


@pytest.fixture(scope="module")
def table(s3: Any, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file of HDF5 in the bucket."""
    path = tmp_path_factory.mktemp("table") / "table.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("values", data=np.arange(4000, dtype=np.float32).reshape(1000, 4), chunks=(64, 4))
    s3.put(bucket, "table.h5", path.read_bytes())


@pytest.fixture
def mounting(s3: Any, bucket: str, table: None, tmp_path: Path) -> Callable[..., Any]:
    """Mounts the bucket; options as of ``s3fs_mount``."""

    def mount(program: str = "s3fs", **options: Any) -> AbstractContextManager[Mount]:
        if missing := missing_for_mounts(program):
            pytest.skip(missing)
        (tmp_path / "mount").mkdir(exist_ok=True)
        given = {
            "endpoint": s3.endpoint, "bucket": bucket, "key": s3.options["key"],
            "secret": s3.options["secret"], "mountpoint": tmp_path / "mount", **options,
        }  # fmt: skip
        return _PROGRAMS[program](**given)

    return mount


def _epoch(dataset: Any) -> Any:
    (batch,) = stream(FastLoader(dataset, len(dataset)))
    return batch


def _is_mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def test_datasets_of_a_mount_have_the_samples_of_the_stock_ones(mounting: Any, photo_tree: Path) -> None:
    with mounting() as mount:
        root = mount.path / "train"
        dataset, stock = FastImageFolder(root, STEADY), ImageFolder(root)
        assert list(dataset.samples) == stock.samples and dataset.classes == stock.classes
        assert _epoch(dataset) == plain(default_collate(list(ImageFolder(photo_tree, STEADY))))
        dataset.close()
        rows = FastHDF5Dataset(mount.path / "table.h5", "values")
        batches = torch.cat([batch.clone() for batch in FastLoader(rows, 100)])
        assert torch.equal(batches, torch.arange(4000, dtype=torch.float32).reshape(1000, 4))
        del rows  # which has the file open


def test_an_image_of_a_mount_whose_program_was_killed_is_named(mounting: Any, near: Any) -> None:
    with mounting() as mount:
        dataset = FastImageFolder(mount.path / "train", STEADY, cache="off", **near)
        os.kill(mount.pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"not connected|abort") as error:
            _epoch(dataset)
        assert str(dataset.samples[0][0]) in str(error.value)
        dataset.close()
    assert not _is_mounted(mount.path)


def _files(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*.jpg")}


@pytest.mark.parametrize("program", sorted(_PROGRAMS))
def test_a_mount_ends_although_a_file_is_open(
    program: str, mounting: Any, photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/missing")
    with mounting(program) as mount:
        assert _files(mount.path / "train") == _files(photo_tree)
        assert _is_mounted(mount.path)
        while mount.cpu_seconds() == 0:  # what it counts is ticks of the clock
            os.listdir(mount.path / "train")
        with pytest.raises(RuntimeError, match="is a mount already"):
            mounting(program).__enter__()
        file = open(mount.path / "table.h5", "rb")  # noqa: SIM115
    assert not _is_mounted(mount.path) and not os.path.exists(f"/proc/{mount.pid}")
    assert mount.cpu_seconds() == 0
    mount.unmount()
    with pytest.raises(OSError, match="not connected"):
        file.close()


def test_a_failed_mount_is_an_error_without_secrets(mounting: Any, s3: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)has not mounted .*bucket or key not found") as error:
        mounting(bucket="missing").__enter__()
    assert s3.options["secret"] not in str(error.value)
    with pytest.raises(RuntimeError, match="invalid credentials") as error:
        mounting(secret="hush").__enter__()
    assert "hush" not in str(error.value) and not _is_mounted(tmp_path / "mount")
