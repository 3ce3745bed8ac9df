"""Check an HDF5 file by reading and decoding every chunk of every dataset, in threads."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fastpipe.console import Progress
from fastpipe.core.files import open_file
from fastpipe.core.reads import ChunkError
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.layout import Layout, grid_of, in_blocks, read_layout
from fastpipe.hdf5.library import require_filters
from fastpipe.hdf5.opening import DamagedError, dtype_of, library_errors, name_of, opened, walk_datasets
from fastpipe.tools.scan_images import Findings, Verdict, in_threads

_BLOCK_NBYTES = 1 << 22  # bytes of a part to read if the dataset has no chunks
_SPARSE = 64  # above this number of chunks for each written chunk, read only written chunks


def scan_hdf5(path: str, threads: int, progress: Progress) -> Findings:
    found = Findings(path, "chunks", progress)
    descriptor = open_file(path)
    try:
        with opened(path) as file:
            _scan(file, found, descriptor, threads)
    finally:
        os.close(descriptor)
    return found


def _scan(file: Any, found: Findings, descriptor: int, threads: int) -> None:
    by_threads: list[tuple[Any, Layout]] = []
    by_library: list[tuple[Any, int, Iterator[tuple[slice, ...]]]] = []
    damaged: list[tuple[str, HDF5Error]] = []
    for name, dataset in walk_datasets(file, found.root):
        if isinstance(dataset, HDF5Error):
            damaged.append((name, dataset))
            continue
        try:
            with library_errors(f"{found.root}, dataset {name}", DamagedError):
                if dataset.shape is None:
                    continue  # the dataset has no data
                layout = read_layout(dataset) if dataset.shape and dtype_of(dataset) is not None else None
                if layout is None or layout.kind == "h5py":
                    require_filters(dataset, found.root)
                    by_library.append((dataset, *_blocks(dataset)))
                else:
                    by_threads.append((dataset, in_blocks(layout)))
        except HDF5Error as error:
            damaged.append((name, error))
    for name, why in damaged:
        found.add(_verdict(found.root, name, why), 0)
    numbers = [np.flatnonzero(layout.offsets >= 0) for _, layout in by_threads]
    found.total = len(damaged) + sum(map(len, numbers)) + sum(count for _, count, _ in by_library)
    for (dataset, layout), some in zip(by_threads, numbers, strict=True):
        _by_threads(dataset, layout, some.tolist(), found, descriptor, threads)
    for dataset, _, blocks in by_library:
        for block in blocks:
            _by_library(dataset, block, found)
    found.finish()


def _by_threads(
    dataset: Any, layout: Layout, numbers: Sequence[int], found: Findings, descriptor: int, threads: int
) -> None:
    reader = ChunkReader(layout, FileState.of(os.fstat(descriptor)))
    doubted: list[int] = []

    def judge_one(place: int) -> None:
        number = numbers[place]
        try:
            reader.decode(np.array([number]), np.empty((1, reader.nbytes), np.uint8))
        except ChunkError:
            doubted.append(number)
        else:
            found.add(Verdict(found.root), reader.nbytes)

    in_threads(judge_one, len(numbers), threads)
    for number in sorted(doubted):  # the HDF5 library decides, as in a script
        _by_library(dataset, _box(layout, number), found)


def _by_library(dataset: Any, block: tuple[slice, ...], found: Findings) -> None:
    where = f"{name_of(dataset)}[{', '.join(f'{part.start}:{part.stop}' for part in block)}]"
    try:
        with library_errors(f"{found.root}, dataset {where}", DamagedError, dataset):
            values = dataset[block]
    except HDF5Error as error:
        found.add(_verdict(found.root, where, error), 0)
    else:
        found.add(Verdict(found.root), getattr(values, "nbytes", 0))


def _verdict(root: str, where: str, error: HDF5Error) -> Verdict:
    cause = error.__cause__ or error
    reason = f"{type(cause).__name__}: {cause.args[0] if isinstance(cause, KeyError) else cause}"
    state: Any = "corrupt" if isinstance(error, DamagedError) else "unreadable"
    return Verdict(where, None, state, reason, f"{root}: {where}: {reason}")


def _box(layout: Layout, number: int) -> tuple[slice, ...]:
    corner = np.unravel_index(number, grid_of(layout.shape, layout.chunk))
    return _part(layout.shape, layout.chunk, map(int, corner))


def _part(shape: Sequence[int], chunk: Sequence[int], place: Iterable[int]) -> tuple[slice, ...]:
    return tuple(
        slice(at * side, min((at + 1) * side, size))
        for at, side, size in zip(place, chunk, shape, strict=True)
    )


def _blocks(dataset: Any) -> tuple[int, Iterator[tuple[slice, ...]]]:
    shape, chunk = dataset.shape, dataset.chunks
    if not dataset.is_virtual and not dataset.id.get_storage_size():
        return 0, iter(())  # no data were written
    if chunk is None:
        row = max(1, math.prod(shape[1:]) * max(1, dataset.id.get_type().get_size()))
        chunk = (max(1, min(shape[0], _BLOCK_NBYTES // row)), *shape[1:]) if shape else ()
    chunk = tuple(max(1, side) for side in chunk)
    grid = grid_of(shape, chunk)
    count = math.prod(grid)
    if dataset.chunks is not None and count > _SPARSE * dataset.id.get_num_chunks():
        places: list[tuple[int, ...]] = []
        dataset.id.chunk_iter(
            lambda one: places.append(tuple(map(operator.floordiv, one.chunk_offset, chunk)))
        )
        return len(places), (_part(shape, chunk, place) for place in places)
    return count, (_part(shape, chunk, _place(number, grid)) for number in range(count))


def _place(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(grid):
        number, at = divmod(number, size)
        place.insert(0, at)
    return tuple(place)
