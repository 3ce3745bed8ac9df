"""Batches that are made on a GPU: decoded there, resampled there, and there when they are used."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from fastpipe.core.clock import ranged
from fastpipe.core.extras import require
from fastpipe.core.transfer import on_stream, uploaded
from fastpipe.core.types import Box
from fastpipe.images.dali import DaliDecoder
from fastpipe.images.gpu_resampling import resample_by_torch, resample_by_triton, tables_of
from fastpipe.images.gpu_share import Share, takes
from fastpipe.images.kernels import BILINEAR, axis
from fastpipe.images.nvjpeg import NvJpegDecoder
from fastpipe.images.pixels import Resampling
from fastpipe.options import Decode

_log = logging.getLogger("fastpipe.torch")
_TELLING = 8  # images of a batch that tell of a decoder
DeviceDecoder = NvJpegDecoder | DaliDecoder


class BatchThere:
    """A batch on a device, uint8 (N, 3, H, W): whole after a CUDA event, or where there is none."""

    def __init__(self, tensor: Any, done: Any) -> None:
        self._tensor, self._done = tensor, done

    def tensor(self) -> Any:
        """Return the batch, for work on the stream that is current in this thread."""
        if self._done is not None:
            current = require("torch", extra="torch").cuda.current_stream(self._tensor.device)
            current.wait_event(self._done)
            self._tensor.record_stream(current)
        return self._tensor


class DeviceMaker:
    """Makes the batches of a dataset on a device, on a stream of its own.  May be used from any thread."""

    def __init__(self, device: Any, decoder: DeviceDecoder, share: Share) -> None:
        self._torch = require("torch", extra="torch")
        self._device, self._decoder, self._share = device, decoder, share
        self._stream: Any = self._torch.cuda.Stream(device) if device.type == "cuda" else None
        self._resample = _resampler(device)
        self._lock = threading.Lock()
        self._has_decoded = False
        # Pixels that a kernel may still be reading: memory of the decoder's own is not torch's to keep.
        self._in_use: deque[tuple[Any, list[Any]]] = deque()

    def describe(self) -> str:
        """Return who decodes and resamples, in a few words."""
        how = "Triton's kernel" if self._resample is not resample_by_torch else "torch's operations"
        share = self._share.describe()
        return f"{self._decoder.describe()}, resampled there by {how}{share and f'; {share}'}"

    def turn(self) -> Turn:
        """Begin a batch."""
        self._forget()
        return Turn(self, self._share)

    def waited(self, seconds: float) -> None:
        """Hear how long the script waited for the batch that was handed out last."""
        self._forget()
        self._share.waited(seconds)

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[Any]:
        """Begin to decode parts of trusted JPEGs, each a rectangle inside the image.

        Return tensors on the device; None for those that are declined.
        """
        with self._on_stream():
            found = self._decoder.decode(parts, self._stream)
        with self._lock:
            is_first = not self._has_decoded and len(parts) >= _TELLING
            self._has_decoded = self._has_decoded or is_first
        if is_first and all(image is None for image in found):  # which tells of the decoder, not of files
            _log.warning(
                "images are decoded on the CPU, not on %s: %s declined all %d of a batch; it needs nvJPEG "
                "13.2 or later (pip install 'fastpipe[gpu]')",
                self._device, self._decoder.describe(), len(found),
            )  # fmt: skip
        return found

    @ranged("resample")
    def finish(
        self, plan: Any, images: Mapping[int, tuple[Any, Resampling]], rows: Mapping[int, Any], count: int
    ) -> BatchThere:
        """Begin to make a batch of ``count`` samples; those that are in neither mapping hold anything.

        ``images`` are of samples by their numbers, pixels and how they are resampled; ``rows`` of others,
        their bytes as the plan, which writes bytes, writes them on the CPU.
        """
        torch, spec = self._torch, plan.output
        numbers = sorted(images)
        pixels = [images[number][0] for number in numbers]
        tables = tables_of([images[number][1] for number in numbers]) if numbers else None
        layout = torch.channels_last if spec.layout == "channels_last" else torch.contiguous_format
        with self._on_stream():
            out = torch.empty(
                (count, *spec.shape), dtype=torch.uint8, device=self._device, memory_format=layout
            )
            if tables is not None:
                if len(numbers) == count:
                    self._resample(pixels, tables, out)
                else:
                    made = torch.empty_like(out[: len(numbers)])
                    self._resample(pixels, tables, made)
                    out[uploaded(torch.tensor(numbers), self._device)] = made
            if rows:
                host = torch.empty((len(rows), *spec.shape), dtype=torch.uint8, memory_format=layout)
                for place, row in enumerate(rows.values()):
                    host[place] = plan.over(torch.from_numpy(row), (1, *spec.shape))[0]
                places = uploaded(torch.tensor(list(rows)), self._device)
                out[places] = uploaded(host, self._device)
            return BatchThere(out, self._ended(pixels))

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else on_stream(self._stream)

    def _ended(self, pixels: list[Any]) -> Any:
        """The event of all that was begun so far, until which these are kept."""
        if self._stream is None:
            return None
        done = self._stream.record_event()
        with self._lock:
            self._in_use.append((done, pixels))
        return done

    def _forget(self) -> None:
        """Let go of pixels that are not needed any more."""
        with self._lock:
            while self._in_use and self._in_use[0][0].query():
                self._in_use.popleft()


class Turn:
    """One batch of a maker's, of which it decodes a share.  What an engine asks of a device."""

    def __init__(self, maker: DeviceMaker, share: Share) -> None:
        self._share, self._part = share, share.begin()
        self.is_there = self._part > 0  # any of it
        self.maker = maker
        self.decode, self.finish, self.describe = maker.decode, maker.finish, maker.describe

    def takes(self, number: int) -> bool:
        """Return whether the sample of this number is decoded there."""
        return takes(self._part, number)

    def given(self) -> None:
        """Hear that the batch is handed out."""
        self._share.given(self._part)


