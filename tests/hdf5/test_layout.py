"""Whatever the HDF5 format lets a file say of a dataset: values are h5py's, or the library reads it, with the reason."""

from __future__ import annotations

import math
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from h5py import h5d, h5f, h5p, h5s, h5t, h5z
from hdf5_kit import UNCERTAIN, check_all_ways, check_chunks, layout_of, read, reader_of, stored
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from fastpipe import FastHDF5Dataset, FastPatchDataset
from fastpipe.cli import main
from fastpipe.core.reads import ChunkError
from fastpipe.errors import HDF5Error
from fastpipe.hdf5 import layout as layout_module
from fastpipe.hdf5 import library
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.files import SampleFile, SampleFiles
from fastpipe.hdf5.filters import BLOSC2, FilterStep, decode_chunk, why_not
from fastpipe.hdf5.layout import read_layout
from fastpipe.hdf5.library import has_blosc2
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader
from fastpipe.sampling import Uniform

FILTERS: dict[str, Any] = {
    "shuffle": lambda plist: plist.set_shuffle(),
    "gzip": lambda plist: plist.set_filter(h5z.FILTER_DEFLATE, h5z.FLAG_MANDATORY, (4,)),
    "lzf": lambda plist: plist.set_filter(h5z.FILTER_LZF, h5z.FLAG_OPTIONAL),
    "fletcher32": lambda plist: plist.set_fletcher32(),
}
FILL_TIMES = {"alloc": h5d.FILL_TIME_ALLOC, "never": h5d.FILL_TIME_NEVER, "ifset": h5d.FILL_TIME_IFSET}
ALLOC_TIMES = {"early": h5d.ALLOC_TIME_EARLY, "late": h5d.ALLOC_TIME_LATE, "incr": h5d.ALLOC_TIME_INCR}
LIBVERS = {"earliest": h5f.LIBVER_EARLIEST, "v108": h5f.LIBVER_V18, "v110": h5f.LIBVER_V110, "latest": h5f.LIBVER_LATEST}  # fmt: skip


@st.composite
def histories(draw: Any) -> dict[str, Any]:
    """A dataset as the format can have it, and what happens to it until it is read."""
    chunk = draw(st.sampled_from([(4,), (3, 2), (2, 3, 2)]))
    most = [draw(st.one_of(st.none(), st.integers(side, 9))) for side in chunk]
    shapes = st.tuples(*(st.integers(0, size or 9) for size in most))
    seeds = st.integers(0, 99)
    steps = st.one_of(st.tuples(st.just("write"), seeds), st.tuples(st.just("resize"), shapes))
    alloc_time = draw(st.sampled_from(sorted(ALLOC_TIMES)))
    filters = st.lists(st.sampled_from(sorted(FILTERS)), max_size=4).filter(
        # LZF may fail in chunks that the library fills, or beside a second compressor.
        lambda names: (
            "lzf" not in names or (names.count("lzf") + names.count("gzip") == 1 and alloc_time != "early")
        )
    )
    return {
        "chunk": chunk, "shape": draw(shapes), "most": tuple(most),
        "dtype": draw(st.sampled_from(["u1", "<i2", ">i4", "<f4", "<f8"])),
        "filters": draw(filters), "unfiltered_edges": draw(st.booleans()), "fill": draw(st.sampled_from(["default", "own"])),
        "fill_time": draw(st.sampled_from(sorted(FILL_TIMES))), "alloc_time": alloc_time,
        "steps": draw(st.lists(steps, max_size=4)), "reopens": draw(st.booleans()), "skips": draw(st.booleans()),
        "libver": draw(st.sampled_from(sorted(LIBVERS))), "userblock": draw(st.sampled_from([0, 1024, 2048])),
        "sizes": draw(st.sampled_from([(8, 8), (4, 4), (8, 4)])), "is_paged": draw(st.booleans()),
    }  # fmt: skip


def _access(case: dict[str, Any]) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(LIBVERS[case["libver"]], h5f.LIBVER_LATEST)
    return access


