"""Decoding alone: the part of the job that no loader around this decoder can avoid."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.bench.boxes import crop_box
from fastpipe.bench.runner import ContenderError
from fastpipe.errors import MissingDependencyError

__all__ = ["DecodeRow", "crop_boxes", "is_jpeg"]

Decoder = Callable[[bytes, Sequence[int]], Any]


def is_jpeg(data: bytes) -> bool:
    """Whether encoded bytes are a JPEG's."""
    return data[:3] == b"\xff\xd8\xff"


def crop_boxes(sizes: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Boxes distributed as those of ``RandomResizedCrop``.

    Args:
        sizes: int64 array (N, 2) of height and width.
        rng: source of randomness.

    Returns:
        int64 array (N, 4): top, left, height, width, each inside its image.

    >>> crop_boxes(np.array([[400, 500]]), np.random.default_rng(0)).shape
    (1, 4)
    """
    boxes = np.empty((len(sizes), 4), np.int64)
    for row, (height, width) in enumerate(sizes.tolist()):
        boxes[row] = crop_box(height, width, rng)
    return boxes


class DecodeRow:
    """A `Contender` that decodes crops of JPEGs from memory and does nothing else.

    Args:
        files: the photos; those that are no JPEG are left out.
        threads: how many threads decode.

    Raises:
        ContenderError: there is no decoder, or no JPEG.
    """

    key = "floor"
    workers = 0

    def __init__(self, files: Sequence[str], threads: int, batch_size: int) -> None:
        self.chunk = batch_size
        blobs = [Path(file).read_bytes() for file in files]
        self._blobs = [blob for blob in blobs if is_jpeg(blob)]
        if not self._blobs:
            raise ContenderError("no photo is a JPEG")
        self.note, make, self._sizes = _decoder(self._blobs)
        self._decoders = [make() for _ in range(threads)]
        self._rng = np.random.default_rng(0)

    def measure(self, images: int) -> float:
        """Decode so many crops; return the seconds it took."""
        which = np.resize(self._rng.permutation(len(self._blobs)), images)
        boxes = crop_boxes(self._sizes[which], self._rng).tolist()
        work = [(self._blobs[i], box) for i, box in zip(which.tolist(), boxes, strict=True)]
        failed: list[BaseException] = []
        # One shared counter hands out the work: `next` on it is atomic.
        counter = itertools.count()

        def run(decode: Decoder) -> None:
            try:
                while not failed and (place := next(counter)) < len(work):
                    decode(*work[place])
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(decode,), daemon=True) for decode in self._decoders]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if failed:
            raise ContenderError(f"decoding alone failed: {failed[0]}")
        return seconds

    def close(self) -> None:
        """Drop the decoders and the photos."""
        self._decoders, self._blobs = [], []


def _decoder(blobs: Sequence[bytes]) -> tuple[str, Callable[[], Decoder], npt.NDArray[np.int64]]:
    """The fastest decoder installed: what it does, a maker of one per thread, the sizes."""
    for candidate in (_nvimgcodec, _simplejpeg):
        try:
            return candidate(blobs)
        except MissingDependencyError:
            continue
    raise ContenderError("no decoder to measure: pip install 'fastpipe[image]'")


def _nvimgcodec(blobs: Sequence[bytes]) -> tuple[str, Callable[[], Decoder], npt.NDArray[np.int64]]:
    """nvImageCodec decodes only the blocks that a crop needs."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    codec = require("nvidia.nvimgcodec", extra="image")
    params = codec.DecodeParams(apply_exif_orientation=False)

    def make() -> Decoder:
        decoder = codec.Decoder(
            device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
        )

        def decode(blob: bytes, box: Sequence[int]) -> Any:
            top, left, height, width = box
            region = codec.Region(top, left, top + height, left + width)
            image = decoder.decode(codec.CodeStream(blob).get_sub_code_stream(region=region), params=params)
            if image is None:
                raise ValueError("nvImageCodec could not decode a photo")
            return image

        return decode

    streams = [codec.CodeStream(blob) for blob in blobs]
    sizes = np.array([(stream.height, stream.width) for stream in streams], np.int64)
    return "nvImageCodec, crops only, from memory", make, sizes


def _simplejpeg(blobs: Sequence[bytes]) -> tuple[str, Callable[[], Decoder], npt.NDArray[np.int64]]:
    """simplejpeg decodes whole images; the crop makes no difference to it."""
    codec = require("simplejpeg", extra="image")

    def make() -> Decoder:
        return lambda blob, box: codec.decode_jpeg(blob)

    sizes = np.array([codec.decode_jpeg_header(blob)[:2] for blob in blobs], np.int64)
    return "simplejpeg, whole images, from memory", make, sizes
