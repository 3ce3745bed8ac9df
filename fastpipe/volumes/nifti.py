"""Read NIfTI images: uncompressed files directly, and compressed files from an uncompressed copy.

The copy is made once.  nibabel reads the headers.  nifti1.h and nifti2.h of the NIfTI data format working
group define the format.
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

_PIECE = 1 << 22  # bytes decompressed at a time
_MOST_RATIO = 1032  # largest ratio of decompressed to compressed bytes in deflate
_UNUSED_S = 30 * 86400.0  # a copy that is unused for this time is removed
_LEFT = 1 << 28  # bytes of disk that stay free
_SUFFIX, _LOCKS = ".raw", "locks"  # the suffix of copies, and the lock file for making copies


def nifti_volume(path: str, *, may_write: bool) -> Volume:
    """Open a ``.nii`` or ``.nii.gz`` file, or a file of a pair ``.hdr`` and ``.img``.

    The volume has the values of ``nibabel.load(path).dataobj``.
    """
    nibabel = require("nibabel", extra="volume")
    status = regular_status(path)  # taken before reading, so that a later change is detected
    headers, files = nibabel.spatialimages, nibabel.filebasedimages
    own = headers.HeaderDataError, headers.HeaderTypeError, nibabel.wrapstruct.WrapStructError
    with as_volume_error(f"{path} cannot be read as a NIfTI image", files.ImageFileError, *own):
        image = retrying_open(nibabel.load, path)
        proxy, affine = image.dataobj, np.asarray(image.affine, np.float64)
        shape, dtype, offset = tuple(map(int, proxy.shape)), np.dtype(proxy.dtype), int(proxy.offset)
        slope, inter = float(proxy.slope), float(proxy.inter)
    if min(shape, default=1) < 0 or offset < 0:
        raise VolumeError(
            f"{path} is not a NIfTI image: its header claims the shape {shape}, from byte {offset} on"
        )
    if dtype.kind not in "biufc":
        raise VolumeError(f"{path} has elements of {dtype}, and not numbers")
    source = os.fspath(proxy.file_like)  # in a pair, the file with the elements
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
        if nbytes > _MOST_RATIO * status.st_size:  # checked before allocating
            raise VolumeError(
                f"{path} is truncated, or its header is damaged: it claims {in_bytes(nbytes)}, and "
                f"{in_bytes(status.st_size)} of gzip are less at any rate"
            )
        copied = FileState.of(source, status)
        file, status = converted_file(source, nbytes, lambda to: unpack(source, to, nbytes))
        how = f"NIfTI, from a copy that is not compressed ({in_bytes(nbytes)})"
    volume = RawVolume(file, shape, dtype, offset, True, how, status, name=path)
    volume.source, volume.copied = source, copied
    found = volume if (slope, inter) == (1.0, 0.0) else ScaledVolume(volume, slope, inter)
    found.affine = affine
    return found


class ScaledVolume(WrappedVolume):
    """A volume whose values are slope · element + inter; the image's header contains slope and inter."""

    def __init__(self, inner: Volume, slope: float, inter: float) -> None:
        super().__init__(inner)
        self.slope, self.inter = slope, inter
        self.dtype, self._fill = self.scaled(np.zeros(1, inner.dtype)).dtype, b""
        self.how = f"{inner.how}, scaled to {self.dtype}"

    def viewed(self, axes: Sequence[int], flips: Sequence[bool]) -> ScaledVolume:
        assert isinstance(self.inner, RawVolume)
        return ScaledVolume(self.inner.viewed(axes, flips), self.slope, self.inter)

    def scaled(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values of the elements ``stored``, with nibabel's dtype."""
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
            # Elements beyond the array's ends stay zeros here, because arbitrary bytes may not be scalable.
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
                    return  # a small file can unpack to any size
                is_over, data = stream.eof, stream.unconsumed_tail
                if is_over:  # another member of the gzip file may follow, or zeros after the last member
                    data = stream.unused_data.lstrip(b"\0")
                    stream = zlib.decompressobj(wbits=31) if data else stream
        if not is_over or done < nbytes:
            raise VolumeError(
                f"{path} is cut off: it has {in_bytes(done)} of {in_bytes(nbytes)}; copy it again"
            )


def converted_file(path: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> tuple[str, os.stat_result]:
    """Return the path and the state of an uncompressed copy of ``path``; ``fill`` writes a missing copy.

    If a file at the copy's path has another state later, this file is not the copy.  Each copy belongs to one
    state of one original, so a changed original gets a new copy.  Whenever a copy is written, copies that
    have been unused for thirty days are removed.
    """
    file = identify(path, b"converted 1")
    place = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
    name = f"{place}-{file.digest.hex()}{_SUFFIX}"
    with PrivateFolder(user_cache_folder() / "converted") as folder:
        status = _found(folder, name, nbytes)
        if status is None:
            # Only one process makes the copy.  A second process would replace a copy that others have opened.
            with contextlib.closing(LockFile(folder.here(_LOCKS))) as lock:
                with contextlib.suppress(OSError):  # the file system may not support locks
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
        with contextlib.suppress(OSError):  # set the access time, which marks the copy as used
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
    """Remove copies of older states of a file, and copies that have been unused for a long time."""
    for name in folder.names():
        if name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                is_old = name.startswith(f"{place}-")
                if is_old or time.time() - folder.stat(name).st_atime > _UNUSED_S:
                    folder.remove(name)
