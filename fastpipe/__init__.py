"""fastpipe: make the input pipeline of an existing training script fast.

Replace the script's dataset or loader by the fastpipe class that behaves in the same way::

    from fastpipe import FastImageFolder, FastLoader

Importing this package loads only the standard library and NumPy.  Other packages, such as torch, are
imported when a script first uses a name of fastpipe that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe import errors, sampling
from fastpipe.core.extras import load_part
from fastpipe.options import BadSamples, Cache, Decode, Rescale, Shard, Shuffle, Stage, Subset, ZScore

if TYPE_CHECKING:
    # ``as`` exports a name to type checkers.
    from fastpipe import augment as augment
    from fastpipe import generation as generation
    from fastpipe import pillow as pillow
    from fastpipe import profiling as profiling
    from fastpipe import tf as tf
    from fastpipe import tools as tools
    from fastpipe import torch as torch
    from fastpipe.generation import generate, memoize
    from fastpipe.tools import autotune, autotune_batch_size, profile, watch
    from fastpipe.torch import (
        FastHDF5Dataset,
        FastImageFolder,
        FastLoader,
        FastPatchDataset,
        accelerate,
        group_batches,
        segment_reduce,
        stitch,
    )

__version__ = "0.1.0"

__all__ = [
    "BadSamples", "Cache", "Decode", "FastHDF5Dataset", "FastImageFolder", "FastLoader",
    "FastPatchDataset", "Rescale", "Shard", "Shuffle", "Stage", "Subset", "ZScore", "accelerate",
    "autotune", "autotune_batch_size", "errors", "generate", "group_batches", "memoize", "profile",
    "sampling", "segment_reduce", "stitch", "watch",
]  # fmt: skip

_LAZY = {
    **dict.fromkeys(
        (
            "FastHDF5Dataset",
            "FastImageFolder",
            "FastLoader",
            "FastPatchDataset",
            "accelerate",
            "group_batches",
            "segment_reduce",
            "stitch",
        ),
        "fastpipe.torch",
    ),
    **dict.fromkeys(("generate", "memoize"), "fastpipe.generation"),
    **dict.fromkeys(("autotune", "autotune_batch_size", "profile", "watch"), "fastpipe.tools"),
}


# Subpackages that scripts use without an import of their own, as in ``fastpipe.tf.image_dataset``.
_PARTS = ("augment", "generation", "pillow", "profiling", "tf", "tools", "torch")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return load_part(f"{__name__}.{name}")
    if name in _LAZY:
        value = getattr(load_part(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
