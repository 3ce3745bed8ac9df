"""Is a swap ever slower?  Every common dataset with every kind of transform, before and after.

::

    python benchmarks/never_slower.py --photos FOLDER --rounds 3 --json never-slower.json

Each cell compares ``DataLoader`` with ``FastLoader`` and with ``accelerate``, over the same dataset
(``ImageFolder`` becomes ``FastImageFolder`` under ``FastLoader``) and with the same ``num_workers``: whole
epochs in turns, the first of each loader not counted.  The ratio is the median over rounds of some seconds.
Asked is 0.97 everywhere.  The last column says where samples are made, as the plan does.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import torch
from PIL import Image
from rounds import save_facts
from tables import ASKED, compared
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torchvision.datasets import ImageFolder
from torchvision.transforms import (
    Compose,
    RandAugment,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToTensor,
    TrivialAugmentWide,
)

from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, accelerate
from fastpipe.bench.synthetic import photo_tree

_EACH_S = 1.0
_BATCH = 32
_SIZE = 128


class OwnStep:
    """A transform of the script's: 2 ms of Python for each image."""

    def __call__(self, image: Any) -> Any:
        sum(range(60_000))
        return image


class OwnDataset(Dataset[Any]):
    """Opens images itself, as most scripts do."""

    def __init__(self, root: str, transform: Any) -> None:
        self.samples, self.transform = ImageFolder(root).samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), target


class OwnFolder(ImageFolder):
    """A subclass with code of its own for each sample."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, target, index


class OwnFastFolder(FastImageFolder):
    """The same over fastpipe's class."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, target, index


class OwnHDF5(Dataset[Any]):
    """Reads images from an HDF5 file that each worker opens."""

    def __init__(self, path: str, transform: Any) -> None:
        self.path, self.transform, self.file = path, transform, None
        with h5py.File(path) as file:
            self.count = len(file["images"])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        image = Image.fromarray(self.file["images"][index])
        return self.transform(image), int(self.file["labels"][index])


class OwnStream(IterableDataset[Any]):
    """Opens images in the order of a list, shared among workers."""

    def __init__(self, root: str, transform: Any) -> None:
        self.samples, self.transform = ImageFolder(root).samples, transform

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for path, target in self.samples[first::step]:
            with Image.open(path) as image:
                yield self.transform(image.convert("RGB")), target


@dataclass
class Cell:
    """One comparison.

    Attributes:
        dataset, transform, workers, way: which.
        before, after: samples per second, medians.
        ratio: median of after ÷ before of rounds.
        low, high: their range.
        note: what the plan says of where samples are made.
    """

    dataset: str
    transform: str
    workers: int
    way: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    note: str


def datasets(root: str, hdf5: str) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return, by name, a stock dataset and the one that takes its place, of a transform."""

    def same(make: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        return make, make

    return {
        "ImageFolder": (lambda t: ImageFolder(root, t), lambda t: FastImageFolder(root, t, cache="off")),
        "Dataset of one's own": same(lambda t: OwnDataset(root, t)),
        "subclass": (lambda t: OwnFolder(root, t), lambda t: OwnFastFolder(root, t, cache="off")),
        "HDF5 by hand": same(lambda t: OwnHDF5(hdf5, t)),
        "IterableDataset": same(lambda t: OwnStream(root, t)),
    }


def cells(root: str, hdf5: str) -> Iterator[tuple[str, str, int, str, Callable[[], Any], Callable[[], Any]]]:
    """Yield each cell's names, and what makes its loader before and after."""
    crop = [RandomResizedCrop(_SIZE), RandomHorizontalFlip()]
    kinds = {
        "known": Compose([*crop, ToTensor()]),
        "of one's own": Compose([*crop, OwnStep(), ToTensor()]),
        "RandAugment": Compose([*crop, RandAugment(), ToTensor()]),
        "TrivialAugmentWide": Compose([*crop, TrivialAugmentWide(), ToTensor()]),
    }
    for name, (stock, fast) in datasets(root, hdf5).items():
        for kind, transform in kinds.items():
            for workers in (0, 2):
                options: dict[str, Any] = {"batch_size": _BATCH, "num_workers": workers}
                if name != "IterableDataset":
                    options["shuffle"] = True

                def before(stock: Any = stock, transform: Any = transform, options: Any = options) -> Any:
                    return DataLoader(stock(transform), **options)

                def swapped(fast: Any = fast, transform: Any = transform, options: Any = options) -> Any:
                    return FastLoader(fast(transform), **options)

                def accelerated(before: Any = before, name: str = name) -> Any:
                    cache = {"cache": "off"} if name == "ImageFolder" else {}
                    return accelerate(before(), **cache)

                yield name, kind, workers, "FastLoader", before, swapped
                yield name, kind, workers, "accelerate", before, accelerated
    rows = torch.randn(20_000, 64), torch.arange(20_000)
    with h5py.File(hdf5) as file:
        columns = np.asarray(file["vectors"]).shape
    for workers in (0, 2):
        options = {"batch_size": 256, "num_workers": workers, "shuffle": True}

        def tensors(options: Any = options) -> Any:
            return DataLoader(TensorDataset(*rows), **options)

        def rows_before(options: Any = options) -> Any:
            return DataLoader(OwnRows(hdf5, columns[0]), **options)

        yield (
            "TensorDataset",
            "none",
            workers,
            "FastLoader",
            tensors,
            lambda o=options: FastLoader(TensorDataset(*rows), **o),
        )
        yield "TensorDataset", "none", workers, "accelerate", tensors, lambda t=tensors: accelerate(t())
        yield (
            "HDF5 rows",
            "none",
            workers,
            "FastLoader",
            rows_before,
            lambda o=options: FastLoader(FastHDF5Dataset(hdf5, "vectors", cache="off"), **o),
        )


