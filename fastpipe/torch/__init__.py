"""fastpipe behind torch's own interfaces: datasets and a loader."""

from __future__ import annotations

from fastpipe._extras import require

# First, so that a missing package is said with the pip command that brings it.
require("torch", extra="torch")
require("torchvision", extra="torch")

from fastpipe.torch.accelerating import accelerate  # noqa: E402
from fastpipe.torch.hdf5.dataset import FastHDF5Dataset  # noqa: E402
from fastpipe.torch.image_folder import FastImageFolder  # noqa: E402
from fastpipe.torch.loader import FastLoader  # noqa: E402
from fastpipe.torch.segments import group_batches, segment_reduce  # noqa: E402
from fastpipe.torch.trainers import prepare  # noqa: E402

__all__ = [
    "FastHDF5Dataset", "FastImageFolder", "FastLoader", "accelerate", "group_batches", "prepare",
    "segment_reduce",
]  # fmt: skip
