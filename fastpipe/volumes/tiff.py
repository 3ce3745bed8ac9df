"""Read TIFF files of many pages, and folders of files that are the slices of a volume.

tifffile locates strips and tiles, and decodes them if the native core does not.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import open_file, regular_status, retrying_open
from fastpipe.core.native import native
from fastpipe.core.reads import read_bytes
from fastpipe.core.text import natural_sorted
from fastpipe.errors import FastpipeError, MissingDependencyError, VolumeError
from fastpipe.volumes.raw import RawVolume, raw_unit, read_box
from fastpipe.volumes.volume import (
    UNREADABLE,
    DamagedUnitError,
    FileState,
    Int64Array,
    UInt8Array,
    UnitGrid,
    UnitReader,
    Volume,
    as_volume_error,
    chunk_text,
    shortened,
    swapped,
)

_decoded: set[Any] = set()  # kinds of segments that this process has decoded

# TIFF's compression numbers, and the filters of fastpipe/native/codecs.h that undo each compression.
_FILTERS: dict[int, list[tuple[int, int, int, int]]] = {
    1: [], 8: [(1, 1, 0, 0)], 32946: [(1, 1, 0, 0)], 50000: [(32015, 1, 0, 0)],
}  # fmt: skip


def is_tiff_name(name: str) -> bool:
    """Return True for the name of a TIFF file that is not hidden; patterns do not match hidden files."""
    return name.lower().endswith((".tif", ".tiff")) and not name.startswith(".")


class _Page(NamedTuple):
    """The common properties of a volume's pages."""

    shape: tuple[int, ...]  # (rows, columns), (rows, columns, samples), or (samples, rows, columns) if planar
    dtype: np.dtype[Any]  # in the file's byte order if ``is_raw``, and otherwise in native byte order
    segment: tuple[int, ...]  # shape of a strip or tile
    is_raw: bool  # True if each whole page is uncompressed and contiguous
    is_planar: bool  # True if samples are in separate planes
    compression: str


class _Segments(NamedTuple):
    """The places of a page's strips or tiles in its file."""

    offsets: Int64Array  # int64 (N,)
    sizes: Int64Array  # int64 (N,); 0 for a strip or tile that was never written
    tables: bytes | None  # JPEG tables for decoding the data


class _Stored(NamedTuple):
    """The properties of segments (strips or tiles) that the native core needs to decode them."""

    filters: list[tuple[int, int, int, int]] | None  # None if tifffile must decode
    dtype: np.dtype[Any]  # the stored dtype, with the file's byte order
    fill: bytes  # the bytes of an element in a segment that was never written
    is_clipped: bool  # True if the last segments of a page end at the page's end

    @classmethod
    def of(cls, page: Any) -> _Stored:
        dtype = np.dtype(page.dtype).newbyteorder(page.parent.byteorder)
        is_plain = page.predictor == page.fillorder == 1 and not page.is_subsampled
        is_plain = is_plain and page.bitspersample == 8 * dtype.itemsize
        filters = _FILTERS.get(int(page.compression)) if is_plain else None
        return cls(filters, dtype, np.array(page.nodata).astype(dtype).tobytes(), not page.is_tiled)


class _Slice(NamedTuple):
    state: FileState
    segments: _Segments
    keyframe: Any  # tifffile's page object, which decodes segments


def tiff_volume(path: str) -> Volume:
    """Open the first series of images in a file, or a folder whose files, in natural order, are slices."""
    if os.path.isdir(path):
        # Adding or removing a slice changes the state of the folder.
        state = FileState.of(path)
        names = natural_sorted(filter(is_tiff_name, os.listdir(path)))
        return _slices(path, [os.path.join(path, name) for name in names], state, "natural order")
    status = regular_status(path)  # taken before reading, so that later changes are detected
    if (raw := _raw(path, status)) is not None:
        return raw
    shape, page, segments, first = _series(path)
    made = TiffVolume(path, [path], shape, page, segments, FileState.of(path, status))
    made.stored = _Stored.of(first)
    return made


def slices_volume(files: Sequence[str | os.PathLike[str]]) -> Volume:
    paths = [os.fspath(file) for file in files]
    name = f"{len(paths):,} files from {paths[0]}"
    return _slices(name, paths, FileState.of(paths[0]), "the given order")


def _slices(name: str, files: list[str], state: FileState, order: str) -> TiffVolume:
    shape, page, _, _ = _series(files[0])
    if len(shape) != len(page.shape):
        raise VolumeError(f"{name}: {files[0]} has {shape}, where a slice is one image: name a single file")
    return TiffVolume(name, files, (len(files), *shape), page, None, state, order)


