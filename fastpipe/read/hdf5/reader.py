"""Samples of an HDF5 dataset, read into a batch's memory without the HDF5 library's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.read.hdf5 import kernels
from fastpipe.read.hdf5.errors import ChunkError
from fastpipe.read.hdf5.filters import decode_chunk
from fastpipe.read.hdf5.geometry import Geometry, Group, Runs, grid_of
from fastpipe.read.hdf5.layout import Layout

__all__ = ["SampleReader"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_TASK_NBYTES = 1 << 20  # of rows that one task reads: more than it costs to hand it to a thread


class SampleReader:
    """Reads samples of one dataset that is not of the kind ``"h5py"``.  For threads at once.

    Args:
        layout: of the dataset.
        sample_dims: how many of its dimensions count samples.
        descriptor: of the file, open for reading; it stays the caller's.

    Attributes:
        geometry: of the samples and chunks.
        reads_rows: whether rows are read from the file by themselves, as nothing has to be decoded; else
            a chunk is decoded whole.
    """

    def __init__(self, layout: Layout, sample_dims: int, descriptor: int) -> None:
        self.geometry = Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, sample_dims)
        self.reads_rows = not layout.filters and layout.kind != "compact"
        self._layout, self._descriptor = layout, descriptor
        self._fill = np.frombuffer(layout.fill, np.uint8)

    def tasks(self, samples: Int64Array, out: UInt8Array) -> list[Callable[[], None]]:
        """What is to be done for some samples; the tasks can run side by side, in any order.

        Args:
            samples: int64 (N,), each at least 0 and below ``geometry.count``.
            out: uint8 (N * geometry.sample_nbytes,), C-contiguous: the samples, one after the other.

        Returns:
            Functions that raise

            * ChunkError: the file does not hold what it should; the message says where.
            * OSError: it cannot be read.
        """
        geometry = self.geometry
        if not self.reads_rows:
            return [
                partial(self._from_chunk, group, part, out)
                for group in geometry.grouped(samples)
                for part in range(geometry.parts)
            ]
        groups, rows = geometry.places(samples)
        step = max(1, _TASK_NBYTES // max(1, geometry.sample_nbytes))
        return [
            partial(self._from_file, groups[first : first + step], rows[first : first + step], first, out)
            for first in range(0, len(samples), step)
        ]

    def _from_chunk(self, group: Group, part: int, out: UInt8Array) -> None:
        """Copy one part of a group's samples from its chunk."""
        number, runs = self.geometry.chunk(group.number, part), self.geometry.runs(part)
        to = group.places * self.geometry.sample_nbytes
        if self._layout.offsets[number] < 0 and self._layout.kind != "compact":
            _fill(out, to, runs, self._fill)
            return
        data = self.decoded(number)
        if not kernels.copy_runs(data, group.rows, out, to, runs.in_chunk, runs.in_sample, runs.nbytes):
            raise AssertionError(f"{self._where(number)}: rows outside of the chunk or of the batch")

    def _from_file(self, groups: Int64Array, rows: Int64Array, first: int, out: UInt8Array) -> None:
        """Read some samples, the first of which is number ``first`` of the batch."""
        geometry = self.geometry
        to = (first + np.arange(len(groups))) * geometry.sample_nbytes
        for part in range(geometry.parts):
            runs, numbers = geometry.runs(part), geometry.chunk(groups, part)
            offsets = self._layout.offsets[numbers]
            is_there = offsets >= 0
            if not is_there.all():
                _fill(out, to[~is_there], runs, self._fill)
            at = np.add.outer((offsets + rows)[is_there], runs.in_chunk).ravel()
            places = np.add.outer(to[is_there], runs.in_sample).ravel()
            done = 0
            while done < len(at):
                # The kernel stops at whatever is unusual: then here it is said, or was a signal only.
                count = kernels.read_runs(self._descriptor, at[done:], out, places[done:], runs.nbytes)
                if count < 0:
                    raise AssertionError(f"{self._where(int(numbers[0]))}: rows outside of the batch")
                done += count
                if done < len(at):
                    sample = int(np.flatnonzero(is_there)[done // len(runs.in_chunk)])
                    run = out[places[done] : places[done] + runs.nbytes]
                    self._read_run(int(at[done]), run, int(numbers[sample]))
                    done += 1

    def decoded(self, number: int) -> UInt8Array:
        """A chunk that was written, decoded: uint8 (chunk_nbytes,).

        Args:
            number: in C order of the chunks' grid.

        Raises:
            ChunkError, OSError: as for ``tasks``.
        """
        layout = self._layout
        if layout.kind == "compact":
            return np.frombuffer(layout.inside, np.uint8)
        stored = np.empty(int(layout.sizes[number]), np.uint8)
        self._read_run(int(layout.offsets[number]), stored, number)
        try:
            return decode_chunk(stored, layout.filters, int(layout.masks[number]), self.geometry.chunk_nbytes)
        except ChunkError as error:
            raise ChunkError(f"{self._where(number)}: {error}") from None

    def _read_run(self, offset: int, out: UInt8Array, number: int) -> None:
        view: Any = out.data
        while len(view):
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise ChunkError(f"{self._where(number)}: the file ends within it")
            view, offset = view[count:], offset + count

    def _where(self, number: int) -> str:
        layout = self._layout
        if layout.kind != "chunked":
            return f"{layout.file}, dataset {layout.name}"
        corner = np.unravel_index(number, grid_of(layout.shape, layout.chunk))
        box = ", ".join(
            f"{at * side}:{min((at + 1) * side, size)}"
            for at, side, size in zip(map(int, corner), layout.chunk, layout.shape, strict=True)
        )
        return f"{layout.file}, dataset {layout.name}, chunk {number} at [{box}]"


def _fill(out: UInt8Array, to: Int64Array, runs: Runs, fill: UInt8Array) -> None:
    """Write what is read where nothing was written: rare, so without a kernel."""
    pattern = np.tile(fill, runs.nbytes // len(fill))
    for first in np.add.outer(to, runs.in_sample).ravel().tolist():
        out[first : first + runs.nbytes] = pattern
