"""Judges an HDF5 file: every chunk of every dataset is read and decoded, in threads."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.console import Progress
from fastpipe.engine.bad import is_of_machine
from fastpipe.files.scanning.findings import Findings
from fastpipe.files.scanning.folder import Ticker, in_threads
from fastpipe.files.scanning.verdicts import Verdict
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.files import damage_as_error, opened
from fastpipe.hdf5.geometry import grid_of
from fastpipe.hdf5.layout import Layout, in_blocks, read_layout
from fastpipe.hdf5.library import name_of
from fastpipe.hdf5.rows import dtype_of

__all__ = ["scan_hdf5"]

_BLOCK_NBYTES = 1 << 22  # that are read together where there are no chunks


def scan_hdf5(path: str, threads: int, progress: Progress) -> Findings:
    """Judge every chunk that was written, as the HDF5 library would.

    Args:
        path: the file.
        threads: how many decode; what only the library can read is read by one.
        progress: shows how far it is.

    Raises:
        HDF5Error: it is no HDF5 file, or cannot be opened.
        OSError: it cannot be read for a reason that is the machine's.
    """
    found = Findings(path, "chunks")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        with opened(path) as file, damage_as_error(path):
            _scan(file, found, descriptor, threads, progress)
    finally:
        os.close(descriptor)
    found.sort()
    return found


def _scan(file: Any, found: Findings, descriptor: int, threads: int, progress: Progress) -> None:
    h5py = require("h5py", extra="hdf5")
    datasets: list[Any] = []
    file.visititems(lambda _, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
    ticker = Ticker(progress, found)
    by_threads: list[tuple[Any, Layout]] = []
    by_library: list[tuple[Any, list[tuple[slice, ...]]]] = []
    for dataset in datasets:
        if not dataset.shape and dataset.shape != ():
            continue  # it has no data
        try:
            layout = read_layout(dataset) if dataset.shape and dtype_of(dataset) is not None else None
        except Exception as error:  # of the library, on what the file says about its chunks
            found.add(_verdict(found.root, name_of(dataset), error), 0)
            continue
        if layout is None or layout.kind == "h5py":
            by_library.append((dataset, list(_blocks(dataset))))
        else:
            by_threads.append((dataset, in_blocks(layout)))
    numbers = [np.flatnonzero(layout.offsets >= 0) for _, layout in by_threads]
    found.total = sum(map(len, numbers)) + sum(len(blocks) for _, blocks in by_library)
    for (dataset, layout), some in zip(by_threads, numbers, strict=True):
        _by_threads(dataset, layout, some.tolist(), found, descriptor, threads, ticker)
    for dataset, blocks in by_library:
        for block in blocks:
            _by_library(dataset, block, found)
            ticker.tell()
    found.seconds = ticker.seconds()


def _by_threads(
    dataset: Any,
    layout: Layout,
    numbers: Sequence[int],
    found: Findings,
    descriptor: int,
    threads: int,
    ticker: Ticker,
) -> None:
    reader = ChunkReader(layout, FileState.of(os.fstat(descriptor)))
    doubted: list[int] = []

    def judge_one(place: int) -> None:
        number = numbers[place]
        try:
            reader.decode(np.array([number]), np.empty((1, reader.nbytes), np.uint8))
        except Exception as error:
            if is_of_machine(error):
                raise
            doubted.append(number)
        else:
            found.add(Verdict(found.root), reader.nbytes)
        ticker.tell()

    in_threads(judge_one, len(numbers), threads)
    for number in sorted(doubted):  # the library decides, as it does in the script
        _by_library(dataset, _box(layout, number), found)


def _by_library(dataset: Any, block: tuple[slice, ...], found: Findings) -> None:
    """Read a part through the library."""
    try:
        values = dataset[block]
    except Exception as error:
        if is_of_machine(error):
            raise
        where = ", ".join(f"{part.start}:{part.stop}" for part in block)
        found.add(_verdict(found.root, f"{name_of(dataset)}[{where}]", error), 0)
    else:
        found.add(Verdict(found.root), getattr(values, "nbytes", 0))


def _verdict(root: str, where: str, error: Exception) -> Verdict:
    reason = f"{type(error).__name__}: {error}"
    return Verdict(where, None, "corrupt", reason, f"{root}: {where}: {reason}")


def _box(layout: Layout, number: int) -> tuple[slice, ...]:
    """The part of a dataset that a chunk holds."""
    corner = map(int, np.unravel_index(number, grid_of(layout.shape, layout.chunk)))
    return tuple(
        slice(at * side, min((at + 1) * side, size))
        for at, side, size in zip(corner, layout.chunk, layout.shape, strict=True)
    )


def _blocks(dataset: Any) -> Iterator[tuple[slice, ...]]:
    """Parts of a dataset that are to be read one after the other."""
    shape = dataset.shape
    if not shape:
        yield ()
        return
    chunk = dataset.chunks
    if chunk is None:
        row = max(1, math.prod(shape[1:]) * max(1, dataset.id.get_type().get_size()))
        chunk = (max(1, min(shape[0], _BLOCK_NBYTES // row)), *shape[1:])
    sides = [range(0, size, max(1, side)) for size, side in zip(shape, chunk, strict=True)]
    for corner in itertools.product(*sides):
        yield tuple(
            slice(at, min(at + side, size)) for at, side, size in zip(corner, chunk, shape, strict=True)
        )
