"""What metadata of Zarr and N5 can say: read as the libraries read it, or refused by an error that says why."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from PIL import Image
from volume_kit import same_bits, whole
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from fastpipe.errors import FastpipeError, OptionError, VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import DamagedUnitError

DATA = np.arange(63, dtype="<i4").reshape(7, 9)
METADATA = {2: ".zarray", 3: "zarr.json"}


def write(path: Path, version: Any, kind: str = "<i4", **options: Any) -> None:
    """An array without its first chunk, of which nothing but the fill value is known."""
    options = {"compressors": None, "fill_value": 1} | options
    array = zarr.create_array(path, shape=(7, 9), chunks=(3, 4), dtype=kind, zarr_format=version, **options)
    array[...] = DATA.astype(kind)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name[-1].isdigit())
    files[0].unlink()


def edit(path: Path, version: int, **values: Any) -> None:
    file = path / METADATA[version]
    found = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


def is_as_zarr_python_reads_it(path: Path) -> None:
    assert same_bits(whole(open_volume(path)), zarr.open_array(path, mode="r")[...])


CODECS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "<i4", {"order": "F"}), (2, ">f8", {"order": "F", "compressors": numcodecs.Zstd(1)}),
    (2, "<i4", {"compressors": numcodecs.BZ2(1)}), (2, "<i4", {"compressors": numcodecs.Zstd(1, True)}),
    (2, "<f4", {"compressors": numcodecs.Blosc("zstd", 3, numcodecs.Blosc.BITSHUFFLE)}),
    (3, "i4", {"filters": [TransposeCodec(order=(1, 0))]}), (3, "i4", {"filters": [TransposeCodec(order=(0, 1))]}),
    (3, "f8", {"serializer": BytesCodec(endian="big"), "fill_value": 2.5}),
    (3, "i4", {"compressors": [Crc32cCodec()]}), (3, "u2", {"compressors": [ZstdCodec(), Crc32cCodec()]}),
    (3, "i4", {"compressors": [GzipCodec(), ZstdCodec()]}),
    (3, "i4", {"chunk_key_encoding": {"name": "v2", "separator": "/"}}),
    (3, "f2", {"chunk_key_encoding": {"name": "default", "separator": "."}}),
]  # fmt: skip


@pytest.mark.parametrize(("version", "kind", "options"), CODECS)
def test_arrays_of_all_orders_codecs_and_keys_are_read(
    tmp_path: Path, version: int, kind: str, options: dict[str, Any]
) -> None:
    write(tmp_path / "x", version, kind, **options)
    is_as_zarr_python_reads_it(tmp_path / "x")


@pytest.mark.parametrize("place", ["start", "end"])
def test_shards_are_read(tmp_path: Path, place: Any) -> None:
    array = zarr.create_array(
        tmp_path / "x", shape=(7, 9), chunks=(3, 3), shards={"shape": (6, 6), "index_location": place},
        dtype="i4", fill_value=5,
    )  # fmt: skip
    array[3:, :6] = DATA[3:, :6]
    is_as_zarr_python_reads_it(tmp_path / "x")


# The kind of elements and what the metadata have as their fill value, for each version: these are read.
FILLS = [
    *(("<f4", value, 23) for value in ("NaN", "Infinity", "-Infinity", 1.5, 1, -0.0, 16777217, 0.1)),
    *((kind, value, 23) for kind in ("<i4", "<u8") for value in (1, 1.0, True)), (">i4", 7, 2), (">f8", "NaN", 2),
    ("<u8", 2**64 - 1, 23), ("<u8", float(2**63), 23), ("|b1", True, 23), ("|b1", 1, 23), ("<f2", "NaN", 23),
    ("<c16", ["NaN", 1], 23), ("<c16", [0, "-Infinity"], 23), ("<f4", "0x7fc00001", 3), ("<f8", "0x7FF8000000000001", 3),
    ("<c16", ["NaN", "0x7ff8000000000001"], 3), ("<c8", ["0x7fc00001", "-Infinity"], 3), ("<f4", None, 2), ("<c8", None, 2), ("|b1", None, 2),
]  # fmt: skip
# These are not, as zarr-python does not read them, or casts them.
UNKNOWN = [
    *(("<f4", value, 23) for value in ("AAAAAA==", "0x1", [1, 2], {}, "1", "nan")), ("<f4", "0x7fc00001", 2),
    *(("<i4", value, 23) for value in (1.5, 5.000001, "1", "NaN", 2**31, 1e300, "AQAAAA==", [1])), ("<u8", -1, 23),
    *(("|b1", value, 23) for value in (2, 0.5, "True", "false", "AQ==")), *(("<c16", value, 23) for value in (1, [1], "x")),
    *((kind, None, 3) for kind in ("<f4", "<i4", "<c16", "|b1")), ("<c16", [0, "0x7fc00000"], 23),
]  # fmt: skip


def cases(some: list[tuple[Any, Any, int]]) -> list[Any]:
    return [(kind, value, int(one)) for kind, value, versions in some for one in str(versions)]


def with_fill(path: Path, kind: str, value: Any, version: int) -> None:
    write(path, version, np.dtype(kind).newbyteorder("=").str if version == 3 else kind)
    edit(path, version, fill_value=value)


@pytest.mark.parametrize(("kind", "value", "version"), cases(FILLS))
def test_fill_values_are_those_of_zarr_python(tmp_path: Path, kind: str, value: Any, version: int) -> None:
    with_fill(tmp_path / "x", kind, value, version)
    is_as_zarr_python_reads_it(tmp_path / "x")


@pytest.mark.parametrize(("kind", "value", "version"), cases(UNKNOWN))
def test_fill_values_that_do_not_fit_their_elements_are_damage(
    tmp_path: Path, kind: str, value: Any, version: int
) -> None:
    with_fill(tmp_path / "x", kind, value, version)
    with pytest.raises(VolumeError, match=rf"{METADATA[version]} is damaged"):
        open_volume(tmp_path / "x")


READ: list[tuple[int, dict[str, Any]]] = [
    (2, {"filters": []}), (2, {"filters": ...}), (2, {"compressor": ...}), (2, {"unknown": 1}),
    (3, {"dimension_names": ["a", None]}), (3, {"unknown": {"must_understand": False}}), (3, {"storage_transformers": []}),
    (3, {"chunk_key_encoding": {"name": "default"}}), (3, {"codecs": [{"name": "bytes"}]}),
    (3, {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}),
]  # fmt: skip
REFUSED: list[tuple[int, dict[str, Any]]] = [
    *((2, {name: ...}) for name in ("zarr_format", "shape", "chunks", "dtype", "order", "fill_value")),
    *((2, {"zarr_format": value}) for value in (1, 3, None)), *((2, {"order": value}) for value in ("c", None, "A")),
    *((2, {"dtype": value}) for value in ("i4", "=i4", "|i4", "int32", "<f16", "<U1", "|V4", "<M8[ns]", "|O")),
    (2, {"dtype": [["a", "<i4"]], "fill_value": None}), (2, {"dtype": [["a", "<i2"], ["b", "<i2"]], "fill_value": None}),
    *((2, {"shape": value}) for value in ([7.0, 9.0], [7.5, 9], ["7", "9"], [True, 9], 7)), (2, {"chunks": [3.0, 4]}),
    *((2, {"compressor": value}) for value in ({"id": "none"}, {"id": "lz4", "x": 1}, {"id": "zstd", "x": 1})),
    *((2, {"filters": [{"id": value, "dtype": "<i4"}]}) for value in ("fixedscaleoffset", "shuffle", "none")),
    *((3, {name: ...}) for name in ("zarr_format", "node_type", "shape", "data_type", "fill_value", "codecs")),
    (3, {"zarr_format": 2}), (3, {"zarr_format": 4}), (3, {"node_type": "x"}),
    (3, {"unknown": 1}), (3, {"unknown": {"name": "x"}}), (3, {"unknown": {"must_understand": True}}),
    (3, {"chunk_grid": {"name": "rectangular", "configuration": {"chunk_shape": [[3, 4], [9]]}}}),
    (3, {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4], "origin": [1, 1]}}}),
    (3, {"chunk_key_encoding": {"name": "suffix"}}), (3, {"chunk_key_encoding": {"name": "default", "configuration": {"x": 1}}}),
    *((3, {"codecs": [{"name": "bytes", "configuration": value}]}) for value in ({"endian": "Big"}, {"endian": "little", "x": 1})),
    *((3, {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": name}]})
      for name in ("none", "zlib", "numcodecs.zlib", "numcodecs.delta", "x")),
    *((3, {"data_type": value}) for value in ("r32", "string", "bfloat16", "float8_e4m3fn", "int4", {"name": "int32"})),
    (3, {"storage_transformers": [{"name": "x"}]}),
    *((2, {"compressor": value}) for value in ("x", {}, 5)), (2, {"chunks": [0, 4]}), (2, {"chunks": [2, 2, 2]}),
    *((2, {"shape": value}) for value in (None, ["a", 4], [-3, 4], [4])),
    *((2, {"fill_value": value}) for value in ({}, [1, 2, 3], 1 << 40, "", "!")), (2, {"dtype": "|u3"}),
    *((2, {"dimension_separator": value}) for value in (None, 3, "\0", "/../../")),
    *((version, {"shape": [float("inf"), 4]}) for version in (2, 3)),
    *((3, {"shape": value}) for value in (None, ["a", 4], [4], [4, 1 << 70])),
    *((3, {"chunk_grid": value}) for value in (
        3, {"name": "regular"}, {"name": "regular", "configuration": {"chunk_shape": [0, 1]}})),
    *((3, {"codecs": value}) for value in (None, [1], [["bytes"]], [])),
    *((3, {"chunk_key_encoding": value}) for value in (None, "default")),
    *((3, {"chunk_key_encoding": {"name": "default", "configuration": value}}) for value in (
        None, {"separator": None}, {"separator": "/../../"})),
    *((3, {"fill_value": value}) for value in ({}, 1 << 40, "0x12")),
    (3, {"fill_value": "0x123456789", "data_type": "float32"}),
    (3, {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Found an empty list of filters")
@pytest.mark.parametrize(("version", "values"), READ)
def test_metadata_may_say_more(tmp_path: Path, version: int, values: dict[str, Any]) -> None:
    write(tmp_path / "x", version)
    edit(tmp_path / "x", version, **values)
    is_as_zarr_python_reads_it(tmp_path / "x")


@pytest.mark.parametrize(("version", "values"), REFUSED)
def test_metadata_that_are_not_known_are_refused_and_never_passed_over(
    tmp_path: Path, version: int, values: dict[str, Any]
) -> None:
    write(tmp_path / "x", version)
    edit(tmp_path / "x", version, **values)
    with pytest.raises((VolumeError, OptionError), match=str(tmp_path)) as caught:
        open_volume(tmp_path / "x")
    assert "tensorstore_spec" not in str(caught.value)


def arrays_of_numcodecs() -> list[tuple[int, str, dict[str, Any]]]:
    """Arrays of version 2 and 3 with each codec that only zarr-python has."""
    found: list[tuple[int, str, dict[str, Any]]] = []
    v3: Any = zarr.codecs.numcodecs
    for name, (kind, role, options) in {
        "Delta": ("<i4", "filters", {"dtype": "<i4"}), "Shuffle": ("<i4", "compressors", {"elementsize": 4}),
        "FixedScaleOffset": ("<f8", "filters", {"offset": 3, "scale": 10, "dtype": "<f8", "astype": "<i2"}),
        "Quantize": ("<f8", "filters", {"digits": 1, "dtype": "<f8"}), "BitRound": ("<f4", "filters", {"keepbits": 3}),
        "AsType": ("<f8", "filters", {"encode_dtype": "<f4", "decode_dtype": "<f8"}), "PackBits": ("|b1", "filters", {}),
        **{name: ("<i4", "compressors", {}) for name in (
            "LZ4", "LZMA", "BZ2", "Zlib", "GZip", "CRC32", "Adler32", "Fletcher32", "JenkinsLookup3")},
    }.items():  # fmt: skip
        found.append((2, kind, {role: [getattr(numcodecs, name)(**options)]}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append((3, np.dtype(kind).name, {role: [getattr(v3, name)(**options)]}))
    return found


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@pytest.mark.parametrize(("version", "kind", "options"), arrays_of_numcodecs())
def test_codecs_of_numcodecs_are_undone(tmp_path: Path, version: int, kind: str, options: Any) -> None:
    write(tmp_path / "x", version, kind, **options)
    is_as_zarr_python_reads_it(tmp_path / "x")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("inside", ["", "a/b"])
def test_arrays_in_a_zip_file_are_read(tmp_path: Path, version: Any, inside: str) -> None:
    path, options = tmp_path / "x.zarr.zip", {"chunks": (3, 4), "dtype": "i4", "zarr_format": version}
    with zarr.storage.ZipStore(path, mode="w") as store:
        array = zarr.create_array(store, name=inside, shape=(7, 9), **options)
        array[:5] = DATA[:5]
        expected = array[...]
    assert same_bits(whole(open_volume(path / inside)), expected)
    if inside:
        with pytest.raises(VolumeError, match=r"name one of its Zarr arrays behind a slash: it has a/b"):
            open_volume(path)


def test_codecs_that_run_code_are_refused(tmp_path: Path) -> None:
    """A chunk that is a pickle would run what it says."""

    class Harmful:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "ran"), "w")

    pickles = {"filters": [{"id": "pickle"}]}
    for number, values in enumerate((pickles, {"compressor": {"id": "pickle"}}, pickles | {"dtype": "|O"})):
        path = tmp_path / str(number)
        write(path, 2)
        edit(path, 2, **values)
        for chunk in path.glob("[0-9].[0-9]"):
            chunk.write_bytes(pickle.dumps(Harmful()))
        with pytest.raises(VolumeError, match=r"pickle|object"):
            open_volume(path)
    assert not (tmp_path / "ran").exists()


def test_version_3_is_taken_where_a_folder_has_two_versions(tmp_path: Path) -> None:
    write(tmp_path / "x", 2)
    write(tmp_path / "y", 3, fill_value=7)
    os.replace(tmp_path / "y" / "zarr.json", tmp_path / "x" / "zarr.json")
    with pytest.warns(UserWarning, match="Both"):
        is_as_zarr_python_reads_it(tmp_path / "x")
    (tmp_path / "x" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(VolumeError, match="is a Zarr group"):
        open_volume(tmp_path / "x")


def test_an_array_says_itself_what_it_is(tmp_path: Path) -> None:
    """Consolidated metadata of its group may be older; its children are named in natural order."""
    group = zarr.open_group(tmp_path / "x", mode="w")
    for name in ("10", "2"):
        group.create_array(name, data=DATA, chunks=(3, 4))
    with pytest.warns(UserWarning, match="Consolidated"):
        zarr.consolidate_metadata(tmp_path / "x")
    group["2"].resize((4, 9))  # type: ignore[union-attr]
    is_as_zarr_python_reads_it(tmp_path / "x" / "2")
    with pytest.raises(VolumeError, match=r"it has 2, 10$"):
        open_volume(tmp_path / "x")


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_beyond_the_shape_are_ignored(tmp_path: Path, version: Any) -> None:
    zarr.create_array(tmp_path / "x", data=DATA, chunks=(3, 4), zarr_format=version)
    edit(tmp_path / "x", version, shape=[4, 5])
    is_as_zarr_python_reads_it(tmp_path / "x")


def write_n5(path: Path, data: Any, mode: int, packed: Any, is_whole: bool, **values: Any) -> None:
    """By hand, as the specification of N5 says."""
    block = (3, 4)
    path.mkdir()
    metadata = {"dataType": data.dtype.name, "dimensions": data.shape, "blockSize": block, **values}
    (path / "attributes.json").write_text(json.dumps(metadata))
    counts = [-(-size // side) for size, side in zip(data.shape, block, strict=True)]
    for at in itertools.product(*map(range, counts)):
        part = data[tuple(slice(one * side, (one + 1) * side) for one, side in zip(at, block, strict=True))]
        if is_whole:  # blocks at the ends may be whole, or cut off
            part = np.pad(part, [(0, side - size) for side, size in zip(block, part.shape, strict=True)])
        head = struct.pack(">HH2I", mode, 2, *part.shape) + (struct.pack(">I", part.size) if mode else b"")
        (path / str(at[0])).mkdir(exist_ok=True)
        content = part.astype(part.dtype.newbyteorder(">")).tobytes("F")
        (path / str(at[0]) / str(at[1])).write_bytes(head + packed(content))


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i2", "u8", "f4", "f8"])
@pytest.mark.parametrize(
    ("compression", "packed"),
    [({"type": "raw"}, bytes), ({"type": "gzip"}, gzip.compress), ({"type": "gzip", "useZlib": True}, zlib.compress)],
)  # fmt: skip
def test_n5_is_read_by_its_specification(
    tmp_path: Path, compression: Any, packed: Any, kind: str, is_whole: bool
) -> None:
    """Big-endian, the first index fastest."""
    data, more = DATA.astype(kind), {"axes": ["x", "y"], "units": ["nm", "nm"]}
    write_n5(tmp_path / "x", data, 0, packed, is_whole, compression=compression, **more)
    assert same_bits(whole(open_volume(tmp_path / "x")), data)


@pytest.mark.parametrize("mode", [1, 2])
def test_blocks_of_n5_that_are_not_supported_are_not_called_damaged(tmp_path: Path, mode: int) -> None:
    """Else a policy for bad samples would leave out all of them."""
    write_n5(tmp_path / "x", DATA, mode, bytes, False, compression={"type": "raw"})
    said = r"varlength chunks not supported|Unexpected N5 chunk mode"
    with pytest.raises(FastpipeError, match=said) as caught:
        whole(open_volume(tmp_path / "x"))
    assert not isinstance(caught.value, DamagedUnitError)


def test_a_url_of_another_format_is_refused(tmp_path: Path) -> None:
    """tensorstore reads some images, but not as their own libraries do: with other dimensions."""
    Image.fromarray(np.arange(63, dtype="u1").reshape(7, 9)).save(tmp_path / "x.png")
    with pytest.raises(VolumeError, match=r"x\.png is png: a URL must be that of an array in Zarr"):
        open_volume(f"file://{tmp_path}/x.png")
