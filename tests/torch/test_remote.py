"""``FastImageFolder`` over a URL: the samples of the same folder on a disk, in every way to load them."""

from __future__ import annotations

import functools
import gc
import logging
import pickle
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

import fastpipe
from fastpipe import Cache, FastImageFolder, FastLoader, Stage
from fastpipe.errors import BadSampleError, OptionError, StageError

BY_PROCESSES = functools.partial(FastLoader, workers="processes")

pytestmark = pytest.mark.usefixtures("same_generators", "own_cache_folder")

STEADY = v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
ROOT = "memory://bucket/train"


@pytest.fixture
def objects(photo_tree: Path) -> Iterator[Any]:
    """The tree's files as objects of fsspec's file system in memory."""
    system = fsspec.filesystem("memory")
    for path in sorted(photo_tree.rglob("*")):
        if path.is_file():
            system.pipe(f"/bucket/train/{path.relative_to(photo_tree)}", path.read_bytes())
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


@pytest.fixture
def make(objects: Any) -> Iterator[Callable[..., FastImageFolder]]:
    """Makes datasets that are closed after the test."""
    made = []

    def dataset(transform: Any = STEADY, **options: Any) -> FastImageFolder:
        made.append(FastImageFolder(ROOT, transform, **options))
        return made[-1]

    yield dataset
    while made:  # and none is kept by the fixture
        made.pop().close()