def _resampler(device: Any) -> Any:
    """Return what resamples on a device: the kernel, if it does so there."""
    if device.type == "cuda":
        try:
            _try_kernel(device)
        except Exception as error:  # Triton is not there, or has no compiler, or not for this device
            text = f"{type(error).__name__}: {error}"
            _log.info("torch's operations resample on %s, as Triton's kernel does not: %s", device, text)
        else:
            return resample_by_triton
    return resample_by_torch


def _try_kernel(device: Any) -> None:
    """Resample an image of one pixel, which has the kernel compiled as well; or raise an error."""
    torch = require("torch", extra="torch")
    pixel = axis(BILINEAR, 1, 1)
    tables = tables_of([Resampling(Box(0, 0, 1, 1), BILINEAR, pixel, pixel, False)])
    with torch.cuda.device(device):
        source = torch.full((1, 1, 3), 7, dtype=torch.uint8, device=device)
        out = torch.zeros((1, 3, 1, 1), dtype=torch.uint8, device=device)
        resample_by_triton([source], tables, out)
        if out.flatten().tolist() != [7, 7, 7]:
            raise RuntimeError(f"it made {out.flatten().tolist()} of 7, 7, 7")


# ---- Which decoder decodes on a device --------------------------------------------------------------


def share_of(decode: Decode) -> float | Literal["auto"]:
    """Return which part of each batch is to be decoded on a device.

    >>> share_of(Decode()), share_of(Decode("dali")), share_of(Decode(gpu_share="auto"))
    (0.0, 1.0, 'auto')
    """
    if decode.gpu_share is None:
        return 1.0 if decode.backend in ("nvimgcodec", "dali") else 0.0
    return decode.gpu_share


def device_decoder(decode: Decode, device: Any, threads: int) -> DeviceDecoder | None:
    """Return what decodes on a device; None where images are decoded on the CPU.

    Only where the options name a back end or a share is decoded elsewhere, as pixels differ there.
    """
    if device.type != "cuda" or not share_of(decode) or decode.scaled:
        return None
    if decode.backend != "dali":
        return NvJpegDecoder(device, threads)
    torch = require("torch", extra="torch")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DaliDecoder(threads, index, torch.from_dlpack)
