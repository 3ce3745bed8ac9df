"""Tells the user of a loader, once, what would make its batches faster."""

from __future__ import annotations

import dis
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter, thread_time
from types import FunctionType
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils.collate import default_collate, default_convert

from fastpipe.core.machine import default_threads
from fastpipe.core.processes import why_no_processes
from fastpipe.errors import MissingDependencyError
from fastpipe.torch.source import Source, SplitError
from fastpipe.torch.views import ends_of

__all__ = ["Advice", "Waits", "advice_for", "opens_images"]

_log = logging.getLogger("fastpipe")

# Advice is given when the loop has waited this long, this share of its time, and this long for each batch: a
# batch that takes less is made faster here than it is sent from another process.
_WAITED_S = 1.0
_WAITED_SHARE = 0.2
_EACH_S = 0.005
# The share of the threads' time that torchvision's transforms take before another way to do them is named.
_TRANSFORM_SHARE = 0.3


class Waits:
    """How long a loop has waited for a loader's batches, in all epochs so far.

    Attributes:
        batches: how many.
        waited: seconds spent on what can be helped.
        elapsed: seconds from the first request of each epoch on.
        has_advised: whether the user has been told.
    """

    def __init__(self) -> None:
        self.batches, self.waited, self.elapsed = 0, 0.0, 0.0
        self.has_advised = False