def _create(path: Path, case: dict[str, Any], properties_of: Any) -> Any:
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_userblock(case["userblock"])
    if case["libver"] == "earliest" and not case["unfiltered_edges"]:
        # In newer forms the library loses unlimited dimensions where numbers are shorter.
        creation.set_sizes(*case["sizes"])
    if case["is_paged"]:
        creation.set_file_space_strategy(h5f.FSPACE_STRATEGY_PAGE, False, 1)
        creation.set_file_space_page_size(512)
    file = h5py.File(h5f.create(bytes(path), h5f.ACC_TRUNC, creation, _access(case)))
    dtype = np.dtype(case["dtype"])
    if case["unfiltered_edges"]:
        properties = properties_of(f"edges {len(case['chunk'])} {dtype.itemsize}")
    else:
        properties = h5p.create(h5p.DATASET_CREATE)
        properties.set_chunk(case["chunk"])
    for name in case["filters"]:
        FILTERS[name](properties)
    if case["fill"] == "own":
        properties.set_fill_value(np.array(7, dtype))
    properties.set_fill_time(FILL_TIMES[case["fill_time"]])
    properties.set_alloc_time(ALLOC_TIMES[case["alloc_time"]])
    most = tuple(h5s.UNLIMITED if size is None else size for size in case["most"])
    h5d.create(file.id, b"x", h5t.py_create(dtype), h5s.create_simple(case["shape"], most), properties)
    return file


def _write_history(path: Path, case: dict[str, Any], properties_of: Any) -> None:
    file = _create(path, case, properties_of)
    for what, value in case["steps"]:
        if case["reopens"]:
            file.close()
            file = h5py.File(h5f.open(bytes(path), h5f.ACC_RDWR, _access(case)))
        dataset = file["x"]
        if what == "write" and dataset.size:
            random = np.random.default_rng(value)
            begins = [int(random.integers(size)) for size in dataset.shape]
            ends = [int(random.integers(*some)) + 1 for some in zip(begins, dataset.shape, strict=True)]
            box = tuple(map(slice, begins, ends))
            dataset[box] = random.integers(0, 100, dataset[box].shape).astype(dataset.dtype)
        # The library fails at resizing where it looks for edges and there are no chunks.
        elif what == "resize" and (dataset.id.get_num_chunks() or not case["unfiltered_edges"]):
            dataset.resize(value)
    if case["skips"] and file["x"].size:  # a chunk without its filters, as its mask then says
        file.close()
        file = h5py.File(path, "r+")
        raw = np.arange(math.prod(case["chunk"]), dtype=case["dtype"]).tobytes()
        file["x"].id.write_direct_chunk((0,) * len(case["chunk"]), raw, (1 << len(case["filters"])) - 1)
    file.close()


PLAIN: dict[str, Any] = {
    "chunk": (3, 2), "shape": (7, 5), "most": (None, None), "dtype": "<f4", "filters": ["shuffle"],
    "unfiltered_edges": True, "fill": "default", "fill_time": "ifset", "alloc_time": "incr",
    "steps": [("write", 1), ("write", 2), ("write", 3)], "reopens": True, "skips": False, "libver": "latest", "userblock": 0,
    "sizes": (8, 8), "is_paged": False,
}  # fmt: skip


