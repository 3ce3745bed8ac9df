"""What tests of ``fastpipe.hdf5`` share: readers of a file, and what they read."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import numpy as np
from h5py import h5d, h5p, h5s, h5t, h5z
from same import same

from fastpipe.core.native import native
from fastpipe.core.pool import Job, NativeJob
from fastpipe.core.reads import MADE
from fastpipe.core.shared_chunks import UnitFile, private_units
from fastpipe.hdf5.cache import chunk_nbytes
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.files import SampleFile, SampleFiles
from fastpipe.hdf5.layout import Layout, read_layout
from fastpipe.hdf5.reader import RowReader

UNCERTAIN = "the library does not say for certain which chunk is where"
KINDS = ("none", "much", "little", "shared")  # of memory for decoded chunks
PLUGINS = [
    hdf5plugin.LZ4(), hdf5plugin.LZ4(nbytes=24), hdf5plugin.Zstd(),
    *(hdf5plugin.Blosc(cname=name, shuffle=shuffle)
      for name in ("blosclz", "lz4", "lz4hc", "zlib", "zstd") for shuffle in (0, 1, 2)),
    *(hdf5plugin.Bitshuffle(cname="none", nelems=elements) for elements in (0, 8)),
    *(hdf5plugin.Bitshuffle(cname="lz4", nelems=elements) for elements in (0, 16)),
    hdf5plugin.Bitshuffle(cname="zstd"), hdf5plugin.Blosc2(cname="zstd"),
    hdf5plugin.Blosc2(cname="lz4", filters=hdf5plugin.Blosc2.BITSHUFFLE),
]  # fmt: skip
GZIP = h5z.FILTER_DEFLATE, (1,)
COMPRESSORS: list[tuple[int, tuple[int, ...]] | None] = [
    None, GZIP, (h5z.FILTER_LZF, ()), *((int(one.filter_id), tuple(map(int, one.filter_options))) for one in PLUGINS)
]  # fmt: skip


class Rows(NamedTuple):
    """A batch as the native core leaves it: an array for each dataset, (samples, *sample_shape), which rows it made,
    bool (samples,), their statuses, uint8 (samples, 8), and the ``native.RowBatch``, or None."""

    arrays: list[Any]
    is_made: Any
    statuses: Any
    batch: Any


def stored(path: Path, data: Any, libver: Any = None, userblock_size: int = 0, **options: Any) -> Path:
    """Writes a file of one dataset, ``x``, and returns its path."""
    with h5py.File(path, "w", libver=libver, userblock_size=userblock_size) as file:
        file.create_dataset("x", data=data, **options)
    return path


def layout_of(path: Path, name: str = "x") -> Layout:
    """Returns the layout of a dataset that is read directly."""
    with h5py.File(path, "r") as file:
        layout = read_layout(file[name])
    assert layout.kind != "h5py", layout.why
    return layout


def files_of(path: Path, layouts: Sequence[Layout], sample_dims: int = 1) -> SampleFiles:
    """Returns a file with layouts that were read before it was damaged, perhaps."""
    file, files = SampleFile.__new__(SampleFile), SampleFiles.__new__(SampleFiles)
    file.path = file.shown = str(path)
    file.layouts, file.sample_dims = list(layouts), sample_dims
    file.count = int(np.prod(file.layouts[0].shape[:sample_dims], dtype=np.int64))
    file.state = FileState.of(os.stat(path))
    files.files, files.count, files.firsts = [file], file.count, np.array([0, file.count])
    return files


def reader_of(path: Path, sample_dims: int = 1, layout: Layout | None = None, **options: Any) -> RowReader:
    return RowReader(files_of(path, [layout or layout_of(path)], sample_dims), **options)


def _outs(files: SampleFiles, count: int, before: int) -> list[Any]:
    found = []
    for number, layout in enumerate(files.layouts):
        shape = count, *files.sample_shape(number)
        if layout.dtype.hasobject:
            found.append(np.full(shape, None, layout.dtype))
            continue
        memory = np.full(int(np.prod(shape)) * layout.dtype.itemsize, before, np.uint8)
        found.append(memory.view(layout.dtype).reshape(shape))
    return found


def read_natively(reader: RowReader, samples: Any, before: int = 0xAB, threads: int = 0) -> Rows:
    """Reads samples by the native core alone, into bytes that were ``before``: in the calling thread, or in
    ``threads`` of the engine."""
    samples = np.ascontiguousarray(samples, np.int64)
    outs = _outs(reader._files, len(samples), before)
    started = reader.start(samples, np.arange(len(samples)), outs)
    is_made = np.ones(len(samples), bool)
    if started.batch is not None:
        if threads:
            job = NativeJob(started.batch, native.Channel(threads), threads, lambda: None)
            job.wait()
            del job
        else:
            native.run_here(started.batch)
        assert started.batch.is_complete
        assert set(np.unique(started.statuses[:, 0])) <= {MADE, 2}
        is_made = started.statuses[:, 0] == MADE
        if started.keep is not None and started.batch.has_chunks:
            started.keep()
    if started.tasks:
        tasks = Job(lambda number: started.tasks[number].run(), len(started.tasks))
        tasks.run_here()
        tasks.wait()
    return Rows(outs, is_made, started.statuses, started.batch)


def read(reader: RowReader, samples: Any, before: int = 0xAB, threads: int = 0) -> Any:
    """Reads samples as a dataset does: what the core declines is read alone, which raises what is wrong."""
    samples = np.ascontiguousarray(samples, np.int64)
    rows = read_natively(reader, samples, before, threads)
    for row in np.flatnonzero(~rows.is_made).tolist():
        reader.read_alone(int(samples[row]), row, rows.arrays)
    return rows.arrays[0] if len(rows.arrays) == 1 else rows.arrays


def read_alone(reader: RowReader, samples: Any, before: int = 0xAB) -> Any:
    """Reads samples one by one, without the native batch."""
    outs = _outs(reader._files, len(samples), before)
    for row, sample in enumerate(samples):
        reader.read_alone(int(sample), row, outs)
    return outs[0] if len(outs) == 1 else outs


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Changes bits of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= mask
    path.write_bytes(content)


def check_all_ways(
    path: Path, layout: Layout, expected: Any, sample_dims: int, samples: Any, kinds: Sequence[str] = KINDS
) -> None:
    """Compares what each way to read makes of samples: with all kinds of memory, and alone."""
    shape = layout.shape
    flat = expected.reshape(math.prod(shape[:sample_dims]), *shape[sample_dims:])
    chunks, nbytes = len(layout.offsets), chunk_nbytes(layout)
    file = UnitFile(chunks, 3, nbytes) if chunks else None
    memories = {
        "none": None,
        "much": private_units(chunks, chunks, nbytes) if chunks else None,
        "little": private_units(chunks, 1, nbytes) if chunks else None,
        "shared": file.opened() if file is not None else None,
    }
    for name in kinds:
        options = {"memory": lambda *_, memory=memories[name]: (memory, 0), "threads": 2, "turn": 0.4}
        reader = reader_of(path, sample_dims, layout, **options)
        for threads in (0, 2):
            parts = [samples] if name == "none" else np.array_split(samples, 3)  # some of a chunk's at a time
            for part in parts:
                rows = read_natively(reader, part, 0x5A + threads, threads)
                assert rows.is_made.all(), (name, threads, rows.statuses[~rows.is_made][:1])
                assert same(rows.arrays[0], flat[part]), (name, threads)
    few = samples[:6]
    assert same(read_alone(reader_of(path, sample_dims, layout), few), flat[few])
    if file is not None:
        del reader, options, memories
        file.close()


def check_chunks(path: Path, layout: Layout, expected: Any) -> None:
    """Compares whole chunks, by all at once and by one after the other, as far as they are in the dataset."""
    reader = ChunkReader(layout, FileState.of(path.stat()))
    numbers = np.flatnonzero(layout.offsets >= 0)
    if layout.kind != "chunked" or not len(numbers):
        return
    out = np.full((len(numbers), reader.nbytes), 0x77, np.uint8)
    reader.decode(numbers, out)
    grid = tuple(-(-size // side) for size, side in zip(layout.shape, layout.chunk, strict=True))
    for number, decoded in zip(numbers.tolist(), out, strict=True):
        assert reader.decode_alone(number).tobytes() == decoded.tobytes()
        place = np.unravel_index(number, grid)
        sides = zip(place, layout.chunk, strict=True)
        part = expected[tuple(slice(int(at) * side, int(at + 1) * side) for at, side in sides)]
        inside = decoded.view(layout.dtype).reshape(layout.chunk)[tuple(map(slice, part.shape))]
        assert same(inside, part)


def content(shape: tuple[int, ...], dtype: Any, values: str, random: Any) -> Any:
    dtype, nbytes = np.dtype(dtype), math.prod(shape) * np.dtype(dtype).itemsize
    if dtype.kind == "b":
        raw = random.integers(0, 2, nbytes, np.uint8)
    elif values == "noise":
        raw = random.integers(0, 256, nbytes, np.uint8)
    else:
        raw = random.choice(np.array([0, 1, 7, 255] if values == "few" else [0], np.uint8), nbytes)
    return raw.view(dtype).reshape(shape)


def create(file: Any, case: dict[str, Any], random: Any) -> Any:
    """Creates the dataset, in which nothing is written."""
    dtype, properties, most = np.dtype(case["dtype"]), h5p.create(h5p.DATASET_CREATE), case["shape"]
    if case["kind"] == "chunked":
        properties.set_chunk(case["chunk"])
        most = tuple(map(max, most, case["chunk"]))
        if case["grows"]:
            most = (h5s.UNLIMITED,) * len(most)
        for name in case["filters"]:
            if name == "shuffle":
                properties.set_shuffle()
            elif name == "fletcher32":
                properties.set_fletcher32()
            elif case["compressor"] is not None:
                code, options = case["compressor"]
                properties.set_filter(code, h5z.FLAG_OPTIONAL, options)
    elif case["kind"] == "compact" and math.prod(case["shape"]) * dtype.itemsize < 1 << 16:
        properties.set_layout(h5d.COMPACT)
    if case["fill"]:
        properties.set_fill_value(content((), dtype, "few", random))
    space = h5s.create_simple(case["shape"], most)
    h5d.create(file.id, b"x", h5t.py_create(dtype, logical=True), space, properties)
    return file["x"]


def write(path: Path, case: dict[str, Any]) -> None:
    random = np.random.default_rng(case["seed"])
    with h5py.File(path, "w", libver=case["libver"], userblock_size=case["userblock"]) as file:
        dataset = create(file, case, random)
        if not dataset.size or case["written"] == "none":
            return
        data = content(case["shape"], case["dtype"], case["values"], random)
        if case["written"] == "all":
            dataset[...] = data
        else:
            box = tuple(slice(int(random.integers(size)), None) for size in case["shape"])
            dataset[box] = data[box]
        count = dataset.id.get_create_plist().get_nfilters()
        if case["masked"] and case["kind"] == "chunked" and count:
            grid = [-(-size // side) for size, side in zip(case["shape"], case["chunk"], strict=True)]
            for _ in range(3):  # chunks without any of the filters
                at = [int(random.integers(size)) for size in grid]
                place = tuple(one * side for one, side in zip(at, case["chunk"], strict=True))
                raw = content(case["chunk"], case["dtype"], case["values"], random).tobytes()
                dataset.id.write_direct_chunk(place, raw, filter_mask=(1 << count) - 1)
