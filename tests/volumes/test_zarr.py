"""Zarr arrays that are read without a library in between: units within chunks, codecs, groups and damage."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numcodecs
import numcodecs.blosc
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from volume_files import compressor_of, create_zarr, read_zarr, write_zarr
from volume_kit import boxes_equal_with_memory, random_array, same_bits, whole

from fastpipe.core.reads import ChunkError
from fastpipe.errors import VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import DamagedUnitError
from fastpipe.volumes.zarr import ZarrArray, ZarrVolume, decode

CODECS: list[Any] = [("blosc", "lz4", 3, "shuffle", 0), ("zstd", 1), ("gzip", 1), ("zlib", 1), ("none",)]


def files_of(path: Path) -> list[Path]:
    names = {".zarray", ".zattrs", "zarr.json"}
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name not in names)


@pytest.mark.parametrize(
    ("cname", "shuffle", "version"),
    [("blosclz", "noshuffle", 2), ("lz4", "shuffle", 3), ("lz4hc", "bitshuffle", 2), ("zlib", "shuffle", 2),
     ("zstd", "bitshuffle", 3), ("zstd", "noshuffle", 2), ("lz4", "bitshuffle", 3)],
)  # fmt: skip
def test_parts_of_large_chunks_are_decoded_alone(
    tmp_path: Path, cname: str, shuffle: str, version: int
) -> None:
    """Chunks of which a unit is a slab; the second is of nothing but zeros and the last one is not there."""
    data = random_array((150, 65, 64), "u2", 1)
    data[64:128, :64] = 0
    codec = "blosc", cname, 3, shuffle, 1 << 15
    write_zarr(tmp_path / "x", data, (64, 64, 64), version=version, codec=codec)
    first, *_, last = files_of(tmp_path / "x")
    last.unlink()
    expected, content = read_zarr(tmp_path / "x"), first.read_bytes()
    for damage in (content[:15], content[:4] + bytes(12), content):
        first.write_bytes(damage)  # then the header of another chunk is looked at
        volume = open_volume(tmp_path / "x")
        assert isinstance(volume, ZarrVolume)
        assert volume.grid.unit == (16, 64, 64)
        assert "in 4 parts" in volume.how
    assert same_bits(whole(volume), expected)
    boxes_equal_with_memory(volume, expected, 0, 5, 8)


@pytest.mark.parametrize(
    ("chunk", "unit", "codec"),
    [((1, 64, 128, 64), (1, 16, 128, 64), ("none",)), ((1, 1, 1 << 19, 1), (1, 1, 1 << 17, 1), ("none",)),
     ((3, 1, 1 << 18), (1, 1, 1 << 18), ("blosc", "lz4", 3, "noshuffle", 1 << 15))],
)  # fmt: skip
def test_slabs_are_along_the_first_dimension_that_a_chunk_has(
    tmp_path: Path, chunk: tuple[int, ...], unit: tuple[int, ...], codec: Any
) -> None:
    data = random_array([side + 1 if side < 1 << 17 else side for side in chunk], "u1", 3)
    write_zarr(tmp_path / "x", data, chunk, codec=codec)
    volume = open_volume(tmp_path / "x")
    assert volume.grid.unit == unit
    np.testing.assert_array_equal(whole(volume), data)
    numbers = np.arange(volume.grid.count)
    along: dict[int, tuple[int, ...]] = {}
    for number, stored in zip(numbers.tolist(), volume.stored_in(numbers).tolist(), strict=True):
        corner = tuple(side.start // most for side, most in zip(volume.grid.box(number), chunk, strict=True))
        assert along.setdefault(stored, corner) == corner
    assert len(set(along.values())) == len(along)


@pytest.mark.hang_after(20)
@pytest.mark.parametrize("side", [1_000_000_007, (1 << 61) - 1])
def test_a_chunk_of_a_large_prime_number_of_elements_is_opened_at_once(tmp_path: Path, side: int) -> None:
    write_zarr(tmp_path / "x", np.ones(4, "u1"), (2,), version=2, codec=("none",))
    metadata = json.loads((tmp_path / "x" / ".zarray").read_text()) | {"shape": [side], "chunks": [side]}
    (tmp_path / "x" / ".zarray").write_text(json.dumps(metadata))
    assert open_volume(tmp_path / "x").unit_nbytes <= 1 << 32


def test_parts_whose_elements_the_compressor_did_not_know_are_right(tmp_path: Path) -> None:
    """The chunk whose header is looked at first has elements of one byte, another one of 12, another 7."""
    data = random_array((192, 64, 64), "u2", 4)
    codec = "blosc", "lz4", 3, "noshuffle", 1 << 15
    write_zarr(tmp_path / "x", data, (64, 64, 64), version=2, codec=codec)
    for number, size in ((1, 12), (2, 7)):
        chunk = data[64 * number : 64 * (number + 1)].tobytes()
        stored = numcodecs.blosc.compress(chunk, b"lz4", 3, 1, 1 << 14, typesize=size)
        (tmp_path / "x" / f"{number}.0.0").write_bytes(stored)
    volume = open_volume(tmp_path / "x")
    assert "in 4 parts" in volume.how
    np.testing.assert_array_equal(whole(volume), data)


@pytest.mark.parametrize("codec", [("none",), ("blosc", "lz4", 1, "shuffle", 0), ("zstd", 1)])
def test_arrays_without_dimensions_are_read(tmp_path: Path, codec: Any) -> None:
    for version, keys in ((2, "default"), (3, "default"), (3, "v2")):
        options = {"version": version, "codec": codec, "keys": keys}
        create_zarr(tmp_path / "x", (), (), "f8", **options)[...] = 2.5
        create_zarr(tmp_path / "y", (), (), "f8", fill=4, **options)
        assert open_volume(tmp_path / "x").shape == ()
        assert [float(whole(open_volume(tmp_path / name))) for name in "xy"] == [2.5, 4]


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_within_a_group_is_named_behind_a_slash(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    with pytest.raises(VolumeError, match="it has none"):
        open_volume(tmp_path / "x.zarr")
    array = group.create_array("a/b", shape=(3, 3), chunks=(2, 2), dtype="i4")
    array[...] = np.arange(9).reshape(3, 3)
    group["a"].attrs["kind"] = "array"  # which makes it none
    group.create_array("c", shape=(3,), chunks=(2,), dtype="i4")
    assert whole(open_volume(f"{tmp_path}/x.zarr/a/b")).sum() == 36
    with pytest.raises(VolumeError, match=r"is a Zarr group; name one of its arrays .*: it has a/b, c$"):
        open_volume(tmp_path / "x.zarr")
    with pytest.raises(VolumeError, match=r"is a Zarr group; .*: it has b$"):
        open_volume(f"{tmp_path}/x.zarr/a")
    for name in ("x.zarr/c/y", "nothing"):
        with pytest.raises(FileNotFoundError):
            open_volume(tmp_path / name)
    next((tmp_path / "x.zarr" / "c").glob("*z*")).write_bytes(b"\xff\xfe")  # its metadata
    with pytest.raises(VolumeError, match="is a Zarr group"):
        open_volume(tmp_path / "x.zarr")


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_is_cut_off_anywhere_is_named_with_its_place(tmp_path: Path, codec: Any) -> None:
    data = random_array((6, 10), "i2", 6)
    write_zarr(tmp_path / "x", data, (4, 5), version=2 if codec[0] in ("zlib", "none") else 3, codec=codec)
    volume, file = open_volume(tmp_path / "x"), files_of(tmp_path / "x")[1]
    content, said, finer = file.read_bytes(), rf"{file}.*the chunk at \[0:4, 5:10\]", volume.finer or volume
    for length in range(len(content)):
        file.write_bytes(content[:length])
        for one in (volume, finer):
            with pytest.raises(DamagedUnitError, match=said):
                whole(one)
    file.write_bytes(content + b"\0")
    if codec[0] == "none":  # others may be followed by zeros
        with pytest.raises(DamagedUnitError, match=said):
            whole(finer)
    elif codec[0] != "zstd":
        np.testing.assert_array_equal(whole(volume), data)
    file.write_bytes(content)
    np.testing.assert_array_equal(whole(volume), data)


@pytest.mark.parametrize("codec", CODECS[:4])
def test_a_chunk_of_another_size_is_damaged(tmp_path: Path, codec: Any) -> None:
    write_zarr(tmp_path / "x", np.arange(8, dtype="u1"), (8,), version=2, codec=codec)
    for count in (0, 1, 7, 9, 1000):
        packed = compressor_of(2, codec).encode(np.ones(count, "u1").tobytes())
        (tmp_path / "x" / "0").write_bytes(packed)
        with pytest.raises(DamagedUnitError, match=r"the chunk at \[0:8\]"):
            whole(open_volume(tmp_path / "x"))


@pytest.mark.parametrize("codec", CODECS[1:3])
def test_any_change_of_a_chunk_with_a_checksum_is_noticed(tmp_path: Path, codec: Any) -> None:
    """But for those parts that say nothing about its content: gzip's header has a time and a name."""
    data = np.random.default_rng(0).integers(0, 4, (8, 8)).astype("u1")
    write_zarr(tmp_path / "x", data, (8, 8), codec=codec)
    (file,) = files_of(tmp_path / "x")
    content, volume = file.read_bytes(), open_volume(tmp_path / "x")
    for place, bit in itertools.product(range(len(content)), (1, 128)):
        changed = bytearray(content)
        changed[place] ^= bit
        file.write_bytes(changed)
        try:
            made = whole(volume)
        except DamagedUnitError as error:
            assert str(file) in str(error)
        else:
            np.testing.assert_array_equal(made, data)


