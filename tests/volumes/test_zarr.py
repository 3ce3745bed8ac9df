"""Zarr arrays read without a library in between are those of zarr-python, bit for bit."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from volume_kit import boxes_equal, random_array, reader_of, same_bits, whole
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

from fastpipe.errors import VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.volume import DamagedUnitError, GroupedVolume, NativeVolume
from fastpipe.volumes.zarr import ZarrArray, ZarrVolume, decode, even_parts, zarr_array

NUMBERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
CNAMES = ["blosclz", "lz4", "lz4hc", "zlib", "zstd"]
SHUFFLES = ["noshuffle", "shuffle", "bitshuffle"]
FILLS: dict[str, list[Any]] = {
    "?": [False, True], "f": [0, 1.5, np.nan, np.inf, -np.inf, -0.0], "c": [0, 1 - 2j, complex(np.nan, np.inf)],
    "i": [0, -1, 100], "u": [0, 1, 255],
}  # fmt: skip


def codecs() -> Any:
    blosc = st.tuples(
        st.just("blosc"),
        st.sampled_from(CNAMES),
        st.integers(0, 9),
        st.sampled_from(SHUFFLES),
        st.sampled_from([0, 0, 512]),
    )
    others = st.sampled_from([("zstd", 3), ("zstd", 0), ("gzip", 5), ("gzip", 1), ("zlib", 5), ("none",)])
    return st.one_of(blosc, others)


@st.composite
def arrays(draw: Any) -> dict[str, Any]:
    rank = draw(st.integers(1, 5))
    most = {1: 60, 2: 20, 3: 9, 4: 6, 5: 4}[rank]
    kind = draw(st.sampled_from(NUMBERS))
    return {
        "shape": tuple(draw(st.integers(1, most)) for _ in range(rank)),
        "chunks": tuple(draw(st.integers(max(1, most // 4), most + 2)) for _ in range(rank)),
        "kind": kind, "order": draw(st.sampled_from("<>")), "codec": draw(codecs()), "version": draw(st.sampled_from([2, 3])),
        "fill": draw(st.sampled_from(FILLS[np.dtype(kind).kind if kind != "?" else "?"])),
        "separator": draw(st.sampled_from("./")), "keys": draw(st.sampled_from(["default", "v2"])),
        "written": draw(st.sampled_from(["all", "all", "some", "none"])), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


def compressor_of(version: int, codec: tuple[Any, ...]) -> Any:
    name, *options = codec
    if name == "none":
        return None
    if name == "blosc":
        cname, level, shuffle, block = options
        if version == 2:
            return numcodecs.Blosc(cname, level, SHUFFLES.index(shuffle), block)
        return BloscCodec(cname=cname, clevel=level, shuffle=shuffle, blocksize=block)
    if version == 2:
        return {"zstd": numcodecs.Zstd, "gzip": numcodecs.GZip, "zlib": numcodecs.Zlib}[name](*options)
    return ZstdCodec(level=options[0], checksum=True) if name == "zstd" else GzipCodec(level=options[0])


def create(path: Path | str, **case: Any) -> Any:
    """An array of a case, which zarr-python writes."""
    version, codec = case.get("version", 3), case.get("codec", ("zstd", 0))
    if version == 3 and codec[0] == "zlib":  # which is version 2's only
        codec = ("gzip", 5)
    dtype = np.dtype(case["kind"]).newbyteorder(case.get("order", "<"))
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": case.get("separator", ".")}}
    if version == 3:
        options["chunk_key_encoding"]["name"] = case.get("keys", "default")
        if dtype.itemsize > 1:
            options["serializer"] = BytesCodec(endian="big" if case.get("order") == ">" else "little")
        dtype = dtype.newbyteorder("=")
    return zarr.create_array(
        os.fspath(path), shape=case["shape"], chunks=case["chunks"], dtype=dtype, zarr_format=version,
        compressors=compressor_of(version, codec), fill_value=case.get("fill", 0), overwrite=True, **options,
    )  # fmt: skip


def write(path: Path | str, case: dict[str, Any], data: Any) -> None:
    array = create(path, **case)
    if case.get("written", "all") == "all":
        array[...] = data
    elif case["written"] == "some":
        some = tuple(slice(size // 3, size // 3 + size // 2 + 1) for size in case["shape"])
        array[some] = data[some]


def files_of(path: Path) -> list[Path]:
    """The chunks' files."""
    metadata = {".zarray", ".zattrs", "zarr.json"}
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name not in metadata)