class OwnRows(Dataset[Any]):
    """Rows of an HDF5 file, one read each."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count, self.file = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        return self.file["vectors"][index]


def rates(loaders: tuple[Any, Any]) -> list[float]:
    """Return samples per second of both: whole epochs in turns, until each has taken a second."""
    counts, spent, turn = [0, 0], [0.0, 0.0], 0
    while min(spent) < _EACH_S:
        for side in (0, 1) if turn % 2 else (1, 0):
            begun = perf_counter()
            for batch in loaders[side]:
                counts[side] += len(batch[0]) if isinstance(batch, (list, tuple)) else len(batch)
            spent[side] += perf_counter() - begun
        turn += 1
    return [count / seconds for count, seconds in zip(counts, spent, strict=True)]


def measured(before: Callable[[], Any], after: Callable[[], Any], rounds: int) -> tuple[Any, ...]:
    """Return medians of both rates, the ratio with its range, and the loader's note."""
    loaders = before(), after()
    for loader in loaders:
        for _ in loader:  # the first epoch opens files and compiles
            pass
    pairs = [rates(loaders) for _ in range(rounds)]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    work = next((line.strip() for line in repr(loaders[1].plan).splitlines() if "work:" in line), "")
    theirs, ours = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return theirs, ours, statistics.median(ratios), ratios[0], ratios[-1], work.removeprefix("work: ")


def files(photos: Path, folder: Path, count: int = 128) -> tuple[str, str]:
    """Make an image folder of links to some photos, and an HDF5 file of their pixels."""
    found = sorted(path for path in photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    random.Random(0).shuffle(found)
    root, pixels = folder / "photos", []
    for number in range(count):
        place = root / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        source = found[number % len(found)]
        (place / f"{number}.jpg").symlink_to(source.resolve())
        with Image.open(source) as image:
            pixels.append(np.asarray(image.convert("RGB").resize((256, 256))))
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("images", data=np.stack(pixels), chunks=(1, 256, 256, 3), compression="gzip")
        file["labels"] = np.arange(count) % 4
        vectors = np.random.default_rng(0).standard_normal((8192, 256), np.float32)
        file.create_dataset("vectors", data=vectors, chunks=(32, 256), compression="gzip", shuffle=True)
    return str(root), str(folder / "data.h5")


def main() -> int:
    """Measure all cells, print their table, and return 1 if one is slower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs (default: made photographs)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cell (default: 3)")
    parser.add_argument("--only", default="", help="cells whose names hold this")
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    logging.getLogger("fastpipe").setLevel(logging.ERROR)  # its advice, which is not asked for here
    found: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        photos = args.photos or photo_tree(Path(folder) / "made", classes=4, per_class=50)
        root, hdf5 = files(photos, Path(folder))
        for *names, before, after in cells(root, hdf5):
            if args.only not in " · ".join(map(str, names)):
                continue
            found.append(Cell(*names, *measured(before, after, args.rounds)))
            gc.collect()
            cell = found[-1]
            print(*names, f"{cell.before:,.0f} -> {cell.after:,.0f}: {cell.ratio:.2f}", flush=True)
    facts = {"rounds": args.rounds, "cells": [asdict(cell) for cell in found]}
    print(compared(save_facts(args.json, None, facts)))
    slower = [cell for cell in found if cell.ratio < ASKED]
    print(f"{len(found)} cells, {len(slower)} below {ASKED}", file=sys.stderr)
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
