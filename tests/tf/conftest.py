"""TensorFlow, once, with what it leaves running; a table of photographs."""

from __future__ import annotations

import os
from collections.abc import Callable
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
    """TensorFlow's threads and descriptors, which stay to the end, are there before any test looks."""
    made = tf.data.Dataset.range(8).map(lambda n: n + 1, num_parallel_calls=tf.data.AUTOTUNE).batch(2)
    assert len(list(made.prefetch(tf.data.AUTOTUNE))) == 4
    assert int(tf.py_function(lambda: 3, [], tf.int32)) == 3


class Photos:
    """A table of photographs, with a name as the label, the width and height, and a box (left, top, right,
    bottom) of each."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.rglob("*") if path.is_file())
        self.labels = [Path(path).parent.name for path in self.paths]
        self.sizes = []
        for path in self.paths:
            with Image.open(path) as image:
                self.sizes.append(image.size)
        rng = np.random.default_rng(0)
        edges = [[sorted(rng.choice(side + 1, 2, replace=False)) for side in size] for size in self.sizes]
        self.boxes = np.array([[left, top, right, bottom] for (left, right), (top, bottom) in edges])

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def table(self) -> dict[str, Any]:
        """All of it, as a dict of columns."""
        corners = dict(zip(("x0", "y0", "x1", "y1"), self.boxes.T.tolist(), strict=True))
        return {"file": self.paths, "label": self.labels, "box": self.boxes.tolist(), **corners}


@pytest.fixture(scope="session")
def photo_table(photos: Path) -> Photos:
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


@pytest.fixture
def rows() -> Callable[[Any], list[Any]]:
    """All rows of a dataset of (images, labels) or images, as arrays."""
    return lambda made: [tf.nest.map_structure(lambda one: one.numpy(), row) for row in made.unbatch()]


@pytest.fixture
def same() -> Callable[..., None]:
    """Compares two datasets: the same elements, of the same types."""

    def compare(made: Any, expected: Any) -> None:
        assert made.element_spec == expected.element_spec
        for element, other in zip(made, expected, strict=True):
            tf.nest.assert_same_structure(element, other)
            for one, like in zip(tf.nest.flatten(element), tf.nest.flatten(other), strict=True):
                np.testing.assert_array_equal(one.numpy(), like.numpy())

    return compare


@pytest.fixture(scope="session")
def two_replicas() -> Any:
    """A strategy of two replicas on this machine's processor: one, as keys of collectives are not taken twice."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
