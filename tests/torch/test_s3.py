"""``FastImageFolder`` over a bucket of a real server: the samples of the same files in a folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader, Stage
from fastpipe.errors import StoreAccessError, StoreError

pytestmark = pytest.mark.usefixtures("same_generators", "own_cache_folder")

STEADY = v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
SECRET = "hush-this-is-wrong"
ODD = [
    "train/one/a.jpg",
    "train/one/a/b.jpg",
    "train/one/a.jpg/b.jpg",
    "train/one/A.jpg",
    "train/one/a.JPG",
    "train/one/with space.jpg",
    "train/one/100%.jpg",
    "train/one/100%25.jpg",
    "train/one/what?.jpg",
    "train/one/a#b.jpg",
    "train/one/a+b.jpg",
    "train/one/ü.jpg",
    "train/one/u\u0308.jpg",
    "train/two/" + "k" * 986 + ".jpg",
]


@pytest.fixture(scope="module")
def bucket(s3: Any, photo_tree: Path) -> str:
    """The tree's files as objects."""
    name: str = s3.bucket()
    files = [path for path in sorted(photo_tree.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda path: s3.put(name, f"train/{path.relative_to(photo_tree)}", path.read_bytes()), files
            )
        )
    return name


@pytest.fixture(params=["ahead", "staged"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a dataset: without a stage, and with one."""
    return {"stage": Stage(tmp_path / "stage")} if request.param == "staged" else {}


@pytest.fixture
def make(s3: Any, bucket: str, near: dict[str, Any]) -> Iterator[Callable[..., FastImageFolder]]:
    """Makes datasets that are closed after the test."""
    made = []

    def dataset(transform: Any = RANDOM) -> FastImageFolder:
        made.append(FastImageFolder(f"s3://{bucket}/train", transform, storage_options=s3.options, **near))
        return made[-1]

    yield dataset
    while made:  # and none is kept by the fixture
        made.pop().close()


def _batches(loader: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images.clone(), labels.clone()) for images, labels in loader]


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and torch.equal(s, t) for (x, s), (y, t) in zip(a, b, strict=True)
    )


def test_it_finds_what_is_found_in_a_folder(make: Any, bucket: str, photo_tree: Path) -> None:
    ours, theirs = make(), ImageFolder(photo_tree)
    assert (ours.classes, ours.targets) == (theirs.classes, theirs.targets)
    assert [path for path, _ in ours.samples] == [
        path.replace(str(photo_tree), f"s3://{bucket}/train") for path, _ in theirs.samples
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
def test_values_are_the_local_folders(kind: Any, workers: int, make: Any, photo_tree: Path) -> None:
    def run(dataset: Any) -> list[Any]:
        torch.manual_seed(1)
        loader = kind(dataset, batch_size=5, shuffle=True, num_workers=workers)
        return _batches(loader) + _batches(loader)

    assert _same(run(make()), run(FastImageFolder(photo_tree, RANDOM)))


@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
def test_values_in_a_worker_that_gets_a_pickle(kind: Any, make: Any, photo_tree: Path) -> None:
    loader = kind(make(STEADY), batch_size=5, num_workers=1, multiprocessing_context="forkserver")
    assert _same(_batches(loader), _batches(FastLoader(FastImageFolder(photo_tree, STEADY), 5)))


def test_keys_of_every_kind(s3: Any, near: Any, photo_tree: Path) -> None:
    name = s3.bucket()
    local = FastImageFolder(photo_tree, STEADY)
    files = [path for path, _ in local.samples]
    for index, key in enumerate(ODD):
        s3.put(name, key, Path(files[index]).read_bytes())
    images = {f"s3://{name}/{key}": local[index][0] for index, key in enumerate(ODD)}
    dataset = FastImageFolder(f"s3://{name}/train", STEADY, storage_options=s3.options, **near)
    assert dataset.classes == ["one", "two"]
    assert sorted(path for path, _ in dataset.samples) == sorted(images)
    for loader in (FastLoader(dataset, 4), FastLoader(dataset, 4)):
        loaded = torch.cat([batch for batch, _ in loader])
        for image, (path, _) in zip(loaded, dataset.samples, strict=True):
            assert torch.equal(image, images[path]), path
    dataset.close()


def test_a_key_that_climbs_stays_in_the_bucket_and_the_stage(
    s3: Any, near: Any, photo_tree: Path, tmp_path: Path
) -> None:
    name = s3.bucket()
    files = [path for path in sorted(photo_tree.rglob("*")) if path.is_file()]
    s3.put(name, "train/one/x.jpg", files[0].read_bytes())
    s3.put(name, "train/one/../../x.jpg", files[1].read_bytes())
    before = set(tmp_path.rglob("*.jpg"))
    kept = sorted(s3.keys(name))
    dataset = FastImageFolder(f"s3://{name}/train", STEADY, storage_options=s3.options, **near)
    local = FastImageFolder(photo_tree, STEADY)
    images = {
        f"s3://{name}/train/one/x.jpg": local[0][0],
        f"s3://{name}/train/one/../../x.jpg": local[1][0],
    }
    assert kept == ["train/one/../../x.jpg", "train/one/x.jpg"]
    for index, (path, _) in enumerate(dataset.samples):
        assert torch.equal(dataset[index][0], images[path]), path
    assert set(tmp_path.rglob("*.jpg")) == before
    dataset.close()


def test_wrong_credentials(s3: Any, bucket: str) -> None:
    options = {**s3.options, "secret": SECRET}
    with pytest.raises(StoreAccessError, match=bucket) as caught:
        FastImageFolder(f"s3://{bucket}/train", STEADY, storage_options=options, refresh=True)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error) + repr(error) + repr(vars(error))
        error = error.__cause__ or error.__context__
    assert SECRET.encode() not in pickle.dumps(caught.value)


def test_a_bucket_that_there_is_not(s3: Any) -> None:
    with pytest.raises((StoreError, FileNotFoundError), match="no-such-bucket-of-ours") as caught:
        FastImageFolder("s3://no-such-bucket-of-ours/train", STEADY, storage_options=s3.options)
    assert s3.options["secret"] not in str(caught.value)


def test_the_right_secret_is_shown_nowhere(s3: Any, make: Any) -> None:
    ours = make()
    next(iter(FastLoader(ours, 4)))
    for text in (repr(ours), repr(ours.plan), repr(vars(ours))):
        assert s3.options["secret"] not in text
    assert s3.options["secret"].encode() not in pickle.dumps(ours)
