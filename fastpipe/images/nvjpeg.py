"""Decoding on a GPU by nvImageCodec, which has nvJPEG: the parts of a whole batch by one call."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from fastpipe.core.extras import briefly_set, require
from fastpipe.core.types import Box
from fastpipe.images.dali import decodes_regions, region_of

# Batches that are decoded at once: while the GPU's engines are at one, another is parsed and sent.
_AT_ONCE = 2
# Threads of a decoder of engines, which parse files for them; with one, or four, it decodes a tenth less.
_PARSING = 2


def _require_nvimgcodec() -> Any:
    """Import nvImageCodec, which says nothing on stderr of what it cannot decode: that comes back as None."""
    with briefly_set("PYNVIMGCODEC_VERBOSITY", "0"):
        return require("nvidia.nvimgcodec", extra="gpu")


class NvJpegDecoder:
    """nvImageCodec on the engines that a GPU has for JPEGs, or on its kernels where it has none.

    Where there are engines, they alone decode: nvImageCodec would share a batch with its kernels, which need
    the CPU for half of the work and are slower than it (H200: 9,400 images/s shared, 9,900 by the engines).
    What these decline is decoded by the threads that would do so without a GPU.  May be used from any thread.
    """

    def __init__(self, device: Any, threads: int) -> None:
        self._codec = _require_nvimgcodec()
        self._torch = require("torch", extra="torch")
        self.device = device
        self._params = self._codec.DecodeParams(
            apply_exif_orientation=False, color_spec=self._codec.ColorSpec.SRGB
        )
        self._by_region = decodes_regions(self._codec.__version__)
        self._index = self._torch.cuda.current_device() if device.index is None else device.index
        first, self.has_engines = self._first(threads)
        rest = [self._new(threads, self.has_engines) for _ in range(_AT_ONCE - 1)]
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for decoder in (first, *rest):
            self._idle.put(decoder)

    def decode(self, parts: Sequence[tuple[bytes, Box]], stream: Any) -> list[Any]:
        """Begin to decode parts of trusted JPEGs: uint8 tensors (H, W, 3) on the device, on a
        ``torch.cuda.Stream``; None for those that are declined."""
        found: list[Any] = [None] * len(parts)
        streams = {number: self._part(*part) for number, part in enumerate(parts)}
        numbers = [number for number, part in streams.items() if part is not None]
        with self._decoder() as decoder:
            images = decoder.decode(
                [streams[number] for number in numbers], params=self._params, cuda_stream=stream.cuda_stream
            )
        for number, image in zip(numbers, images, strict=True):
            found[number] = self._tensor(image, parts[number][1], stream)
        return found

    def describe(self) -> str:
        """Return its name and what it does, in a few words."""
        what = "only the region that is needed" if self._by_region else "whole images"
        how = "its engines for JPEGs" if self.has_engines else "its kernels and the CPU"
        return f"nvImageCodec {self._codec.__version__} on {self.device}, by {how}, {what}"

    def _first(self, threads: int) -> tuple[Any, bool]:
        """Return a decoder, and whether it is one of engines."""
        try:
            decoder, file = self._new(threads, True), io.BytesIO()
            require("PIL.Image", extra="image").new("RGB", (256, 256)).save(file, "JPEG")
            if decoder.decode(self._codec.CodeStream(file.getvalue()), params=self._params) is not None:
                return decoder, True
        except RuntimeError:  # what the library raises where it has no such decoder
            pass
        return self._new(threads, False), False

    def _new(self, threads: int, has_engines: bool) -> Any:
        kinds = self._codec.BackendKind
        # Not CPU_ONLY: what a GPU does not decode is decoded by the threads that would do so without one.
        wanted = [kinds.HW_GPU_ONLY] if has_engines else [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
        return self._codec.Decoder(
            device_id=self._index, max_num_cpu_threads=_PARSING if has_engines else threads,
            options=":fancy_upsampling=1",
            backends=[self._codec.Backend(kind) for kind in wanted],
        )  # fmt: skip

    @contextmanager
    def _decoder(self) -> Iterator[Any]:
        """Lend a decoder that nobody else uses meanwhile."""
        decoder = self._idle.get()
        try:
            yield decoder
        finally:
            self._idle.put(decoder)

    def _part(self, blob: bytes, box: Box) -> Any:
        try:
            whole = self._codec.CodeStream(blob)
            if not self._by_region:
                return whole
            region = self._codec.Region(box.top, box.left, box.top + box.height, box.left + box.width)
            return whole.get_sub_code_stream(region=region)
        except RuntimeError:  # what the library raises for a stream that it cannot parse
            return None

    def _tensor(self, image: Any, box: Box, stream: Any) -> Any:
        if image is None:
            return None
        pixels = self._torch.from_dlpack(image.to_dlpack(cuda_stream=stream.cuda_stream))
        return region_of(pixels, box._replace(top=0, left=0) if self._by_region else box)
