"""A copy of a volume as a Zarr array with other chunks: made chunk by chunk, then read back."""

from __future__ import annotations

import argparse
import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from fastpipe.console import Pace, Progress, print_line
from fastpipe.core.files import is_url
from fastpipe.core.machine import available_cpus
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError, VolumeError
from fastpipe.hdf5.checkpoints import write_whole
from fastpipe.volumes.bricks import Bricks, finish_all, planned_bricks, read_box
from fastpipe.volumes.opened import attributes_of, open_source, state_of, stored_nbytes
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.unfinished import Unfinished, clear, exists_already, forget_empty, is_left_behind
from fastpipe.volumes.volume import Box, DamagedUnitError, UnitGrid, Volume, box_text, box_within
from fastpipe.volumes.wrappers import GroupedVolume
from fastpipe.volumes.zarr_writing import (
    Codec,
    ZarrLayout,
    chunk_path,
    encoder,
    metadata,
    remove_chunk,
    sync_chunk,
    write_chunk,
)

__all__ = ["repack_volume"]

_FORMAT = 2
_NOTED_NBYTES = 1 << 30  # that are written, or compared, between two notes of how far it is
_COMPARED = 1 << 16  # elements at a time: comparing takes memory, a byte for each
_METADATA = "zarr.json"
# A folder of such a name would be taken for what it is not.
_OF_OTHERS = {
    ".b2nd", ".gz", ".h5", ".hdf", ".hdf5", ".he5", ".mrc", ".n5", ".nii", ".npy", ".npz", ".nrrd", ".raw",
    ".tif", ".tiff",
}  # fmt: skip

Array = npt.NDArray[Any]


