"""The decoders: each one turns a rectangle of a trusted JPEG into RGB pixels.

A decoder has one method, ``decode(blob, box) -> array | None``: a C-contiguous uint8 array
(H, W, 3), or None for "not by me", upon which the caller asks Pillow.  Decoders may be
called from any number of threads; state that threads cannot share is kept per thread.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Protocol

import numpy as np

from fastpipe._extras import require
from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.read._libjpeg_warnings import silence_codecs
from fastpipe.read.jpeg_header import JpegHeader
from fastpipe.types import Box, UInt8Array

__all__ = [
    "Decoder", "NvImageCodecDecoder", "SimpleJpegDecoder", "load_nvimagecodec", "make_decoder",
    "make_whole_decoder",
]  # fmt: skip

_log = logging.getLogger("fastpipe.read")


_UNIT = 16  # rows of the tallest unit of blocks


class Decoder(Protocol):
    """Turns a rectangle of a trusted JPEG into RGB pixels, or declines."""

    def decode(self, blob: bytes, box: Box) -> UInt8Array | None:
        """Decode ``box``, which lies inside the image, or return None."""

    def describe(self) -> str:
        """The decoder's name and what it does, in a few words."""


class _Holder:
    image: object = None


def _references(holder: Any) -> int:
    """How many references there are to a holder's image."""
    image = holder.image
    return sys.getrefcount(image)


def _alone() -> int:
    """How many of those there are if nobody else has one; versions of Python count differently."""
    holder = _Holder()
    holder.image = object()
    return _references(holder)


_ALONE = _alone()


def load_nvimagecodec() -> Any:
    """Import nvImageCodec with its messages off: what it cannot decode comes back as None anyway.

    It reads the environment when it is imported, and the script's is the same afterwards.
    """
    name = "PYNVIMGCODEC_VERBOSITY"
    is_mine = name not in os.environ and "nvidia.nvimgcodec" not in sys.modules
    if is_mine:
        os.environ[name] = "0"
    try:
        return require("nvidia.nvimgcodec", extra="image")
    finally:
        if is_mine:
            os.environ.pop(name, None)


class NvImageCodecDecoder:
    """nvImageCodec on the CPU: decodes only the part of the image that is asked for."""

    def __init__(self) -> None:
        # Descriptor 2 is everybody's, so it is turned for the one moment when something is said.
        is_there = "nvidia.nvimgcodec" in sys.modules
        with nullcontext() if is_there else _quiet_stderr(_is_extension_noise):
            self._codec = load_nvimagecodec()
        if not hasattr(self._codec, "NVIMGCODEC_DEVICE_CPU_ONLY"):
            raise MissingDependencyError(
                f"nvImageCodec {self._codec.__version__} cannot decode on the CPU alone. "
                "Install a newer one with:  pip install -U 'fastpipe[image]'"
            )
        self._params = self._codec.DecodeParams(
            apply_exif_orientation=False, color_spec=self._codec.ColorSpec.SRGB
        )
        self._local = threading.local()

    def decode(self, blob: bytes, box: Box) -> UInt8Array | None:
        if box.width == 1:
            # Of a first column alone, or of a last one that is the second of its unit of 16, libjpeg does not
            # interpolate the colours of a 4:2:0 image, as if the image were no wider.
            return None
        region = self._codec.Region(box.top, box.left, box.top + box.height, box.left + box.width)
        try:
            stream = self._codec.CodeStream(blob).get_sub_code_stream(region=region)
            decoder = self._thread_decoder()
            if self._local.image is not None and _references(self._local) > _ALONE:
                self._local.image = None  # somebody still has the array that was made over its memory
            image = decoder.decode(stream, params=self._params, image=self._local.image)
        except RuntimeError:  # what the library raises for a stream that it cannot parse
            self._local.image = None
            return None
        self._local.image = image  # new memory would have to be mapped, page by page
        if image is None or image.shape != (box.height, box.width, 3):
            return None
        return np.asarray(image)

    def describe(self) -> str:
        return f"nvImageCodec {self._codec.__version__}, only the region that is needed"

    def _thread_decoder(self) -> Any:
        """One decoder a thread: a shared one would serialise the threads."""
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid, self._local.image = os.getpid(), None
            self._local.decoder = self._codec.Decoder(
                device_id=self._codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[self._codec.Backend(self._codec.BackendKind.CPU_ONLY)],
            )
            silence_codecs()
        return self._local.decoder