def change(path: Path, **values: Any) -> Path:
    """Other values in an array's metadata.  Returns the file."""
    file = next(path / name for name in ("zarr.json", ".zarray") if (path / name).exists())
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return file


@settings(max_examples=170)
@given(case=arrays())
def test_any_array_is_that_of_zarr_python(case: dict[str, Any], memory_for: Any) -> None:
    data = random_array(case["shape"], case["kind"], case["seed"])
    with tempfile.TemporaryDirectory() as path:
        write(path, case, data)
        expected = zarr.open_array(path, mode="r")[...]
        volume = open_volume(path)
        inner = volume.inner if isinstance(volume, NativeVolume) else volume
        inner = inner.inner if isinstance(inner, GroupedVolume) else inner
        assert isinstance(inner, ZarrVolume)
        event(type(volume).__name__)
        event(case["codec"][0])
        assert volume.shape == case["shape"]
        for one in (volume, inner):
            assert same_bits(whole(one, case["seed"]), expected)
        expected = expected.astype(volume.dtype)
        boxes_equal(reader_of(volume), expected, case["seed"], 4)
        for slots in (1, 1 + case["seed"] % 7, inner.grid.count):
            first = case["seed"] % 3
            memory = memory_for(inner, slots, first)
            boxes_equal(reader_of(inner, memory.opened(), first), expected, case["seed"], 4)
            memory.close()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("cname", CNAMES)
def test_parts_of_large_chunks_are_decoded_alone(
    tmp_path: Path, cname: str, shuffle: str, version: int, memory_for: Any
) -> None:
    """Chunks of which a unit is a slab; the second is of nothing but zeros and the last one is not there."""
    shape, chunks = (150, 65, 64), (64, 64, 64)
    data = random_array(shape, "u2", 1)
    data[64:128, :64] = 0
    case = {"version": version, "shape": shape, "chunks": chunks, "kind": "u2"}
    write(tmp_path / "x", case | {"codec": ("blosc", cname, 3, shuffle, 1 << 15)}, data)
    last = files_of(tmp_path / "x")[-1]
    last.unlink()
    expected = zarr.open_array(tmp_path / "x", mode="r")[...]
    volume = open_volume(tmp_path / "x")
    assert isinstance(volume, ZarrVolume)
    assert volume.grid.unit == (16, 64, 64)
    assert "in 4 parts" in volume.how
    assert same_bits(whole(volume), expected)
    memory = memory_for(volume, 5)
    boxes_equal(reader_of(volume), expected, 0, 6)
    boxes_equal(reader_of(volume, memory.opened()), expected, 1, 20)
    memory.close()


