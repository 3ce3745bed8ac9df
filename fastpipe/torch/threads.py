"""The threads of a dataset in this process, and the torchvision transforms that may run in these threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from fastpipe.core.extras import require_threadpoolctl
from fastpipe.core.machine import default_threads
from fastpipe.core.pool import Process, ThreadPool
from fastpipe.images.steps import is_pristine

_MANY = 8  # with at least this many threads, one thread less costs almost no speed
# OpenMP is looked up here, so that a failure is an import error, not an error in a decoding thread.
_openmp = require_threadpoolctl("torch").ThreadpoolController().select(user_api="openmp")


def do_without_helpers() -> None:
    """Run this thread's torch operations without helper threads, as torch's worker processes do.  The
    decoding threads already occupy the cores that helper threads would use."""
    torch.get_num_threads()  # this call sets the thread's default now; otherwise torch would set it later
    # torch.set_num_threads would also apply to all threads that start later.  OpenMP's own setting applies
    # only to the calling thread.
    _openmp.limit(limits=1)


def process_of(threads: int | str, name: str) -> Process:
    """Return an object with this process's threads for a dataset.  A worker with one thread gets no pool.
    With ``"auto"``, the number of threads is this process's part of the cores, minus one if this is 8 or more
    and there is at most one worker."""
    worker = get_worker_info()
    if threads == "auto":
        threads = default_threads(worker.num_workers if worker else 1)
        if threads >= _MANY and (worker is None or worker.num_workers == 1):
            threads -= 1  # leaves a core for the training's own thread
    # A pool of one thread would only add a handover, while the worker's main thread is idle.
    pool = None if worker and threads == 1 else ThreadPool(int(threads), name, do_without_helpers)
    return Process(pool) if worker is None else Process(pool, worker.num_workers, worker.id)


_write: Callable[[int, str], None] | None = None
_native_lines: npt.NDArray[np.uint8] | None = None


def start_noting(write: Callable[[int, str], None], lines: npt.NDArray[np.uint8]) -> None:
    """In a worker, write notes from now on.  A note tells the parent process what a thread is doing.  Python
    threads call ``write``, and native threads write to the memory ``lines``."""
    global _write, _native_lines
    _write, _native_lines = write, lines


def native_lines() -> npt.NDArray[np.uint8] | None:
    """Return the memory in which native threads write their notes; None outside of workers."""
    return _native_lines


def note(about: Any) -> None:
    """In a worker, write a note about the work that this thread begins now; elsewhere do nothing."""
    if _write is not None:
        _write(threading.get_ident(), str(about))


# ---- transforms that may run in threads --------------------------------------------------------------

Transform = Callable[[Any], Any]


def is_thread_safe(transforms: Sequence[Transform]) -> bool:
    """Return whether these transforms give the same results in any thread, if `run_keyed` calls them."""
    return all(map(_is_safe, transforms))


def stock_note(is_promised: bool, stock: Sequence[Any]) -> str:
    if is_promised:
        return "as it is, in threads (thread_safe=True)"
    if is_thread_safe(stock):
        return "torchvision, in threads, with a generator for each sample"
    return "as it is, one sample after the other: fastpipe does not know it, or what follows it"


def thread_safe_types() -> frozenset[type]:
    """Return the types of torchvision's transforms that use no random numbers except those that
    ``KeyedGenerator`` controls.

    Three kinds are excluded: v1's ``RandomChoice`` and ``RandomOrder``, which draw from Python's ``random``;
    types that take a function, such as ``Lambda``; and transforms of batches.
    """
    return _known_types()[0]


def _is_safe(transform: Any) -> bool:
    # If torchvision.transforms is not loaded, the script uses none of its types.
    is_loaded = "torchvision.transforms" in sys.modules
    types, containers = _known_types() if is_loaded else ({torch.nn.Sequential}, {torch.nn.Sequential})
    # A transform with hooks or replaced methods runs unknown code.
    if type(transform) not in types or not is_pristine(transform):
        return False
    if type(transform) in containers:
        children: Iterable[Any] = getattr(transform, "transforms", transform)
        return all(map(_is_safe, children))
    return True


@cache
def _known_types() -> tuple[frozenset[type], frozenset[type]]:
    """Return all thread-safe types, and the subset whose objects contain other transforms."""
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    containers = (
        _named(v1, "Compose RandomApply")
        | _named(v2, "Compose RandomApply RandomChoice RandomOrder")
        | {torch.nn.Sequential}
    )
    return containers | _named(v1, _SHARED) | _named(v2, _SHARED + _ONLY_V2), containers


def _named(module: Any, names: str) -> frozenset[type]:
    return frozenset(getattr(module, name) for name in names.split() if hasattr(module, name))


# These names are in both generations of torchvision's transforms, v1 and v2.
_SHARED = """
    AugMix AutoAugment CenterCrop ColorJitter ConvertImageDtype ElasticTransform FiveCrop
    GaussianBlur Grayscale LinearTransformation Normalize PILToTensor Pad RandAugment
    RandomAdjustSharpness RandomAffine RandomAutocontrast RandomCrop RandomEqualize RandomErasing
    RandomGrayscale RandomHorizontalFlip RandomInvert RandomPerspective RandomPosterize
    RandomResizedCrop RandomRotation RandomSolarize RandomVerticalFlip Resize TenCrop ToPILImage
    ToTensor TrivialAugmentWide
"""
_ONLY_V2 = """
    ClampBoundingBoxes ConvertBoundingBoxFormat GaussianNoise Identity JPEG RGB
    RandomChannelPermutation RandomIoUCrop RandomPhotometricDistort RandomResize
    RandomShortestSize RandomZoomOut ScaleJitter ToDtype ToImage ToPureTensor
    UniformTemporalSubsample
"""
