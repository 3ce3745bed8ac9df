"""The threads of a dataset in this process, and the torchvision transforms that may run in them."""

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

_MANY = 8  # number of threads from which one less is hardly slower
# Looked up here, so that a failure is an import error, not an error in a decoding thread.
_openmp = require_threadpoolctl("torch").ThreadpoolController().select(user_api="openmp")


def do_without_helpers() -> None:
    """Run this thread's torch operations without helper threads, whose cores the decoding threads occupy
    already; torch's worker processes do the same."""
    torch.get_num_threads()  # sets this thread's default now, which would otherwise happen later
    # torch.set_num_threads would apply to all threads that start later; OpenMP's own setting applies
    # to the calling thread only.
    _openmp.limit(limits=1)


def process_of(threads: int | str, name: str) -> Process:
    """Return this process with a dataset's threads: none in a worker process with one thread; ``"auto"``
    is the number of cores that this process may use, minus one from 8 on."""
    worker = get_worker_info()
    if threads == "auto":
        threads = default_threads(worker.num_workers if worker else 1)
        if threads >= _MANY and (worker is None or worker.num_workers == 1):
            threads -= 1  # a core for the training's own thread
    # One thread beside the idle process would only add a handover.
    pool = None if worker and threads == 1 else ThreadPool(int(threads), name, do_without_helpers)
    return Process(pool) if worker is None else Process(pool, worker.num_workers, worker.id)


_write: Callable[[int, str], None] | None = None
_native_lines: npt.NDArray[np.uint8] | None = None


def start_noting(write: Callable[[int, str], None], lines: npt.NDArray[np.uint8]) -> None:
    """In a worker, use this function to write notes from now on; native threads write to ``lines``."""
    global _write, _native_lines
    _write, _native_lines = write, lines


def native_lines() -> npt.NDArray[np.uint8] | None:
    """Return the memory in which native threads write their notes; None outside of workers."""
    return _native_lines


def note(about: Any) -> None:
    """Note what this thread is about to do; do nothing outside of workers."""
    if _write is not None:
        _write(threading.get_ident(), str(about))


# ---- transforms that may run in threads --------------------------------------------------------------

Transform = Callable[[Any], Any]


def is_thread_safe(transforms: Sequence[Transform]) -> bool:
    """Return whether `run_keyed` reproduces these transforms from any thread."""
    return all(map(_is_safe, transforms))


def stock_note(is_promised: bool, stock: Sequence[Any]) -> str:
    if is_promised:
        return "as it is, in threads (thread_safe=True)"
    if is_thread_safe(stock):
        return "torchvision, in threads, with a generator for each sample"
    return "as it is, one sample after the other: fastpipe does not know it, or what follows it"


def thread_safe_types() -> frozenset[type]:
    """Return torchvision's types that draw only through torch with ``KeyedGenerator``, or not at all.

    Excluded are ``RandomChoice`` and ``RandomOrder`` of the first generation (they draw from Python's
    ``random``), ``Lambda`` and others that take a function, and transforms of batches.
    """
    return _known_types()[0]


def _is_safe(transform: Any) -> bool:
    # Otherwise there are no torchvision transforms in use.
    is_loaded = "torchvision.transforms" in sys.modules
    types, containers = _known_types() if is_loaded else ({torch.nn.Sequential}, {torch.nn.Sequential})
    # Hooks and replaced methods are unknown code.
    if type(transform) not in types or not is_pristine(transform):
        return False
    if type(transform) in containers:
        children: Iterable[Any] = getattr(transform, "transforms", transform)
        return all(map(_is_safe, children))
    return True


@cache
def _known_types() -> tuple[frozenset[type], frozenset[type]]:
    """Return the types, and those of them that contain other transforms."""
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


# In both generations of torchvision's transforms.
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
