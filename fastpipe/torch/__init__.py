"""Datasets and a loader that have the same interfaces as torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part, require
from fastpipe.core.processes import load_triton_apart

# This call comes first, so that the error for a missing package contains the pip command that installs it.
require("torch", extra="torch")
load_triton_apart()

if TYPE_CHECKING:
    from fastpipe.torch.hdf5_dataset import FastHDF5Dataset
    from fastpipe.torch.image_folder import FastImageFolder
    from fastpipe.torch.loader import FastLoader, accelerate
    from fastpipe.torch.patch_dataset import FastPatchDataset
    from fastpipe.torch.segments import group_batches, segment_reduce
    from fastpipe.torch.stitching import stitch
    from fastpipe.torch.trainers import EpochTimer, accelerate_trainer, prepare

__all__ = [
    "EpochTimer", "FastHDF5Dataset", "FastImageFolder", "FastLoader", "FastPatchDataset", "accelerate",
    "accelerate_trainer", "group_batches", "prepare", "segment_reduce", "stitch",
]  # fmt: skip


# The module that defines each name.  A module is imported when one of its names is first used.
_LAZY = {
    "EpochTimer": "fastpipe.torch.trainers",
    "FastHDF5Dataset": "fastpipe.torch.hdf5_dataset",
    "FastImageFolder": "fastpipe.torch.image_folder",
    "FastLoader": "fastpipe.torch.loader",
    "FastPatchDataset": "fastpipe.torch.patch_dataset",
    "accelerate": "fastpipe.torch.loader",
    "accelerate_trainer": "fastpipe.torch.trainers",
    "group_batches": "fastpipe.torch.segments",
    "prepare": "fastpipe.torch.trainers",
    "segment_reduce": "fastpipe.torch.segments",
    "stitch": "fastpipe.torch.stitching",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        if name == "FastImageFolder":
            require("torchvision", extra="torch")
        value = getattr(load_part(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