@pytest.mark.parametrize(
    ("chunk", "unit"),
    [((1, 64, 128, 64), (1, 16, 128, 64)), ((1, 1, 1 << 19, 1), (1, 1, 1 << 17, 1)), ((3, 1, 1 << 18), (1, 1, 1 << 18))],
)  # fmt: skip
@pytest.mark.parametrize("codec", [("none",), ("blosc", "lz4", 3, "noshuffle", 1 << 15)])
def test_slabs_are_along_the_first_dimension_that_a_chunk_has(
    tmp_path: Path, chunk: tuple[int, ...], unit: tuple[int, ...], codec: Any
) -> None:
    shape = tuple(side + 1 if side < 1 << 17 else side for side in chunk)
    data = random_array(shape, "u1", 3)
    write(tmp_path / "x", {"shape": shape, "chunks": chunk, "kind": "u1", "codec": codec}, data)
    volume = open_volume(tmp_path / "x")
    assert volume.grid.unit == unit
    np.testing.assert_array_equal(whole(volume), data)
    numbers = np.arange(volume.grid.count)
    stored, along = volume.stored_in(numbers), {}
    for number, chunk_number in zip(numbers.tolist(), stored.tolist(), strict=True):
        corner = tuple(side.start // most for side, most in zip(volume.grid.box(number), chunk, strict=True))
        assert along.setdefault(chunk_number, corner) == corner
    assert len(set(along.values())) == len(along)


@given(side=st.integers(1, 5000))
def test_even_parts_are_all_divisors(side: int) -> None:
    assert even_parts(side) == [part for part in range(1, side + 1) if side % part == 0]


@pytest.mark.hang_after(20)
@pytest.mark.parametrize("side", [1_000_000_007, (1 << 61) - 1])
def test_a_chunk_of_a_large_prime_number_of_elements_is_opened_at_once(tmp_path: Path, side: int) -> None:
    write(tmp_path / "x", {"shape": (4,), "chunks": (2,), "kind": "u1", "version": 2}, np.ones(4, "u1"))
    change(tmp_path / "x", shape=[side], chunks=[side], compressor=None)
    assert open_volume(tmp_path / "x").unit_nbytes <= 1 << 32


def test_parts_whose_elements_the_compressor_did_not_know_are_right(tmp_path: Path) -> None:
    """The chunk whose header is looked at first has elements of one byte, another one of 12, another 7."""
    data = random_array((192, 64, 64), "u2", 4)
    case = {"version": 2, "shape": data.shape, "chunks": (64, 64, 64), "kind": "u2"}
    write(tmp_path / "x", case | {"codec": ("blosc", "lz4", 3, "noshuffle", 1 << 15)}, data)
    for number, size in ((1, 12), (2, 7)):
        chunk = data[64 * number : 64 * (number + 1)].tobytes()
        stored = numcodecs.blosc.compress(chunk, b"lz4", 3, 1, 1 << 14, typesize=size)
        (tmp_path / "x" / f"{number}.0.0").write_bytes(stored)
    volume = open_volume(tmp_path / "x")
    assert "in 4 parts" in volume.how
    np.testing.assert_array_equal(whole(volume), data)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("codec", [("none",), ("blosc", "lz4", 1, "shuffle", 0), ("zstd", 1)])
@pytest.mark.parametrize("keys", ["default", "v2"])
def test_arrays_without_dimensions(tmp_path: Path, version: int, codec: Any, keys: str) -> None:
    case = {"version": version, "shape": (), "chunks": (), "kind": "f8", "codec": codec, "keys": keys}
    create(tmp_path / "x", **case)[...] = 2.5
    volume = open_volume(tmp_path / "x")
    assert volume.shape == ()
    assert whole(volume) == 2.5
    create(tmp_path / "y", **case, fill=4)
    assert whole(open_volume(tmp_path / "y")) == 4


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_without_elements(tmp_path: Path, version: int) -> None:
    create(tmp_path / "x", version=version, shape=(0, 4), chunks=(1, 2), kind="f8")
    volume = open_volume(tmp_path / "x")
    assert whole(volume).shape == (0, 4)
    assert volume.nbytes == 0


@pytest.mark.parametrize(
    ("kind", "fill", "bits"),
    [("f4", "0x7fc00001", "u4"), ("f8", "0x7ff8000000000123", "u8"), ("f2", "0x7e01", "u2"), ("f4", "-Infinity", "u4")],
)  # fmt: skip
@pytest.mark.parametrize("order", ["<", ">"])
def test_a_missing_chunk_is_the_fill_value_to_its_last_bit(
    tmp_path: Path, kind: str, fill: str, bits: str, order: str
) -> None:
    create(tmp_path / "x", shape=(6, 5), chunks=(4, 4), kind=kind, order=order)
    change(tmp_path / "x", fill_value=fill)
    value = int(fill, 16) if fill.startswith("0x") else np.array(-np.inf, kind).view(bits)
    made = whole(open_volume(tmp_path / "x"))
    assert made.dtype.byteorder in ("=", "<" if order == "<" else ">")
    assert (made.astype(kind).view(bits) == value).all()


def test_complex_fill_values_may_be_bits(tmp_path: Path) -> None:
    create(tmp_path / "x", shape=(3,), chunks=(2,), kind="c8")
    change(tmp_path / "x", fill_value=["0x7fc00001", "-Infinity"])
    made = whole(open_volume(tmp_path / "x")).view("f4").reshape(3, 2)
    assert np.isnan(made[:, 0]).all()
    assert (made[:, 1] == -np.inf).all()


def test_without_a_fill_value_there_are_zeros(tmp_path: Path) -> None:
    create(tmp_path / "x", version=2, shape=(3,), chunks=(2,), kind="f4", fill=9)
    change(tmp_path / "x", fill_value=None)
    assert whole(open_volume(tmp_path / "x")).tolist() == [0, 0, 0]


def test_an_array_within_a_group_is_named_behind_a_slash(tmp_path: Path) -> None:
    for version in (2, 3):
        group = zarr.open_group(tmp_path / f"{version}.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
        array = group.create_array("a/b", shape=(3, 3), chunks=(2, 2), dtype="i4")
        array[...] = np.arange(9).reshape(3, 3)
        group.create_array("c", shape=(3,), chunks=(2,), dtype="i4")
        assert whole(open_volume(f"{tmp_path}/{version}.zarr/a/b")).sum() == 36
        with pytest.raises(VolumeError, match=r"is a Zarr group; name one of its arrays .*: it has a/b, c$"):
            open_volume(tmp_path / f"{version}.zarr")
        with pytest.raises(VolumeError, match=r"is a Zarr group; .*: it has b$"):
            open_volume(f"{tmp_path}/{version}.zarr/a")


def test_a_group_that_speaks_of_arrays_is_still_a_group(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x", mode="w")
    group.create_group("a", attributes={"kind": "array"}).create_array("b", shape=(3,), dtype="i4")
    with pytest.raises(VolumeError, match=r"it has a/b$"):
        open_volume(tmp_path / "x")


def test_a_group_with_a_damaged_array_is_still_a_group(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "x", mode="w").create_array("a", shape=(3,), dtype="i4")
    (tmp_path / "x" / "a" / "zarr.json").write_bytes(b"\xff\xfe")
    with pytest.raises(VolumeError, match="is a Zarr group"):
        open_volume(tmp_path / "x")


def test_an_empty_group_has_no_arrays_to_be_named(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "x", mode="w")
    with pytest.raises(VolumeError, match="it has none"):
        open_volume(tmp_path / "x")


@pytest.mark.parametrize("name", ["x/y", "nothing"])
def test_what_is_not_there_is_not_found(tmp_path: Path, name: str) -> None:
    create(tmp_path / "x", shape=(3,), chunks=(2,), kind="f4")
    with pytest.raises(FileNotFoundError):
        open_volume(tmp_path / name)


# -- what tensorstore reads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shards": (8, 8, 8)}, "sharding_indexed"),
        ({"filters": zarr.codecs.TransposeCodec(order=(2, 0, 1))}, "transpose"),
        ({"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]}, "crc32c"),
        ({"zarr_format": 2, "order": "F"}, "Fortran"),
        ({"zarr_format": 2, "compressors": numcodecs.BZ2(1)}, "bz2"),
    ],
)
def test_other_codecs_are_tensorstore_s_and_equal(
    tmp_path: Path, options: dict[str, Any], why: str, memory_for: Any
) -> None:
    data = random_array((11, 9, 13), "i4", 5)
    zarr.create_array(
        os.fspath(tmp_path / "x"), shape=data.shape, chunks=(4, 4, 4), dtype="i4", fill_value=3, **options
    )[:9] = data[:9]
    expected = zarr.open_array(tmp_path / "x", mode="r")[...]
    volume = open_volume(tmp_path / "x")
    inner = volume.inner if isinstance(volume, GroupedVolume) else volume
    assert isinstance(inner, TensorStoreVolume)
    assert why in volume.how
    np.testing.assert_array_equal(whole(volume), expected)
    memory = memory_for(volume, 2)
    boxes_equal(reader_of(volume), expected, 0, 6)
    boxes_equal(reader_of(volume, memory.opened()), expected, 1, 6)
    memory.close()


# -- damage ---------------------------------------------------------------------------------------------------


def damaged(volume: Any, reads: Any) -> str:
    with pytest.raises(DamagedUnitError) as caught:
        reads(volume)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "codec", [("blosc", "lz4", 3, "shuffle", 0), ("zstd", 1), ("gzip", 1), ("zlib", 1), ("none",)]
)
def test_a_damaged_chunk_is_named_with_its_file_and_place(tmp_path: Path, codec: Any, version: int) -> None:
    """Cut off at every length, and emptied; in units of a chunk, and in larger ones."""
    data = random_array((6, 10), "i2", 6)
    case = {"version": version, "shape": data.shape, "chunks": (4, 5), "kind": "i2", "codec": codec}
    write(tmp_path / "x", case, data)
    volume = open_volume(tmp_path / "x")
    inner = volume.inner if isinstance(volume, GroupedVolume) else volume
    file = files_of(tmp_path / "x")[1]
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        said = damaged(inner, whole)
        assert str(file) in said
        assert "the chunk at [0:4, 5:10]" in said
    assert said in damaged(volume, whole)
    file.write_bytes(content + b"\0")
    if codec[0] == "none":  # others may be followed by zeros
        assert str(file) in damaged(inner, whole)
    elif codec[0] != "zstd":
        np.testing.assert_array_equal(whole(volume), data)
    file.write_bytes(content)
    np.testing.assert_array_equal(whole(volume), data)


@pytest.mark.parametrize("codec", [("zstd", 1), ("gzip", 1), ("zlib", 1)])
def test_a_chunk_of_another_size_is_damaged(tmp_path: Path, codec: Any) -> None:
    case = {"version": 2, "shape": (8,), "chunks": (8,), "kind": "u1", "codec": codec}
    write(tmp_path / "x", case, np.arange(8, dtype="u1"))
    compressor = compressor_of(2, codec)
    for count in (0, 1, 7, 9, 1000):
        (tmp_path / "x" / "0").write_bytes(compressor.encode(np.ones(count, "u1").tobytes()))
        assert "the chunk at [0:8]" in damaged(open_volume(tmp_path / "x"), whole)


@pytest.mark.parametrize("codec", [("zstd", 1), ("gzip", 1)])
def test_any_change_of_a_chunk_with_a_checksum_is_noticed(tmp_path: Path, codec: Any) -> None:
    """But for those parts that say nothing about its content: gzip's header has a time and a name."""
    data = np.random.default_rng(0).integers(0, 4, (8, 8)).astype("u1")
    write(tmp_path / "x", {"shape": (8, 8), "chunks": (8, 8), "kind": "u1", "codec": codec}, data)
    (file,) = files_of(tmp_path / "x")
    content, volume = file.read_bytes(), open_volume(tmp_path / "x")
    for place in range(len(content)):
        for bit in (1, 16, 128):
            changed = bytearray(content)
            changed[place] ^= bit
            file.write_bytes(changed)
            try:
                made = whole(volume)
            except DamagedUnitError as error:
                assert str(file) in str(error)
            else:
                np.testing.assert_array_equal(made, data)


def test_several_members_of_gzip_are_one_chunk(tmp_path: Path) -> None:
    data = np.arange(64, dtype="u1")
    write(tmp_path / "x", {"shape": (64,), "chunks": (64,), "kind": "u1", "codec": ("gzip", 1)}, data)
    (file,) = files_of(tmp_path / "x")
    encode = numcodecs.GZip(1).encode
    file.write_bytes(encode(data[:20].tobytes()) + encode(data[20:].tobytes()))
    np.testing.assert_array_equal(whole(open_volume(tmp_path / "x")), data)


@pytest.mark.parametrize("codec", [("zstd", 1), ("blosc", "lz4", 1, "shuffle", 0)])
def test_a_chunk_that_cannot_be_read_is_named(tmp_path: Path, codec: Any) -> None:
    """A folder in its place is what a test can have of a disk's errors."""
    case = {"shape": (4,), "chunks": (2,), "kind": "u1", "codec": codec}
    write(tmp_path / "x", case, np.ones(4, "u1"))
    volume, file = open_volume(tmp_path / "x"), files_of(tmp_path / "x")[0]
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match=str(file)):
        whole(volume)


@pytest.mark.hang_after(20)
def test_a_chunk_that_is_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    write(tmp_path / "x", {"shape": (4,), "chunks": (2,), "kind": "u1"}, np.ones(4, "u1"))
    volume, file = open_volume(tmp_path / "x"), files_of(tmp_path / "x")[0]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match=f"Not a regular file: '{file}'"):
        whole(volume)


