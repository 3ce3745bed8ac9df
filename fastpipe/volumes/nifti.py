"""NIfTI images: of those without compression parts are read; of others a copy is made once.

The format: nifti1.h and nifti2.h of the NIfTI data format working group, as nibabel reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.file_identity import identify
from fastpipe.core.files import open_file, regular_status, retrying_open
from fastpipe.core.locks import LockFile
from fastpipe.core.machine import free_disk
from fastpipe.core.private_folder import PrivateFolder, user_cache_folder
from fastpipe.core.text import in_bytes
from fastpipe.errors import CacheError, VolumeError
from fastpipe.volumes.raw import RawVolume
from fastpipe.volumes.volume import (
    FileState,
    Int64Array,
    UInt8Array,
    UnitReader,
    Volume,
    WrappedReader,
    WrappedVolume,
    as_volume_error,
)

_PIECE = 1 << 22  # bytes that are decompressed at a time
_MOST_RATIO = 1032  # of bytes to those that deflate makes of them
_UNUSED_S = 30 * 86400.0  # after which a copy is removed
_LEFT = 1 << 28  # bytes of disk that are left to others
_SUFFIX, _LOCKS = ".raw", "locks"  # of copies, and a file of which a byte is locked while one is made


def nifti_volume(path: str, *, may_write: bool) -> Volume:
    """Open ``.nii``, ``.nii.gz``, or one of a pair, ``.hdr`` and ``.img``, as ``nibabel.load(path).dataobj``
    has it."""
    nibabel = require("nibabel", extra="volume")
    status = regular_status(path)  # from before it is read, so that a change since then is noticed
    headers, files = nibabel.spatialimages, nibabel.filebasedimages
    own = headers.HeaderDataError, headers.HeaderTypeError, nibabel.wrapstruct.WrapStructError
    with as_volume_error(f"{path} cannot be read as a NIfTI image", files.ImageFileError, *own):
        proxy = retrying_open(nibabel.load, path).dataobj
        shape, dtype, offset = tuple(map(int, proxy.shape)), np.dtype(proxy.dtype), int(proxy.offset)
        slope, inter = float(proxy.slope), float(proxy.inter)
    if min(shape, default=1) < 0 or offset < 0:
        raise VolumeError(
            f"{path} is no NIfTI image: it says that its shape is {shape}, from byte {offset} on"
        )
    if dtype.kind not in "biufc":
        raise VolumeError(f"{path} has elements of {dtype}, and not numbers")
    source = os.fspath(proxy.file_like)  # of a pair the one with the elements
    if source != path:
        status = regular_status(source)
    file, how, copied = source, "NIfTI, not compressed", None
    if source.lower().endswith(".gz"):
        if not may_write:
            raise VolumeError(
                f'{path} is compressed as a whole, and read from a copy, which cache="off" forbids: give '
                f'cache="auto" or "ram", or unpack it with:  gunzip {source}'
            )
        nbytes = offset + math.prod(shape) * dtype.itemsize
        if nbytes > _MOST_RATIO * status.st_size:  # before room is made for it
            raise VolumeError(
                f"{path} is cut off, or its header is damaged: it says that it has {in_bytes(nbytes)}, and "
                f"{in_bytes(status.st_size)} of gzip are less at any rate"
            )
        copied = FileState.of(source, status)
        file, status = converted_file(source, nbytes, lambda to: unpack(source, to, nbytes))
        how = f"NIfTI, from a copy that is not compressed ({in_bytes(nbytes)})"
    volume = RawVolume(file, shape, dtype, offset, True, how, status, name=path)
    volume.source, volume.copied = source, copied
    return volume if (slope, inter) == (1.0, 0.0) else ScaledVolume(volume, slope, inter)


class ScaledVolume(WrappedVolume):
    """A volume whose elements stand for others, slope · element + inter, as in an image's header."""

    def __init__(self, inner: Volume, slope: float, inter: float) -> None:
        super().__init__(inner)
        self.slope, self.inter = slope, inter
        self.dtype, self._fill = self.scaled(np.zeros(1, inner.dtype)).dtype, b""
        self.how = f"{inner.how}, scaled to {self.dtype}"

    def scaled(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what elements stand for, of the type that nibabel gives them."""
        scale = require("nibabel.volumeutils", extra="volume").apply_read_scaling
        made: npt.NDArray[Any] = scale(stored, np.float64(self.slope), np.float64(self.inter))
        return made

    def native_source(self) -> Any | None:
        source, stored = self.inner.native_source(), self.inner.dtype
        if source is None or self.dtype != np.float64 or stored.kind == "c":
            return None
        if not stored.isnative:
            source = source.swap(stored.itemsize)
        return source.scale(stored.str[1:], self.slope, self.inter)

    def open(self) -> UnitReader:
        return _ScaledReader(self)

    def state(self) -> tuple[str, str]:
        file, state = self.inner.state()
        return file, f"{state} scaled {self.slope!r} {self.inter!r}"


class _ScaledReader(WrappedReader):
    _volume: ScaledVolume

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        inner = self._volume.inner
        for number, out in zip(numbers, outs, strict=True):
            # What lies beyond the array's ends is arbitrary, but must not be a number that cannot be scaled.
            stored = np.zeros(inner.unit_nbytes, np.uint8)
            self._reader.read(number[None], [stored])
            out.view(self._volume.dtype)[:] = self._volume.scaled(stored.view(inner.dtype))


def unpack(path: str, target: BinaryIO, nbytes: int) -> None:
    done = 0
    with open(path, "rb", opener=open_file) as source:
        stream, is_over = zlib.decompressobj(wbits=31), False
        while data := source.read(_PIECE):
            while data:
                try:
                    made = stream.decompress(data, _PIECE)
                except zlib.error as error:
                    done_so_far = in_bytes(done)
                    raise VolumeError(f"{path} is damaged, {done_so_far} into its content: {error}") from None
                target.write(made[: max(0, nbytes - done)])
                done += len(made)
                if done >= nbytes + _PIECE:
                    return  # a small file can unpack to any amount
                is_over, data = stream.eof, stream.unconsumed_tail
                if is_over:  # another member may follow; zeros behind the last are no such
                    data = stream.unused_data.lstrip(b"\0")
                    stream = zlib.decompressobj(wbits=31) if data else stream
        if not is_over or done < nbytes:
            raise VolumeError(
                f"{path} is cut off: it has {in_bytes(done)} of {in_bytes(nbytes)}; copy it again"
            )


def converted_file(path: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> tuple[str, os.stat_result]:
    """The path of a copy that ``fill`` has written, and its state: what is there later, and is of another, is
    not the copy.

    A copy belongs to one state of one file: one that changes gets another.  Copies that nobody has used
    for thirty days are removed when another is made.
    """
    file = identify(path, b"converted 1")
    place = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
    name = f"{place}-{file.digest.hex()}{_SUFFIX}"
    with PrivateFolder(user_cache_folder() / "converted") as folder:
        status = _found(folder, name, nbytes)
        if status is None:
            # One makes it: a second would put another in its place, which is not what others have opened.
            with contextlib.closing(LockFile(folder.here(_LOCKS))) as lock:
                with contextlib.suppress(OSError):  # where the file system has no locks, nobody waits
                    lock.take(int(place, 16) >> 1, waits=True)
                status = _found(folder, name, nbytes)
                if status is None:
                    _check_room(folder, path, nbytes)
                    _remove_old(folder, place)
                    folder.write(name, fill)
                    status = folder.stat(name)
        return str(folder.path / name), status


def _found(folder: PrivateFolder, name: str, nbytes: int) -> os.stat_result | None:
    try:
        descriptor = folder.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        with contextlib.suppress(OSError):  # in use: not to be removed; but not changed
            os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
        return status if status.st_size >= nbytes else None


def _check_room(folder: PrivateFolder, path: str, nbytes: int) -> None:
    descriptor = os.open(folder.here(), os.O_RDONLY)
    try:
        room = free_disk(descriptor)
    finally:
        os.close(descriptor)
    if room < nbytes + _LEFT:
        raise CacheError(
            f"{path} is read from a copy of {in_bytes(nbytes)} that is not compressed, and "
            f"{str(folder.path)!r} has room for {in_bytes(max(0, room - _LEFT))}: make some, or "
            "set XDG_CACHE_HOME to a folder elsewhere"
        )


def _remove_old(folder: PrivateFolder, place: str) -> None:
    """Remove copies of earlier states of a file, and those that nobody has used for long."""
    for name in folder.names():
        if name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                is_old = name.startswith(f"{place}-")
                if is_old or time.time() - folder.stat(name).st_atime > _UNUSED_S:
                    folder.remove(name)
