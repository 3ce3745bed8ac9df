"""fastpipe for TensorFlow: datasets and augmentation for ``tf.data`` and Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.epoch_times import EpochTimes
from fastpipe.core.extras import load_part, require
from fastpipe.core.processes import load_triton_apart

# Call ``require`` first. If a package is missing, the error names the pip command that installs the package.
require("tensorflow", extra="tf")
require("keras", extra="tf")
load_triton_apart()

from fastpipe.tf.augment import Augment  # noqa: E402
from fastpipe.tf.dataset import Dataset, ImageDataset  # noqa: E402
from fastpipe.tf.image_dataset import image_dataset  # noqa: E402
from fastpipe.tf.options import Modality  # noqa: E402
from fastpipe.tf.timer import EpochTimer  # noqa: E402

if TYPE_CHECKING:
    from fastpipe.tf.arrays import hdf5_dataset, patch_dataset

__all__ = [
    "Augment", "Dataset", "EpochTimer", "EpochTimes", "ImageDataset", "Modality", "hdf5_dataset",
    "image_dataset", "patch_dataset",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("hdf5_dataset", "patch_dataset"):  # image-only users do not need the array kernels
        value = getattr(load_part("fastpipe.tf.arrays"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe.tf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
