"""Whatever is in a file is in its copy: values bit for bit, types, attributes, links, references."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.cli import main

Repack = Callable[..., tuple[int, str, str]]

COLOURS = h5py.enum_dtype({"RED": 0, "GREEN": 7}, basetype="i2")
DTYPES: list[Any] = [
    "u1", "<i4", ">i8", "<f2", "<f4", ">f8", "<c8", ">c16", "?", "S5", COLOURS,
    np.dtype([("a", "<i2"), ("b", ">f8", (2,)), ("c", "S3")]),
    np.dtype({"names": ["x"], "formats": ["<f4"], "offsets": [4], "itemsize": 12}),
    h5py.string_dtype(), h5py.string_dtype("ascii"), h5py.vlen_dtype(np.uint8),
]  # fmt: skip
FILTERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"compression": "lzf"},
    hdf5plugin.Zstd(),
    hdf5plugin.Blosc("zstd", 3),
    hdf5plugin.Blosc2(),
    hdf5plugin.Bitshuffle(),
]
CODECS = ["keep", "none", "gzip:1", "lzf", "lz4", "zstd:1", "blosc", "blosc:blosclz:9"]


def random_rows(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Every bit pattern, where the type bears it."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.hasobject:
        out = np.empty(shape, dtype)
        for place in np.ndindex(shape):
            data = rng.integers(97, 123, int(rng.integers(4)), np.uint8)
            out[place] = data if h5py.check_string_dtype(dtype) is None else data.tobytes().decode()
        return out
    if dtype.kind == "b" or h5py.check_enum_dtype(dtype) is not None:
        return rng.choice(np.array([0, 1] if dtype.kind == "b" else [0, 7]), shape).astype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def raw(dataset: Any) -> Any:
    """All values: bytes as the file has them, or objects."""
    if dataset.dtype.hasobject:
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in dataset[()].ravel()]
    out = np.zeros(dataset.shape, np.dtype((np.void, dataset.id.get_type().get_size())))
    if out.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, dataset.id.get_type())
    return out.tobytes()


def values_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [values_of(one) for one in value.ravel()] if value.dtype.hasobject else value.tobytes()
    return value


def is_same(old: Any, new: Any) -> None:
    assert new.dtype == old.dtype
    assert new.id.get_type() == old.id.get_type()
    assert (new.shape, new.maxshape) == (old.shape, old.maxshape)
    assert raw(new) == raw(old)
    assert np.asarray(new.fillvalue).tobytes() == np.asarray(old.fillvalue).tobytes()
    assert list(new.attrs) == list(old.attrs)
    for name in old.attrs:
        assert values_of(new.attrs[name]) == values_of(old.attrs[name])


@settings(max_examples=40)
@given(st.data())
def test_any_dataset(data: st.DataObject) -> None:
    draw = data.draw
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0 if axis else 1, 7)) for axis in range(rank))
    dtype = draw(st.sampled_from(DTYPES))
    is_chunked = all(shape) and draw(st.booleans())
    options: dict[str, Any] = {}
    if is_chunked:
        options["chunks"] = tuple(draw(st.integers(1, side)) for side in shape)
        options |= draw(st.sampled_from(FILTERS)) if not np.dtype(dtype).hasobject else {}
        if draw(st.booleans()):
            options["maxshape"] = (None, *shape[1:])
    rows = random_rows(shape, dtype, draw(st.integers(0, 99)))
    if rows.size and not rows.dtype.hasobject and draw(st.booleans()):
        options["fillvalue"] = rows.ravel()[0]
    codec, chunk = draw(st.sampled_from(CODECS)), draw(st.sampled_from(["auto", "1", "3"]))
    more = draw(st.sampled_from([[], ["--sample-dims", "2"]]))
    if codec not in ("keep", "none"):
        more = [*more, *draw(st.sampled_from([[], ["--shuffle"], ["--no-shuffle"]]))]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.h5"), Path(folder, "out.h5")
        with h5py.File(source, "w", libver=draw(st.sampled_from([None, "latest"]))) as file:
            made = file.create_dataset("a/b", shape, dtype, **options)
            made.attrs["unit"] = "mV"
            of = dtype
            made.attrs.create("many", random_rows((3,), of, 1), (3,), of)
            if rows.size and draw(st.booleans()):
                made.id.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)
        arguments = ["--codec", codec, "--chunk-rows", chunk, "--dataset", "a/b", *more]
        assert main(["repack", str(source), str(out), *arguments]) == 0
        with h5py.File(source) as old, h5py.File(out) as new:
            is_same(old["a/b"], new["a/b"])
            wanted = None if chunk == "auto" else int(chunk)
            dims = min(2 if "--sample-dims" in more else 1, rank)
            if wanted:
                first = min(wanted, max(shape[dims - 1], 1))
                assert new["a/b"].chunks[:dims] == (*(1,) * (dims - 1), first)
            elif codec == "none" and "maxshape" not in options:
                assert new["a/b"].chunks is None
        assert [path.name for path in sorted(Path(folder).iterdir())] == ["in.h5", "out.h5"]


def test_everything_around_the_rows(tmp_path: Path, repack: Repack) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    with h5py.File(source, "w", userblock_size=1024, track_order=True) as file:
        file.attrs["title"], file.attrs["nothing"] = "a file", h5py.Empty("f4")
        rows = file.create_dataset("z rows", data=np.arange(3000).reshape(1000, 3), chunks=(100, 3))
        file.create_dataset("a scale", data=np.arange(1000.0))
        file["a scale"].make_scale("time")
        rows.dims[0].attach_scale(file["a scale"])
        rows.dims[0].label = "t"
        file["again"] = rows
        group = file.create_group("grüppe", track_order=False)
        group.attrs["pair"] = [1, 2]
        group["soft"], group["dangling"] = h5py.SoftLink("/z rows"), h5py.SoftLink("/none")
        group["outside"], group["up"] = h5py.ExternalLink("other.h5", "/x"), file["/"]
        group["type"] = np.dtype("<f4")
        file["one"], file["null"], file["text"] = 5, h5py.Empty("i4"), "a text"
        references = file.create_dataset("references", (3,), h5py.ref_dtype)
        references[0], references[1] = rows.ref, group.ref
        regions = file.create_dataset("regions", (2,), h5py.regionref_dtype)
        regions[0] = rows.regionref[10:20, 1]
        file.create_dataset("one reference", data=group.ref, dtype=h5py.ref_dtype)
    with open(source, "r+b") as plain:
        plain.write(b"before")
    assert repack(source, out, "--dataset", "again", "--codec", "gzip", "--chunk-rows", "7")[0] == 0
    assert out.read_bytes().startswith(b"before")
    with h5py.File(source) as old, h5py.File(out) as new:
        assert list(new) == list(old)
        assert new.userblock_size == 1024
        assert new["z rows"].chunks == (7, 3) and new["z rows"].compression == "gzip"
        assert new["again"] == new["z rows"]
        assert dict(new.attrs) == dict(old.attrs)
        assert new["a scale"].chunks is None
        assert new["z rows"].dims[0]["time"] == new["a scale"] and new["z rows"].dims[0].label == "t"
        assert new["a scale"].is_scale
        group = new["grüppe"]
        assert list(group) == list(old["grüppe"])
        assert group.get("soft", getlink=True).path == "/z rows"
        assert group.get("dangling", getlink=True).path == "/none"
        link = group.get("outside", getlink=True)
        assert (link.filename, link.path) == ("other.h5", "/x")
        assert group["up"] == new["/"]
        assert group["type"].dtype == "<f4" and group.attrs["pair"].tolist() == [1, 2]
        assert new["one"][()] == 5 and new["text"][()] == b"a text" and new["null"].shape is None
        assert new[new["references"][0]] == new["z rows"] and new[new["references"][1]] == group
        assert not new["references"][2]
        region = new["regions"][0]
        np.testing.assert_array_equal(new[region][region], old["z rows"][10:20, 1:2])
        assert new[new["one reference"][()]] == group
        for name in ("z rows", "a scale"):
            assert raw(new[name]) == raw(old[name])


def test_virtual_and_external_data_come_into_the_copy(tmp_path: Path, repack: Repack) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "elsewhere" / "out.h5"
    out.parent.mkdir()
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["x"] = np.arange(40).reshape(10, 4)
    (tmp_path / "bytes.bin").write_bytes(np.arange(20, dtype="<i2").tobytes())
    with h5py.File(source, "w") as file:
        layout = h5py.VirtualLayout((12, 4), "<i8")
        layout[:10] = h5py.VirtualSource(str(tmp_path / "part.h5"), "x", (10, 4))
        file.create_virtual_dataset("virtual", layout, fillvalue=-3)
        file.create_dataset("external", (10, 2), "<i2", external=[(str(tmp_path / "bytes.bin"), 0, 40)])
    assert repack(source, out, "--codec", "lzf")[0] == 0
    with h5py.File(out) as new:
        assert not new["virtual"].is_virtual and new["external"].external is None
        assert new["virtual"].fillvalue == -3
        np.testing.assert_array_equal(new["virtual"][:10], np.arange(40).reshape(10, 4))
        assert (new["virtual"][10:] == -3).all()
        np.testing.assert_array_equal(new["external"][()], np.arange(20).reshape(10, 2))


def test_what_is_small_or_not_named_stays_as_it_is(tmp_path: Path, repack: Repack) -> None:
    source, out, named = tmp_path / "in.h5", tmp_path / "out.h5", tmp_path / "named.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("large", data=np.zeros((600, 512)), chunks=(10, 512), compression="gzip")
        file.create_dataset("small", data=np.zeros((600, 5)), chunks=(10, 5), compression="gzip")
    assert repack(source, out, "--codec", "lzf", "--chunk-rows", "2")[0] == 0
    with h5py.File(out) as new:
        assert (new["large"].chunks, new["large"].compression) == ((2, 512), "lzf")
        assert (new["small"].chunks, new["small"].compression) == ((10, 5), "gzip")
    assert repack(source, named, "--codec", "lzf", "--dataset", "small")[0] == 0
    with h5py.File(named) as new:
        assert (new["large"].chunks, new["large"].compression) == ((10, 512), "gzip")
        assert (new["small"].chunks, new["small"].compression) == ((600, 5), "lzf")


@pytest.mark.parametrize(
    ("shape", "wanted"), [((100, 300), (28, 300)), ((100, 20000), (1, 20000)), ((5, 3), (5, 3))]
)
def test_rows_that_are_chosen_make_64_kib(
    tmp_path: Path, repack: Repack, shape: tuple[int, int], wanted: tuple[int, int]
) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"] = np.zeros(shape)
    assert repack(tmp_path / "in.h5", tmp_path / "out.h5", "--codec", "lzf", "--dataset", "x")[0] == 0
    with h5py.File(tmp_path / "out.h5") as new:
        assert new["x"].chunks == wanted


def test_one_of_several_filters_is_kept_with_a_new_codec(tmp_path: Path, repack: Repack) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((9, 9)), chunks=(3, 9), compression="gzip", fletcher32=True)
    assert repack(tmp_path / "in.h5", tmp_path / "out.h5", "--codec", "zstd:5", "--dataset", "x")[0] == 0
    with h5py.File(tmp_path / "out.h5") as new:
        properties = new["x"].id.get_create_plist()
        filters = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
        assert filters == [2, 32015, 3]  # shuffle, zstd, fletcher32


def test_types_that_numpy_has_not(tmp_path: Path, repack: Repack) -> None:
    source, out, stamp = tmp_path / "in.h5", tmp_path / "out.h5", h5py.h5t.UNIX_D32LE
    values = np.arange(15, dtype="<i4").reshape(5, 3).view("V4")
    with h5py.File(source, "w") as file:
        made = h5py.h5d.create(file.id, b"when", stamp, h5py.h5s.create_simple(values.shape))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values, stamp)
        attribute = h5py.h5a.create(made, b"since", stamp, h5py.h5s.create_simple((3,)))
        attribute.write(values[1], stamp)
    assert repack(source, out, "--dataset", "when", "--codec", "lzf", "--chunk-rows", "2")[0] == 0
    with h5py.File(out) as new:
        assert new["when"].chunks == (2, 3) and new["when"].compression == "lzf"
        read = np.zeros((5, 3), "V4")
        new["when"].id.read(h5py.h5s.ALL, h5py.h5s.ALL, read, stamp)
        assert read.tobytes() == values.tobytes()


def test_a_reference_to_what_is_gone_is_empty(tmp_path: Path, repack: Repack) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    with h5py.File(source, "w") as file:
        file["kept"], file["gone"] = np.arange(3), np.arange(4)
        references = file.create_dataset("references", (2,), h5py.ref_dtype)
        references[0], references[1] = file["kept"].ref, file["gone"].ref
        file.flush()
        del file["gone"]
    code, _, errors = repack(source, out)
    assert code == 0
    assert "references to objects without a name, which are empty in the copy: 1" in errors
    with h5py.File(out) as new:
        assert new[new["references"][0]] == new["kept"]
        assert not new["references"][1]


@pytest.mark.parametrize("options", [[], ["--codec", "lzf"], ["--codec", "keep", "--chunk-rows", "4"]])
def test_what_is_stored_in_odd_ways(
    odd_hdf5: Path, tmp_path: Path, options: list[str], repack: Repack
) -> None:
    """Packed anew, and copied as it is: without an option all datasets are too small to be packed anew."""
    out = tmp_path / "out.h5"
    with h5py.File(odd_hdf5) as old:
        named = [part for name in old for part in ("--dataset", name)] if options else []
        assert repack(odd_hdf5, out, *options, *named)[0] == 0
        with h5py.File(out) as new:
            for name in old:
                assert raw(new[name]) == raw(old[name]), name