@pytest.mark.hang_after(20)
@pytest.mark.parametrize("codec", CODECS[:2])
def test_a_chunk_that_is_no_file_is_named(tmp_path: Path, codec: Any) -> None:
    """A folder at its path is what a test can have of a disk's errors; a FIFO is not waited for."""
    write_zarr(tmp_path / "x", np.ones(4, "u1"), (2,), codec=codec)
    volume, file = open_volume(tmp_path / "x"), files_of(tmp_path / "x")[0]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match=f"Not a regular file: '{file}'"):
        whole(volume)
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match=str(file)):
        whole(volume)
    shutil.rmtree(tmp_path / "x")  # which is not taken for an array that was never written
    with pytest.raises(FileNotFoundError):
        whole(volume)


@pytest.mark.parametrize(("version", "name"), [(2, ".zarray"), (3, "zarr.json")])
def test_text_that_is_no_metadata_is_damage(tmp_path: Path, version: int, name: str) -> None:
    create_zarr(tmp_path / "x", (4, 4), (2, 2), "u1", version=version)
    file = tmp_path / "x" / name
    content = file.read_bytes()
    texts = "", "[]", "null", "3", '"x"', "{}", "\xff", "[" * 200_000, '{"a":' * 200_000
    for text in (*(text.encode("latin-1") for text in texts), b'{"shape": ' + b"9" * 10_000 + b"}"):
        file.write_bytes(text)
        with pytest.raises(VolumeError, match=f"{file}.* is damaged"):
            open_volume(tmp_path / "x")
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(VolumeError, match=str(file)):
            open_volume(tmp_path / "x")


