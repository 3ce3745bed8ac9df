"""Whatever the HDF5 format lets a file say about a dataset: values are h5py's, or the library reads it, with the reason."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5f, h5p, h5s, h5t, h5z
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from fastpipe.read.hdf5.layout import read_layout
from fastpipe.read.hdf5.reader import SampleReader

ReaderOf = Callable[..., AbstractContextManager[SampleReader]]
PropertiesOf = Callable[..., Any]

FILTERS: dict[str, Callable[[Any], None]] = {
    "shuffle": lambda plist: plist.set_shuffle(),
    "gzip": lambda plist: plist.set_filter(h5z.FILTER_DEFLATE, h5z.FLAG_MANDATORY, (4,)),
    "lzf": lambda plist: plist.set_filter(h5z.FILTER_LZF, h5z.FLAG_OPTIONAL),
    "fletcher32": lambda plist: plist.set_fletcher32(),
}
FILL_TIMES = {"alloc": h5d.FILL_TIME_ALLOC, "never": h5d.FILL_TIME_NEVER, "ifset": h5d.FILL_TIME_IFSET}
ALLOC_TIMES = {"early": h5d.ALLOC_TIME_EARLY, "late": h5d.ALLOC_TIME_LATE, "incr": h5d.ALLOC_TIME_INCR}
LIBVERS = {"earliest": h5f.LIBVER_EARLIEST, "v108": h5f.LIBVER_V18, "v110": h5f.LIBVER_V110, "latest": h5f.LIBVER_LATEST}  # fmt: skip


@st.composite
def datasets(draw: Any) -> dict[str, Any]:
    """A dataset as the format can have it, and what happens to it until it is read."""
    chunk = draw(st.sampled_from([(4,), (3, 2), (2, 3, 2)]))
    most = [draw(st.one_of(st.none(), st.integers(side, 9))) for side in chunk]
    shapes = st.tuples(*(st.integers(0, size or 9) for size in most))

    seeds = st.integers(0, 99)
    steps = st.one_of(st.tuples(st.just("write"), seeds), st.tuples(st.just("resize"), shapes))
    return {
        "chunk": chunk, "shape": draw(shapes), "most": tuple(most),
        "dtype": draw(st.sampled_from(["u1", "<i2", ">i4", "<f4", "<f8"])),
        "filters": draw(st.lists(st.sampled_from(sorted(FILTERS)), max_size=4)),
        "unfiltered_edges": draw(st.booleans()),
        "fill": draw(st.sampled_from(["default", "own"])),
        "fill_time": draw(st.sampled_from(sorted(FILL_TIMES))), "alloc_time": draw(st.sampled_from(sorted(ALLOC_TIMES))),
        "steps": draw(st.lists(steps, max_size=4)), "reopens": draw(st.booleans()),
        "skips": draw(st.booleans()),
        "libver": draw(st.sampled_from(sorted(LIBVERS))), "userblock": draw(st.sampled_from([0, 1024, 2048])),
        "sizes": draw(st.sampled_from([(8, 8), (4, 4), (8, 4)])), "is_paged": draw(st.booleans()),
    }  # fmt: skip


def _create(path: Path, case: dict[str, Any], properties_of: PropertiesOf) -> Any:
    creation, access = h5p.create(h5p.FILE_CREATE), _access(case)
    creation.set_userblock(case["userblock"])
    if case["libver"] == "earliest" and not case["unfiltered_edges"]:
        creation.set_sizes(*case["sizes"])  # the library loses unlimited dimensions in newer forms of shorter numbers
    if case["is_paged"]:
        creation.set_file_space_strategy(h5f.FSPACE_STRATEGY_PAGE, False, 1)
        creation.set_file_space_page_size(512)
    file = h5py.File(h5f.create(bytes(path), h5f.ACC_TRUNC, creation, access))
    dtype = np.dtype(case["dtype"])
    properties = h5p.create(h5p.DATASET_CREATE)
    if case["unfiltered_edges"]:
        properties = properties_of(f"edges {len(case['chunk'])} {dtype.itemsize}")
    else:
        properties.set_chunk(case["chunk"])
    for name in case["filters"]:
        FILTERS[name](properties)
    if case["fill"] == "own":
        properties.set_fill_value(np.array(7, dtype))
    properties.set_fill_time(FILL_TIMES[case["fill_time"]])
    properties.set_alloc_time(ALLOC_TIMES[case["alloc_time"]])
    most = tuple(h5s.UNLIMITED if size is None else size for size in case["most"])
    space = h5s.create_simple(case["shape"], most)
    h5d.create(file.id, b"x", h5t.py_create(dtype), space, properties)
    return file


def _access(case: dict[str, Any]) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(LIBVERS[case["libver"]], h5f.LIBVER_LATEST)
    return access


def _write(path: Path, case: dict[str, Any], properties_of: PropertiesOf) -> None:
    file = _create(path, case, properties_of)
    for what, value in case["steps"]:
        if case["reopens"]:
            file.close()
            file = h5py.File(h5f.open(bytes(path), h5f.ACC_RDWR, _access(case)))
        dataset = file["x"]
        if what == "write":
            _write_part(dataset, np.random.default_rng(value))
        elif dataset.id.get_num_chunks() or not case["unfiltered_edges"]:
            dataset.resize(value)  # the library fails at this where it looks for edges and there are no chunks
    file.close()
    if case["skips"]:  # a chunk without its filters, as its mask then says
        with h5py.File(path, "r+") as file:
            if file["x"].size:
                raw = np.arange(math.prod(case["chunk"]), dtype=case["dtype"]).tobytes()
                mask = (1 << len(case["filters"])) - 1
                file["x"].id.write_direct_chunk((0,) * len(case["chunk"]), raw, mask)


def _write_part(dataset: Any, random: Any) -> None:
    if not dataset.size:
        return
    begins = [int(random.integers(size)) for size in dataset.shape]
    box = tuple(
        slice(begin, int(random.integers(begin, size)) + 1)
        for begin, size in zip(begins, dataset.shape, strict=True)
    )
    part = dataset[box]
    dataset[box] = random.integers(0, 100, part.shape).astype(part.dtype)


PLAIN: dict[str, Any] = {
    "chunk": (3, 2), "shape": (7, 5), "most": (None, None), "dtype": "<f4", "filters": ["shuffle"],
    "unfiltered_edges": True, "fill": "default", "fill_time": "ifset", "alloc_time": "incr",
    "steps": [("write", 1), ("write", 2), ("write", 3)], "reopens": True, "skips": False, "libver": "latest", "userblock": 0,
    "sizes": (8, 8), "is_paged": False,
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(case=datasets())
@example(case={**PLAIN})
@example(case={**PLAIN, "libver": "earliest", "userblock": 1024, "filters": ["gzip", "fletcher32"]})
@example(case={**PLAIN, "fill": "own", "fill_time": "never", "steps": [("write", 1)]})
@example(case={**PLAIN, "steps": [("write", 1), ("resize", (9, 9)), ("write", 2)]})
@example(case={**PLAIN, "steps": [("write", 1), ("write", 2), ("resize", (5, 3))]})
def test_any_dataset_is_as_h5py_reads_it(
    case: dict[str, Any], reader_of: ReaderOf, read: Any, properties_of: PropertiesOf
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        _write(path, case, properties_of)
        with h5py.File(path) as file:
            expected, layout = file["x"][...], read_layout(file["x"])
        is_packed_twice = sum(name in ("gzip", "lzf") for name in case["filters"]) > 1
        if layout.kind == "h5py":
            event(layout.why)
            has_one_growing = case["most"].count(None) == 1 and case["most"][0] is not None
            is_allocated = case["alloc_time"] == "early" and case["shape"] != case["most"]
            assert is_packed_twice or case["fill_time"] == "never" or has_one_growing or is_allocated
            return
        assert not is_packed_twice
        with reader_of(path, layout=layout) as reader:
            event("chunks" if layout.filters else "rows")
            assert read(reader, expected.dtype, range(len(expected))).tobytes() == expected.tobytes()