def _raw(path: str, status: os.stat_result) -> RawVolume | None:
    """Open a file whose images are uncompressed and contiguous; return None for any other file."""
    with _opened(path) as file:
        series = file.series[0]
        if not series.dataoffset or not all(_is_together(page) for page in series.pages):
            return None
        dtype = series.dtype.newbyteorder(file.byteorder)
        shape, offset = tuple(map(int, series.shape)), int(series.dataoffset)
    return RawVolume(path, shape, dtype, offset, False, "TIFF, not compressed", status)


def _series(path: str) -> tuple[tuple[int, ...], _Page, list[_Segments], Any]:
    """Return the shape of a file's first series, its pages' properties and segments, and tifffile's page."""
    regular_status(path)
    with _opened(path) as file:
        series = file.series[0]
        first, pages = series.keyframe, series.pages
        shape = tuple(map(int, series.shape))
        # Check each page, because tifffile considers pages equal even if their strips differ.
        is_raw = first.is_final and all(one is None or _is_together(one) for one in pages)
        page = _page(first, file.byteorder, shape, len(pages), is_raw)
        if any(one is not None and _storage(one.keyframe) != _storage(first) for one in pages):
            raise ValueError("its pages are stored in different ways")
        _ = first.decode  # for JPEG this reads from the file, which is open now
        found = [_segments(one, page, first) for one in pages]
        if not is_raw and _Stored.of(first).filters is None:
            _check_decodes(file, first, found)
        return shape, page, found, first


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a file with tifffile; convert tifffile's errors within the block to fastpipe's errors."""
    tifffile = require("tifffile", extra="volume")
    with (
        as_volume_error(f"{path} cannot be read as TIFF"),
        retrying_open(tifffile.TiffFile, path, _multifile=False) as file,
    ):
        first = file.series[0]
        is_elsewhere = file.is_ome and first.kind != "ome" and "FileName=" in (file.ome_metadata or "")
        if is_elsewhere or any(page is not None and page.parent is not file for page in first.pages):
            raise VolumeError(
                f"{path} refers to pages in other files: write its series to one file, as "
                "tifffile.imwrite(file, tifffile.imread(path)) does"
            )
        yield file


def _check_decodes(file: Any, keyframe: Any, pages: Sequence[_Segments]) -> None:
    """Check that tifffile can decode segments of this kind: try segments until one is decoded.

    A segment may fail because it is damaged, although tifffile supports the kind.
    """
    coding = keyframe.compression, keyframe.predictor, keyframe.fillorder
    kind = *coding, keyframe.bitspersample, keyframe.dtype
    if kind in _decoded:
        return
    _decode(keyframe, None, 0, pages[0])  # a segment that was never written is not decoded
    for page in pages:
        for number in np.flatnonzero(page.sizes).tolist():
            try:
                at, size = int(page.offsets[number]), int(page.sizes[number])
                _decode(keyframe, read_bytes(file.filehandle.fileno(), at, size), number, page)
            except UNREADABLE:
                continue
            _decoded.add(kind)
            return


def _decode(keyframe: Any, stored: bytes | None, number: int, page: _Segments) -> tuple[Any, Any, Any]:
    tables = {} if page.tables is None else {"jpegtables": page.tables}
    try:
        made: tuple[Any, Any, Any] = keyframe.decode(stored, number, **tables)
        return made
    except (ImportError, NotImplementedError, ValueError) as error:
        if not isinstance(error, ImportError) and "requires the 'imagecodecs' package" not in str(error):
            raise
        imagecodecs = require("imagecodecs", package="imagecodecs")
        raise MissingDependencyError(
            f"the installed imagecodecs {imagecodecs.__version__} does not decode this TIFF: {error}. "
            "Install one that does with:  pip install --upgrade 'imagecodecs[all]'"
        ) from error


def _described(shape: Sequence[int], page: _Page) -> str:
    parts = "not compressed" if page.is_raw else f"in parts of {page.segment}, {page.compression}"
    return f"{tuple(shape)} {page.dtype}, {parts}{', in planes' if page.is_planar else ''}"


def _storage(keyframe: Any) -> tuple[Any, ...]:
    """Return the properties that the decoding of a page's segments needs, as far as tifffile exposes them."""
    return keyframe.hash, repr(keyframe.nodata), keyframe.is_jfif


