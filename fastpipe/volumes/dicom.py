"""Read series of DICOM images: uncompressed slices are read directly, from where they lie in their files.

pydicom reads the headers.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.files import lent, open_file
from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError
from fastpipe.core.text import in_bytes, natural_sorted
from fastpipe.errors import VolumeError
from fastpipe.volumes.axes import viewed_array
from fastpipe.volumes.raw import raw_unit, read_box
from fastpipe.volumes.volume import (
    DamagedUnitError,
    FileState,
    Int64Array,
    UInt8Array,
    UnitGrid,
    UnitReader,
    Volume,
    as_volume_error,
)

_MAGIC_AT, _MAGIC = 128, b"DICM"
_NAMES = (".dcm", ".dicom", ".ima")  # files with these extensions must be DICOM
_UID = re.compile(r"[0-9]+(\.[0-9]+)+")
_PIXELS = b"\xe0\x7f\x10\x00"  # the tag (7FE0,0010)
_LONG_VRS = (b"OB", b"OW")  # the types of pixel data; a length of four bytes follows two unused bytes
_MOST_HEAD = 12  # bytes of the pixel data's tag, type and length
_UNDEFINED = 0xFFFFFFFF  # the length of compressed pixel data
# The uncompressed transfer syntaxes that are read, and True if types (VRs) are explicit.
_SYNTAXES = {"1.2.840.10008.1.2": False, "1.2.840.10008.1.2.1": True}
_NEEDED = (
    "Rows", "Columns", "BitsAllocated", "BitsStored", "PixelRepresentation", "ImagePositionPatient",
    "ImageOrientationPatient", "PixelSpacing",
)  # fmt: skip
_TAGS = [
    *_NEEDED, "SeriesInstanceUID", "SeriesDescription", "Modality", "HighBit", "SamplesPerPixel",
    "NumberOfFrames", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence",
]  # fmt: skip
_ROUNDED, _TOLERANCE = ("pixel spacing", "directions"), 1e-3  # numbers that scanners round
_LEAST_NORMAL = 0.9  # the least length of the normal, which is 1 for perpendicular directions
_MOST_UNEVEN = 0.1  # of the usual distance of slices, by which a distance may differ
_MOST_SHOWN = 5  # series in an error
_INTEGERS = ("u1", "u2", "u4", "i1", "i2", "i4")


class _Scale(NamedTuple):
    """The conversion of a slice's stored values: ``slope · value + intercept``."""

    slope: float
    intercept: float
    bits: int  # of the stored values; higher bits of an element are ignored

    def bounds(self, stored: np.dtype[Any]) -> list[int]:
        """Return the least and the greatest value, for a slope and an intercept that are integers."""
        low = -(1 << (self.bits - 1)) if stored.kind == "i" else 0
        ends = low, low + (1 << self.bits) - 1
        return sorted(int(self.slope) * end + int(self.intercept) for end in ends)

    def applied(self, stored: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if (unused := 8 * stored.itemsize - self.bits) > 0:
            stored = stored << unused >> unused
        if (self.slope, self.intercept) == (1, 0):
            return stored
        if dtype.kind == "f":
            return stored.astype(dtype) * self.slope + self.intercept
        return (stored.astype(np.int64) * int(self.slope) + int(self.intercept)).astype(dtype)


class _Header(NamedTuple):
    path: str
    state: FileState
    tags: Any  # pydicom's dataset
    pixels: tuple[int, bytes]  # where the pixel data begin, and their first bytes

    @property
    def series(self) -> str:
        """The UID of the series, which follows the path of a folder."""
        return str(self.tags.get("SeriesInstanceUID") or "0.0")

    @property
    def about(self) -> str:
        found = f"{self.tags.get('Modality') or ''} {self.tags.get('SeriesDescription') or ''}".strip()
        return found or "not described"


class _Slice(NamedTuple):
    path: str
    state: FileState
    position: npt.NDArray[np.float64]  # mm, of the first voxel: left, posterior, superior
    directions: npt.NDArray[np.float64]  # (2, 3): along a row, and along a column
    spacing: tuple[float, float]  # mm, between rows and between columns
    shape: tuple[int, int]  # rows, columns
    dtype: np.dtype[Any]  # of the stored elements
    scale: _Scale
    offset: int  # the byte where the elements begin


def is_series_name(name: str) -> bool:
    """Return True for the text of a DICOM UID, which may follow a folder's path to choose a series."""
    return _UID.fullmatch(name) is not None


def is_dicom(path: str) -> bool:
    with open(path, "rb", opener=open_file) as file:
        return _has_magic(file)


def _has_magic(file: BinaryIO) -> bool:
    begin = file.read(_MAGIC_AT + len(_MAGIC))
    file.seek(0)
    return begin[_MAGIC_AT:] == _MAGIC


def dicom_folder(path: str, series: str = "") -> DicomVolume | None:
    """Open the series of a folder; ``series`` is its UID, which may be empty if there is only one.

    Other files, and objects without an image, are left out.  Return None if the folder has no DICOM image.
    """
    names = natural_sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    files = [os.path.join(path, name) for name in names if not name.startswith(".")]
    found = [one for file in files if (one := _header(file, is_optional=True)) is not None]
    if not found:
        return None
    counts = Counter(one.series for one in found)
    if series not in counts and (series or len(counts) > 1):
        about = {one.series: f"{counts[one.series]:,} files, {one.about}" for one in found}
        shown = [f"{os.path.join(path, uid)} ({about[uid]})" for uid in list(counts)[:_MOST_SHOWN]]
        more = "" if len(counts) <= _MOST_SHOWN else f" and {len(counts) - _MOST_SHOWN:,} more"
        what = f"no series {series}" if series else f"{len(counts):,} series"
        raise VolumeError(f"{path} has {what}; name one of these: {', '.join(shown)}{more}")
    chosen = [one for one in found if one.series == series or not series]
    return DicomVolume(os.path.join(path, series) if series else path, list(map(_slice, chosen)))


def dicom_files(files: Sequence[str | os.PathLike[str]]) -> DicomVolume:
    """Open files that are the slices of one volume, in any order."""
    paths = [os.fspath(file) for file in files]
    found = [one for path in paths if (one := _header(path, is_optional=False)) is not None]
    return DicomVolume(f"{len(paths):,} files from {paths[0]}", list(map(_slice, found)))


def _header(path: str, *, is_optional: bool) -> _Header | None:
    """Read the header of a file.

    If ``is_optional``, return None for a file that is not DICOM, and for an object without an image.
    """
    with open(path, "rb", opener=open_file) as file:
        state = FileState.of(path, os.fstat(file.fileno()))  # taken first, so that changes are noticed
        if not _has_magic(file):
            if is_optional and not path.lower().endswith(_NAMES):
                return None
            raise VolumeError(f"{path} is not a DICOM file; copy it again")
        with _as_dicom_error(path):
            tags = require("pydicom", extra="volume").dcmread(
                file, stop_before_pixels=True, specific_tags=_TAGS
            )
            if tags.get("Rows") is None:
                about = tags.file_meta
                kind = getattr(about.get("MediaStorageSOPClassUID"), "name", "Image")
                if is_optional and "Image" not in kind and "TransferSyntaxUID" in about:
                    return None  # such as a report; a file that is cut off has no transfer syntax
                raise VolumeError(f"{path} has no image; leave it out, or copy it again if it is cut off")
            return _Header(path, state, tags, (file.tell(), file.read(_MOST_HEAD)))


def _as_dicom_error(path: str) -> AbstractContextManager[None]:
    invalid = require("pydicom.errors", extra="volume").InvalidDicomError
    return as_volume_error(f"{path} cannot be read as DICOM", invalid)


def _slice(header: _Header) -> _Slice:
    with _as_dicom_error(header.path):
        return _described(header)


def _described(header: _Header) -> _Slice:
    path, state, tags, _ = header
    syntax = tags.file_meta.get("TransferSyntaxUID")
    if syntax not in _SYNTAXES:
        name = getattr(syntax, "name", syntax)
        raise VolumeError(
            f"{path} has the transfer syntax {name}, and only uncompressed little-endian slices are read: "
            "decompress the series once, with pydicom's Dataset.decompress() and save_as(), or convert it to "
            "NIfTI with dcm2niix"
        )
    frames, samples = int(tags.get("NumberOfFrames") or 1), int(tags.get("SamplesPerPixel") or 1)
    if frames != 1 or samples != 1:
        what = f"{frames} frames" if frames != 1 else f"{samples} samples for each pixel"
        raise VolumeError(
            f"{path} has {what}, and not one image of numbers: leave it out, or convert it with dcm2niix"
        )
    if missing := [name for name in _NEEDED if tags.get(name) in (None, "")]:
        what = " and no ".join(missing)
        raise VolumeError(f"{path} has no {what}: it is no slice of a volume; leave it out")
    if tags.get("ModalityLUTSequence"):
        raise VolumeError(f"{path} has a Modality LUT, which is not supported: apply it once, and save it")
    offset, nbytes = _pixels(header, is_explicit=_SYNTAXES[syntax])
    dtype, scale = _elements(header)
    shape = int(tags.Rows), int(tags.Columns)
    needed = math.prod(shape) * dtype.itemsize
    if nbytes < needed or state.state.size < offset + needed:
        there = in_bytes(max(0, min(nbytes, state.state.size - offset)))
        raise VolumeError(f"{path} is cut off: its image has {there} of {in_bytes(needed)}; copy it again")
    return _Slice(
        path, state, _numbers(tags.ImagePositionPatient, 3),
        _numbers(tags.ImageOrientationPatient, 6).reshape(2, 3),
        tuple(_numbers(tags.PixelSpacing, 2).tolist()), shape, dtype, scale, offset,
    )  # fmt: skip


def _elements(header: _Header) -> tuple[np.dtype[Any], _Scale]:
    path, tags = header.path, header.tags
    allocated, bits = int(tags.BitsAllocated), int(tags.BitsStored)
    highest = int(tags.get("HighBit", bits - 1))
    if allocated not in (8, 16, 32) or not 0 < bits <= allocated or highest != bits - 1:
        raise VolumeError(
            f"{path} has elements of {allocated} bits, of which {bits} up to bit {highest} are used. This is "
            "not supported: convert it with dcm2niix"
        )
    slope, intercept = tags.get("RescaleSlope"), tags.get("RescaleIntercept")
    scale = _Scale(1.0 if slope is None else float(slope), float(intercept or 0), bits)
    if not math.isfinite(scale.slope) or not math.isfinite(scale.intercept):
        raise VolumeError(f"{path} has the rescale slope {slope} and the intercept {intercept}: correct them")
    return np.dtype(f"<{'i' if tags.PixelRepresentation else 'u'}{allocated // 8}"), scale


def _numbers(values: Any, count: int) -> npt.NDArray[np.float64]:
    found = np.array([float(value) for value in values])
    if len(found) != count or not np.isfinite(found).all():
        raise ValueError(f"there are {values} instead of {count} numbers")
    return found


def _pixels(header: _Header, *, is_explicit: bool) -> tuple[int, int]:
    """Return the byte where the elements begin, and their number of bytes."""
    at, head = header.pixels
    size = 12 if is_explicit else 8
    if head[:4] != _PIXELS or len(head) < size or (is_explicit and head[4:6] not in _LONG_VRS):
        raise VolumeError(f"{header.path} has no pixel data of integers: leave it out")
    nbytes = int.from_bytes(head[size - 4 : size], "little")
    if nbytes == _UNDEFINED:
        raise VolumeError(f"{header.path} has compressed pixel data, and an uncompressed transfer syntax")
    return at + size, nbytes


def _sorted(name: str, slices: list[_Slice]) -> tuple[list[_Slice], npt.NDArray[np.float64]]:
    """Sort slices by their positions along the normal; return them and the affine of (slice, row, column)."""
    first = slices[0]
    for one in slices[1:]:
        _check_alike(name, one, first)
    normal = np.cross(*first.directions)
    if np.linalg.norm(normal) < _LEAST_NORMAL:
        raise VolumeError(f"{first.path} has no orientation: its directions are {first.directions.tolist()}")
    places = np.array([one.position @ normal for one in slices])
    order = np.argsort(places, kind="stable").tolist()
    slices, gaps, step = [slices[at] for at in order], np.diff(places[order]), normal
    if len(gaps):
        _check_gaps(name, slices, gaps)
        step = (slices[-1].position - slices[0].position) / len(gaps)
    along_row, along_column = first.directions
    columns = step, along_column * first.spacing[0], along_row * first.spacing[1], slices[0].position
    affine = np.vstack([np.stack(columns, axis=1), [0, 0, 0, 1]])
    affine[:2] *= -1  # DICOM's axes go to the left and to the back, an affine's to the right and to the front
    return slices, affine


def _check_alike(name: str, one: _Slice, first: _Slice) -> None:
    for what, here, there in (
        ("size", one.shape, first.shape), ("elements", one.dtype.name, first.dtype.name),
        ("pixel spacing", one.spacing, first.spacing),
        ("directions", one.directions.tolist(), first.directions.tolist()),
    ):  # fmt: skip
        is_equal = np.allclose(here, there, atol=_TOLERANCE) if what in _ROUNDED else here == there
        if not is_equal:
            raise VolumeError(
                f"{name} has images of several kinds: the {what} of {one.path} is {here}, and of "
                f"{first.path} {there}. Give a list of the files of one volume: [[file, …]]"
            )


def _check_gaps(name: str, slices: Sequence[_Slice], gaps: npt.NDArray[np.float64]) -> None:
    usual, least = float(np.median(gaps)), int(np.argmin(gaps))
    if gaps[least] <= _MOST_UNEVEN * usual:
        raise VolumeError(
            f"{name} has several images at one position, such as {slices[least].path} and "
            f"{slices[least + 1].path}. Of time points or echoes, give a list of the files of each: "
            "[[file, …], [file, …]]"
        )
    worst = int(np.abs(gaps - usual).argmax())
    if abs(gaps[worst] - usual) > _MOST_UNEVEN * usual:
        raise VolumeError(
            f"{name} has uneven gaps: slices are {usual:.4g} mm apart, but {slices[worst].path} and "
            f"{slices[worst + 1].path} {gaps[worst]:.4g} mm. If slices are missing, copy them again; if the "
            "scan has these gaps, resample it once (SimpleITK.Resample) and save it as NIfTI"
        )


def _value_dtype(stored: np.dtype[Any], scales: Sequence[_Scale]) -> np.dtype[Any]:
    """Return the dtype of a series' values.

    It is the stored dtype if nothing is rescaled.  If all slopes and intercepts are integers, it is the
    smallest integer dtype that holds every value that the stored bits can have.  Otherwise, it is float64.
    """
    if all((one.slope, one.intercept) == (1, 0) for one in scales):
        return stored.newbyteorder("=")
    if all(one.slope.is_integer() and one.intercept.is_integer() for one in scales):
        bounds = [one.bounds(stored) for one in scales]
        low, high = min(one[0] for one in bounds), max(one[1] for one in bounds)
        for name in _INTEGERS:
            if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
                return np.dtype(name)
    return np.dtype(np.float64)


class DicomVolume(Volume):
    """The slices of a series, in the order of their positions along the normal of their planes.

    The dimensions are (slice, row, column), or others after ``viewed``.  Values are rescaled.
    """

    def __init__(self, name: str, slices: list[_Slice]) -> None:
        self.name = name
        self.slices, self.affine = _sorted(name, slices)
        self.stored = self.slices[0].dtype
        self._scales = list({one.scale for one in self.slices})
        self.dtype = _value_dtype(self.stored, self._scales)
        self.how = f"DICOM, {len(self.slices):,} slices in the order of their positions, not compressed"
        if self.dtype != self.stored.newbyteorder("="):
            self.how += f", scaled from {self.stored.name} to {self.dtype}"
        self._set_view([0, 1, 2], [False] * 3)

    def _set_view(self, axes: Sequence[int], flips: Sequence[bool]) -> None:
        self._axes, self._flips = list(axes), list(flips)
        shape = len(self.slices), *self.slices[0].shape
        unit = 1, *raw_unit(shape[1:], self.stored.itemsize)
        self.shape = tuple(shape[axis] for axis in axes)
        self.grid = UnitGrid(self.shape, [unit[axis] for axis in axes])

    def viewed(self, axes: Sequence[int], flips: Sequence[bool]) -> DicomVolume:
        """Return the volume with its dimensions in the order ``axes``, and some of them reversed."""
        made = copy.copy(self)
        made._set_view(axes, flips)
        return made

    def in_files(self, box: Sequence[slice]) -> tuple[slice, slice, slice]:
        """Return the slices, rows and columns of a box."""
        found = [slice(0)] * 3
        for axis, flip, side, size in zip(self._axes, self._flips, box, self.shape, strict=True):
            found[axis] = slice(size - side.stop, size - side.start) if flip else side
        return found[0], found[1], found[2]

    def as_in_files(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of the volume's dimensions with those of the files: (slice, row, column)."""
        flips = tuple(slice(None, None, -1 if flip else None) for flip in self._flips)
        return part[flips].transpose(np.argsort(self._axes))

    def array_of_library(self) -> npt.NDArray[Any]:
        """Return the array that pydicom reads."""
        read = require("pydicom", extra="volume").dcmread
        planes = [one.scale.applied(read(one.path).pixel_array, self.dtype) for one in self.slices]
        return viewed_array(np.stack(planes), self._axes, self._flips)

    def native_source(self) -> Any | None:
        """Return a native source; None if the slices are scaled in different ways."""
        stored, shape = self.stored, self.slices[0].shape
        if len(self._scales) > 1:
            return None
        element, plane = stored.itemsize, stored.itemsize * math.prod(shape)
        steps = [(plane, element * shape[1], element)[axis] for axis in self._axes]
        steps = [-step if flip else step for step, flip in zip(steps, self._flips, strict=True)]
        pieces = [(os.fsencode(one.path), one.state.state, one.offset) for one in self.slices]
        source = native.volume_in_pieces(pieces, plane, element, steps)
        if not stored.isnative:
            source = source.swap(stored.itemsize)
        slope, intercept, bits = self._scales[0]
        if (slope, intercept, bits) == (1, 0, 8 * stored.itemsize):
            return source
        return source.scale(stored.str[1:], slope, intercept, self.dtype.str[1:], bits)

    def open(self) -> UnitReader:
        return _SlicesReader(self)

    def state(self) -> tuple[str, str]:
        states = repr([(one.path, tuple(one.state.state)) for one in self.slices]).encode()
        view = f"{self._axes} {self._flips}"
        return self.slices[0].path, f"dicom {hashlib.sha256(states).hexdigest()} {view}"


class _SlicesReader(UnitReader):
    def __init__(self, volume: DicomVolume) -> None:
        self._volume = volume
        self._files: dict[str, Any] = {}  # native.DataFile by path

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        for number, out in zip(numbers.tolist(), outs, strict=True):
            self._read_unit(number, out)

    def _read_unit(self, number: int, out: UInt8Array) -> None:
        volume = self._volume
        box = volume.grid.box(number)
        unit = out.view(volume.dtype).reshape(volume.grid.unit)
        target = volume.as_in_files(unit[tuple(slice(side.stop - side.start) for side in box)])
        which, *rest = volume.in_files(box)
        for one, plane in zip(volume.slices[which], target, strict=True):
            stored = np.empty(plane.shape, one.dtype)
            self._read_slice(one, rest, stored)
            plane[...] = one.scale.applied(stored, volume.dtype)

    def _read_slice(self, one: _Slice, box: Sequence[slice], stored: npt.NDArray[Any]) -> None:
        file = self._files.setdefault(one.path, native.data_file(os.fsencode(one.path), one.state.state))
        try:
            with lent(file, one.path) as descriptor:
                read_box(descriptor, one.offset, one.shape, box, stored)
        except ChunkError as error:
            raise DamagedUnitError(f"{one.path}: {error}") from None
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise one.state.changed() from None
            raise