@pytest.fixture(params=["ahead", "staged"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a dataset: without a stage, and with one."""
    return {"stage": Stage(tmp_path / "stage")} if request.param == "staged" else {}


def _batches(loader: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images.clone(), labels.clone()) for images, labels in loader]


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and torch.equal(s, t) for (x, s), (y, t) in zip(a, b, strict=True)
    )


def test_it_finds_what_is_found_in_a_folder(make: Any, photo_tree: Path) -> None:
    ours, theirs = make(), ImageFolder(photo_tree)
    assert (ours.root, ours.classes, ours.class_to_idx) == (ROOT, theirs.classes, theirs.class_to_idx)
    assert ours.targets == theirs.targets
    assert list(ours.samples) == [
        (path.replace(str(photo_tree), ROOT), target) for path, target in theirs.samples
    ]
    assert ours.imgs is ours.samples and isinstance(ours, ImageFolder)


def test_single_samples(make: Any, near: Any, photo_tree: Path) -> None:
    ours, theirs = make(None, **near), FastImageFolder(photo_tree)
    for index in (0, 5, -1):
        assert ours[index][0].tobytes() == theirs[index][0].tobytes()
        assert ours[index][1] == theirs[index][1]


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_in_a_loader(kind: Any, workers: int, make: Any, near: Any, photo_tree: Path) -> None:
    def run(dataset: Any) -> list[Any]:
        torch.manual_seed(1)
        loader = kind(dataset, batch_size=5, shuffle=True, num_workers=workers)
        return _batches(loader) + _batches(loader)

    assert _same(run(make(RANDOM, **near)), run(FastImageFolder(photo_tree, RANDOM)))


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_seed(workers: int, make: Any, near: Any, photo_tree: Path) -> None:
    def run(dataset: Any) -> list[Any]:
        loader = FastLoader(
            dataset,
            5,
            shuffle=True,
            seed=3,
            num_workers=workers,
            workers="processes",
            persistent_workers=workers > 0,
        )
        return [batch for _ in range(3) for batch in _batches(loader)]

    assert _same(run(make(RANDOM, **near)), run(FastImageFolder(photo_tree, RANDOM)))


def test_workers_that_get_a_pickle(make: Any, near: Any, photo_tree: Path, tmp_path: Path) -> None:
    # What is in memory is in one process alone.
    url = f"file://{photo_tree}"
    theirs = _batches(FastLoader(FastImageFolder(photo_tree, STEADY), 5))
    dataset = FastImageFolder(url, STEADY, **near)
    assert _same(
        _batches(DataLoader(dataset, 5, num_workers=1, multiprocessing_context="forkserver")), theirs
    )
    dataset.close()


def test_a_folder_that_is_far_away(photo_tree: Path, tmp_path: Path, caplog: Any) -> None:
    mount = tmp_path / "mount"
    shutil.copytree(photo_tree, mount)
    theirs = _batches(FastLoader(FastImageFolder(photo_tree, STEADY), 5))
    dataset = FastImageFolder(mount, STEADY, stage=tmp_path / "stage")
    assert list(dataset.samples) == ImageFolder(mount).samples
    for _ in range(2):
        assert _same(_batches(FastLoader(dataset, 5)), theirs)
    assert dataset.downloaded[0] == len(dataset)
    dataset.close()
    again = FastImageFolder(mount, STEADY, stage=tmp_path / "stage")
    mount.rename(tmp_path / "away")
    assert _same(_batches(FastLoader(again, 5)), theirs)
    again.close()


@pytest.mark.parametrize(
    ("kind", "root"),
    [
        (str, "train"),
        (str, "train/"),
        (str, "./train"),
        (str, "~/train"),
        (Path, "train"),
        (Path, "../x/train"),
    ],
)
def test_a_staged_folder_has_the_paths_that_torchvision_gives(
    kind: Any, root: str, photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train").symlink_to(photo_tree)
    monkeypatch.chdir(tmp_path / "x")
    monkeypatch.setenv("HOME", str(tmp_path / "x"))
    theirs = ImageFolder(kind(root))
    ours = FastImageFolder(kind(root), stage=tmp_path / "stage")
    assert (ours.root, list(ours.samples), ours.classes) == (theirs.root, theirs.samples, theirs.classes)
    assert ours[3][0].tobytes() == theirs[3][0].tobytes()
    ours.close()


def test_for_workers_nothing_is_held_in_the_parent_whatever_it_read_before(make: Any, tmp_path: Path) -> None:
    dataset = make(stage=tmp_path / "stage")
    dataset[0], next(iter(FastLoader(dataset, 2)))
    loader = FastLoader(dataset, 5, shuffle=True, seed=1, num_workers=2, workers="processes")
    for _ in range(2):
        _batches(loader)
    prefetcher = dataset._remote.reader().prefetcher
    while prefetcher.active or prefetcher.staging:
        torch.empty(0)
    assert not any(slot.generation == prefetcher.generation for slot in prefetcher.slots.values())


def test_behind_wrappers(make: Any, near: Any, photo_tree: Path) -> None:
    def run(first: Any, second: Any) -> list[Any]:
        both = ConcatDataset([Subset(first, [3, 9, 4]), second])
        return [batch for _ in range(2) for batch in _batches(FastLoader(both, 4, shuffle=True, seed=1))]

    local = FastImageFolder(photo_tree, STEADY)
    assert _same(run(make(**near), make(**near)), run(local, local))
    assert _same(run(make(**near), local), run(local, local))


def test_an_epoch_after_the_first_downloads_nothing(make: Any, tmp_path: Path) -> None:
    dataset = make(stage=tmp_path / "stage")
    loader = FastLoader(dataset, 5, shuffle=True, seed=1)
    first = sorted(label for _, labels in loader for label in labels.tolist())
    count, nbytes = dataset.downloaded
    assert count == len(dataset)
    assert nbytes == sum(
        fsspec.filesystem("memory").size(path.split("memory:/")[1]) for path, _ in dataset.samples
    )
    assert sorted(label for _, labels in loader for label in labels.tolist()) == first
    assert dataset.downloaded == (count, nbytes)
    again = make(stage=tmp_path / "stage")  # as another run of the script
    _batches(FastLoader(again, 5))
    assert again.downloaded == (0, 0)


def test_all_of_it_can_be_staged_before_training(make: Any, objects: Any, tmp_path: Path) -> None:
    dataset = make(stage=tmp_path / "stage")
    gone = dataset.samples[3][0]
    objects.rm(gone.split("memory:/")[1])
    told: list[tuple[int, int]] = []
    (failed,) = dataset.stage_all(lambda count, nbytes: told.append((count, nbytes)))
    assert failed[0] == gone and isinstance(failed[1], FileNotFoundError)
    assert dataset.downloaded[0] == len(dataset) - 1
    assert told == sorted(told)
    objects.rm("/bucket", recursive=True)
    again = make(stage=tmp_path / "stage", bad_samples="skip")
    assert sum(len(labels) for _, labels in FastLoader(again, 5)) == len(dataset) - 1


def test_staging_all_of_it_says_when_there_is_no_room(make: Any, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="max_bytes"):
        make(stage=Stage(tmp_path / "stage", max_bytes=20_000)).stage_all()
    with pytest.raises(OptionError, match="stage="):
        make().stage_all()


def test_a_mirror_is_filled_while_the_first_batches_are_used(make: Any, tmp_path: Path) -> None:
    dataset = make(stage=Stage(tmp_path / "stage", mode="mirror", read_ahead=1 << 14))
    batches = iter(FastLoader(dataset, 2, shuffle=True, seed=1))
    next(batches)
    staged = dataset._remote.reader()._staged
    while not all(map(staged.has, range(len(dataset)))):
        torch.empty(0)
    assert sum(1 for _ in batches) == len(dataset) // 2 - 1
    assert dataset.downloaded[0] == len(dataset)


def test_the_next_epoch_is_fetched_ahead_of_it(make: Any) -> None:
    dataset = make()
    loader = FastLoader(dataset, 5, shuffle=True, seed=1)
    _batches(loader)
    prefetcher = dataset._remote.reader().prefetcher
    while prefetcher.ahead < int(dataset._remote.listing.sizes.sum()):
        torch.empty(0)
    assert dataset.downloaded[0] == len(dataset)  # as all of them fit


@pytest.mark.parametrize("transform", [RANDOM, STEADY], ids=["random", "steady"])
def test_decoded_images_are_kept(make: Any, near: Any, photo_tree: Path, transform: Any) -> None:
    dataset = make(transform, cache=Cache("ram", 64 << 20), seed=1, **near)
    theirs = FastImageFolder(photo_tree, transform, seed=1, cache="off")
    for _ in range(2):
        assert _same(_batches(FastLoader(dataset, 5)), _batches(FastLoader(theirs, 5)))
    store = dataset._running().cache.store
    assert len(store) == len(dataset)
    assert [one.shape for one in store.entries()] != []


def test_the_stock_equivalent(make: Any, near: Any, photo_tree: Path) -> None:
    loader = FastLoader(make(**near), 5, shuffle=True, seed=2)
    assert _same(
        _batches(loader.reference()),
        _batches(FastLoader(FastImageFolder(photo_tree, STEADY), 5, shuffle=True, seed=2)),
    )


def test_samples_that_the_script_changes(make: Any, near: Any, photo_tree: Path) -> None:
    ours, theirs = make(**near), FastImageFolder(photo_tree, STEADY)
    for dataset in (ours, theirs):
        dataset.samples = dataset.samples[4:12]
        dataset.samples.reverse()
    assert _same(_batches(FastLoader(ours, 3)), _batches(FastLoader(theirs, 3)))


def test_a_path_that_was_not_listed(make: Any, objects: Any, near: Any) -> None:
    dataset = make(**near)
    name, target = dataset.samples[0]
    objects.pipe("/bucket/elsewhere.jpg", objects.cat(name.split("memory:/")[1]))
    expected = dataset[0][0]
    dataset.samples = [("memory://bucket/elsewhere.jpg", target), *dataset.samples]
    images, _ = next(iter(FastLoader(dataset, 2)))
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], expected)


def test_classes(make: Any) -> None:
    names = make().classes
    assert make(classes=names[2:0:-1]).classes == names[2:0:-1]
    assert make(classes=lambda found: found[1:]).classes == names[1:]
    drawn = make(classes=fastpipe.Subset(num=2, seed=42))
    assert drawn.classes == fastpipe.Subset(num=2, seed=42).select(names)
    assert set(drawn.targets) == {0, 1}


def test_a_listing_is_kept_until_it_is_refreshed(make: Any, objects: Any, caplog: Any) -> None:
    dataset = make()
    objects.pipe(f"/bucket/train/{dataset.classes[0]}/zzz.jpg", b"new")
    with caplog.at_level(logging.INFO, logger="fastpipe.index"):
        assert len(make()) == len(dataset)
    assert "refresh=True" in caplog.text
    assert len(make(refresh=True)) == len(dataset) + 1
    assert len(make()) == len(dataset) + 1
    assert len(make(cache="off")) == len(dataset) + 1


@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_an_object_that_is_gone_is_a_bad_sample(policy: str, make: Any, objects: Any, near: Any) -> None:
    dataset = make(bad_samples=policy, **near)
    gone = dataset.samples[3][0]
    objects.rm(gone.split("memory:/")[1])
    loader = FastLoader(dataset, 4)
    if policy == "raise":
        with pytest.raises(BadSampleError, match=gone):
            _batches(loader)
        return
    count = sum(len(labels) for _, labels in loader)
    assert count == len(dataset) - (policy == "skip")


def test_an_object_that_was_replaced_is_used_as_it_is_now(
    make: Any, objects: Any, near: Any, caplog: Any
) -> None:
    dataset = make(**near)
    first, second = (dataset.samples[index][0].split("memory:/")[1] for index in (0, 1))
    objects.pipe(first, objects.cat(second))
    images = torch.cat([images for images, _ in FastLoader(dataset, 4)])
    assert torch.equal(images[0], images[1])
    assert "refresh=True" in caplog.text
    images = torch.cat([images for images, _ in FastLoader(dataset, 4)])
    assert torch.equal(images[0], images[1])


def test_options_that_have_no_effect_are_refused(photo_tree: Path, objects: Any) -> None:
    for options in ({"storage_options": {}}, {"refresh": True}):
        with pytest.raises(OptionError, match="URL"):
            FastImageFolder(photo_tree, **options)
    with pytest.raises(OptionError, match="loader"):
        FastImageFolder(ROOT, loader=lambda path: path)


def test_no_class_folder_is_said_as_of_folders(objects: Any) -> None:
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder in memory://bucket/none"):
        FastImageFolder("memory://bucket/none")


def test_what_is_where_is_said(make: Any, near: Any) -> None:
    dataset = make(**near)
    text = repr(dataset.plan) + repr(FastLoader(dataset, 2).plan)
    assert "memory://bucket/train" in text
    assert ("stage" in repr(dataset)) == bool(near) == ("staged in" in text)


def test_a_pickled_dataset_works_where_it_arrives(photo_tree: Path, near: Any) -> None:
    dataset = FastImageFolder(f"file://{photo_tree}", STEADY, **near)
    _batches(FastLoader(dataset, 5))
    other = pickle.loads(pickle.dumps(dataset))
    assert _same(_batches(FastLoader(other, 5)), _batches(FastLoader(dataset, 5)))
    dataset.close()
    other.close()


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_dataset_that_is_dropped_is_freed_with_its_threads(
    photo_tree: Path, tmp_path: Path, seed: int | None, is_staged: bool
) -> None:
    stage = tmp_path / "stage" if is_staged else None
    dataset = FastImageFolder(f"file://{photo_tree}", seed=seed, stage=stage)
    loader: Any = FastLoader(dataset, batch_size=8, shuffle=True, collate_fn=list)
    assert sum(len(batch) for batch in loader) == len(dataset)
    dropped = weakref.ref(dataset)
    del dataset, loader
    gc.collect()
    assert dropped() is None  # and ``no_leaks`` sees to its threads


def test_an_object_that_does_not_come_is_asked_for_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make(bad_samples="skip")
    reader, asked = dataset._remote.reader(), list[str]()
    real, lost = reader.read, dataset.samples[1][0]

    def read(path: str, row: int) -> bytes:
        asked.append(path)
        if path == lost:
            raise FileNotFoundError(2, "No such object", path)
        data: bytes = real(path, row)
        return data

    monkeypatch.setattr(reader, "read", read)
    assert len(dataset.__getitems__(range(4))) == 3
    assert sorted(asked) == sorted(dataset.samples[number][0] for number in range(4))