def test_a_volume_that_is_gone_is_not_taken_for_one_never_written(tmp_path: Path) -> None:
    write(tmp_path / "x", {"shape": (4,), "chunks": (2,), "kind": "u1"}, np.ones(4, "u1"))
    volume = open_volume(tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        whole(volume)


METADATA_2: list[dict[str, Any]] = [
    {"shape": None}, {"shape": ["a", 4]}, {"shape": [-3, 4]}, {"shape": [4]}, {"chunks": [0, 4]}, {"chunks": [2, 2, 2]},
    {"dtype": "zz"}, {"dtype": "|u3"}, {"compressor": "x"}, {"compressor": {}}, {"compressor": 5}, {"fill_value": {}},
    {"fill_value": [1, 2, 3]},
]  # fmt: skip
METADATA_3: list[dict[str, Any]] = [
    {"shape": None}, {"shape": ["a", 4]}, {"shape": [4]}, {"chunk_grid": 3}, {"chunk_grid": {"name": "regular"}},
    {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 1]}}}, {"codecs": None}, {"codecs": [1]},
    {"codecs": [["bytes"]]}, {"codecs": []}, {"chunk_key_encoding": None}, {"chunk_key_encoding": "default"},
    {"chunk_key_encoding": {"name": "default", "configuration": None}}, {"fill_value": {}}, {"data_type": "int7"},
    {"storage_transformers": [{"name": "x"}]}, {"fill_value": "0x12"},
]  # fmt: skip
METADATA: list[tuple[int, dict[str, Any]]] = [
    (2, {"fill_value": 300}), (3, {"fill_value": 300}), (2, {"fill_value": ""}), (2, {"fill_value": "!"}),
    (2, {"shape": [float("inf"), 4]}), (3, {"shape": [float("inf"), 4]}), (3, {"shape": [4, 1 << 70]}),
    (3, {"fill_value": "0x123456789", "data_type": "float32"}),
    (2, {"dimension_separator": None}), (2, {"dimension_separator": 3}), (2, {"dimension_separator": "\0"}),
    (2, {"dimension_separator": "/../../"}),
    (3, {"chunk_key_encoding": {"name": "default", "configuration": {"separator": None}}}),
    (3, {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../../"}}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "values"),
    [(2, values) for values in METADATA_2] + [(3, values) for values in METADATA_3] + METADATA,
)
def test_damaged_metadata_are_an_error_that_names_them(
    tmp_path: Path, version: int, values: dict[str, Any]
) -> None:
    create(tmp_path / "x", version=version, shape=(4, 4), chunks=(2, 2), kind="u1")
    change(tmp_path / "x", **values)
    with pytest.raises(VolumeError, match=str(tmp_path / "x")):
        open_volume(tmp_path / "x")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "{}", "\xff", '{"zarr_format": 3}'])
