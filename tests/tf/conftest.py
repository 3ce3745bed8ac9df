"""TensorFlow, once, with what it leaves running."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# Tests of torch run in the same process, and import torchvision: see fastpipe/core/processes.py.
import torchvision  # noqa: F401

import tensorflow as tf  # isort: skip

# For tests of strategies; to be said before anything runs.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(autouse=True, scope="session")
def started() -> None:
    """Its threads and descriptors, which stay to the end, are there before any test looks."""
    made = tf.data.Dataset.range(8).map(lambda n: n + 1, num_parallel_calls=tf.data.AUTOTUNE).batch(2)
    assert len(list(made.prefetch(tf.data.AUTOTUNE))) == 4
    assert int(tf.py_function(lambda: 3, [], tf.int32)) == 3


class Photos:
    """A table of photographs.

    Attributes:
        paths: of the files.
        sizes: width and height of each.
        boxes: int (N, 4): left, top, right, bottom.
        labels: names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = sorted(str(path) for path in folder.rglob("*") if path.is_file())
        self.labels = [Path(path).parent.name for path in self.paths]
        self.sizes = [self._size(path) for path in self.paths]
        rng = np.random.default_rng(0)
        self.boxes = np.array([self._box(rng, *size) for size in self.sizes])

    @staticmethod
    def _size(path: str) -> tuple[int, int]:
        with Image.open(path) as image:
            return image.size  # type: ignore[no-any-return]

    @staticmethod
    def _box(rng: np.random.Generator, width: int, height: int) -> list[int]:
        left, right = sorted(rng.choice(width + 1, 2, replace=False).tolist())
        top, bottom = sorted(rng.choice(height + 1, 2, replace=False).tolist())
        return [left, top, right, bottom]

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def table(self) -> dict[str, Any]:
        """All of it, as a dict of columns."""
        x0, y0, x1, y1 = self.boxes.T.tolist()
        return {
            "file": self.paths, "label": self.labels, "box": self.boxes.tolist(), "x0": x0, "y0": y0, "x1": x1,
            "y1": y1,
        }  # fmt: skip


@pytest.fixture(scope="session")
def photo_table(photos: Path) -> Photos:
    """The photographs of this machine, or made ones."""
    return Photos(photos)


@pytest.fixture
def by_pillow() -> Callable[..., Any]:
    """What scripts do: ``Image.open(…).convert(…).crop(…).resize(…)``, as float32."""

    def load(path: str, box: Any, size: int, mode: str = "RGB", how: str = "BILINEAR") -> Any:
        with Image.open(path) as opened:
            image = opened.convert(mode)
        if box is not None:
            image = image.crop(tuple(int(edge) for edge in box))
        pixels = np.asarray(image.resize((size, size), Image.Resampling[how]), np.float32)
        return pixels if pixels.ndim == 3 else pixels[:, :, None]

    return load


def rows_of(dataset: Any) -> Iterator[Any]:
    """The rows of a dataset of (images, labels) or images, as arrays."""
    for element in dataset.unbatch():
        yield tf.nest.map_structure(lambda tensor: tensor.numpy(), element)


@pytest.fixture
def rows() -> Callable[[Any], list[Any]]:
    """All rows of a dataset."""
    return lambda dataset: list(rows_of(dataset))


@pytest.fixture(scope="session")
def two_replicas() -> Any:
    """A strategy of two replicas on this machine's processor: one, as keys of collectives are not taken twice."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
