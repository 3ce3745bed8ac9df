"""Decoding by NVIDIA DALI, on the CPU or on a GPU: one pipeline run decodes the parts of a whole batch."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.types import Box

# https://github.com/NVIDIA/nvImageCodec/issues/55: before this version, parts of ordinary JPEGs cause errors
# on some GPUs, and crash the process on others.
_WITHOUT = ("0.9.0",)


def decodes_regions(version: str) -> bool:
    """Return whether a version of nvImageCodec, which DALI uses as well, can decode parts on a GPU.

    >>> decodes_regions("0.9.0"), decodes_regions("0.9.0.20"), decodes_regions("0.9.1")
    (False, False, True)
    """
    return not any(version == bad or version.startswith(f"{bad}.") for bad in _WITHOUT)


def region_of(image: Any, box: Box) -> Any | None:
    """Return a part of a decoded image, (H, W, 3), as a view; None if the image does not contain it."""
    height, width, channels = image.shape
    if channels != 3 or box.top + box.height > height or box.left + box.width > width:
        return None
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


_log = logging.getLogger("fastpipe.read")
_MOST_FAILURES = 8
_LEAVE_S = 10.0

_Part = tuple[bytes, Box]

# Pipelines that this process has made or is making, and whether it was forked from a process that has.  In a
# forked process DALI's threads do not exist, so a pipeline would wait for them forever, also when one of the
# parent's pipelines is destroyed.
_made: weakref.WeakSet[Any] = weakref.WeakSet()
_decoders: weakref.WeakSet[DaliDecoder] = weakref.WeakSet()
_has_made = _is_forked = _is_registered = False
_importing: list[None] = []  # by threads that are about to make one


def _after_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or _has_made or bool(_importing)
    for pipeline in list(_made):
        if (core := getattr(pipeline, "_pipe", None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(core))  # never taken down
            pipeline._pipe = None
    if _is_forked:
        for decoder in list(_decoders):
            decoder._is_closed = True


def _end() -> None:
    """Abandon the pipelines before the interpreter ends, when DALI would destroy them.

    It would do so while threads use one of them or make another."""
    if not _is_forked:
        for decoder in list(_decoders):
            decoder.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def make_batch_decoder(
    backend: str, threads: int, dct: Literal["exact", "fast"] = "exact"
) -> DaliDecoder | None:
    """Return a decoder of whole batches; None if threads decode images one by one."""
    if backend != "dali":
        return None
    if _is_forked:
        _log.warning(
            "DALI does not work in a process that was forked from one which has used it: its threads decode "
            "images themselves, to the same pixels. With multiprocessing_context='forkserver', or "
            "num_workers=0, DALI decodes"
        )
        return None
    return DaliDecoder(threads, dct=dct)


class DaliDecoder:
    """A pipeline that decodes rectangles of JPEGs; on the CPU it needs no driver.

    A pipeline that meets a file which it cannot decode becomes unusable.  Then a new one is made, and the
    files of that batch are tried in halves until the bad file is found.  That file is declined from then on.

    Args:
        device_id: the number of the GPU on which it decodes; None for the CPU.
        array: makes an array of the caller's kind over DALI's memory, without a copy.
        dct: libjpeg's transform: ``"exact"`` gives Pillow's pixels, ``"fast"`` TensorFlow's.
    """

    def __init__(
        self,
        threads: int,
        device_id: int | None = None,
        array: Callable[[Any], Any] = np.asarray,
        dct: Literal["exact", "fast"] = "exact",
    ) -> None:
        global _is_registered
        _importing.append(None)  # a child forked now would wait for the import forever
        try:
            self._dali = require("nvidia.dali", extra="dali")
            self._fn = require("nvidia.dali.fn", extra="dali")
        finally:
            _importing.pop()
        if not _is_registered:  # after DALI's import: the last one registered is called first
            _is_registered = True
            atexit.register(_end)
        self._threads, self._device_id, self._array = threads, device_id, array
        self._is_fast = dct == "fast"
        self._lock = threading.Lock()
        self._is_closed = False
        _decoders.add(self)
        self._pipeline: Any = None
        self._most = 0  # images per run
        self._by_region = device_id is None or decodes_regions(
            require("nvidia.nvimgcodec", extra="image").__version__  # DALI's decoding threads
        )
        self._failures = 0  # of single files, since the last success
        self._declined: dict[int, set[int]] = {}  # hashes of files by length, which costs nothing to compare

    def decode(self, parts: Sequence[_Part], stream: Any = None) -> list[Any]:
        """Decode parts of trusted JPEGs: uint8 (H, W, 3), on a GPU by a stream; None for declined files."""
        found: list[Any] = [None] * len(parts)
        if self._is_closed:  # the lock may be one of the parent's
            return found
        with self._lock:
            if self._is_closed or self._failures >= _MOST_FAILURES:
                return found
            declined = self._declined
            numbers = [
                number
                for number, (blob, box) in enumerate(parts)
                # For a single column libjpeg does not always interpolate the colours of a 4:2:0 image.
                if box.width > 1 and not (len(blob) in declined and hash(blob) in declined[len(blob)])
            ]
            self._decode(parts, numbers, found, stream)
        return found

    def close(self) -> None:
        """Decline everything from now on; wait for running decodes, but not forever."""
        self._is_closed = True
        if self._lock.acquire(timeout=_LEAVE_S):
            try:
                self._pipeline = None
            finally:
                self._lock.release()

    def describe(self) -> str:
        """Return its name and its task, in a few words."""
        where = "" if self._device_id is None else f" on GPU {self._device_id}"
        what = "only the region that is needed" if self._by_region else "whole images"
        return f"DALI {self._dali.__version__}{where}, {what}, a batch at a time"

    def _decode(self, parts: Sequence[_Part], numbers: list[int], found: list[Any], stream: Any) -> None:
        """Decode these files, or halves of them if that fails."""
        if not numbers or self._is_closed or self._failures >= _MOST_FAILURES:
            return
        try:
            images = self._run([parts[number] for number in numbers], stream)
        except RuntimeError as error:  # DALI has no other error for bad files
            self._pipeline = None
            if len(numbers) == 1:
                text = str(error)  # not the error: its traceback has the whole batch
                blob = parts[numbers[0]][0]
                _log.info("DALI does not decode a file of %d bytes: %s", len(blob), text)
                self._declined.setdefault(len(blob), set()).add(hash(blob))
                self._failures += 1
                if self._failures == _MOST_FAILURES:  # the error is not about the files
                    _log.warning(
                        "DALI has failed for %d images one after the other, and is no longer used: images "
                        "are "
                        "decoded without it. The last error: %s",
                        _MOST_FAILURES, text,
                    )  # fmt: skip
                return
            middle = len(numbers) // 2
            self._decode(parts, numbers[:middle], found, stream)
            self._decode(parts, numbers[middle:], found, stream)
            return
        self._failures = 0
        for number, image in zip(numbers, images, strict=True):
            found[number] = image if self._by_region else region_of(image, parts[number][1])

    def _run(self, parts: Sequence[_Part], stream: Any) -> list[Any]:
        if self._pipeline is None or self._most < len(parts):
            self._most = max(len(parts), self._most)
            self._pipeline = self._new_pipeline()
        boxes = np.array([box for _, box in parts], np.int32)
        files = [np.frombuffer(blob, np.uint8) for blob, _ in parts]
        where = {"starts": list(boxes[:, :2]), "shapes": list(boxes[:, 2:])} if self._by_region else {}
        (images,) = self._pipeline.run(stream, files=files, **where)
        return [self._array(images[number]) for number in range(len(parts))]

    def _new_pipeline(self) -> Any:
        global _has_made
        _has_made = True  # before, as it imports more, and starts threads
        fn, types = self._fn, self._dali.types
        # Batches are passed in as they come, so there is nothing to prefetch; the result of a run
        # stays valid while something refers to it.
        pipeline = self._dali.Pipeline(
            batch_size=self._most, num_threads=self._threads, device_id=self._device_id,
            prefetch_queue_depth=1, exec_dynamic=True,
        )  # fmt: skip
        with pipeline:
            files = fn.external_source(name="files", dtype=types.UINT8, ndim=1, no_copy=True)
            options: dict[str, Any] = {
                "output_type": types.RGB, "adjust_orientation": False, "use_fast_idct": self._is_fast,
                # As libjpeg does; on a GPU only if requested.
                "jpeg_fancy_upsampling": self._device_id is not None,
                "device": "cpu" if self._device_id is None else "mixed",
            }  # fmt: skip
            if self._by_region:
                starts = fn.external_source(name="starts", dtype=types.INT32, ndim=1)
                shapes = fn.external_source(name="shapes", dtype=types.INT32, ndim=1)
                images = fn.decoders.image_slice(files, start=starts, shape=shapes, axes=[0, 1], **options)
            else:
                images = fn.decoders.image(files, **options)
            pipeline.set_outputs(images)
        _made.add(pipeline)
        pipeline.build()
        return pipeline
