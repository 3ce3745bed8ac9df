"""Decoding on a GPU by nvImageCodec, which has nvJPEG: the parts of a whole batch by one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fastpipe._extras import require
from fastpipe.read.gpu_regions import decodes_regions, region_of
from fastpipe.types import Box

__all__ = ["NvJpegDecoder"]


class NvJpegDecoder:
    """nvImageCodec with all that it has for a GPU: its engine for JPEGs, its kernels, and threads for both.

    Args:
        device: a ``torch.device`` of CUDA's.
        threads: for what of decoding is done on the CPU.
    """

    def __init__(self, device: Any, threads: int) -> None:
        os.environ.setdefault(
            "PYNVIMGCODEC_VERBOSITY", "0"
        )  # what cannot be decoded comes back as None anyway
        self._codec = require("nvidia.nvimgcodec", extra="image")
        self._torch = require("torch", extra="torch")
        self.device = device
        self._params = self._codec.DecodeParams(
            apply_exif_orientation=False, color_spec=self._codec.ColorSpec.SRGB
        )
        kinds = self._codec.BackendKind
        # Not CPU_ONLY: what a GPU does not decode is decoded by the threads that would do so without one.
        backends = [
            self._codec.Backend(kind) for kind in (kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
        ]
        self._by_region = decodes_regions(self._codec.__version__)
        index = self._torch.cuda.current_device() if device.index is None else device.index
        self._decoder = self._codec.Decoder(
            device_id=index, max_num_cpu_threads=threads, backends=backends, options=":fancy_upsampling=1"
        )

    def decode(self, parts: Sequence[tuple[bytes, Box]], stream: Any) -> list[Any]:
        """Begin to decode parts of trusted JPEGs.

        Args:
            parts: of each the file, and a rectangle inside the image.
            stream: a ``torch.cuda.Stream``, on which the pixels are there.

        Returns:
            Of each a uint8 tensor (H, W, 3) on the device; None for those that are declined.
        """
        found: list[Any] = [None] * len(parts)
        streams = {number: self._part(*part) for number, part in enumerate(parts)}
        numbers = [number for number, part in streams.items() if part is not None]
        images = self._decoder.decode(
            [streams[number] for number in numbers], params=self._params, cuda_stream=stream.cuda_stream
        )
        for number, image in zip(numbers, images, strict=True):
            found[number] = self._tensor(image, parts[number][1], stream)
        return found

    def describe(self) -> str:
        """Its name and what it does, in a few words."""
        what = "only the region that is needed" if self._by_region else "whole images"
        return f"nvImageCodec {self._codec.__version__} on {self.device}, {what}"

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
