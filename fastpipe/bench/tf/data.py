"""Which photos are read, and the tables of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["ALONE", "FULL", "MODALITIES", "NUMBERS", "QUICK", "SIDE", "Lengths", "Photos", "Setting", "Table"]

SIDE = 128
# Names of the images of a sample, and of the numbers beside them.
ALONE = ("image",)
MODALITIES = ("photo", "depth", "thermal", "mask")
NUMBERS = "numbers"

# The part of an image's area that a box has.
LEAST_AREA, MOST_AREA = 0.3, 0.6
# JPEGs alone: whoever decodes boxes with TensorFlow's operations has nothing else.
_ENDINGS = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Lengths:
    """Samples of an epoch, in each section.

    Attributes:
        crops: one box of each.
        folder: photos of a folder.
        modalities: four boxes of each.
        batches: batches in memory, of which it is the number.
        rows: of an HDF5 file.
        patches: of a volume.
    """

    crops: int
    folder: int
    modalities: int
    batches: int
    rows: int
    patches: int


# Epochs as long as those of small data sets, for each has a beginning and an end that cost something; of
# larger samples fewer, so that an epoch takes as long.
FULL = Lengths(2048, 512, 512, 32, 1024, 128)
QUICK = Lengths(40, 24, 24, 4, 40, 6)


@dataclass(frozen=True)
class Photos:
    """JPEGs of an image folder.

    Attributes:
        name: what the report calls the folder.
        files: their paths.
        labels: int32 (N,): numbers of their classes, all of which occur.
        classes: names of these.
        sizes: (N, 2): width and height.
        total: how many JPEGs the folder has.
    """

    name: str
    files: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    classes: tuple[str, ...]
    sizes: npt.NDArray[np.int64]
    total: int

    @classmethod
    def of(cls, folder: Path, name: str, most: int) -> Photos:
        """At most so many photos of a folder, spread evenly over it.

        Raises:
            OptionError: there are no class folders, or no JPEGs in them.
        """
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if not classes:
            raise OptionError(
                f"{str(folder)!r} has no class folders; an image folder has one sub-folder per class"
            )
        files = [
            path for one in classes for path in sorted((folder / one).rglob("*"))
            if path.suffix.lower() in _ENDINGS and path.is_file()
        ]  # fmt: skip
        count = min(len(files), most)
        chosen = [files[i * len(files) // count] for i in range(count)]
        sizes = {path: size for path in chosen if (size := _size(path)) is not None}
        if not sizes:
            raise OptionError(f"{str(folder)!r} has no JPEGs in its class folders, which this case needs")
        of_class = [path.relative_to(folder).parts[0] for path in sizes]
        found, labels = np.unique(of_class, return_inverse=True)
        return cls(
            name, tuple(map(str, sizes)), labels.astype(np.int32), tuple(found.tolist()),
            np.array(list(sizes.values()), np.int64), len(files),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(os.path.getsize(path) for path in self.files)

    @property
    def text(self) -> str:
        """The photos in one line."""
        count, part = len(self.files), "" if len(self.files) == self.total else f" of {self.total:,}"
        return (
            f"{count:,}{part} photos in {len(self.classes)} classes, {self.nbytes / count / 1000:.0f} kB each"
            f" ({self.name})"
        )

    def table(self, count: int, names: tuple[str, ...] = ALONE) -> Table:
        """Rows of so many samples: photos again and again, each time with other boxes.

        Args:
            count: of the rows.
            names: of the images that a row has, all of the same photo, each with a box of its own.
        """
        at = np.arange(count) % len(self.files)
        boxes = {name: _boxes(self.sizes[at], seed) for seed, name in enumerate(names)}
        numbers = np.random.default_rng(len(names)).random((count, 2)).astype(np.float32)
        return Table(tuple(self.files[i] for i in at), self.labels[at], boxes, numbers)

    def copied(self, folder: Path, count: int) -> Path:
        """A folder with so many photos in class folders.

        They are copies: a cache knows one file in two places to be one.

        Args:
            folder: where they go; made here.
            count: how many; photos are taken again where there are fewer.
        """
        for number in range(count):
            at = number % len(self.files)
            target = folder / self.classes[self.labels[at]] / f"{number:06d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.files[at], target)
        return folder


@dataclass(frozen=True)
class Table:
    """What a script's data frame holds.

    Attributes:
        files: of each row.
        labels: int32 (N,): of each row.
        boxes: name of an image → int32 (N, 4): left, top, right, bottom.
        numbers: float32 (N, 2): further inputs, of tables with several images.
    """

    files: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    boxes: Mapping[str, npt.NDArray[np.int32]]
    numbers: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def is_single(self) -> bool:
        """Whether the input of a model is one image."""
        return tuple(self.boxes) == ALONE

    @property
    def columns(self) -> dict[str, Any]:
        """All of it, for ``from_tensor_slices``."""
        return {"file": list(self.files), "label": self.labels, NUMBERS: self.numbers, **self.boxes}


@dataclass(frozen=True)
class Setting:
    """What datasets are made of.

    Attributes:
        photos: the photos.
        lengths: samples of epochs.
        batch_size: samples in a batch.
        scratch: a folder for what is written while measuring.
    """

    photos: Photos
    lengths: Lengths
    batch_size: int
    scratch: Path

    @cached_property
    def crops(self) -> Table:
        """A table of one image in each row."""
        return self.photos.table(self.lengths.crops)

    @cached_property
    def several(self) -> Table:
        """A table of four images in each row."""
        return self.photos.table(self.lengths.modalities, MODALITIES)

    def cache(self, where: Literal["off", "ram", "disk"]) -> fastpipe.Cache:
        """Where samples are kept: of the same option in the same place, as long as a dataset has it."""
        return fastpipe.Cache(where, dir=self.scratch / "kept" if where == "disk" else None)

    @cached_property
    def folder(self) -> Path:
        """An image folder."""
        return self.photos.copied(self.scratch / "photos", self.lengths.folder)


def _size(path: Path) -> tuple[int, int] | None:
    """Width and height of a JPEG; None of what is none."""
    image = require("PIL.Image", extra="image")
    try:
        with image.open(path) as opened:
            return (opened.width, opened.height) if opened.format == "JPEG" else None
    except OSError:
        return None


def _boxes(sizes: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int32]:
    """A box in each image, of any form and anywhere.

    Args:
        sizes: (N, 2): width and height.
        seed: decides the boxes.
    """
    rng, count = np.random.default_rng(seed), len(sizes)
    area = rng.uniform(LEAST_AREA, MOST_AREA, count)
    wide = area ** rng.uniform(0, 1, count)  # from all of the width to all of the height
    parts = np.stack([wide, area / wide], axis=1)
    spans = np.clip(np.rint(parts * sizes), 1, sizes)
    start = np.floor(rng.uniform(0, 1, (count, 2)) * (sizes - spans + 1))
    return np.hstack([start, start + spans]).astype(np.int32)