@settings(max_examples=120)
@given(case=histories())
@example(case={**PLAIN})
@example(case={**PLAIN, "libver": "earliest", "userblock": 1024, "filters": ["gzip", "fletcher32"]})
@example(case={**PLAIN, "fill": "own", "fill_time": "never", "steps": [("write", 1)]})
@example(case={**PLAIN, "steps": [("write", 1), ("resize", (9, 9)), ("write", 2)]})
@example(case={**PLAIN, "steps": [("write", 1), ("write", 2), ("resize", (5, 3))]})
def test_datasets_of_any_history_are_as_h5py_reads_them(case: dict[str, Any], properties_of: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        _write_history(path, case, properties_of)
        with h5py.File(path) as file:
            layout = read_layout(file["x"])
            try:
                expected = file["x"][...]
            except OSError:
                # The library forgot to write the mask of a chunk that was as long with its filters.
                assert case["skips"]
                expected = None
        if layout.kind == "h5py":
            event(layout.why)
            assert layout.why in _reasons(case)
        elif expected is None:
            with pytest.raises(DamagedError):
                read(reader_of(path, layout=layout), range(layout.shape[0]))
        else:
            assert layout.dtype == expected.dtype
            check_all_ways(path, layout, expected, 1, np.arange(len(expected)), ["none", "little"])
            check_chunks(path, layout, expected)


def _reasons(case: dict[str, Any]) -> set[str]:
    """Why the library may read a dataset: all others are to be read without it."""
    most, filters = case["most"], case["filters"]
    grows_behind = most.count(None) == 1 and most[0] is not None
    is_uncertain = grows_behind or (case["alloc_time"] == "early" and most.count(None) < len(most))
    reasons = {
        "it is compressed twice": filters.count("gzip") + filters.count("lzf") > 1,
        # The library sets the size of an element of the first alone.
        "its filter shuffle does not have the size of an element": filters.count("shuffle") > 1,
        "parts of it were never written, and no fill value is read there": case["fill_time"] == "never",
        UNCERTAIN: is_uncertain,
    }
    return {why for why, is_so in reasons.items() if is_so}


@pytest.mark.parametrize(
    ("libver", "most", "alloc_time", "filters"),
    [
        ("earliest", (None,), "incr", {"compression": "gzip"}),  # a B-tree, version 1
        ("latest", (2500,), "incr", {"compression": "gzip"}),  # a fixed array of several pages
        ("latest", (2500,), "early", {}),  # an implicit index
        ("latest", (None,), "incr", {"compression": "gzip"}),  # an extensible array of several data blocks
        ("latest", (None, None), "incr", {"compression": "gzip"}),  # a B-tree, version 2
        ("latest", (2500,), "incr", {"shuffle": True, "fletcher32": True}),
    ],
)
def test_many_chunks_of_every_index_are_read(
    tmp_path: Path, libver: Any, most: Any, alloc_time: str, filters: dict[str, Any]
) -> None:
    rows = np.random.default_rng(0).integers(0, 9, (2500, 3)[: len(most)])
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_alloc_time(ALLOC_TIMES[alloc_time])
    options = {"chunks": (1, 3)[: len(most)], "maxshape": most, "dcpl": properties, **filters}
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        dataset = file.create_dataset("x", rows.shape, "i8", **options)
        dataset[:1100], dataset[2000:] = rows[:1100], rows[2000:]
        expected = dataset[...]
    np.testing.assert_array_equal(read(reader_of(tmp_path / "x.h5"), range(2500)), expected)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_growing_dimension_that_is_not_the_first_is_right(tmp_path: Path, libver: Any) -> None:
    """In the newer form the library lists the chunk at (2, 0) as one at (0, 2), where there may be one as well."""
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        dataset = file.create_dataset("x", (4, 4), "i8", chunks=(2, 2), maxshape=(4, None))
        dataset[:, :2] = np.arange(8).reshape(4, 2)
        expected, layout = dataset[...], read_layout(dataset)
    assert (layout.why == UNCERTAIN) == (libver == "latest")
    if libver == "earliest":
        np.testing.assert_array_equal(read(reader_of(tmp_path / "x.h5"), range(4)), expected)


@pytest.mark.parametrize(
    ("written", "kind", "why"),
    [(10, "chunked", ""), (9, "h5py", "nearly all of its 40 chunks were never written")],
)
def test_a_few_written_chunks_of_many_are_left_to_the_library(
    tmp_path: Path, written: int, kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "MANY_CHUNKS", 10)
    monkeypatch.setattr(layout_module, "_SPARSE", 4)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", (40,), "u1", chunks=(1,))
        dataset[:written] = 1
        layout = read_layout(dataset)
    assert (layout.kind, layout.why) == (kind, why)


@pytest.mark.parametrize("chunk", [None, (1 << 20, 4)])
def test_a_shape_larger_than_any_file_is_left_to_the_library(tmp_path: Path, chunk: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        properties = h5p.create(h5p.DATASET_CREATE)
        if chunk is not None:
            properties.set_chunk(chunk)
        h5d.create(file.id, b"x", h5t.STD_U8LE, h5s.create_simple((1 << 60, 4)), properties)
    dataset = FastHDF5Dataset(path, "x", cache="off")
    assert "it is declared to be larger than any file" in str(dataset)
    assert (len(dataset), dataset[1 << 59].tolist()) == (1 << 60, [0, 0, 0, 0])
    assert not FastPatchDataset(path / "x", (8, 4), sampling=Uniform(2), seed=0, cache="off")[0].any()
    said = r"x\.h5 declares 1,152,921,504,606,846,976 samples, more than there is"
    with pytest.raises(HDF5Error, match=said):
        dataset.locality_groups()
    for *arguments, code in (["scan", 0], ["inspect", 0], ["repack", 2]):
        assert main([*arguments, str(path), *([str(tmp_path / "out.h5")] if code else [])]) == code


def test_memory_is_not_taken_by_the_chunks_that_a_file_declares(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (60_000_000,), "u1", chunks=(1,))[5] = 7
    tracemalloc.start()
    reader = RowReader(SampleFiles([tmp_path / "x.h5"], ["x"]))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 24
    out = np.zeros(3, "u1")
    for row, sample in enumerate((4, 5, 59_999_999)):
        reader.read_alone(sample, row, [out])
    assert out.tolist() == [0, 7, 0]


def test_an_undefined_fill_value_does_not_matter_where_all_is_written(
    tmp_path: Path, properties_of: Any
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        space, properties = h5s.create_simple((5,)), properties_of("undefined fill")
        h5d.create(file.id, b"x", h5t.NATIVE_INT32, space, properties)
        file["x"][...] = np.arange(5)
    np.testing.assert_array_equal(read(reader_of(tmp_path / "x.h5"), range(5)), np.arange(5))


class _Old:
    """Something of h5py's, of which some attributes are others."""

    def __init__(self, own: Any, **others: Any) -> None:
        self._own = own
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def test_offsets_that_leave_out_the_user_block_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gave them so before 1.14.4."""
    path = stored(tmp_path / "x.h5", np.arange(20), userblock_size=512, chunks=(6,))
    is_old = library.leaves_out_user_block()
    assert is_old == (h5py.version.hdf5_version_tuple < (1, 14, 4))
    monkeypatch.setattr("fastpipe.hdf5.layout.leaves_out_user_block", lambda: True)
    with h5py.File(path) as file:
        own, less = file["x"].id, 0 if is_old else 512

        def chunk_iter(callback: Any) -> None:
            own.chunk_iter(lambda chunk: callback(chunk._replace(byte_offset=chunk.byte_offset - less)))

        layout = read_layout(_Old(file["x"], id=_Old(own, chunk_iter=chunk_iter)))
    np.testing.assert_array_equal(read(reader_of(path, layout=layout), range(20)), np.arange(20))


def _type(kind: Any, **values: Any) -> Any:
    """A copy of an HDF5 type with other properties."""
    made = kind.copy()
    for name, value in values.items():
        getattr(made, f"set_{name}")(*(value if isinstance(value, tuple) else (value,)))
    return made


def _enum(base: str, **members: int) -> Any:
    return h5t.py_create(h5py.enum_dtype(members, base), logical=True)


def _compound(size: int, *fields: tuple[bytes, int, Any]) -> Any:
    made = h5t.create(h5t.COMPOUND, size)
    for field in fields:
        made.insert(*field)
    return made


# Types, and whether they are NumPy's as they are.
TYPES: dict[str, tuple[Any, bool]] = {
    "20 of 32 bits": (_type(h5t.STD_I32LE, precision=20), False),
    "20 of 32 bits behind 4": (_type(h5t.STD_U32LE, precision=20, offset=4), False),
    "bits": (h5t.STD_B32BE, False),
    "half": (h5t.IEEE_F16BE, True),
    "bfloat16": (_type(h5t.IEEE_F32LE, fields=(15, 7, 8, 0, 7), precision=16, size=2), False),
    "long double": (h5t.NATIVE_LDOUBLE, True),
    "enum": (_enum(">i2", A=1, B=300), True),
    "bool": (_enum("i1", FALSE=0, TRUE=1), True),
    "bool, the other way": (_enum("i1", FALSE=1, TRUE=0), True),
    "wide bool": (_enum("<i4", FALSE=0, TRUE=1), False),
    "complex": (h5t.py_create(np.dtype(">c16")), True),
    "complex with a gap": (_compound(12, (b"r", 0, h5t.IEEE_F32LE), (b"i", 8, h5t.IEEE_F32LE)), False),
    "fields out of order": (_compound(12, (b"b", 8, h5t.IEEE_F32LE), (b"a", 0, h5t.STD_I32BE)), True),
    "a field of 20 bits": (_compound(8, (b"a", 0, _type(h5t.STD_I32LE, precision=20)), (b"b", 4, h5t.IEEE_F32LE)), False),
    "opaque": (_type(h5t.create(h5t.OPAQUE, 5), tag=b""), True),
    "text to a zero": (_type(h5t.C_S1, size=6, strpad=h5t.STR_NULLTERM), False),
    "text with zeros": (_type(h5t.C_S1, size=6, strpad=h5t.STR_NULLPAD), True),
    "text with spaces": (_type(h5t.C_S1, size=6, strpad=h5t.STR_SPACEPAD), False),
    "arrays": (h5t.array_create(h5t.STD_I16BE, (2, 3)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("has_name", [True, False])
def test_elements_of_any_type_are_read_as_h5py_reads_them(tmp_path: Path, name: str, has_name: bool) -> None:
    kind, is_numpys = TYPES[name]
    raw = np.random.default_rng(0).integers(0, 2, (7, kind.get_size()), np.uint8)
    properties, kind = h5p.create(h5p.DATASET_CREATE), kind.copy()
    properties.set_chunk((3,))
    properties.set_shuffle()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        if has_name:
            kind.commit(file.id, b"kind")
        dataset = h5d.create(file.id, b"x", kind, h5s.create_simple((7,)), properties)
        dataset.write(h5s.ALL, h5s.ALL, raw.view(f"V{kind.get_size()}")[:, 0], kind)
    with h5py.File(tmp_path / "x.h5") as file:
        layout, expected = read_layout(file["x"]), file["x"][...]
    assert (layout.kind == "chunked") == is_numpys, layout.why
    if is_numpys:
        found = read(reader_of(tmp_path / "x.h5", layout=layout), range(7))
        assert repr(found.tolist()) == repr(expected.tolist())


def _virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "y", (4,))
    file.create_virtual_dataset("x", layout)


def _dataset(dtype: Any, **options: Any) -> Any:
    return lambda file: file.create_dataset("x", (4,), dtype, **options)


def _filtered(code: int, *values: int) -> Any:
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_filter(code, 0, values)
    return properties


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_virtual, "virtual"), (_dataset("f4", external=[("raw.bin", 0, h5f.UNLIMITED)]), "external files"),
        *((_dataset(dtype), "no fixed size")
          for dtype in (h5py.string_dtype(), h5py.ref_dtype, h5py.regionref_dtype, h5py.vlen_dtype("i4"))),
        (_dataset(np.dtype(("f4", (3,)))), "arrays"), (_dataset("i4", scaleoffset=4), "scale-offset"),
        (_dataset("i4", chunks=(4,), dcpl=_filtered(h5z.FILTER_NBIT)), "is known to the library only"),
        (_dataset("i4", chunks=(4,), dcpl=_filtered(h5z.FILTER_SCALEOFFSET, 2, 0)), "is known to the library only"),
        (_dataset("i4", chunks=(4,), **hdf5plugin.Blosc(cname="snappy")), "its filter blosc is known to the library only"),
    ],
)  # fmt: skip
def test_a_dataset_that_only_the_library_reads_has_the_reason(tmp_path: Path, make: Any, why: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
        layout = read_layout(file["x"])
    assert (layout.kind, len(layout.offsets)) == ("h5py", 0)
    assert why in layout.why


def test_drivers_and_missing_codecs_are_left_to_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "x.h5", np.arange(100), chunks=(50,), **hdf5plugin.Blosc2())
    with h5py.File(path, "r", driver="core") as file:
        assert "driver 'core'" in read_layout(file["x"]).why
    monkeypatch.setattr(layout_module, "has_blosc2", lambda: False)
    with h5py.File(path) as file:
        layout = read_layout(file["x"])
    assert (layout.kind, "blosc2" in layout.why) == ("h5py", True)


@pytest.mark.parametrize("shape", [(50,), (10, 5)])
def test_a_frame_of_blosc2_of_another_size_is_an_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.zeros(shape), chunks=shape, **hdf5plugin.Blosc2())
        _, raw = dataset.id.read_direct_chunk((0,) * len(shape))
    assert has_blosc2()
    step = FilterStep(BLOSC2, (), "blosc2")
    assert not decode_chunk(raw, [step], 0, 400).any()
    for more in (-8, 8):
        with pytest.raises(ChunkError, match="blosc2: "):
            decode_chunk(raw, [step], 0, 400 + more)


@pytest.mark.parametrize("size", [0, 1 << 31, (1 << 32) - 1])
def test_a_filter_with_an_impossible_size_of_elements_is_an_error(tmp_path: Path, size: int) -> None:
    why = why_not([FilterStep(2, (size,), "shuffle")], has_blosc2=True)
    assert why == "its filter shuffle does not have the size of an element"
    path = stored(tmp_path / "x.h5", np.zeros(600, "<i4"), chunks=(600,), **hdf5plugin.Bitshuffle())
    step = FilterStep(32008, (0, 4, size, 0, 2), "bitshuffle")
    assert not why_not([step], has_blosc2=True)
    chunks = ChunkReader(layout_of(path)._replace(filters=(step,)), FileState.of(path.stat()))
    with pytest.raises(ChunkError, match="bitshuffle: its blocks have an impossible size"):
        chunks.decode(np.array([0]), np.zeros((1, chunks.nbytes), np.uint8))


@pytest.mark.parametrize("driver", [{"driver": "family", "memb_size": 2048}, {"driver": "split"}])
def test_a_part_of_a_file_is_no_file(tmp_path: Path, driver: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "x%d", "w", **driver) as file:
        file["x"] = np.arange(1000)
    for path in tmp_path.iterdir():
        with pytest.raises(OSError):
            h5py.File(path)
        with pytest.raises(HDF5Error):
            SampleFile(path, ["x"])


def test_filters_without_what_they_need_are_left_to_the_library(tmp_path: Path) -> None:
    rows, options = np.arange(12, dtype="<i4"), {"libver": "earliest", "chunks": (6,), "shuffle": True}
    path = stored(tmp_path / "x.h5", rows, **options)
    # The message's filter: number 2, a name of 8 bytes, flags 1, one value, which is 4.
    data, own = path.read_bytes(), b"\2\0\x08\0\1\0\1\0shuffle\0\4\0\0\0"
    assert data.count(own) == 1
    path.write_bytes(data.replace(own, own[:-4] + bytes(4)))
    with h5py.File(path) as file:
        assert read_layout(file["x"]).why == "its filter shuffle does not have the size of an element"
        with pytest.raises(OSError, match=r"invalid shuffle parameters|filter returned failure"):
            file["x"][...]