def _is_together(page: Any) -> bool:
    """Return True if a page's strips or tiles all exist and are contiguous in the file."""
    if page is None or page is page.keyframe:
        return page is not None and (page.is_contiguous and page.dataoffsets[0] > 0)
    offsets, sizes = np.array(page.dataoffsets, np.int64), np.array(page.databytecounts, np.int64)
    if len(offsets) == 1:  # tifffile then ignores the size that the file states
        return bool(offsets[0])
    ends = offsets + sizes
    return bool(len(offsets) and offsets.all() and sizes.all() and (ends[:-1] == offsets[1:]).all())


def _page(first: Any, order: Any, whole: tuple[int, ...], pages: int, is_raw: bool) -> _Page:
    """Return the properties of the pages of a series, which has the shape ``whole`` and ``pages`` pages."""
    if first.dtype is None or first.dtype.kind not in "biufc":
        raise ValueError(f"its elements are of {first.bitspersample} bits, in a format that NumPy has not")
    shape = tuple(map(int, first.shape))
    if whole[-1:] == (1,) and whole[-len(shape) :] != shape:  # pages omit the last dimension of size 1
        shape = (*shape, 1)
    if whole[-len(shape) :] != shape or math.prod(whole[: -len(shape)]) != pages:
        raise ValueError(f"it has {pages} pages of {shape}, which are not {whole}")
    dtype = np.dtype(first.dtype).newbyteorder(order)
    if first.imagedepth > 1:
        raise ValueError("its images have a depth of their own")
    if is_raw:
        return _Page(shape, dtype, shape, True, False, "")
    rows, columns = int(first.imagelength), int(first.imagewidth)
    if not first.is_tiled and first.rowsperstrip < 1:
        raise ValueError(f"its strips have {first.rowsperstrip} rows")
    side = (first.tilelength, first.tilewidth) if first.is_tiled else (min(first.rowsperstrip, rows), columns)
    if min(side) < 1:
        raise ValueError(f"its strips or tiles are {side}")
    samples = int(first.samplesperpixel)
    is_planar, segment = first.planarconfig == 2 and samples > 1, tuple(map(int, side))
    if shape == (samples, rows, columns) and is_planar:
        segment = (1, *segment)
    elif shape == (rows, columns, samples) and not is_planar:
        segment = (*segment, samples)
    elif shape != (rows, columns):
        raise ValueError(f"its images of {rows}×{columns} with {samples} samples have the shape {shape}")
    compression = str(getattr(first.compression, "name", first.compression)).lower()
    # tifffile decodes elements to native byte order.
    return _Page(shape, dtype.newbyteorder("="), segment, False, is_planar, compression)


