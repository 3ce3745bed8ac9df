"""Decoding with NVIDIA DALI, on the CPU or on a GPU. One run of a pipeline decodes a whole batch."""

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

# https://github.com/NVIDIA/nvImageCodec/issues/55: in these versions, decoding parts of ordinary JPEGs causes
# errors on some GPUs, and crashes the process on other GPUs.
_WITHOUT = ("0.9.0",)


def decodes_regions(version: str) -> bool:
    """Return whether this version of nvImageCodec can decode parts of images on a GPU. DALI uses nvImageCodec
    as well.

    >>> decodes_regions("0.9.0"), decodes_regions("0.9.0.20"), decodes_regions("0.9.1")
    (False, False, True)
    """
    return not any(version == bad or version.startswith(f"{bad}.") for bad in _WITHOUT)


def region_of(image: Any, box: Box) -> Any | None:
    """Return the part ``box`` of an image as a view; None if the box is not inside the image, or if the image
    is not (H, W, 3)."""
    height, width, channels = image.shape
    if channels != 3 or box.top + box.height > height or box.left + box.width > width:
        return None
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


_log = logging.getLogger("fastpipe.read")
_MOST_FAILURES = 8
_LEAVE_S = 10.0

_Part = tuple[bytes, Box]

# ``_made`` holds the pipelines that this process has made or is making.  ``_is_forked`` is True if this
# process was forked from a process that had made a pipeline.  DALI's threads do not exist in a forked
# process.  A pipeline would wait for these threads forever, even when the pipeline is destroyed.
_made: weakref.WeakSet[Any] = weakref.WeakSet()
_decoders: weakref.WeakSet[DaliDecoder] = weakref.WeakSet()
_has_made = _is_forked = _is_registered = False
_importing: list[None] = []  # one item for each thread that is importing DALI


def _after_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or _has_made or bool(_importing)
    for pipeline in list(_made):
        if (core := getattr(pipeline, "_pipe", None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(core))  # the pipeline is never destroyed
            pipeline._pipe = None
    if _is_forked:
        for decoder in list(_decoders):
            decoder._is_closed = True


def _end() -> None:
    """Release the pipelines before the interpreter ends.

    Otherwise DALI destroys the pipelines at the interpreter's end, while threads may still use or make
    pipelines.
    """
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
    """Decodes rectangles of JPEGs with a DALI pipeline. On the CPU, DALI needs no GPU driver.

    If a pipeline cannot decode a file, the pipeline becomes unusable.  The decoder then makes a new pipeline
    and decodes the batch in halves until it finds the bad file.  From then on, the decoder returns None for
    that file.

    Args:
        device_id: the number of the GPU that decodes; None for the CPU.
        array: makes an array or tensor that shares DALI's memory; ``np.asarray`` or ``torch.from_dlpack``.
        dct: the transform that libjpeg uses: ``"exact"`` gives Pillow's pixels, ``"fast"`` gives TensorFlow's
            pixels.
    """

    def __init__(
        self,
        threads: int,
        device_id: int | None = None,
        array: Callable[[Any], Any] = np.asarray,
        dct: Literal["exact", "fast"] = "exact",
    ) -> None:
        global _is_registered
        _importing.append(None)  # a process forked now would wait for the import forever
        try:
            self._dali = require("nvidia.dali", extra="dali")
            self._fn = require("nvidia.dali.fn", extra="dali")
        finally:
            _importing.pop()
        if not _is_registered:  # after DALI's import: the function that is registered last is called first
            _is_registered = True
            atexit.register(_end)
        self._threads, self._device_id, self._array = threads, device_id, array
        self._is_fast = dct == "fast"
        self._lock = threading.Lock()
        self._is_closed = False
        _decoders.add(self)
        self._pipeline: Any = None
        self._most = 0  # the number of images per run
        self._by_region = device_id is None or decodes_regions(
            require("nvidia.nvimgcodec", extra="image").__version__  # DALI decodes with this package
        )
        self._failures = 0  # the number of single files that failed since the last success
        self._declined: dict[int, set[int]] = {}  # hashes of files by length; lengths are cheap to compare

    def decode(self, parts: Sequence[_Part], stream: Any = None) -> list[Any]:
        """Decode parts of trusted JPEGs (see ``ImageReader``) to uint8 (H, W, 3). A GPU decodes in the CUDA
        stream ``stream``. Return None for files that DALI cannot decode."""
        found: list[Any] = [None] * len(parts)
        if self._is_closed:  # after a fork, the parent process may hold the lock
            return found
        with self._lock:
            if self._is_closed or self._failures >= _MOST_FAILURES:
                return found
            declined = self._declined
            numbers = [
                number
                for number, (blob, box) in enumerate(parts)
                # If the part is a single column, libjpeg does not always interpolate the colours of a 4:2:0
                # image.
                if box.width > 1 and not (len(blob) in declined and hash(blob) in declined[len(blob)])
            ]
            self._decode(parts, numbers, found, stream)
        return found

    def close(self) -> None:
        """Make ``decode`` return None for all files from now on. Wait at most ten seconds for a running
        decode."""
        self._is_closed = True
        if self._lock.acquire(timeout=_LEAVE_S):
            try:
                self._pipeline = None
            finally:
                self._lock.release()

    def describe(self) -> str:
        """Return the decoder's name and task in a few words."""
        where = "" if self._device_id is None else f" on GPU {self._device_id}"
        what = "only the region that is needed" if self._by_region else "whole images"
        return f"DALI {self._dali.__version__}{where}, {what}, a batch at a time"

    def _decode(self, parts: Sequence[_Part], numbers: list[int], found: list[Any], stream: Any) -> None:
        """Decode these files. If DALI raises an error, decode each half separately."""
        if not numbers or self._is_closed or self._failures >= _MOST_FAILURES:
            return
        try:
            images = self._run([parts[number] for number in numbers], stream)
        except RuntimeError as error:  # DALI raises no other error for bad files
            self._pipeline = None
            if len(numbers) == 1:
                text = str(error)  # do not keep the error: its traceback refers to the whole batch
                blob = parts[numbers[0]][0]
                _log.info("DALI does not decode a file of %d bytes: %s", len(blob), text)
                self._declined.setdefault(len(blob), set()).add(hash(blob))
                self._failures += 1
                if self._failures == _MOST_FAILURES:  # the files are not the cause of the error
                    _log.warning(
                        "DALI has failed for %d images one after the other, and is no longer used: images "
                        "are decoded without it. The last error: %s",
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
        _has_made = True  # set before DALI imports more modules and starts threads
        fn, types = self._fn, self._dali.types
        # Each run receives its batch as an argument, so the pipeline has nothing to prefetch. The result of a
        # run stays valid while an object refers to it.
        pipeline = self._dali.Pipeline(
            batch_size=self._most, num_threads=self._threads, device_id=self._device_id,
            prefetch_queue_depth=1, exec_dynamic=True,
        )  # fmt: skip
        with pipeline:
            files = fn.external_source(name="files", dtype=types.UINT8, ndim=1, no_copy=True)
            options: dict[str, Any] = {
                "output_type": types.RGB, "adjust_orientation": False, "use_fast_idct": self._is_fast,
                # libjpeg does this by default. On a GPU, DALI does it only if requested.
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
