"""fastpipe behind TensorFlow's own interfaces: datasets for ``tf.data`` and Keras."""

from __future__ import annotations

from fastpipe._beside import load_triton_apart
from fastpipe._extras import require

# First, so that a missing package is said with the pip command that brings it.
require("tensorflow", extra="tf")
require("keras", extra="tf")
load_triton_apart()

from fastpipe.tf.augment import Augment  # noqa: E402
from fastpipe.tf.dataset import ImageDataset  # noqa: E402
from fastpipe.tf.image_dataset import image_dataset  # noqa: E402
from fastpipe.tf.options import Modality  # noqa: E402
from fastpipe.tf.timer import EpochTimer, EpochTimes  # noqa: E402

__all__ = ["Augment", "EpochTimer", "EpochTimes", "ImageDataset", "Modality", "image_dataset"]
