"""fastpipe behind TensorFlow's own interfaces: datasets for ``tf.data`` and Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.epoch_times import EpochTimes
from fastpipe.core.extras import load_part, require
from fastpipe.core.processes import load_triton_apart

# First, so that a missing package is said with the pip command that brings it.
require("tensorflow", extra="tf")
require("keras", extra="tf")
load_triton_apart()

from fastpipe.tf.augment import Augment  # noqa: E402
from fastpipe.tf.dataset import Dataset, ImageDataset  # noqa: E402
from fastpipe.tf.image_dataset import image_dataset  # noqa: E402
from fastpipe.tf.options import Modality  # noqa: E402
from fastpipe.tf.timer import EpochTimer  # noqa: E402

if TYPE_CHECKING:
    from fastpipe.tf.of_hdf5 import hdf5_dataset
    from fastpipe.tf.of_volumes import patch_dataset

__all__ = [
    "Augment", "Dataset", "EpochTimer", "EpochTimes", "ImageDataset", "Modality", "hdf5_dataset",
    "image_dataset", "patch_dataset",
]  # fmt: skip


# With kernels that who reads images only has no use for.
_LAZY = {"hdf5_dataset": "fastpipe.tf.of_hdf5", "patch_dataset": "fastpipe.tf.of_volumes"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(load_part(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe.tf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
