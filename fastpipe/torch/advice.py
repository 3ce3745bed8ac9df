"""Tells the user of a loader, once, what would make its batches faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from types import FunctionType
from typing import Any

from torch.utils.data._utils.collate import default_collate

from fastpipe._cpus import default_threads
from fastpipe.torch.source import Source
from fastpipe.torch.split import SplitError
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
        remedy: gives the text; empty if there is nothing to say.
        clock: tells the seconds that can be helped: ``perf_counter`` for all of a wait, ``thread_time`` for
            code that runs in the loop's thread.
    """

    def __init__(
        self, waits: Waits, remedy: Callable[[], str] | None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._waits, self._remedy, self._clock = waits, remedy, clock
        self._last: float | None = None

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
    if source is None and not waits.has_advised:
        opener = next((end for end in ends_of(loader.dataset) if opens_images(end)), None)
        if opener is not None:
            waits.has_advised = True
            _log.warning("%s", _about_images(opener, loader.num_workers))
    if waits.has_advised or in_processes:
        return Advice(waits, None)
    if source is None:
        kinds = {type(end) for end in ends_of(loader.dataset)}
        own = next((kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES), None)
        if own is None:
            return Advice(waits, None)
        name = own.__name__
        return Advice(waits, lambda: _about_workers(f"{name}'s code"))
    if source.runs_user_code:
        return Advice(waits, lambda: _about_workers("a transform of the script's"), thread_time)
    if loader.collate_fn is not default_collate:
        return Advice(waits, lambda: _about_workers("the script's collate_fn"), thread_time)
    if loader.augment is None:
        return Advice(waits, lambda: _about_augment(source))
    return Advice(waits, None)


def _about_workers(what: str) -> str:
    cores = default_threads()
    if cores == 1:
        return ""
    return (
        f"batches wait for {what}, which runs in this process, one sample after the other: "
        f"num_workers={cores} runs it in worker processes, as with a DataLoader"
    )


def _about_images(dataset: Any, num_workers: int) -> str:
    pairs = "dataset.samples" if hasattr(dataset, "samples") else "zip(files, labels)"
    text = (
        f"{type(dataset).__name__} opens its images one by one in Python. If a sample is an image and its "
        f"target, dataset = FastImageFolder.from_samples({pairs}, transform) makes the same samples, about "
        "twice as fast"
    )
    cores = default_threads()
    return text if num_workers or cores == 1 else f"{text}; or else num_workers={cores} helps"


def _about_augment(source: Source) -> str:
    totals = source.clock.totals()
    spent = sum(seconds for stage, seconds in totals.items() if stage != "wait")
    if totals.get("transform", 0.0) < _TRANSFORM_SHARE * spent:
        return ""
    try:
        source.split()
    except SplitError:
        return ""
    return (
        "batches wait for torchvision's transforms after the crop: FastLoader(…, augment='auto') measures "
        "whether fastpipe's augmentation is faster, with the same distributions and other draws"
    )


# Their datasets cost little, and no worker helps them.
_LIBRARIES = {"builtins", "numpy", "torch"}
_READERS = {"default_loader", "pil_loader", "imread", "read_image", "decode_image", "decode_jpeg"}


def opens_images(dataset: Any) -> bool:
    """Return whether a dataset's own code opens image files, as far as the names in it tell.

    >>> from PIL import Image
    >>> class Own:
    ...     def __getitem__(self, index):
    ...         return Image.open(self.files[index])
    >>> opens_images(Own())
    True
    """
    kind = type(dataset)
    todo: list[Any] = [getattr(kind, "__getitem__", None)]
    seen: set[Any] = set()
    while todo and len(seen) < 50:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        names = set(function.__code__.co_names)
        if names & _READERS or {"Image", "open"} <= names:
            return True
        todo += [getattr(kind, name, None) or function.__globals__.get(name) for name in names]
    return False