class SimpleJpegDecoder:
    """libjpeg-turbo through simplejpeg: decodes the whole image, returns the part."""

    def __init__(self) -> None:
        self._decode: Callable[..., UInt8Array] = require("simplejpeg", extra="image").decode_jpeg

    def decode(self, blob: bytes, box: Box) -> UInt8Array | None:
        try:
            whole = self._decode(blob, colorspace="RGB", fastdct=False, fastupsample=False)
        except ValueError:  # damaged data: Pillow decides whether that is an error
            return None
        if box.height > whole.shape[0] or box.width > whole.shape[1]:
            return None
        return np.ascontiguousarray(whole[box.top : box.top + box.height, box.left : box.left + box.width])

    def rows(self, blob: bytes, header: JpegHeader, count: int, factor: int) -> UInt8Array | None:
        """The first rows of an image that is made smaller while it is decoded, by leaving out the high
        frequencies of each block of 8 by 8 pixels.

        Args:
            blob, header: a JPEG whose header is trusted.
            count: rows that are needed, before they are made smaller.
            factor: 2, 4 or 8.

        Returns:
            uint8 (ceil(rows / factor), ceil(width / factor), 3) of at least so many rows; None where the
            library does not do it.
        """
        height = header.height
        if not header.is_progressive:
            # A header that says less ends the decoding early.  The colours of the last rows depend on
            # those below them: one unit of blocks more.
            height = min(height, (count + 2 * _UNIT) // _UNIT * _UNIT)
        if height < header.height:
            view, frame = memoryview(blob), header.frame
            blob = b"".join((view[: frame + 1], height.to_bytes(2, "big"), view[frame + 3 :]))
        size = (-(-height // factor), -(-header.width // factor))
        try:
            # Not strict: it would complain about the rest of the file.
            rows = self._decode(
                blob, colorspace="RGB", fastdct=False, fastupsample=False, min_height=size[0],
                min_width=size[1], strict=height == header.height,
            )  # fmt: skip
        except ValueError:
            return None
        return rows if rows.shape[:2] == size else None

    def describe(self) -> str:
        return "simplejpeg, the whole image"


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "nvimgcodec": NvImageCodecDecoder,
    "simplejpeg": SimpleJpegDecoder,
}
_said: set[str] = set()


def make_decoder(backend: Literal["auto", "nvimgcodec", "simplejpeg", "pillow", "dali"]) -> Decoder | None:
    """The decoder of images one by one, for a back end; None stands for Pillow alone.

    Args:
        backend: as in :class:`fastpipe.Decode`; ``"dali"``, which decodes batches, leaves single images to
            those of ``"auto"``.

    Raises:
        MissingDependencyError: the back end was named and its package is not installed.
    """
    if backend == "pillow":
        return None
    if backend not in ("auto", "dali"):
        if backend not in _DECODERS:
            raise OptionError(f"unknown decoder {backend!r}; there are {', '.join(_DECODERS)}, pillow, auto")
        return _DECODERS[backend]()
    for name, build in _DECODERS.items():
        try:
            return build()
        except MissingDependencyError as error:
            _say_once(f"decoding without {name}, which is slower with the same pixels: {error}")
    return None


def make_whole_decoder(decoder: Decoder | None, backend: str) -> SimpleJpegDecoder | None:
    """The decoder of large and of reduced images beside another one; None if it is not installed, or
    another one was asked for."""
    if isinstance(decoder, SimpleJpegDecoder):
        return decoder
    if decoder is None or backend not in ("auto", "dali"):
        return None
    try:
        return SimpleJpegDecoder()
    except MissingDependencyError:
        return None


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning(message)


_stderr_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock held, or descriptor 2 turned
    os.register_at_fork(
        before=_stderr_lock.acquire,
        after_in_parent=_stderr_lock.release,
        after_in_child=_stderr_lock.release,
    )


def _is_extension_noise(line: bytes) -> bool:
    """Complaints about GPU libraries that the CPU decoder does not need."""
    words = (b"Failed to load nv", b"If using nvImageCodec", b"nvjpeg", b"nvtiff")
    return any(word in line for word in words)


@contextmanager
def _quiet_stderr(is_noise: Callable[[bytes], bool]) -> Iterator[None]:
    """Keep lines that C code writes to descriptor 2 from the terminal when they are noise.

    Everything else that any thread writes meanwhile is passed on when the block ends.
    """
    with _stderr_lock:
        try:
            sys.stderr.flush()
            saved = os.dup(2)
        except (OSError, AttributeError, ValueError):  # no usable stderr: nothing to keep quiet
            yield
            return
        memory = _anonymous_file()
        os.dup2(memory, 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.lseek(memory, 0, os.SEEK_SET)
            while block := os.read(memory, 1 << 20):
                kept = b"".join(line for line in block.splitlines(keepends=True) if not is_noise(line))
                if kept:
                    os.write(2, kept)
            os.close(memory)
            os.close(saved)


def _anonymous_file() -> int:
    """A descriptor of a file without a name, which cannot be left behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fastpipe-stderr", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
