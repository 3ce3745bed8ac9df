"""Recipes for volumes and motion, beside those that ``fastpipe bench augment`` has, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cases import scripts
from fastpipe.bench import augment
from fastpipe.bench.augment import Batches, Kit, Recipe
from fastpipe.core.extras import require

VOLUMES, SIZE = 2, (72, 136, 136)  # of a batch, as large as patches are
SEQUENCES, MOTION = 64, (250, 25, 3)  # frames, joints and coordinates: ten seconds
# Joints that change places in a mirror: of 25 those of left and right.
PAIRS = tuple((joint, joint + 1) for joint in range(1, 25, 2))


# ---- Batches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayBatches(Batches):
    """Batches of photos, spectrograms, volumes and motion.

    Attributes:
        volumes, labels_of_volumes: float32 (M, 1, D, H, W), and uint8 (M, D, H, W) of a few classes.
        motion, lengths: float32 (K, T, J, C), and int64 (K,).
    """

    volumes: npt.NDArray[np.float32]
    labels_of_volumes: npt.NDArray[np.uint8]
    motion: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]

    @property
    def text(self) -> str:
        """The data in one line."""
        volume, sequence = ("×".join(map(str, one.shape[2:])) for one in (self.volumes, self.motion[:, None]))
        return (
            f"{super().text}, one of {len(self.volumes)} made-up volumes of {volume} with labels,"
            f" and one of {len(self.motion)} made-up sequences of {sequence}"
        )

    def count(self, unit: str) -> int:
        """Return how many samples a batch has."""
        return {"volumes": len(self.volumes), "sequences": len(self.motion)}.get(unit, len(self))

    def tensor(self, unit: str, dtype: str, device: str) -> Any:
        """Return a batch."""
        arrays = {"volumes": self.volumes, "sequences": self.motion}
        if unit in arrays:
            return require("torch", extra="torch").from_numpy(arrays[unit]).to(device)
        return super().tensor(unit, dtype, device)

    def more(self, unit: str, device: str) -> Any:
        """Return what is given beside a batch: labels of volumes, lengths of sequences."""
        found = self.labels_of_volumes if unit == "volumes" else self.lengths
        return require("torch", extra="torch").from_numpy(found).to(device)

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


def with_arrays(batches: Batches) -> ArrayBatches:
    """Return batches with made-up volumes and motion beside the photos."""
    rng = np.random.default_rng(0)
    return ArrayBatches(
        batches.name, batches.photos, batches.spectrograms, *made_volumes(rng, VOLUMES, SIZE),
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


# ---- Recipes ---------------------------------------------------------------------------------------


class ScriptedRecipe(Recipe):
    """A recipe for spectrograms or volumes alone."""

    def scripts(self, v2: Any) -> Kit:
        """Return what scripts have."""
        return scripts


class ArrayRecipe(Recipe):
    """A recipe for volumes with labels (unit ``"volumes"``), or for motion with lengths (``"sequences"``)."""

    def chain(self, dtype: str, **options: Any) -> Any:
        """Return the recipe as ``augment.Compose``."""
        return super().chain(dtype, **({"lengths": 1} if self.unit == "sequences" else {}), **options)

    def sampled(self, dtype: str) -> Callable[..., Any]:
        """Return a function that changes each sample, and what is given beside it, as scripts do."""
        torch, ops = require("torch", extra="torch"), self.ops(scripts, dtype)

        def change(*batch: Any) -> Any:
            rows = []
            for sample in zip(*batch, strict=True):
                for op in ops:
                    sample = op(*sample)
                rows.append(sample)
            return tuple(torch.stack(column) for column in zip(*rows, strict=True))

        return change

    def given(self, batches: Any, dtype: str, device: str) -> tuple[Any, ...]:
        """Return the batch, and what is given beside it."""
        return batches.tensor(self.unit, dtype, device), batches.more(self.unit, device)


def _volume(kit: Kit, dtype: str) -> list[Any]:
    """``augment.nnunet_default``, whose list it is."""
    return [
        kit.RandomAffine3D(30, (0.7, 1.4), p_rotation=0.2, p_scale=0.2),
        kit.RandomApply(kit.GaussianNoise3D((0.0, 0.1)), 0.1),
        kit.RandomApply(kit.GaussianBlur3D((0.5, 1.0), p_channel=0.5), 0.2),
        kit.RandomApply(kit.Brightness3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.Contrast3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.LowResolution3D((0.5, 1.0), p_channel=0.5), 0.25),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5), inverted=True), 0.1),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5)), 0.3),
        kit.RandomFlip3D(),
    ]


def _motion(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.MotionSpeed((0.8, 1.25)),
        kit.MotionTranslation(0.1),
        kit.MotionScale((0.9, 1.1)),
        kit.MotionMirror(PAIRS),
    ]


_FLOAT = ("float32",)
RECIPES: Sequence[Recipe] = (
    *augment.RECIPES[:3],
    ArrayRecipe(
        "volume", "nnU-Net's default", _volume, dtypes=_FLOAT, unit="volumes", whose="NumPy and SciPy"
    ),
    ArrayRecipe(
        "motion", "motion: speed, translation, scale, mirror", _motion, dtypes=_FLOAT, unit="sequences",
        whose="NumPy",
    ),
    *augment.RECIPES[3:],
)  # fmt: skip
