"""``fastpipe repack``: whatever is in a file is in its copy, values bit for bit, types, attributes, links."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.cli import main

COLOURS = h5py.enum_dtype({"RED": 0, "GREEN": 7}, basetype="i2")
DTYPES: list[Any] = [
    "u1", "<i4", ">i8", "<f2", "<f4", ">f8", "<c8", ">c16", "?", "S5", COLOURS,
    np.dtype([("a", "<i2"), ("b", ">f8", (2,)), ("c", "S3")]),
    np.dtype({"names": ["x"], "formats": ["<f4"], "offsets": [4], "itemsize": 12}),
    h5py.string_dtype(), h5py.string_dtype("ascii"), h5py.vlen_dtype(np.uint8),
]  # fmt: skip
FILTERS: list[dict[str, Any]] = [
    {}, {"compression": "gzip", "shuffle": True, "fletcher32": True}, {"compression": "lzf"},
    hdf5plugin.Zstd(), hdf5plugin.Blosc("zstd", 3), hdf5plugin.Blosc2(), hdf5plugin.Bitshuffle(),
]  # fmt: skip
CODECS = ["keep", "none", "gzip:1", "lzf", "lz4", "zstd:1", "blosc", "blosc:blosclz:9"]


def random_rows(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Every bit pattern that the type allows."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.hasobject:
        out = np.empty(shape, dtype)
        for place in np.ndindex(shape):
            data = rng.integers(97, 123, int(rng.integers(4)), np.uint8)
            out[place] = data if h5py.check_string_dtype(dtype) is None else data.tobytes().decode()
        return out
    if dtype.kind == "b" or h5py.check_enum_dtype(dtype) is not None:
        return rng.choice(np.array([0, 1] if dtype.kind == "b" else [0, 7]), shape).astype(dtype)
    return rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def raw(dataset: Any) -> Any:
    """All values: bytes as the file has them, or objects."""
    if dataset.dtype.hasobject:
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in dataset[()].ravel()]
    out = np.zeros(dataset.shape, np.dtype((np.void, dataset.id.get_type().get_size())))
    if out.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, dataset.id.get_type())
    return out.tobytes()


def comparable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [comparable(one) for one in value.ravel()] if value.dtype.hasobject else value.tobytes()
    return value


def assert_same(old: Any, new: Any) -> None:
    assert (new.dtype, new.id.get_type()) == (old.dtype, old.id.get_type())
    assert (new.shape, new.maxshape) == (old.shape, old.maxshape)
    assert raw(new) == raw(old)
    assert np.asarray(new.fillvalue).tobytes() == np.asarray(old.fillvalue).tobytes()
    assert [(name, comparable(new.attrs[name])) for name in new.attrs] == [
        (name, comparable(old.attrs[name])) for name in old.attrs
    ]


@settings(max_examples=25)
@given(st.data())
def test_any_dataset_is_the_same_in_the_copy(data: st.DataObject) -> None:
    draw = data.draw
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0 if axis else 1, 7)) for axis in range(rank))
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {}
    if all(shape) and draw(st.booleans()):
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
            made.attrs.create("many", random_rows((3,), dtype, 1), (3,), dtype)
            if rows.size and draw(st.booleans()):
                made.id.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)
        arguments = ["--codec", codec, "--chunk-rows", chunk, "--dataset", "a/b", *more]
        assert main(["repack", str(source), str(out), *arguments]) == 0
        with h5py.File(source) as old, h5py.File(out) as new:
            assert_same(old["a/b"], new["a/b"])
            dims = min(2 if "--sample-dims" in more else 1, rank)
            if chunk != "auto":
                first = min(int(chunk), max(shape[dims - 1], 1))
                assert new["a/b"].chunks[:dims] == (*(1,) * (dims - 1), first)
            elif codec == "none" and "maxshape" not in options:
                assert new["a/b"].chunks is None
        assert [path.name for path in sorted(Path(folder).iterdir())] == ["in.h5", "out.h5"]


def test_attributes_links_scales_and_references_are_copied(tmp_path: Path, repack: Any) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    with h5py.File(source, "w", userblock_size=1024, track_order=True) as file:
        file.attrs["title"], file.attrs["nothing"] = "a file", h5py.Empty("f4")
        rows = file.create_dataset("z rows", data=np.arange(3000).reshape(1000, 3), chunks=(100, 3))
        file.create_dataset("a scale", data=np.arange(1000.0)).make_scale("time")
        rows.dims[0].attach_scale(file["a scale"])
        rows.dims[0].label = "t"
        file["again"] = rows
        group = file.create_group("grüppe", track_order=False)
        group.attrs["pair"] = [1, 2]
        group["soft"], group["dangling"] = h5py.SoftLink("/z rows"), h5py.SoftLink("/none")
        group["outside"], group["up"] = h5py.ExternalLink("other.h5", "/x"), file["/"]
        group["type"] = np.dtype("<f4")
        file["one"], file["null"], file["text"] = 5, h5py.Empty("i4"), "a text"
        references = file.create_dataset("references", (4,), h5py.ref_dtype)
        file["gone"] = np.arange(4)
        references[:] = [rows.ref, group.ref, file["gone"].ref, h5py.Reference()]
        file.create_dataset("regions", (2,), h5py.regionref_dtype)[0] = rows.regionref[10:20, 1]
        file.create_dataset("one reference", data=group.ref, dtype=h5py.ref_dtype)
        file.flush()
        del file["gone"]
    with open(source, "r+b") as plain:
        plain.write(b"before")
    code, _, errors = repack(source, out, "--dataset", "again", "--codec", "gzip", "--chunk-rows", "7")
    assert code == 0
    assert "references to objects without a name, which are empty in the copy: 1" in errors
    assert out.read_bytes().startswith(b"before")
    with h5py.File(source) as old, h5py.File(out) as new:
        assert list(new) == list(old) and new.userblock_size == 1024
        assert new["z rows"].chunks == (7, 3) and new["z rows"].compression == "gzip"
        assert new["again"] == new["z rows"]
        assert dict(new.attrs) == dict(old.attrs)
        assert new["a scale"].chunks is None and new["a scale"].is_scale
        assert new["z rows"].dims[0]["time"] == new["a scale"] and new["z rows"].dims[0].label == "t"
        group = new["grüppe"]
        assert list(group) == list(old["grüppe"]) and group["up"] == new["/"]
        links = {name: group.get(name, getlink=True) for name in ("soft", "dangling", "outside")}
        assert [link.path for link in links.values()] == ["/z rows", "/none", "/x"]
        assert links["outside"].filename == "other.h5"
        assert group["type"].dtype == "<f4" and group.attrs["pair"].tolist() == [1, 2]
        assert new["one"][()] == 5 and new["text"][()] == b"a text" and new["null"].shape is None
        first, second, gone, empty = new["references"]
        assert new[first] == new["z rows"] and new[second] == group and not gone and not empty
        region = new["regions"][0]
        np.testing.assert_array_equal(new[region][region], old["z rows"][10:20, 1:2])
        assert new[new["one reference"][()]] == group
        assert all(raw(new[name]) == raw(old[name]) for name in ("z rows", "a scale"))


def test_virtual_and_external_data_are_in_the_copy(tmp_path: Path, repack: Any) -> None:
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
        assert new["virtual"].fillvalue == -3 and (new["virtual"][10:] == -3).all()
        np.testing.assert_array_equal(new["virtual"][:10], np.arange(40).reshape(10, 4))
        np.testing.assert_array_equal(new["external"][()], np.arange(20).reshape(10, 2))


GZIP = {"chunks": (10, 5), "compression": "gzip"}


@pytest.mark.parametrize(
    ("shape", "made", "options", "chunks", "filters"),
    [
        pytest.param((600, 512), {"compression": "gzip"}, "--chunk-rows 2", (2, 512), [2, 32000], id="large"),
        pytest.param((600, 5), GZIP, "--chunk-rows 2", (10, 5), [1], id="small, so it stays"),
        pytest.param((600, 5), GZIP, "--dataset x", (600, 5), [2, 32000], id="small, but named"),
        pytest.param((600, 5), GZIP, "--dataset y", (10, 5), [1], id="another one is named"),
        pytest.param((100, 300), {}, "--dataset x", (28, 300), [2, 32000], id="rows of 64 KiB"),
        pytest.param((100, 20000), {}, "--dataset x", (1, 20000), [2, 32000], id="large rows"),
        pytest.param((9, 9), {**GZIP, "chunks": (3, 9), "fletcher32": True}, "--dataset x --codec zstd:5",
                     (9, 9), [2, 32015, 3], id="its other filter stays"),
    ],
)  # fmt: skip
def test_datasets_get_their_chunks_and_codec(
    tmp_path: Path, repack: Any, shape: Any, made: Any, options: str, chunks: Any, filters: list[int]
) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("x", data=np.zeros(shape), **made)
        file["y"] = np.zeros(3)
    assert repack(source, out, "--codec", "lzf", *options.split())[0] == 0
    with h5py.File(out) as new:
        properties = new["x"].id.get_create_plist()
        assert new["x"].chunks == chunks
        assert [properties.get_filter(number)[0] for number in range(properties.get_nfilters())] == filters


def test_types_that_numpy_lacks_are_copied(tmp_path: Path, repack: Any) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    stamp, values = h5py.h5t.UNIX_D32LE, np.arange(15, dtype="<i4").reshape(5, 3).view("V4")
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


@pytest.mark.parametrize("options", [[], ["--codec", "lzf"], ["--codec", "keep", "--chunk-rows", "4"]])
def test_oddly_stored_datasets_are_copied(odd_hdf5: Path, options: list[str], repack: Any) -> None:
    out = odd_hdf5.with_name("out.h5")
    with h5py.File(odd_hdf5) as old:  # without an option all are too small to be packed anew
        named = [part for name in old for part in ("--dataset", name)] if options else []
        assert repack(odd_hdf5, out, *options, *named)[0] == 0
        with h5py.File(out) as new:
            for name in old:
                assert raw(new[name]) == raw(old[name]), name
