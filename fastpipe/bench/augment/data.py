"""Which batches are augmented."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.bench.data import listed, scan
from fastpipe.bench.loaders import SIDE, check_transform
from fastpipe.testing import mel_rows

__all__ = ["BANDS", "CLASSES", "FRAMES", "Batches", "made_batches"]

BANDS, FRAMES = 80, 400
CLASSES = 1000


@dataclass(frozen=True)
class Batches:
    """A batch of photos, and one of spectrograms.

    Attributes:
        name: what the report calls the photos.
        photos: uint8 (N, 3, 224, 224).
        spectrograms: float32 (N, 80, 400).
    """

    name: str
    photos: npt.NDArray[np.uint8]
    spectrograms: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def text(self) -> str:
        """The data in one line."""
        count = len(self)
        return (
            f"a batch of {count} photos of {SIDE}×{SIDE} ({self.name}), again and again,"
            f" and one of {count} made-up spectrograms of {BANDS}×{FRAMES}"
        )

    def tensor(self, unit: str, dtype: str, device: str) -> Any:
        """A batch.

        Args:
            unit: ``"images"`` or ``"spectrograms"``.
            dtype: ``"float32"`` or ``"uint8"``.
            device: where it is.
        """
        torch = require("torch", extra="torch")
        if unit == "spectrograms":
            return torch.from_numpy(self.spectrograms).to(device)
        photos = torch.from_numpy(self.photos)
        return (photos / 255 if dtype == "float32" else photos).to(device)

    def labels(self, device: str) -> Any:
        """Numbers of classes, one for each sample."""
        return require("torch", extra="torch").arange(len(self), device=device) % CLASSES

    def save(self, folder: Path) -> tuple[str, str]:
        """Write both as NumPy's files for other processes; return their paths."""
        paths = str(folder / "photos.npy"), str(folder / "spectrograms.npy")
        np.save(paths[0], self.photos)
        np.save(paths[1], self.spectrograms)
        return paths


def made_batches(folder: Path, name: str, count: int) -> Batches:
    """Photos of a folder, spread evenly over it, scaled and cut to one size; spectrograms are made up.

    Args:
        folder: an image folder.
        name: what the report calls it.
        count: samples in a batch; photos are taken again where there are fewer.

    Raises:
        OptionError: the folder cannot be used.
    """
    chosen = scan(folder, name, count).indices
    dataset = listed(folder, check_transform())
    images = [dataset[index][0].numpy() for index in chosen]
    # NumPy would stack them in the layout of the decoded images, which is not that of a loader's batch.
    photos = np.ascontiguousarray(np.stack([images[at % len(images)] for at in range(count)]))
    return Batches(name, photos, mel_rows(np.random.default_rng(0), count, (BANDS, FRAMES)))