def test_metadata_that_are_no_object_are_damaged(tmp_path: Path, version: int, text: str) -> None:
    create(tmp_path / "x", version=version, shape=(4, 4), chunks=(2, 2), kind="u1")
    file = change(tmp_path / "x")
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(VolumeError, match=str(file)):
        open_volume(tmp_path / "x")


def test_metadata_cut_off_anywhere_are_damaged(tmp_path: Path) -> None:
    for version in (2, 3):
        create(tmp_path / "x", version=version, shape=(4, 4), chunks=(2, 2), kind="u1")
        file = change(tmp_path / "x")
        content = file.read_bytes()
        for length in range(len(content)):
            file.write_bytes(content[:length])
            with pytest.raises(VolumeError, match=str(file)):
                open_volume(tmp_path / "x")
        shutil.rmtree(tmp_path / "x")


@settings(max_examples=150, phases=[Phase.generate])  # cases are short as they are
@given(
    version=st.sampled_from([2, 3]),
    place=st.integers(0, 1 << 20),
    value=st.sampled_from(
        [None, True, -1, 0, 3, 10, 0.5, "", "x", "i4", [], [1], [2, 2], {}, {"name": "x"}, {"id": "x"}]
    ),
)
def test_metadata_with_anything_in_the_place_of_anything(version: int, place: int, value: Any) -> None:
    """Opened, they are an error of ours or an array that can be read, or is an error of ours when it is."""
    with tempfile.TemporaryDirectory() as path:
        case = {"version": version, "shape": (4, 4), "chunks": (2, 2), "kind": "i4", "codec": ("gzip", 1)}
        write(path, case, np.ones((4, 4), "i4"))
        file = Path(path) / ("zarr.json" if version == 3 else ".zarray")
        data = json.loads(file.read_text())
        spots = list(_spots(data))
        parent, key = spots[place % len(spots)]
        parent[key] = value
        file.write_text(json.dumps(data))
        try:
            found = zarr_array(path)
            if isinstance(found, str) or np.prod(found.shape) > 100:
                return
            whole(open_volume(path))
        except VolumeError as error:
            assert path in str(error)