def _segments(page: Any, common: _Page, first: Any) -> _Segments:
    if page is None:
        raise ValueError("it misses pages")
    if tuple(page.shape) != tuple(first.shape):
        raise ValueError(f"its pages have {tuple(page.shape)} and {tuple(first.shape)}")
    offsets, sizes = np.array(page.dataoffsets, np.int64), np.array(page.databytecounts, np.int64)
    if common.is_raw:  # tifffile then ignores the sizes that the file states
        offsets, sizes = offsets[:1], np.array([math.prod(common.shape) * common.dtype.itemsize])
    needed = math.prod(-(-size // side) for size, side in zip(common.shape, common.segment, strict=True))
    if min(len(offsets), len(sizes)) < needed:
        raise ValueError(f"{needed:,} strips or tiles are needed, of which it has {len(offsets):,}")
    return _Segments(offsets, sizes, page.jpegtables)


class TiffVolume(Volume):
    """A volume of the pages of one file, or of several files with one page each.

    If the volume has several files, the segments (strips or tiles) of a file are located on its first read.
    """

    def __init__(
        self, name: str, files: Sequence[str], shape: Sequence[int], page: _Page,
        segments: list[_Segments] | None, state: FileState, order: str = "",
    ) -> None:  # fmt: skip
        self.name, self.files, self.page, self.segments = name, list(files), page, segments
        self.stored: _Stored | None = None
        self.opened = state
        self.shape, self.dtype = tuple(shape), page.dtype
        lead = [1] * (len(self.shape) - len(page.shape))
        side = raw_unit(page.shape, page.dtype.itemsize) if page.is_raw else page.segment
        self.grid = UnitGrid(self.shape, [*lead, *side])
        self.dims = len(lead)
        names = [os.path.basename(file) for file in (files[0], files[-1])]
        many = f"{len(files):,} files in {order} ({names[0]} … {names[1]}), " if order else ""
        parts = f"parts of {chunk_text(page.segment, page.dtype, page.compression)}"
        self.how = f"TIFF, {many}{'not compressed' if page.is_raw else parts}"

    def native_source(self) -> Any | None:
        """Return a native source with the places of strips or tiles.

        Return None if the volume has several files, or if tifffile must decode the segments.
        """
        stored, segments = self.stored, self.segments
        if stored is None or stored.filters is None or segments is None or self.page.is_raw:
            return None
        offsets, sizes = (np.concatenate([one[place] for one in segments]) for place in (0, 1))
        source = native.volume_in_segments(
            os.fsencode(self.name), self.opened.state, self.shape, self.grid.unit, self.dtype.itemsize,
            np.where(sizes > 0, offsets, -1), sizes, None, stored.filters, stored.fill, stored.is_clipped,
        )  # fmt: skip
        return source if stored.dtype.isnative else swapped(source, self.dtype)

    def open(self) -> UnitReader:
        return _Reader(self)

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        pages: Int64Array = numbers // math.prod(self.grid.counts[self.dims :])
        return pages

    def state(self) -> tuple[str, str]:
        if self.segments is not None:
            return self.name, f"tiff {self.opened.state}"
        states = repr([tuple(FileState.of(file).state) for file in self.files]).encode()
        return self.opened.name, f"tiff {self.opened.state} {hashlib.sha256(states).hexdigest()}"


class _Reader(UnitReader):
    def __init__(self, volume: TiffVolume) -> None:
        self._volume, self._lock = volume, threading.Lock()
        self._found: dict[int, _Slice] = {}
        # tifffile's page objects by compression settings, which may differ between the files of a folder.
        self._keyframes: dict[Any, Any] = {}
        volume.opened.check()
        with _opened(volume.files[0]) as file:
            self._keyframe = file.series[0].keyframe
            _ = self._keyframe.decode  # for JPEG this reads from the file, which is open now

    def check(self) -> None:
        self._volume.opened.check()

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        volume = self._volume
        self.check()
        pages = volume.stored_in(numbers)
        for page in np.unique(pages).tolist():
            path = volume.files[0] if volume.segments is not None else volume.files[page]
            which = np.flatnonzero(pages == page).tolist()
            found = self._slice(page, path)
            descriptor = open_file(path)
            try:
                found.state.check(descriptor)
                for place in which:
                    self._read_unit(descriptor, found, int(numbers[place]), outs[place])
            except FastpipeError:
                raise
            except UNREADABLE as error:  # raised by the decompression library
                raise DamagedUnitError(f"{path}, page {page}: {shortened(error)}") from None
            finally:
                os.close(descriptor)

    def _slice(self, page: int, path: str) -> _Slice:
        """Return the properties of a page; a page in a separate file is examined on its first read."""
        volume = self._volume
        if volume.segments is not None:
            return _Slice(volume.opened, volume.segments[page], self._keyframe)
        with self._lock:
            found = self._found.get(page)
        if found is None:
            state = FileState.of(path)
            shape, common, (segments, *_), first = _series(path)
            if common != volume.page or shape != volume.shape[1:]:
                here, there = _described(shape, common), _described(volume.shape[1:], volume.page)
                raise VolumeError(
                    f"{path} is not like {volume.files[0]}: it has {here}, and that one {there}"
                )
            with self._lock:
                keyframe = self._keyframes.setdefault(_storage(first), first)
                found = self._found[page] = _Slice(state, segments, keyframe)
        return found

    def _read_unit(self, descriptor: int, found: _Slice, number: int, out: UInt8Array) -> None:
        volume, page, segments = self._volume, self._volume.page, found.segments
        box = volume.grid.box(number)[volume.dims :]
        unit = out.view(volume.dtype).reshape(volume.grid.unit[volume.dims :])
        sizes = [side.stop - side.start for side in box]
        if page.is_raw:
            part = unit if list(unit.shape) == sizes else np.empty(sizes, volume.dtype)
            read_box(descriptor, int(segments.offsets[0]), page.shape, box, part)
            if part is not unit:
                unit[tuple(map(slice, sizes))] = part
            return
        inner = math.prod(volume.grid.counts[volume.dims :])
        at = number % inner
        size = int(segments.sizes[at])
        stored = read_bytes(descriptor, int(segments.offsets[at]), size) if size else None
        data, _, shape = _decode(found.keyframe, stored, at, segments)
        if data is None:  # the segment was never written
            unit[...] = found.keyframe.nodata
            return
        made = data.reshape(data.shape[1:])  # (rows, columns, samples)
        if len(page.shape) == 2:
            made = made[..., 0]
        elif page.is_planar:
            made = made[..., 0][None]
        if list(made.shape) != sizes:
            made = made[tuple(map(slice, sizes))]
        if list(made.shape) != sizes:
            raise ValueError(f"a part of {shape} in the place of {sizes}")
        unit[tuple(map(slice, sizes))] = made
