"""What loaders hand out is distributed as what a stock loader hands out: read off many copies of an image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from scipy import stats
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader

COUNT = 10_000
SURE = 1e-4  # at fixed seeds a smaller p is a real difference
SIDE = 32


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # images are small
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of one image: red grows to the right, green downwards, and blue is 100 everywhere."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "a").mkdir()
    y, x = np.mgrid[:SIDE, :SIDE]
    image = np.stack([4 * x, 4 * y, np.full_like(x, 100)], axis=2).astype(np.uint8)
    Image.fromarray(image).save(folder / "a" / "a.png")
    return str(folder)


def of_many(dataset: Any, count: int) -> Any:
    """Give the dataset its image many times."""
    dataset.samples = dataset.samples * count
    dataset.imgs, dataset.targets = dataset.samples, [0] * count
    return dataset


def read(images: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """What was done to each: sides, centre, mirroring and brightness; and which are grey or erased."""
    red, green, blue = np.moveaxis(images, 1, 0) * 255
    is_erased = (images == 0).all((1, 2, 3))
    factor = blue.mean((1, 2)) / 100
    with np.errstate(divide="ignore", invalid="ignore"):
        columns, rows = red.mean(1) / factor[:, None] / 4, green.mean(2) / factor[:, None] / 4
    found = {
        "brightness": factor, "width": abs(columns[:, -1] - columns[:, 0]),
        "height": abs(rows[:, -1] - rows[:, 0]), "x": columns.mean(1), "y": rows.mean(1),
        "is_mirrored": columns[:, 0] > columns[:, -1], "is_upside_down": rows[:, 0] > rows[:, -1],
    }  # fmt: skip
    return {name: values[~is_erased].astype(np.float64) for name, values in found.items()} | {
        "is_erased": is_erased.astype(np.float64)
    }


def compare(ours: dict[str, npt.NDArray[Any]], theirs: dict[str, npt.NDArray[Any]]) -> None:
    for name, values in theirs.items():
        digits = 2 if name == "brightness" else 1  # bytes and floats round otherwise
        one, other = ours[name].round(digits), values.round(digits)
        assert stats.ks_2samp(one, other, method="asymp").pvalue > SURE, name
    parts = [[values for name, values in each.items() if name != "is_erased"] for each in (ours, theirs)]
    found, wanted = map(np.corrcoef, parts)
    most = 6 / np.sqrt(len(ours["brightness"]))
    assert abs(found - wanted).max() < most, "sides belong together, and nothing else"


def chain(kit: Any) -> list[Any]:
    return [
        kit.RandomResizedCrop(6, scale=(0.1, 0.9), antialias=True), kit.RandomHorizontalFlip(0.3),
        kit.RandomVerticalFlip(0.6), kit.ColorJitter(brightness=(0.6, 1.8)),
    ]  # fmt: skip


CHAINS = {
    "v1": v1.Compose([*chain(v1), v1.ToTensor(), v1.RandomErasing(0.2, (0.99, 0.999), (1.0, 1.0))]),
    "v2": v2.Compose([v2.ToImage(), *chain(v2), v2.ToDtype(torch.float32, scale=True)]),
}
_SLOW = [pytest.param(version, COUNT, marks=pytest.mark.slow) for version in CHAINS]


@pytest.mark.parametrize(("version", "count"), [("v1", COUNT // 8), *_SLOW])
def test_loaders_have_the_distributions_of_stock_loaders(probe: str, version: str, count: int) -> None:
    transform = CHAINS[version]
    torch.manual_seed(0)
    stock = DataLoader(of_many(ImageFolder(probe, transform), count), 500, shuffle=True)
    theirs = read(np.concatenate([images.numpy() for images, _ in stock]))
    assert 0.2 < theirs["is_mirrored"].mean() < 0.4 < theirs["is_upside_down"].mean()
    epochs = []
    for options in ({}, {"augment": "split"}):
        loader = FastLoader(of_many(FastImageFolder(probe, transform), count), 500, shuffle=True, **options)
        for _ in range(2 if version == "v2" else 1):
            epochs.append(read(np.concatenate([images.numpy().copy() for images, _ in loader])))
            compare(epochs[-1], theirs)
    if version == "v2":  # an epoch has nothing to do with the one before it
        for one, other in ((0, 1), (2, 3)):
            assert abs(np.corrcoef(epochs[one]["brightness"], epochs[other]["brightness"])[0, 1]) < 0.05