@given(
    prefix=st.sampled_from(["", "c"]), separator=st.sampled_from([".", "/"]),
    place=st.lists(st.integers(0, 30), max_size=4).map(tuple),
)  # fmt: skip
def test_a_chunk_s_key_says_where_it_is(prefix: str, separator: str, place: tuple[int, ...]) -> None:
    rank = len(place)
    array = ZarrArray((31,) * rank, (1,) * rank, np.dtype("u1"), "none", b"\0", prefix, separator)
    key = array.key(place)
    assert array.place(key) == place
    others = [f"{key}{separator}0", f"x{key}", f"{key} ", f"0{key}", "", ".zarray", "c/", "-1", "c/+1", "٣"]
    others += [array.key(place[:-1] + (at,)) for at in (-1, 31, 1 << 70) if rank]
    assert [array.place(other) for other in others] == [None] * len(others)


def test_a_blosc_buffer_of_another_compressor_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blosc's buffers say by a number which compressor made them: that of Snappy is 2."""
    out = np.full(4096, 0xAB, np.uint8)
    stored = bytearray(numcodecs.blosc.compress(bytes(4096), b"lz4", 3, 1, 0, typesize=4))
    stored[2] = stored[2] & 31 | 2 << 5
    with pytest.raises(ChunkError, match="blosc: "):
        decode("blosc", bytes(stored), out)
    monkeypatch.setattr(numcodecs.blosc, "decompress", lambda data: bytes(4096))
    decode("blosc", bytes(stored), out)
    assert not out.any()
    stored[4:8] = stored[8:12] = (5).to_bytes(4, "little")
    with pytest.raises(ChunkError, match="4096 bytes instead of 5"):
        decode("blosc", bytes(stored), out[:5])
