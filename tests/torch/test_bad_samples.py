"""Files that cannot be read, under each policy, in each place where samples are made."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import BY_PROCESSES, outcomes
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import BadSampleError

SIZE, PER_CLASS = 24, 6
FUSED = v1.Compose([v1.CenterCrop(SIZE), v1.ToTensor()])
TRANSFORMS = {
    "fused": FUSED, "drawn": v1.Compose([v1.Resize(30), v1.Resize(28), v1.CenterCrop(SIZE), v1.ToTensor()]),
    "stock": v1.Compose([v1.Lambda(lambda image: image), FUSED]), "pil": None,
}  # fmt: skip
BAD: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 3]),
    "header only": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "garbage": lambda path: path.write_bytes(b"\xff\xd8 this is no picture" * 30),
    "text": lambda path: path.write_text("hello"),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
    "dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere.jpg")),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("fastpipe.bad_samples").setLevel(logging.ERROR)
    yield
    logging.getLogger("fastpipe.bad_samples").setLevel(logging.NOTSET)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return photo_tree(tmp_path / "tree", classes=2, per_class=PER_CLASS, sizes=(40, 44))


def _broken(tree: Path, numbers: Iterable[int], **options: Any) -> FastImageFolder:
    """The dataset of the tree, with samples of these numbers broken afterwards, each in another way."""
    dataset = FastImageFolder(tree, **{"transform": FUSED, "threads": 2, **options})
    for number, how in zip(numbers, itertools.cycle(BAD.values()), strict=False):
        how(Path(dataset.samples[number][0]))
    return dataset


def _numbered(tree: Path, numbers: Iterable[int], **options: Any) -> FastImageFolder:
    """The same, with each sample its own class, so that it can be told from the others."""
    dataset = _broken(tree, numbers, **options)
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    return dataset


def _labels(batch: Any) -> Any:
    images, labels = batch
    assert len(images) == len(labels)
    return labels.tolist()


def _content(image: Any) -> bytes:
    return image.numpy().tobytes() if isinstance(image, torch.Tensor) else image.tobytes()


@pytest.mark.few(5)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("how", BAD)
def test_raise_names_path_index_and_remedy(tree: Path, how: str, transform: Any) -> None:
    dataset = FastImageFolder(tree, transform, threads=2)
    path = Path(dataset.samples[8][0])
    BAD[how](path)
    for call in (
        lambda: dataset[8], lambda: dataset[-4], lambda: dataset.__getitems__([1, 8, 2]),
        lambda: list(FastLoader(Subset(dataset, [0, 8]), 2, collate_fn=list)),
    ):  # fmt: skip
        with pytest.raises(BadSampleError) as caught:
            call()
        assert (caught.value.index, caught.value.path) == (8, str(path))
        size = f"({path.stat().st_size:,} bytes)" if path.exists() else path.name
        for words in ("sample 8", str(path), "bad_samples", size):
            assert words in str(caught.value)
        assert caught.value.__cause__ is not None and isinstance(caught.value, OSError)
    with pytest.raises(OSError):  # ImageFolder fails as well: nothing good is called bad
        ImageFolder(tree, transform).loader(str(path))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_replace_puts_another_sample_of_the_class(tree: Path, transform: Any) -> None:
    dataset = _broken(tree, [0, 3, 8], bad_samples="replace", transform=transform)
    targets = [0] * PER_CLASS + [1] * PER_CLASS
    for samples in (dataset.__getitems__(range(12)), [dataset[index] for index in range(12)]):
        assert [target for _, target in samples] == targets
    assert _content(dataset[0][0]) in {_content(dataset[index][0]) for index in (1, 2, 4, 5)}


def test_replace_finds_the_only_readable_file(tmp_path: Path) -> None:
    tree = photo_tree(tmp_path / "tree", classes=1, per_class=30, sizes=(40, 44))
    dataset = _broken(tree, [n for n in range(30) if n != 17], bad_samples="replace")
    assert len({_content(dataset[index][0]) for index in (0, 16, 17, 29)}) == 1


@pytest.mark.parametrize("bad", [range(PER_CLASS), [0]], ids=["all of the class", "the only one"])
def test_replace_fails_when_the_class_has_no_readable_file(tree: Path, bad: Any) -> None:
    dataset = _broken(tree, bad, bad_samples="replace")
    if len(bad) == 1:
        dataset.samples = [dataset.samples[0], *dataset.samples[PER_CLASS:]]
    for call in (lambda: dataset[0], lambda: dataset.__getitems__([len(dataset) - 1, 0])):
        with pytest.raises(BadSampleError, match=f"any of {len(bad) - 1} tried .*class 0") as caught:
            call()
        assert caught.value.index == 0
    assert dataset[len(dataset) - 1][1] == 1
    dataset.samples = [(path, "cat" if target else "dog") for path, target in dataset.samples[-2:]]
    BAD["empty"](Path(dataset.samples[0][0]))
    assert dataset[0][1] == "cat", "classes are those of the edited samples"


@pytest.mark.few(16)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 12, 20])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("bad", [[0, 3, 8], [0, 1, 2, 3], [11], [10, 11], range(1, 12), []], ids=str)
def test_a_fastloader_fills_batches_up(tree: Path, batch_size: int, drop_last: bool, bad: Any) -> None:
    dataset = _numbered(tree, bad, bad_samples="skip")
    batches = [_labels(batch) for batch in FastLoader(dataset, batch_size, drop_last=drop_last)]
    asked = 12 // batch_size * batch_size if drop_last else 12  # drop_last: torch's sampler ends earlier
    expected = [number for number in range(asked) if number not in bad]
    full = len(expected) // batch_size * batch_size if drop_last else len(expected)
    assert sum(batches, []) == expected[:full]
    assert all(len(batch) == batch_size for batch in (batches if drop_last else batches[:-1]))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_the_scripts_batches_are_short_and_empty_ones_are_errors(tree: Path, kind: Any, workers: int) -> None:
    dataset = _numbered(tree, [0, 5, 6], bad_samples="skip")
    if kind is DataLoader or workers:
        batches = kind(dataset, 4, num_workers=2 * workers)  # no worker can fill batches up
        assert [_labels(batch) for batch in batches] == [[1, 2, 3], [4, 7], [8, 9, 10, 11]]
    loader = kind(dataset, batch_sampler=[[0, 1], [0, 5], [6, 4, 3], [2]], num_workers=workers)
    found = outcomes(loader, _labels)
    assert [found[0], *found[2:]] == [[1], [4, 3], [2]]
    assert isinstance(found[1], BadSampleError) and "all 2 samples" in str(found[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_batch_of_folders_names_its_first_sample(tree: Path, tmp_path: Path, workers: int) -> None:
    other = photo_tree(tmp_path / "other", classes=2, per_class=3, sizes=(40, 44))
    folders = [_broken(root, range(2), bad_samples="skip") for root in (other, tree)]
    orders = [[6, 0, 7, 1], [0, 6], [7, 1, 0]]
    loader = BY_PROCESSES(ConcatDataset(folders), batch_sampler=orders, num_workers=workers)
    for order, error in zip(orders, outcomes(loader), strict=True):
        index, path = order[0] % 6, folders[order[0] // 6].samples[order[0] % 6][0]
        assert isinstance(error, BadSampleError)
        assert f"all {len(order)} samples of a batch" in str(error)
        assert f"the first: sample {index} could not be read: {path!r}" in str(error)
        if not workers:  # torch makes a worker's error anew from its text
            assert (error.path, error.index) == (path, index)


def test_a_single_sample_cannot_be_skipped(tree: Path) -> None:
    dataset = _broken(tree, [3], bad_samples="skip")
    with pytest.raises(BadSampleError, match="sample 3 "):
        dataset[3]
    with pytest.raises(BadSampleError):  # an IndexError would silently end the loop
        for _ in dataset:
            pass


def test_an_error_between_filled_batches_loses_no_other_batch(tree: Path) -> None:
    dataset = _numbered(tree, [0, 5], bad_samples="skip")
    found = outcomes(FastLoader(dataset, 4, sampler=[0, 1, 2, 3, 4, 5, 6, 99, 7, 8, 9, 10]), _labels)
    assert isinstance(found[0], IndexError) and found[1:] == [[1, 2, 3, 7], [8, 9, 10]]


def test_a_warning_names_each_bad_sample_once(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = _broken(tree, [2], bad_samples="skip")
    with caplog.at_level(logging.WARNING, "fastpipe.bad_samples"):
        for _ in range(3):
            list(FastLoader(dataset, 4))
    assert len(caplog.records) == 1 and dataset.samples[2][0] in caplog.text