def _spots(data: Any) -> Any:
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from _spots(data[key])


def test_extension_types_are_not_called_damaged(tmp_path: Path) -> None:
    create(tmp_path / "x", shape=(4,), chunks=(2,), kind="i8")
    change(tmp_path / "x", data_type={"name": "numpy.datetime64", "configuration": {"unit": "s"}})
    assert "numpy.datetime64" in str(zarr_array(os.fspath(tmp_path / "x")))


def test_a_damaged_small_chunk_spoils_no_box_beside_it(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 9, (64, 64, 64)).astype(">u2")
    zarr.create_array(tmp_path / "x", shape=data.shape, chunks=(8, 8, 8), dtype=">u2", zarr_format=2)[...] = (
        data
    )
    file = tmp_path / "x" / "0.0.0"
    file.write_bytes(file.read_bytes()[:20])
    volume = open_volume(tmp_path / "x")
    assert isinstance(volume, NativeVolume) and isinstance(volume.inner, GroupedVolume)
    reader, out = reader_of(volume), np.zeros((8, 8, 8), "u2")
    reader.read([8, 3, 3], out)
    np.testing.assert_array_equal(out, data[8:16, 3:11, 3:11])
    with pytest.raises(DamagedUnitError, match=r"0\.0\.0, the chunk at \[0:8, 0:8, 0:8\]"):
        reader.read([7, 3, 3], out)


