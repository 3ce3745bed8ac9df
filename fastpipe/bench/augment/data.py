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
from fastpipe.testing.mels import mel_rows

__all__ = [
    "BANDS",
    "CLASSES",
    "FRAMES",
    "SIZE",
    "VOLUMES",
    "Batches",
    "made_batches",
    "made_motion",
    "made_volumes",
]

BANDS, FRAMES = 80, 400
CLASSES = 1000
VOLUMES, SIZE = 2, (72, 136, 136)  # of a batch, as large as patches are
SEQUENCES, MOTION = 64, (250, 25, 3)  # frames, joints and coordinates: ten seconds


@dataclass(frozen=True)
class Batches:
    """A batch of photos, one of spectrograms, one of volumes and one of motion.

    Attributes:
        name: what the report calls the photos.
        photos: uint8 (N, 3, 224, 224).
        spectrograms: float32 (N, 80, 400).
        volumes, labels_of_volumes: float32 (M, 1, D, H, W), and uint8 (M, D, H, W) of a few classes.
        motion, lengths: float32 (K, T, J, C), and int64 (K,).
    """

    name: str
    photos: npt.NDArray[np.uint8]
    spectrograms: npt.NDArray[np.float32]
    volumes: npt.NDArray[np.float32]
    labels_of_volumes: npt.NDArray[np.uint8]
    motion: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def text(self) -> str:
        """The data in one line."""
        count = len(self)
        return (
            f"a batch of {count} photos of {SIDE}×{SIDE} ({self.name}), again and again,"
            f" one of {count} made-up spectrograms of {BANDS}×{FRAMES},"
            f" one of {len(self.volumes)} made-up volumes of {_times(self.volumes.shape[2:])} with labels,"
            f" and one of {len(self.motion)} made-up sequences of {_times(self.motion.shape[1:])}"
        )

    def count(self, unit: str) -> int:
        """Samples in a batch."""
        return {"volumes": len(self.volumes), "sequences": len(self.motion)}.get(unit, len(self))

    def tensor(self, unit: str, dtype: str, device: str) -> Any:
        """A batch.

        Args:
            unit: ``"images"``, ``"spectrograms"``, ``"volumes"`` or ``"sequences"``.
            dtype: ``"float32"`` or ``"uint8"``.
            device: where it is.
        """
        torch = require("torch", extra="torch")
        arrays = {"spectrograms": self.spectrograms, "volumes": self.volumes, "sequences": self.motion}
        if unit in arrays:
            return torch.from_numpy(arrays[unit]).to(device)
        photos = torch.from_numpy(self.photos)
        return (photos / 255 if dtype == "float32" else photos).to(device)

    def more(self, unit: str, device: str) -> Any:
        """What is given beside a batch: labels of volumes, lengths of sequences."""
        torch = require("torch", extra="torch")
        found = self.labels_of_volumes if unit == "volumes" else self.lengths
        return torch.from_numpy(found).to(device)

    def labels(self, device: str) -> Any:
        """Numbers of classes, one for each sample."""
        return require("torch", extra="torch").arange(len(self), device=device) % CLASSES

    def save(self, folder: Path) -> dict[str, str]:
        """Write what other processes need as NumPy's files; return their paths by name."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "photos": self.photos, "spectrograms": self.spectrograms, "volumes": self.volumes,
            "labels_of_volumes": self.labels_of_volumes,
        }  # fmt: skip
        paths = {name: str(folder / f"{name}.npy") for name in arrays}
        for name, array in arrays.items():
            np.save(paths[name], array)
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
    rng = np.random.default_rng(0)
    return Batches(
        name, photos, mel_rows(rng, count, (BANDS, FRAMES)), *made_volumes(rng, VOLUMES, SIZE),
        *made_motion(rng, SEQUENCES, MOTION),
    )  # fmt: skip


def made_volumes(
    rng: np.random.Generator, count: int, size: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Smooth volumes with some noise, of mean 0 and standard deviation 1; labels are four levels of them."""
    torch = require("torch", extra="torch")
    small = torch.from_numpy(rng.standard_normal((count, 1, 6, 9, 9), np.float32))
    smooth = torch.nn.functional.interpolate(small, size, mode="trilinear").numpy()
    values = smooth + 0.1 * rng.standard_normal(smooth.shape, np.float32)
    values = (values - values.mean()) / values.std()
    levels = np.quantile(smooth, [0.5, 0.8, 0.95])
    return values.astype(np.float32), np.digitize(smooth[:, 0], levels).astype(np.uint8)


def made_motion(
    rng: np.random.Generator, count: int, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Joints that wander, each sequence for at least half of the frames."""
    steps = rng.standard_normal((count, *shape), np.float32)
    lengths = rng.integers(shape[0] // 2, shape[0] + 1, count)
    motion: npt.NDArray[np.float32] = np.cumsum(steps, axis=1, dtype=np.float32) / np.float32(10)
    motion[np.arange(shape[0]) >= lengths[:, None]] = 0
    return motion, lengths


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
