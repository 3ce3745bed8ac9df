"""Files that cannot be read, under each policy, in each place where samples are made."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import BadSamples, FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import BadSampleError, TooManyBadSamplesError

BY_PROCESSES = functools.partial(FastLoader, workers="processes")

SIZE, PER_CLASS = 24, 6
FUSED = v1.Compose([v1.CenterCrop(SIZE), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomCrop(SIZE), v1.ToTensor()])


def _identity(image: Any) -> Any:
    return image


TRANSFORMS = {
    "fused": FUSED,
    "drawn": v1.Compose([v1.Resize(30), v1.Resize(28), v1.CenterCrop(SIZE), v1.ToTensor()]),
    "stock": v1.Compose([v1.Lambda(_identity), FUSED]),
    "pil": None,
}
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
    options = {"transform": FUSED, "threads": 2, **options}
    dataset = FastImageFolder(tree, **options)
    for number, how in zip(numbers, itertools.cycle(BAD.values()), strict=False):
        how(Path(dataset.samples[number][0]))
    return dataset


def _numbered(tree: Path, numbers: Iterable[int], **options: Any) -> FastImageFolder:
    """The same, with each sample its own class, so that it can be told from the others."""
    dataset = _broken(tree, numbers, **options)
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    return dataset


def _seen(batches: Iterable[Any]) -> list[list[int]]:
    found = []
    for images, targets in batches:
        assert len(images) == len(targets)
        found.append(targets.tolist())
    return found


def _failure(call: Callable[[], Any]) -> BadSampleError:
    """The error that a call raises, without the traceback, which refers to iterators and workers."""
    try:
        call()
    except BadSampleError as error:
        error.__cause__ = None
        return error.with_traceback(None)
    raise AssertionError("no BadSampleError")


# ---- raise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("how", BAD)
def test_raise_names_path_index_and_remedy(tree: Path, how: str, transform: Any) -> None:
    dataset = FastImageFolder(tree, transform, threads=2)
    path = Path(dataset.samples[8][0])
    BAD[how](path)
    for call in (
        lambda: dataset[8],
        lambda: dataset[-4],
        lambda: dataset.__getitems__([1, 8, 2]),
        lambda: list(DataLoader(dataset, 4, collate_fn=list)),
        lambda: list(FastLoader(dataset, 4, collate_fn=list)),
        lambda: list(FastLoader(Subset(dataset, [0, 8]), 2, collate_fn=list)),
    ):
        with pytest.raises(BadSampleError) as caught:
            call()
        assert (caught.value.index, caught.value.path) == (8, str(path))
        assert "sample 8" in str(caught.value)
        assert str(path) in str(caught.value)
        assert "bad_samples" in str(caught.value)
        size = f"({path.stat().st_size:,} bytes)" if path.exists() else path.name
        assert size in str(caught.value)
        assert caught.value.__cause__ is not None
        assert isinstance(caught.value, OSError)
    with pytest.raises(OSError):  # ImageFolder fails as well: nothing good is called bad
        ImageFolder(tree, transform).loader(str(path))


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
@pytest.mark.parametrize("workers", [0, 1])
def test_iteration_may_go_on_after_the_error(tree: Path, kind: Any, workers: int) -> None:
    iterator = iter(kind(_numbered(tree, [1, 7, 6]), 3, num_workers=workers))
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(iterator)[1].tolist())
        except BadSampleError as error:
            seen.append("sample 1 " in str(error) or "sample 6 " in str(error))
        except StopIteration:
            break
    assert seen == [True, [3, 4, 5], True, [9, 10, 11]]


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_an_error_of_a_worker_is_a_bad_sample_error(tree: Path, kind: Any) -> None:
    dataset = _broken(tree, [5])
    error = _failure(lambda: list(kind(dataset, 4, num_workers=2)))
    assert type(error) is BadSampleError
    assert "sample 5" in str(error)
    assert dataset.samples[5][0] in str(error)


# ---- replace --------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_replace_puts_another_sample_of_the_class(tree: Path, transform: Any) -> None:
    dataset = _broken(tree, [0, 3, 8], bad_samples="replace", transform=transform)
    targets = [0] * PER_CLASS + [1] * PER_CLASS
    for samples in (
        dataset.__getitems__(range(12)),
        [dataset[index] for index in range(12)],
        [sample for batch in FastLoader(dataset, 4, collate_fn=list) for sample in batch],
        [
            sample
            for batch in FastLoader(dataset, 4, collate_fn=list, num_workers=1, workers="processes")
            for sample in batch
        ],
    ):
        assert [target for _, target in samples] == targets
    good = [dataset[index][0] for index in (1, 2, 4, 5)]
    replaced = dataset[0][0]
    assert any(_same_image(replaced, image) for image in good)


def _same_image(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else a.tobytes() == b.tobytes()


def test_replace_is_deterministic_under_a_seed_on_any_topology(tree: Path) -> None:
    streams = set()
    for threads, workers in ((1, 0), (4, 0), (2, 1), (1, 2)):
        dataset = _broken(tree, [], bad_samples="replace", threads=threads, transform=RANDOM)
        if not streams:
            for number in (0, 3, 4, 8):
                BAD["garbage"](Path(dataset.samples[number][0]))
        loader = FastLoader(dataset, 5, shuffle=True, num_workers=workers, workers="processes", seed=9)
        streams.add(b"".join(images.numpy().tobytes() for _ in range(2) for images, _ in loader))
    assert len(streams) == 1


def test_replacements_differ_by_draw(tree: Path) -> None:
    dataset = _broken(tree, [0], bad_samples="replace")
    loader = FastLoader(dataset, 30, sampler=[0] * 30, seed=2)
    images, _ = next(iter(loader))
    assert len({image.numpy().tobytes() for image in images}) == PER_CLASS - 1


def test_replace_finds_the_only_readable_file(tmp_path: Path) -> None:
    tree = photo_tree(tmp_path / "tree", classes=1, per_class=30, sizes=(40, 44))
    dataset = _broken(tree, [n for n in range(30) if n != 17], bad_samples="replace")
    expected = dataset[17]
    for index in (0, 16, 29):
        assert torch.equal(dataset[index][0], expected[0])


@pytest.mark.parametrize("bad", [range(PER_CLASS), [0]], ids=["all of the class", "the only one"])
def test_replace_gives_up_when_the_class_has_no_readable_file(tree: Path, bad: Any) -> None:
    dataset = _broken(tree, bad, bad_samples="replace")
    if len(bad) == 1:
        dataset.samples = [dataset.samples[0], *dataset.samples[PER_CLASS:]]
    for call in (lambda: dataset[0], lambda: dataset.__getitems__([7, 0] if len(bad) > 1 else [1, 0])):
        with pytest.raises(BadSampleError, match="class 0") as caught:
            call()
        assert caught.value.index == 0
        assert f"{len(bad) - 1} tried" in str(caught.value)
    assert dataset[len(dataset) - 1][1] == 1


def test_replace_after_edits_of_samples(tree: Path, tmp_path: Path) -> None:
    dataset = _broken(tree, [0], bad_samples="replace")
    dataset.samples = [(path, "cat" if target else "dog") for path, target in dataset.samples]
    assert dataset[0][1] == "dog"


# ---- skip -----------------------------------------------------------------------------------


@pytest.mark.few(24)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 12, 20])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("bad", [[0, 3, 8], [0, 1, 2, 3], [11], [10, 11], range(1, 12), []], ids=str)
def test_fastloader_fills_up(tree: Path, batch_size: int, drop_last: bool, bad: Any) -> None:
    dataset = _numbered(tree, bad, bad_samples="skip")
    batches = _seen(FastLoader(dataset, batch_size, drop_last=drop_last))
    good = [number for number in range(12) if number not in bad]
    asked = 12 // batch_size * batch_size if drop_last else 12  # drop_last: torch's sampler ends earlier
    expected = [number for number in good if number < asked]
    full = len(expected) // batch_size * batch_size if drop_last else len(expected)
    assert [number for batch in batches for number in batch] == expected[:full]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    if drop_last:
        assert all(len(batch) == batch_size for batch in batches)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_filled_batches_have_the_right_pixels(tree: Path, transform: Any) -> None:
    dataset = _numbered(tree, [0, 5, 6], bad_samples="skip", transform=transform)
    for batch in FastLoader(dataset, 4, collate_fn=list):
        for image, target in batch:
            assert _same_image(image, dataset[target][0])


@pytest.mark.parametrize("seed", [None, 4])
def test_a_shuffled_epoch_has_each_good_sample_once(tree: Path, seed: int | None) -> None:
    loader = FastLoader(_numbered(tree, [0, 5, 6], bad_samples="skip"), 4, shuffle=True, seed=seed)
    for _ in range(3):
        batches = _seen(loader)
        assert [len(batch) for batch in batches] == [4, 4, 1]
        counts = Counter(number for batch in batches for number in batch)
        assert counts == Counter(number for number in range(12) if number not in (0, 5, 6))


@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 0), (DataLoader, 1), (FastLoader, 2)])
def test_batches_are_short_where_nobody_can_fill_them(tree: Path, kind: Any, workers: int) -> None:
    processes = {"workers": "processes"} if kind is FastLoader else {}
    batches = _seen(kind(_numbered(tree, [0, 5, 6], bad_samples="skip"), 4, num_workers=workers, **processes))
    assert batches == [[1, 2, 3], [4, 7], [8, 9, 10, 11]]


def test_the_users_own_batches_are_short(tree: Path) -> None:
    dataset = _numbered(tree, [0, 5], bad_samples="skip")
    assert _seen(FastLoader(dataset, batch_sampler=[[0, 1], [5, 4, 3], [2]])) == [[1], [4, 3], [2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_the_users_with_nothing_left_is_a_clear_error(tree: Path, workers: int) -> None:
    dataset = _numbered(tree, [0, 5], bad_samples="skip")
    for kind in (DataLoader, BY_PROCESSES):
        seen: list[Any] = []
        iterator = iter(kind(dataset, batch_sampler=[[1], [0, 5], [2]], num_workers=workers))
        while True:
            try:
                seen.append(next(iterator)[1].tolist())
            except BadSampleError as error:
                seen.append("all 2 samples" in str(error))
            except StopIteration:
                break
        assert seen == [[1], True, [2]]


@pytest.mark.parametrize("order", [[6, 0, 7, 1], [0, 6], [7, 1, 0]])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_several_folders_with_nothing_left_is_the_same_error(
    tree: Path, tmp_path: Path, order: list[int], workers: int
) -> None:
    """The first sample of the batch is named, whichever folder it is of, and all of them are counted."""
    other = photo_tree(tmp_path / "other", classes=2, per_class=3, sizes=(40, 44))
    folders = [_broken(root, range(2), bad_samples="skip") for root in (other, tree)]
    both = ConcatDataset(folders)
    error = _failure(
        lambda: list(FastLoader(both, batch_sampler=[order], num_workers=workers, workers="processes"))
    )
    assert f"all {len(order)} samples of a batch" in str(error)
    folder, index = folders[order[0] // 6], order[0] % 6
    path = folder.samples[index][0]
    assert f"the first: sample {index} could not be read: {path!r}" in str(error)
    if not workers:  # torch makes a worker's error anew from its text
        assert (error.path, error.index) == (path, index)


def test_all_bad_is_an_error_and_not_an_empty_epoch(tree: Path) -> None:
    dataset = _broken(tree, range(12), bad_samples="skip")
    for loader in (
        FastLoader(dataset, 4),
        FastLoader(dataset, 4, num_workers=1, workers="processes"),
        DataLoader(dataset, 4),
    ):
        error = _failure(lambda: list(loader))
        assert "sample" in str(error)


def test_a_single_sample_cannot_be_skipped(tree: Path) -> None:
    dataset = _broken(tree, [3], bad_samples="skip")
    with pytest.raises(BadSampleError) as caught:
        dataset[3]
    assert caught.value.index == 3
    with pytest.raises(BadSampleError):  # an IndexError would silently end the loop
        for _ in dataset:
            pass


def test_an_error_between_filled_batches_loses_no_sample(tree: Path) -> None:
    dataset = _numbered(tree, [0, 5], bad_samples="skip")
    iterator = iter(FastLoader(dataset, 4, sampler=[0, 1, 2, 3, 4, 5, 6, 99, 7, 8, 9, 10]))
    seen = []
    while True:
        try:
            seen.append(next(iterator)[1].tolist())
        except IndexError:
            seen.append([])
        except StopIteration:
            break
    assert seen == [[], [1, 2, 3, 7], [8, 9, 10]]  # the batch with the wrong index is lost, and no more


# ---- log and budget ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_log_has_a_json_line_for_each_bad_sample(
    tree: Path, tmp_path: Path, policy: Any, workers: int
) -> None:
    log = tmp_path / "bad.jsonl"
    dataset = _broken(tree, [0, 5, 6], bad_samples=BadSamples(policy, log=log))
    loader = FastLoader(dataset, 3, num_workers=workers, workers="processes")
    for _ in range(2):
        list(loader)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["index"] for line in lines} == {0, 5, 6}
    assert {line["path"] for line in lines} == {dataset.samples[index][0] for index in (0, 5, 6)}
    assert {line["action"] for line in lines} == {policy}
    assert all(set(line) == {"index", "path", "target", "action", "error"} for line in lines)
    if workers == 0:
        assert len(lines) == 3
    assert not os.path.exists("bad.jsonl")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_budget(tree: Path, workers: int) -> None:
    dataset = _broken(tree, [0, 5, 6], bad_samples=BadSamples("skip", max_errors=2))
    error = _failure(lambda: list(FastLoader(dataset, 4, num_workers=workers, workers="processes")))
    assert type(error) is TooManyBadSamplesError
    assert "max_errors=2" in str(error)
    enough = _broken(tree, [], bad_samples=BadSamples("skip", max_errors=3))
    assert (
        sum(len(targets) for _, targets in FastLoader(enough, 4, num_workers=workers, workers="processes"))
        == 9
    )


def test_a_warning_names_each_bad_sample_once(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = _broken(tree, [2], bad_samples="skip")
    with caplog.at_level(logging.WARNING, "fastpipe.bad_samples"):
        for _ in range(3):
            list(FastLoader(dataset, 4))
    assert len(caplog.records) == 1
    assert dataset.samples[2][0] in caplog.text