def repack_volume(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Make the copy; ``args`` as of ``repack_cli``.

    Returns:
        0.

    Raises:
        OptionError: the options cannot work.
        VolumeError: the source is damaged, or changes; or the copy is not equal to it.
        OSError: the disk is full, for instance.
    """
    begun = time.monotonic()
    source, out = str(args.input), Path(args.output)
    volume = open_source(source)
    layout = _layout(args, volume)
    _check_paths(source, str(args.output))
    bricks = planned_bricks(volume, layout, args.threads or available_cpus(), args.memory)
    job = _job(source, volume, layout)
    if is_left_behind(out, job):
        clear(out)
    else:
        if os.path.lexists(out):
            forget_empty(out)
            raise exists_already(out)
        try:
            with Unfinished(out, job) as unfinished:
                _Repacking(source, volume, layout, bricks, unfinished, progress).run()
                unfinished.finish()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            said = f"{error.strerror}: free some, and run the same command again, which goes on from there"
            raise OSError(error.errno, said) from error
    progress.stop()
    print_line(console, _summary(out, source, layout, time.monotonic() - begun))
    return 0


def _layout(args: argparse.Namespace, volume: Volume) -> ZarrLayout:
    given = {
        "--chunk-rows": args.chunk_rows is not None, "--shuffle and --no-shuffle": args.shuffle is not None,
        "--dataset": bool(args.dataset), "--sample-dims": args.sample_dims != 1, "--force": args.force,
    }  # fmt: skip
    for name, is_given in given.items():
        if is_given:
            raise OptionError(f"{name} is for copies in HDF5, not in Zarr")
    if args.chunks is None:
        raise OptionError(
            "--chunks is missing: give the shape of a chunk, such as --chunks 64,128,128; "
            "`fastpipe inspect` with --patch says which is good"
        )
    try:
        codec = Codec.of(args.codec, args.level)
        return ZarrLayout.of(volume.shape, volume.dtype, args.chunks, codec, volume.fill)
    except OptionError as error:
        raise OptionError(f"{volume.name}: {error}") from None


def _check_paths(source: str, named: str) -> None:
    out = Path(named)
    if is_url(named):
        raise OptionError(f"{named} is not on this machine; name a folder here, and upload that")
    if not out.name:
        raise OptionError(f"{out} is no name for a folder")
    if out.suffix.lower() in _OF_OTHERS:
        raise OptionError(
            f"{out}: volumes are written as Zarr, in a folder, and {out.suffix} is the ending of something "
            f"else; name it {out.with_suffix('.zarr')}"
        )
    if not out.parent.is_dir():
        raise OptionError(f"there is no folder {out.parent}; make it first")
    if os.path.lexists(out) and os.path.realpath(out) == os.path.realpath(source):
        raise OptionError(f"{out} is the input itself; name another folder")
    if os.path.isdir(source) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise OptionError(f"{out} is within the input, which it would change; name a folder elsewhere")


def _job(source: str, volume: Volume, layout: ZarrLayout) -> dict[str, Any]:
    """What tells one job from another, as JSON gives it back."""
    return {
        "format": _FORMAT,
        "source": source if is_url(source) else os.path.realpath(source),
        "shape": list(layout.shape),
        "dtype": layout.dtype.name,
        "chunks": list(layout.chunk),
        "codec": layout.codec.name,
        "level": layout.codec.level,
        "fill": layout.fill.hex(),
        "state": state_of(source, volume),
    }


def _summary(out: Path, source: str, layout: ZarrLayout, seconds: float) -> str:
    decoded = int(np.prod(layout.shape, dtype=np.int64)) * layout.dtype.itemsize
    before, after = stored_nbytes(source), stored_nbytes(str(out))
    sizes = "" if after is None else f"{in_bytes(decoded if before is None else before)} → {in_bytes(after)}"
    ratio = f" ({after / max(decoded, 1):.2f}× of what is decoded)" if after is not None else ""
    chunks = UnitGrid(layout.shape, layout.chunk).count
    empty = chunks - _chunk_files(out)
    without = f", {empty:,} of them without a file, as they hold nothing but the fill value," if empty else ""
    return (
        f"{out}: {sizes}{ratio}; {chunks:,} chunk{'s' if chunks != 1 else ''}{without} in {seconds:.1f} s "
        f"({in_bytes(decoded / max(seconds, 1e-9))}/s), every one read back and equal"
    )


def _chunk_files(array: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(array / "c"))


@dataclass(frozen=True)
class _Chunk:
    """A chunk of the copy.

    Attributes:
        place: in the grid of chunks.
        box: of the array, as far as the chunk is in it.
    """

    place: tuple[int, ...]
    box: Box


class _Repacking:
    """One run, which begins where the one before was ended."""

    def __init__(
        self,
        path: str,
        volume: Volume,
        layout: ZarrLayout,
        bricks: Bricks,
        unfinished: Unfinished,
        progress: Progress,
    ) -> None:
        self._path, self._volume, self._layout = path, volume, layout
        self._bricks, self._unfinished, self._progress = bricks, unfinished, progress
        self._state = state_of(path, volume)
        self._reader = volume.open()
        self._encode = encoder(layout)
        self._grid = UnitGrid(layout.shape, layout.chunk)
        self._boxes = list(bricks.boxes(layout.shape))

    def run(self) -> None:
        """Write what is not written, and check what is not checked."""
        unfinished = self._unfinished
        if unfinished.brick != list(self._bricks.shape):
            unfinished.written = unfinished.verified = 0
            unfinished.brick = list(self._bricks.shape)
        there = 0
        if unfinished.goes_on:
            there = _chunk_files(unfinished.array)
            self._progress.done(f"going on: {there:,} of {self._grid.count:,} chunks are written")
        pool = ThreadPoolExecutor(self._bricks.threads, "fastpipe-repack")
        try:
            self._write(there, pool)
            self._describe()
            self._verify(pool)
        finally:
            pool.shutdown(cancel_futures=True)
        self._check_unchanged()

    def _chunks(self, box: Box) -> Iterator[_Chunk]:
        numbers = self._grid.touched([side.start for side in box], [side.stop for side in box]).numbers
        for number in numbers.tolist():
            yield _Chunk(self._grid.place(number), self._grid.box(number))

    def _is_there(self, chunk: _Chunk) -> bool:
        return chunk_path(self._unfinished.array, chunk.place).exists()

    def _write(self, there: int, pool: ThreadPoolExecutor) -> None:
        unfinished, fresh = self._unfinished, 0
        pace = Pace(self._progress, "writing", sum(map(self._nbytes, self._boxes[unfinished.written :])))
        # What a machine that failed has lost of those before is found when they are compared.
        for number in range(unfinished.written, len(self._boxes)):
            box = self._boxes[number]
            nbytes = self._nbytes(box)
            some = [one for one in self._chunks(box) if not there or not self._is_there(one)]
            if some:
                self._write_chunks(self._read(self._volume, box, pool), box, some, pool)
                pace.add(nbytes, f"{self._path}, part {number + 1:,} of {len(self._boxes):,}")
            else:
                pace.skip(nbytes)
            # Chunks without a file are no sign of how far it is.
            unfinished.written, fresh = number + 1, fresh + nbytes
            if fresh >= _NOTED_NBYTES:
                unfinished.save()
                fresh = 0
        self._check_unchanged()

    def _read(self, volume: Volume, box: Box, pool: ThreadPoolExecutor) -> Array:
        reader = self._reader if volume is self._volume else volume.open()
        return read_box(volume, reader, box, self._layout.dtype, pool)

    def _write_chunks(self, brick: Array, box: Box, chunks: list[_Chunk], pool: ThreadPoolExecutor) -> None:
        """Write chunks of a brick by all threads; not more at a time than these, as each takes memory.

        Of a chunk that is full of the fill value there is no file.
        """
        layout, unfinished = self._layout, self._unfinished
        element = np.frombuffer(layout.fill, layout.dtype)

        def write(chunk: _Chunk) -> None:
            part = brick[box_within(chunk.box, box)]
            if _are_same(part, np.broadcast_to(element, part.shape)):
                remove_chunk(unfinished.array, chunk.place)
                return
            whole = np.full(layout.chunk, element, layout.dtype)
            whole[tuple(slice(size) for size in part.shape)] = part
            write_chunk(unfinished.array, unfinished.temporary, chunk.place, self._encode(whole))

        finish_all([pool.submit(write, chunk) for chunk in chunks])

    def _describe(self) -> None:
        """Make the folder a Zarr array: only now is there nothing that would be taken for zeros."""
        noted = attributes_of(self._path, self._volume)
        if noted.others:
            self._progress.done(f"not copied, as JSON cannot hold them: attributes {', '.join(noted.others)}")
        content = metadata(self._layout, noted.attributes, noted.names)
        path = self._unfinished.array / _METADATA
        if not path.exists() or path.read_bytes() != content:
            write_whole(path, [content])
        # Names may be on the disk before bytes: what is noted as compared must outlast the machine.
        if hasattr(os, "sync"):
            self._progress.now("waiting for the disk")
            os.sync()

    def _verify(self, pool: ThreadPoolExecutor) -> None:
        """Read everything back.  The copy does not change any more, so what was checked stays checked."""
        unfinished, fresh = self._unfinished, 0
        copy = open_volume(unfinished.array)
        pace = Pace(
            self._progress, "reading back", sum(map(self._nbytes, self._boxes[unfinished.verified :]))
        )
        for number in range(unfinished.verified, len(self._boxes)):
            box = self._boxes[number]
            brick = self._read(self._volume, box, pool)
            wrong = self._wrong_chunks(brick, box, copy, pool)
            if wrong:
                # A machine that failed may have lost what it had said was written.
                for chunk in wrong:
                    self._progress.done(f"chunk {box_text(chunk.box)} was not whole: it is written anew")
                self._write_chunks(brick, box, wrong, pool)
                # All others were on the disk before the first was compared.
                for chunk in wrong:
                    sync_chunk(unfinished.array, chunk.place)
                self._give_up(self._wrong_chunks(brick, box, copy, pool))
            pace.add(self._nbytes(box), f"the copy, part {number + 1:,} of {len(self._boxes):,}")
            unfinished.verified, fresh = number + 1, fresh + self._nbytes(box)
            if fresh >= _NOTED_NBYTES:
                unfinished.save()
                fresh = 0

    def _wrong_chunks(self, brick: Array, box: Box, copy: Volume, pool: ThreadPoolExecutor) -> list[_Chunk]:
        """The chunks of a brick that the copy does not hold as the source does."""
        try:
            back = self._read(copy, box, pool)
        except DamagedUnitError:
            # Of small chunks some are read as one, and all of them fail with one.
            each = copy.inner if isinstance(copy, GroupedVolume) else copy
            return [chunk for chunk in self._chunks(box) if not self._is_right(brick, box, chunk, each, pool)]
        if _are_same(brick, back):
            return []
        chunks = list(self._chunks(box))
        return [one for one in chunks if not _are_same(brick[at := box_within(one.box, box)], back[at])]

    def _is_right(
        self, brick: Array, box: Box, chunk: _Chunk, copy: Volume, pool: ThreadPoolExecutor
    ) -> bool:
        try:
            back = self._read(copy, chunk.box, pool)
        except DamagedUnitError:
            return False
        return _are_same(brick[box_within(chunk.box, box)], back)

    def _give_up(self, wrong: list[_Chunk]) -> None:
        if not wrong:
            return
        for chunk in wrong:
            chunk_path(self._unfinished.array, chunk.place).unlink(missing_ok=True)
        raise VolumeError(
            f"{self._unfinished.array}, the chunk at {box_text(wrong[0].box)}: what was read back is not "
            "what the source holds, and was removed. Is the disk or the memory faulty?"
        )

    def _check_unchanged(self) -> None:
        if state_of(self._path, self._volume) != self._state:
            raise VolumeError(
                f"{self._path} has changed meanwhile; remove {self._unfinished.folder}, and repack it when "
                "it is complete"
            )

    def _nbytes(self, box: Box) -> int:
        return int(np.prod([side.stop - side.start for side in box])) * self._layout.dtype.itemsize


def _are_same(one: Array, other: Array) -> bool:
    """Whether two arrays of one type have the same bytes: one NaN is not another."""
    unsigned = np.dtype(f"V{one.dtype.itemsize}")
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(unsigned.itemsize)
    if bits is None:  # complex numbers of 16 bytes
        return _are_same(one.real, other.real) and _are_same(one.imag, other.imag)
    if one.size > _COMPARED:
        dim = next(dim for dim, side in enumerate(one.shape) if side > 1)
        half = one.shape[dim] // 2
        parts = [(slice(None),) * dim + (part,) for part in (slice(half), slice(half, None))]
        return all(_are_same(one[part], other[part]) for part in parts)
    return bool(np.array_equal(one.view(bits), other.view(bits)))
