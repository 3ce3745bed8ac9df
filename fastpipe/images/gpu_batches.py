"""Batches of images decoded and resampled on a GPU."""

from __future__ import annotations

import functools
import io
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.clock import ranged
from fastpipe.core.extras import briefly_set, require
from fastpipe.core.transfer import on_stream, uploaded
from fastpipe.core.types import Box
from fastpipe.images.dali import DaliDecoder, decodes_regions, region_of
from fastpipe.images.gpu_share import Share, takes
from fastpipe.images.kernels import BILINEAR, Axis, axis, axis_tables
from fastpipe.images.pixels import Resampling
from fastpipe.options import Decode

# ----------------------------------------------------------------------------------------------------
# Resample images on a GPU, with torch or with one Triton kernel, to exactly the bytes of the CPU's kernels.
#
# For each output pixel, the horizontal sums of the pixel's rows are computed within the vertical sum, so
# nothing is stored between the two passes. When an image is made smaller, each input row is needed for about
# two output rows.
#
# The CPU computes each image's weights as it does for its own kernels: Pillow's weights, in 22-bit fixed
# point. The device multiplies and adds integers, and rounds to bytes between the two passes. So a batch
# differs from a batch made on the CPU only if its images were decoded differently.

_HALF, _BITS = 1 << 21, 22
_FIELDS = [Axis._fields.index(name) for name in ("length", "low", "pitch")]


class Tables(NamedTuple):
    """The tables with which the images of a batch are resampled.

    Attributes:
        numbers: int64 (N, 7), seven numbers for each image. The first two numbers are the column and the row
            of the first pixel that the decoded part contains. The next two numbers are the starts of the
            image's tables of columns and of rows in ``flat``. The next two numbers are the numbers of weights
            per output pixel in these tables. The last number says whether the vertical pass comes first.
        flat: int32 (M,), the tables of all axes; see `fastpipe.images.kernels.axis_tables`.
    """

    numbers: npt.NDArray[np.int64]
    flat: npt.NDArray[np.int32]


def tables_of(images: Sequence[Resampling]) -> Tables:
    """Compute the tables of a batch's images."""
    filters = [(how.mode, axis) for how in images for axis in (how.x, how.y)]
    axes = np.array([axis for _, axis in filters], np.int64)
    length, low, pitch = axes[:, _FIELDS].T
    ends = np.cumsum(length * (pitch + 2))
    starts = np.concatenate([[0], ends[:-1]])
    flat = axis_tables(filters)
    order = np.array([how.vertical_first for how in images], np.int64)
    pairs = (column.reshape(-1, 2) for column in (low, starts, pitch))
    return Tables(np.column_stack([*pairs, order]), flat)


def resample_by_torch(sources: Sequence[Any], tables: Tables, out: Any) -> None:
    """Resample images one after the other, with torch operations, on any device that torch supports.

    ``sources`` holds the needed part of each image as a uint8 tensor (H, W, 3) on the device.  The results
    are written to ``out``, uint8 (N, 3, height, width) on the device.
    """
    torch = require("torch", extra="torch")
    flat = uploaded(torch.from_numpy(tables.flat), out.device)
    for pixels, numbers, target in zip(sources, tables.numbers.tolist(), out, strict=True):
        left, top, x_start, y_start, x_pitch, y_pitch, vertical_first = numbers
        height, width = target.shape[1:]
        passes = [(flat[x_start:], width, x_pitch, left, 1), (flat[y_start:], height, y_pitch, top, 0)]
        for table, count, pitch, first, dim in reversed(passes) if vertical_first else passes:
            pixels = _resampled(torch, pixels, table, count, pitch, first, dim)
        target.copy_(pixels.permute(2, 0, 1))


def _resampled(torch: Any, pixels: Any, table: Any, count: int, pitch: int, first: int, dim: int) -> Any:
    """Do one pass: return uint8 (H, W, 3), resampled along the axis ``dim`` to ``count`` rows or columns."""
    starts, taps = table[:count].view(-1, 1) - first, table[count : 2 * count].view(-1, 1)
    weights = table[2 * count : (2 + pitch) * count].view(count, pitch)
    inputs = torch.arange(pitch, device=table.device, dtype=torch.int32).view(1, -1)
    is_there = inputs < taps  # memory after the last weight of an output is undefined
    weights = torch.where(is_there, weights, 0)
    places = torch.where(is_there, starts + inputs, 0).view(-1)
    taken = pixels.index_select(dim, places).to(torch.int32)
    if dim == 0:
        taken = taken.view(count, pitch, *pixels.shape[1:])
        total = (taken * weights.view(count, pitch, 1, 1)).sum(1, dtype=torch.int32)
    else:
        taken = taken.view(pixels.shape[0], count, pitch, 3)
        total = (taken * weights.view(1, count, pitch, 1)).sum(2, dtype=torch.int32)
    return ((total + _HALF) >> _BITS).clamp_(0, 255).to(torch.uint8)