class Advice:
    """Watches an iterator's batches, and names what would help if they are waited for.

    Args:
        waits: the loader's.
        remedy: gives the text, empty if there is nothing to say; None watches nothing.
        clock: tells the seconds that can be helped: ``perf_counter`` for all of a wait, ``thread_time`` for
            code that runs in the loop's thread.
    """

    def __init__(
        self, waits: Waits, remedy: Callable[[], str] | None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._waits, self._remedy, self._clock = waits, remedy, clock
        self._last: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing left to say."""
        return self._remedy is None or self._waits.has_advised

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the block as the request of a batch."""
        if self._remedy is None or self._waits.has_advised:
            yield
            return
        begun, asked = perf_counter(), self._clock()
        yield  # an error, or the end of the epoch, says nothing of waiting
        waits, now = self._waits, perf_counter()
        waits.batches += 1
        waits.waited += self._clock() - asked
        waits.elapsed += now - (begun if self._last is None else self._last)
        self._last = now
        if waits.waited >= max(_WAITED_S, _WAITED_SHARE * waits.elapsed, _EACH_S * waits.batches):
            waits.has_advised = True
            text = self._remedy()
            if text:
                _log.warning("%s", text)


def advice_for(loader: Any, source: Source | None, in_processes: bool, waits: Waits) -> Advice:
    """Return what watches a new iterator of a loader.

    A dataset that opens images is named at once, as nothing has to be measured for that.

    Args:
        loader: a ``FastLoader``.
        source: what makes its batches; None for the dataset's own code.
        in_processes: whether worker processes make them.
        waits: the loader's.
    """
    silent = Advice(waits, None)
    if waits.has_advised:
        return silent
    if source is None:
        opener = next(filter(opens_images, ends_of(loader.dataset)), None)
        if opener is not None:
            waits.has_advised = True
            if _is_new(opener):
                _log.warning("%s", _about_images(opener, loader.num_workers))
            return silent
    if in_processes or loader._why_workers:  # which were chosen by measuring
        return silent
    has_own_collate = loader.collate_fn not in (default_collate, default_convert)
    if source is None:
        own = next((kind for kind in map(type, ends_of(loader.dataset)) if not _is_torchs(kind)), None)
        if own is None and not has_own_collate:
            return silent
        what = "the script's collate_fn" if own is None else f"{own.__name__}'s code"
        is_stream = isinstance(loader.dataset, IterableDataset)
        return Advice(waits, lambda: _about_workers(what, is_stream))
    if source.runs_user_code or has_own_collate:
        what = "a transform of the script's" if source.runs_user_code else "the script's collate_fn"
        if loader.num_workers:  # workers="threads"
            return silent
        return Advice(waits, lambda: _about_workers(what), thread_time)
    return silent if loader.augment is not None else Advice(waits, lambda: _about_augment(source))


def _about_workers(what: str, is_stream: bool = False) -> str:
    cores = 1 if why_no_processes() else default_threads()
    if cores == 1:
        return ""
    text = (
        f"batches wait for {what}, which runs in this process, one sample after the other: "
        f"num_workers={cores} runs it in worker processes, as with a DataLoader"
    )
    part = ", each of which must give its own part of the samples (torch.utils.data.get_worker_info)"
    return text + part if is_stream else text


def _about_images(dataset: Any, num_workers: int) -> str:
    has_samples = inspect.getattr_static(dataset, "samples", None) is not None
    pairs = "dataset.samples" if has_samples else "zip(files, labels)"
    text = (
        f"{type(dataset).__name__} opens its images one by one in Python. If a sample is a file's image in "
        f"RGB, transformed, and its target: dataset = FastImageFolder.from_samples({pairs}, transform) makes "
        "the same samples, usually much faster"
    )
    cores = 1 if why_no_processes() else default_threads()
    return text if num_workers or cores == 1 else f"{text}. Or pass num_workers={cores}"


def _about_augment(source: Source) -> str:
    totals = source.clock.totals()
    spent = sum(seconds for stage, seconds in totals.items() if stage != "wait")
    if totals.get("transform", 0.0) < _TRANSFORM_SHARE * spent:
        return ""
    try:
        source.split()
    except (SplitError, MissingDependencyError):  # advice never ends an epoch
        return ""
    return (
        "batches wait for torchvision's transforms after the crop: augment='auto', of FastLoader and "
        "accelerate, measures whether fastpipe's augmentation is faster, with the same distributions and "
        "other draws"
    )


_told: weakref.WeakSet[Any] = weakref.WeakSet()  # datasets that were named, whatever loaders they have


def _is_new(dataset: Any) -> bool:
    try:
        is_new = dataset not in _told
        _told.add(dataset)
    except TypeError:  # it has no hash, or no weak references
        return True
    return is_new


def _is_torchs(kind: type) -> bool:
    """Whether a dataset costs little, and no worker helps it."""
    return kind.__module__.partition(".")[0] in {"builtins", "numpy", "torch"}


_READERS = {"default_loader", "pil_loader", "imread", "read_image"}


def opens_images(dataset: Any) -> bool:
    """Return whether a dataset's own code opens image files, as far as the names in it tell.

    >>> from PIL import Image
    >>> class Own:
    ...     def __getitem__(self, index):
    ...         return Image.open(self.files[index])
    >>> opens_images(Own())
    True
    """
    folder: Any = sys.modules.get("torchvision.datasets.folder")  # else there is no dataset of its classes
    is_folder = folder is not None and isinstance(dataset, folder.DatasetFolder)
    if is_folder and dataset.loader not in (folder.default_loader, folder.pil_loader):
        return False
    kind: Any = type(dataset)
    return _kind_opens_images(kind)


@lru_cache(64)
def _kind_opens_images(kind: Any) -> bool:
    todo: list[Any] = [inspect.getattr_static(kind, name, None) for name in ("__getitem__", "__getitems__")]
    seen: list[Any] = []
    while todo and len(seen) < 50:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.append(function)
        names = function.__code__.co_names
        if "BytesIO" in names:  # what it opens is no file
            continue
        if _READERS.intersection(names) or _opens_with_pillow(function):
            return True
        for name in names:
            todo += [inspect.getattr_static(kind, name, None), function.__globals__.get(name)]
    return False


def _opens_with_pillow(function: FunctionType) -> bool:
    """Return whether a function names ``Image.open``, by whatever name it knows Pillow's module."""
    module, before = sys.modules.get("PIL.Image"), ""
    for instruction in dis.get_instructions(function):
        name = instruction.argval
        if name == "open" and (before == "Image" or function.__globals__.get(before) is module):
            return module is not None
        before = name if isinstance(name, str) else ""
    return False