def test_a_chunk_of_two_whole_members_of_gzip_is_damaged() -> None:
    raw = bytes(range(256)) * 16
    out = np.zeros(len(raw), np.uint8)
    for second in (raw, bytes(len(raw))):
        stored = np.frombuffer(gzip.compress(raw) + gzip.compress(second), np.uint8)
        with pytest.raises(ValueError, match="gzip: damaged data, or not the 4096 bytes that were expected"):
            decode("gzip", stored, out)


@given(
    prefix=st.sampled_from(["", "c"]), separator=st.sampled_from([".", "/"]),
    place=st.lists(st.integers(0, 30), max_size=4).map(tuple),
)  # fmt: skip
def test_a_chunk_s_key_says_where_it_is(prefix: str, separator: str, place: tuple[int, ...]) -> None:
    rank = len(place)
    array = ZarrArray((40,) * rank, (1,) * rank, np.dtype("u1"), "none", b"\0", prefix, separator)
    key = array.key(place)
    assert array.place(key) == place
    array = array._replace(shape=(31,) * rank)
    others = [
        f"{key}{separator}0",
        f"x{key}",
        f"{key} ",
        f"0{key}",
        "",
        ".zarray",
        "zarr.json",
        "c/",
        "-1",
        "c/+1",
        "٣",
    ]
    others += [array.key(place[:-1] + (at,)) for at in (-1, 31, 1 << 70) if rank]
    for other in others:
        assert array.place(other) is None
