"""A dataset of the script's own that opens images, and what is measured in its place."""

from __future__ import annotations

from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset
from torchvision import transforms as v1
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import fastpipe
from fastpipe.tools.witness import Reads

SECONDS = 0.8
Pair = namedtuple("Pair", "image label")

_V2 = v2.Compose(
    [v2.ToImage(), v2.RandomResizedCrop(32, antialias=True), v2.ToDtype(torch.float32, scale=True)]
)
_V1 = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
FORMS: dict[str, Any] = {
    "pair": lambda image, label: (image, label),
    "dict": lambda image, label: {"label": label, "image": image},
    "nested": lambda image, label: ([label, {"x": image}], "name"),
    "named": Pair,
    "alone": lambda image, label: image,
}


class Photos(Dataset[Any]):
    """Photos of a table."""

    def __init__(self, table: list[tuple[str, int]], tfm: Any, form: str = "pair", load: Any = None) -> None:
        self.table, self.tfm, self.form, self.load = table, tfm, form, load or _open

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        path, label = self.table[index]
        return FORMS[self.form](self.tfm(self.load(path)), label)


def _open(path: str) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB")


@pytest.fixture
def table(photo_tree: Path) -> list[tuple[str, int]]:
    return [(str(path), number % 3) for number, path in enumerate(sorted(photo_tree.rglob("*.jpg")) * 4)]


def _profiled(loader: Any, **options: Any) -> Any:
    return fastpipe.profile(loader, lambda batch: None, seconds=SECONDS, **options)


def _ways(report: Any) -> list[Any]:
    return [advice for advice in report.advice if "from_samples" in advice.what]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("form", "workers", "tfm", "load"),
    [("pair", 0, _V1, None), ("dict", 1, _V2, default_loader), ("nested", 0, _V1, None),
     ("named", 0, _V1, None), ("alone", 0, _V2, None)],
    ids=FORMS,
)  # fmt: skip
@pytest.mark.usefixtures("whatever_it_gains")
def test_images_of_a_table_are_read_by_fastpipe(
    table: list[tuple[str, int]], form: str, workers: int, tfm: Any, load: Any
) -> None:
    open_image = Image.open
    seen = []
    loader = DataLoader(Photos(table, tfm, form, load), batch_size=8, shuffle=True, num_workers=workers)
    report = fastpipe.profile(loader, seen.append, seconds=SECONDS, try_advice=True)
    assert Image.open is open_image
    (way,) = _ways(report)
    assert way.predicted_s is not None and way.predicted_s > 0
    assert way.tried_s is not None
    assert "of your images" in way.why and "your transform" in way.why
    kinds = {type(batch) for batch in seen}
    assert len(kinds) == 1
    for batch in seen:  # those of fastpipe, too
        image = {"dict": lambda: batch["image"], "nested": lambda: batch[0][1]["x"], "alone": lambda: batch}
        made = image.get(form, lambda: batch[0])()
        assert made.shape[1:] == (3, 32, 32) and made.dtype == torch.float32


@pytest.mark.usefixtures("whatever_it_gains")
def test_subsets_are_looked_into(table: list[tuple[str, int]]) -> None:
    assert _ways(_profiled(DataLoader(Subset(Photos(table, _V1), range(64)), batch_size=8)))


@pytest.mark.usefixtures("whatever_it_gains")
def test_a_batch_sampler_says_how_many_samples_a_batch_has(table: list[tuple[str, int]]) -> None:
    dataset = Photos(table, _V1)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 8, False))
    report = _profiled(loader)
    assert _ways(report)
    assert report.loader.batch_size == 8


class Pairs(Photos):
    """Two images for a sample."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), super().__getitem__(index - 1)


class Grey(Photos):
    """Images that are not as ImageFolder's loader makes them."""

    def __getitem__(self, index: int) -> Any:
        path, label = self.table[index]
        return self.tfm(Image.open(path).convert("L")), label


class Inline(Photos):
    """A transform that is nowhere to be found."""

    def __getitem__(self, index: int) -> Any:
        path, label = self.table[index]
        return np.array(_open(path).resize((32, 32))), label


class Own:
    """A transform of the script's own."""

    def __call__(self, image: Any) -> Any:
        return torch.from_numpy(np.asarray(image.resize((32, 32))).copy())


@pytest.mark.parametrize("kind", [Pairs, Grey, Inline])
def test_others_are_left_alone(table: list[tuple[str, int]], kind: Any) -> None:
    tfm = None if kind is Inline else _V1
    report = _profiled(DataLoader(kind(table, tfm), batch_size=8))
    assert report.is_loader_bound and not _ways(report)


def test_a_transform_of_the_scripts_own_is_no_reason(table: list[tuple[str, int]]) -> None:
    assert not _ways(_profiled(DataLoader(Photos(table, Own()), batch_size=8)))


@pytest.mark.usefixtures("whatever_it_gains")
def test_which_of_two_transforms_it_is(table: list[tuple[str, int]]) -> None:
    both = Photos(table, _V1)
    both.other = _V2  # type: ignore[attr-defined]
    assert not _ways(_profiled(DataLoader(both, batch_size=8)))
    both.transform = _V1  # type: ignore[attr-defined]
    assert _ways(_profiled(DataLoader(both, batch_size=8)))


def test_opened_files_are_seen_once_and_counted(table: list[tuple[str, int]]) -> None:
    open_image = Image.open
    with closing(Reads().begin()) as opens:
        opens.begin()  # again
        for path, _ in table[:30]:
            Image.open(path).close()
        with open(table[0][0], "rb") as file:
            Image.open(file)
        with pytest.raises(FileNotFoundError):
            Image.open("nowhere.png")
    assert Image.open is open_image
    assert list(dict.fromkeys(one.file for one in opens.images)) == [path for path, _ in table[:24]]
    assert opens.opened == 31