# ---- the same resampling for all images of a batch, with one Triton kernel -------------------------

# mypy: disable-error-code="no-untyped-call"

_COLUMNS = 9  # the numbers that the kernel reads for each image
_BLOCK = 128
tl: Any = None  # Triton's language; the kernel's code refers to this name


def resample_by_triton(sources: Sequence[Any], tables: Tables, out: Any) -> None:
    """Resample all images with one Triton kernel. The arguments are those of ``resample_by_torch``."""
    torch = require("torch", extra="torch")
    height, width = out.shape[2:]
    places = np.array([(pixels.data_ptr(), pixels.stride(0)) for pixels in sources], np.int64)
    numbers = np.column_stack([places, tables.numbers])
    on_device = [uploaded(torch.from_numpy(part), out.device) for part in (numbers, tables.flat)]
    grid = (len(sources), height, -(-width // _BLOCK))
    jitted()[grid](*on_device, out, height, width, *out.stride(), columns=_COLUMNS, block=_BLOCK)


_compiling = threading.Lock()


def jitted() -> Any:
    """Return the Triton kernel, which is compiled at its first call."""
    with _compiling:  # otherwise several threads could compile the kernel at once
        return _jitted()


@functools.cache
def _jitted() -> Any:
    global tl, _byte
    jit, tl = require("triton", extra="torch").jit, require("triton.language", extra="torch")
    _byte = jit(_byte)
    return jit(_kernel)


def _byte(total):  # type: ignore[no-untyped-def]
    """Convert a sum of products with 22-bit weights to a byte."""
    return tl.minimum(tl.maximum((total + (1 << 21)) >> 22, 0), 255)


def _kernel(  # type: ignore[no-untyped-def]
    numbers, tables, out, height, width, n_stride, c_stride, y_stride, x_stride,
    columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute a block of one row of one output image."""
    # Image numbers have 64 bits, because a batch may have more bytes than 32 bits can count.
    image, y = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = tl.program_id(2) * block + tl.arange(0, block)
    is_inside = x < width
    about = numbers + image * columns
    source = tl.load(about).to(tl.pointer_type(tl.uint8))
    row_stride, left, top = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    x_table, y_table = tables + tl.load(about + 4), tables + tl.load(about + 5)
    x_pitch, y_pitch = tl.load(about + 6), tl.load(about + 7)
    vertical_first = tl.load(about + 8)
    x_start = tl.load(x_table + x, mask=is_inside, other=0) - left
    x_taps = tl.load(x_table + width + x, mask=is_inside, other=0)
    y_start, y_taps = tl.load(y_table + y) - top, tl.load(y_table + height + y)
    x_weights = x_table + 2 * width + x * x_pitch
    y_weights = y_table + 2 * height + y * y_pitch
    most = tl.max(x_taps, 0)
    to = out + image * n_stride + y * y_stride + x * x_stride
    for channel in tl.static_range(3):
        first = source + y_start * row_stride + x_start * 3 + channel
        total = tl.zeros((block,), tl.int32)
        if vertical_first != 0:
            for i in range(most):
                is_there = is_inside & (i < x_taps)
                column = tl.zeros((block,), tl.int32)
                for k in range(y_taps):
                    value = tl.load(first + k * row_stride + i * 3, mask=is_there, other=0)
                    column += value.to(tl.int32) * tl.load(y_weights + k)
                total += _byte(column) * tl.load(x_weights + i, mask=is_there, other=0)
        else:
            for k in range(y_taps):
                row = tl.zeros((block,), tl.int32)
                for i in range(most):
                    is_there = is_inside & (i < x_taps)
                    value = tl.load(first + k * row_stride + i * 3, mask=is_there, other=0)
                    row += value.to(tl.int32) * tl.load(x_weights + i, mask=is_there, other=0)
                total += _byte(row) * tl.load(y_weights + k)
        tl.store(to + channel * c_stride, _byte(total).to(tl.uint8), mask=is_inside)


# ----------------------------------------------------------------------------------------------------
# Decode on a GPU with nvImageCodec, which uses nvJPEG. One call decodes the parts of a whole batch.

# The number of batches that are decoded at once. While the GPU's engines decode one batch, another batch is
# parsed and sent.
_AT_ONCE = 2
# The number of threads in which an engine decoder parses files. With one thread or four threads, decoding is
# a tenth slower.
_PARSING = 2


def _require_nvimgcodec() -> Any:
    """Import nvImageCodec without its messages. The library returns None for files that fail to decode."""
    with briefly_set("PYNVIMGCODEC_VERBOSITY", "0"):
        return require("nvidia.nvimgcodec", extra="gpu")


class NvJpegDecoder:
    """Decodes with nvImageCodec on a GPU's JPEG engines, or with CUDA kernels if the GPU has no engines.

    If the GPU has engines, only the engines decode.  nvImageCodec could share a batch between the engines and
    its CUDA kernels.  But the kernels need the CPU for half of the work, and are slower than decoding on the
    CPU (H200: 9,400 images/s when shared, 9,900 with engines only).  CPU threads decode files that the
    engines cannot decode, as without a GPU.  Any thread may use the decoder.
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
        """Start to decode parts of trusted JPEGs (see ``ImageReader``) on a ``torch.cuda.Stream``.

        Return uint8 tensors (H, W, 3) on the device, and None for parts that the decoder cannot decode.
        """
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
        """Return the decoder's name and task in a few words."""
        what = "only the region that is needed" if self._by_region else "whole images"
        how = "its engines for JPEGs" if self.has_engines else "its kernels and the CPU"
        return f"nvImageCodec {self._codec.__version__} on {self.device}, by {how}, {what}"

    def _first(self, threads: int) -> tuple[Any, bool]:
        """Return the first decoder, and whether this decoder uses the GPU's JPEG engines."""
        try:
            decoder, file = self._new(threads, True), io.BytesIO()
            require("PIL.Image", extra="image").new("RGB", (256, 256)).save(file, "JPEG")
            if decoder.decode(self._codec.CodeStream(file.getvalue()), params=self._params) is not None:
                return decoder, True
        except RuntimeError:  # the library raises this error if it has no engine decoder
            pass
        return self._new(threads, False), False

    def _new(self, threads: int, has_engines: bool) -> Any:
        kinds = self._codec.BackendKind
        # CPU_ONLY is left out: the CPU threads decode files that a GPU cannot decode, as they do without a
        # GPU.
        wanted = [kinds.HW_GPU_ONLY] if has_engines else [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
        return self._codec.Decoder(
            device_id=self._index, max_num_cpu_threads=_PARSING if has_engines else threads,
            options=":fancy_upsampling=1",
            backends=[self._codec.Backend(kind) for kind in wanted],
        )  # fmt: skip

    @contextmanager
    def _decoder(self) -> Iterator[Any]:
        """Lend a decoder for exclusive use."""
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
        except RuntimeError:  # the library raises this error for a stream that it cannot parse
            return None

    def _tensor(self, image: Any, box: Box, stream: Any) -> Any:
        if image is None:
            return None
        pixels = self._torch.from_dlpack(image.to_dlpack(cuda_stream=stream.cuda_stream))
        return region_of(pixels, box._replace(top=0, left=0) if self._by_region else box)


# ----------------------------------------------------------------------------------------------------
# Batches that are made on a GPU: images are decoded, resampled and used on the GPU.

_log = logging.getLogger("fastpipe.torch")
_TELLING = 8  # the number of images with which a decoder can be judged
DeviceDecoder = NvJpegDecoder | DaliDecoder


class BatchThere:
    """A batch on a device, uint8 (N, 3, H, W). The batch is complete after the CUDA event ``done``. If
    ``done`` is None, the batch is already complete."""

    def __init__(self, tensor: Any, done: Any) -> None:
        self._tensor, self._done = tensor, done

    def tensor(self) -> Any:
        """Return the batch. This thread's current CUDA stream waits until the batch is complete."""
        if self._done is not None:
            current = require("torch", extra="torch").cuda.current_stream(self._tensor.device)
            current.wait_event(self._done)
            self._tensor.record_stream(current)
        return self._tensor


class DeviceMaker:
    """Makes a dataset's batches on a GPU, in a CUDA stream of its own.  Any thread may use this object."""

    def __init__(self, device: Any, decoder: DeviceDecoder, share: Share) -> None:
        self._torch = require("torch", extra="torch")
        self._device, self._decoder, self._share = device, decoder, share
        self._stream: Any = self._torch.cuda.Stream(device) if device.type == "cuda" else None
        self._resample = _resampler(device)
        self._lock = threading.Lock()
        self._has_decoded = False
        # Keep pixels that a kernel may still read, because torch does not manage the decoder's memory.
        self._in_use: deque[tuple[Any, list[Any]]] = deque()

    def describe(self) -> str:
        """Return the names of the decoder and of the resampler in a few words."""
        how = "Triton's kernel" if self._resample is not resample_by_torch else "torch's operations"
        share = self._share.describe()
        return f"{self._decoder.describe()}, resampled there by {how}{share and f'; {share}'}"

    def turn(self) -> Turn:
        """Begin the next batch, and return its ``Turn``."""
        self._forget()
        return Turn(self, self._share)

    def waited(self, seconds: float) -> None:
        """Record how long the script waited for the last delivered batch."""
        self._forget()
        self._share.waited(seconds)

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[Any]:
        """Start to decode parts, rectangles inside the image, of trusted JPEGs (see ``ImageReader``).

        Return tensors on the device, and None for parts that the decoder cannot decode.
        """
        with self._on_stream():
            found = self._decoder.decode(parts, self._stream)
        with self._lock:
            is_first = not self._has_decoded and len(parts) >= _TELLING
            self._has_decoded = self._has_decoded or is_first
        if is_first and all(image is None for image in found):  # the cause is the decoder, not the files
            _log.warning(
                "images are decoded on the CPU, not on %s: %s declined all %d of a batch; it needs nvJPEG "
                "13.2 or later (pip install nvidia-nvjpeg)",
                self._device, self._decoder.describe(), len(found),
            )  # fmt: skip
        return found

    @ranged("resample")
    def finish(
        self, plan: Any, images: Mapping[int, tuple[Any, Resampling]], rows: Mapping[int, Any], count: int
    ) -> BatchThere:
        """Start to make a batch of ``count`` samples.

        Samples in neither ``images`` nor ``rows`` are undefined.  ``images`` maps a sample's number to its
        decoded pixels and its ``Resampling``.  ``rows`` maps the numbers of other samples to their bytes,
        which the CPU has made with ``plan``.
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
        """Return an event that follows all work started so far, and keep ``pixels`` until this event."""
        if self._stream is None:
            return None
        done = self._stream.record_event()
        with self._lock:
            self._in_use.append((done, pixels))
        return done

    def _forget(self) -> None:
        """Release pixels that are no longer needed."""
        with self._lock:
            while self._in_use and self._in_use[0][0].query():
                self._in_use.popleft()


class Turn:
    """One batch of a ``DeviceMaker``. The engine that makes the batch decodes some of its images on the GPU
    through this object."""

    def __init__(self, maker: DeviceMaker, share: Share) -> None:
        self._share, self._part = share, share.begin()
        self.is_there = self._part > 0  # whether the device decodes any part of the batch
        self.maker = maker
        self.decode, self.finish, self.describe = maker.decode, maker.finish, maker.describe

    def takes(self, number: int) -> bool:
        """Return whether the sample ``number`` of the batch is decoded on the GPU."""
        return takes(self._part, number)

    def given(self) -> None:
        """Record that the batch was delivered."""
        self._share.given(self._part)


def _resampler(device: Any) -> Any:
    """Return the function that resamples on a device: the function that uses the Triton kernel if the kernel
    works there, else the function that uses torch."""
    if device.type == "cuda":
        try:
            _try_kernel(device)
        except Exception as error:  # Triton is missing, or has no compiler for this device
            text = f"{type(error).__name__}: {error}"
            _log.info("torch's operations resample on %s, as Triton's kernel does not: %s", device, text)
        else:
            return resample_by_triton
    return resample_by_torch


def _try_kernel(device: Any) -> None:
    """Resample an image of one pixel, which also compiles the kernel. Raise an error if the kernel fails."""
    torch = require("torch", extra="torch")
    pixel = axis(BILINEAR, 1, 1)
    tables = tables_of([Resampling(Box(0, 0, 1, 1), BILINEAR, pixel, pixel, False)])
    with torch.cuda.device(device):
        source = torch.full((1, 1, 3), 7, dtype=torch.uint8, device=device)
        out = torch.zeros((1, 3, 1, 1), dtype=torch.uint8, device=device)
        resample_by_triton([source], tables, out)
        if out.flatten().tolist() != [7, 7, 7]:
            raise RuntimeError(f"it made {out.flatten().tolist()} of 7, 7, 7")


# ---- Choose the decoder for a device ---------------------------------------------------------------


def share_of(decode: Decode) -> float | Literal["auto"]:
    """Return which fraction of each batch a GPU decodes with these options: 0 to 1, or ``"auto"``.

    >>> share_of(Decode()), share_of(Decode("dali")), share_of(Decode(gpu_share="auto"))
    (0.0, 1.0, 'auto')
    """
    if decode.gpu_share is None:
        return 1.0 if decode.backend in ("nvimgcodec", "dali") else 0.0
    return decode.gpu_share


def device_decoder(decode: Decode, device: Any, threads: int) -> DeviceDecoder | None:
    """Return the decoder for a device; None if images are decoded on the CPU.

    Images are decoded on a GPU only if ``Decode`` sets a GPU back end or ``gpu_share``.  The user must ask
    for it because the GPU's pixels differ from the CPU's.
    """
    if device.type != "cuda" or not share_of(decode) or decode.scaled:
        return None
    if decode.backend != "dali":
        return NvJpegDecoder(device, threads)
    torch = require("torch", extra="torch")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DaliDecoder(threads, index, torch.from_dlpack)
