"""LMDB files, against the package lmdb."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import FastImageFolder
from fastpipe.core.archive_paths import place_of, version_of
from fastpipe.core.files import read_file
from fastpipe.core.lmdb_files import read_lmdb, values_of
from fastpipe.core.native import native
from fastpipe.errors import OptionError

keys = st.binary(min_size=1, max_size=60) | st.integers(0, 10**6).map(lambda number: b"image-%07d" % number)
# A value of more than about half a page of 4096 bytes has pages of its own.
values = st.binary(max_size=60) | st.integers(0, 9000).map(lambda count: (b"%d " % count * 3000)[:count])
VERSIONS = [0, 1]  # of LMDB's format, as the package counts


def _write(path: Path, values: Mapping[bytes, bytes], gone: Iterable[bytes] = (), **options: Any) -> Path:
    with lmdb.open(str(path), map_size=1 << 28, **options) as env:
        with env.begin(write=True) as txn:
            for key, value in values.items():
                txn.put(key, value)
        for key in gone:
            with env.begin(write=True) as txn:
                txn.delete(key)
    return path


def _native(path: str) -> bytes | None:
    (found,) = native.read_files([os.fsencode(path)])
    return None if found is None else found[0]


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=60, deadline=None)
@given(content=st.dictionaries(keys, values, max_size=80), copies=st.sampled_from([1, 1, 40]), data=st.data())
def test_values_are_those_of_the_package(
    version: int, content: dict[bytes, bytes], copies: int, data: Any
) -> None:  # fmt: skip
    content = {key + bytes([n] * (n > 0)): value for key, value in content.items() for n in range(copies)}
    gone = data.draw(st.lists(st.sampled_from(sorted(content)), max_size=4)) if content else []
    with tempfile.TemporaryDirectory() as folder:
        file = _write(Path(folder, "x.lmdb"), content, gone, lib_version=version) / "data.mdb"
        with lmdb.open(f"{folder}/x.lmdb", readonly=True, lock=False) as env, env.begin() as txn:
            expected = list(txn.cursor())
            found = list(values_of(str(file)))  # although the process has it open
        state = version_of(os.stat(file))
        paths = [f"{file}/@{place_of(*place, state)}/x" for _, place in found]
        assert [key for key, _ in found] == [key for key, _ in expected]
        assert [read_file(path) for path in paths] == [value for _, value in expected]
        assert all(_native(path) == value for path, (_, value) in zip(paths, expected, strict=True))


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_has_its_values_within(version: int, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        content = {b"%03d" % number: b"x" * (number * 37 % 5000) for number in range(300)}
        file = _write(Path(folder, "x.lmdb"), content, lib_version=version) / "data.mdb"
        whole = bytearray(file.read_bytes())
        del whole[data.draw(st.integers(0, len(whole)) | st.just(len(whole))) :]
        leaves = [at for at in range(0, len(whole), 4096) if whole[at + 8 : at + 24].count(0) < 14]
        for at in data.draw(st.lists(st.sampled_from(leaves), max_size=5)) if leaves else ():
            place = at + data.draw(st.integers(0, 200))
            whole[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
        file.write_bytes(whole)
        try:
            for _, place in values_of(str(file)):
                assert 0 <= place.offset <= place.offset + place.nbytes <= len(whole)
        except OptionError as error:
            assert repr(str(file)) in str(error)


def _samples(path: Path | str, image: str, *names: str) -> Any:
    found = read_lmdb([str(path)], image, names, False)
    return [read_file(one) for one in found.images], found.columns


def test_samples_have_values_of_the_same_name(tmp_path: Path) -> None:
    content = {
        b"num-samples": b"2", b"image-2": b"B" * 5000, b"image-1": b"A", b"label-1": "é".encode(), b"label-2": b"7",
        b"n/1.cls": b"3\n", b"n/2.cls": b"4", b"\x00\xff": b"C", b"n/1": b"E", b"image-": b"D", b"label-": b"", b"n/.cls": b"0",
    }  # fmt: skip
    folder = _write(tmp_path / "x.lmdb", content)
    file = _write(tmp_path / "y.mdb", content, subdir=False)
    expected = {"label-*": ["", "é", "7"], "n/*.cls": [0, 3, 4], "__key__": ["", "1", "2"]}
    for path in (folder, file):
        assert _samples(path, "image-*", "label-*", "n/*.cls", "__key__") == (
            [b"D", b"A", b"B" * 5000],
            expected,
        )
        assert _samples(path, "n/1*", "n/*.cls") == ([b"E"], {"n/*.cls": [0]})
        assert _samples(path, "\0*", "__key__") == ([b"C"], {"__key__": ["ff"]})
    found = read_lmdb([str(folder)], "image-*", [], False)
    assert found.where(1) == f"sample '1' of {folder}/data.mdb" and found.images[1].endswith("/image-1")


def test_lmdbs_are_named_by_a_list_or_a_pattern(tmp_path: Path) -> None:
    for name in ("cat_lmdb", "dog_lmdb"):
        _write(tmp_path / name, {name.encode(): b"x"})
    given: dict[str, Any] = {"image": "*", "target": "__key__"}
    for table in (f"{tmp_path}/*_lmdb", [tmp_path / "cat_lmdb", tmp_path / "dog_lmdb"]):
        assert FastImageFolder.from_samples(table, **given).targets == ["cat_lmdb", "dog_lmdb"]
    (tmp_path / "cat_lmdb").rename(tmp_path / "cat")
    assert FastImageFolder.from_samples(f"{tmp_path}/cat", **given).targets == ["cat_lmdb"]
    with pytest.raises(
        OptionError, match=r'leave root= out, and name columns by keys, such as image="image-\*"'
    ):
        FastImageFolder.from_samples(f"{tmp_path}/cat", root=tmp_path, **given)
    with pytest.raises(FileNotFoundError):
        FastImageFolder.from_samples(f"{tmp_path}/none.lmdb", **given)


_JPEG = b"\xff\xd8\xff\xe0" + b"." * 9000
_MSGPACK = b"\x92\xc5\x23\x2c" + _JPEG + b"\x07"


@pytest.mark.parametrize(
    ("content", "names", "said"),
    [({b"0": pickle.dumps((_JPEG, 7))}, ["*"], "'0' in .* is pickled, not the bytes of an image's file. Write the"),
     ({b"0": _JPEG, b"1": _MSGPACK}, ["*"], "'1' in .* is packed by msgpack"),
     ({b"0": b"\x08\x03\x10\x80\x02\x18\x80\x02" + _JPEG}, ["*"], "is a Datum of Caffe"),
     ({b"0": b"\x93NUMPY\x01\0" + _JPEG}, ["*"], "is an array of NumPy"),
     ({b"0": _JPEG, b"length": b"1"}, ["*"], r"'length' in .* is a number, .* such as image=\"image-\*\""),
     ({b"0": _JPEG, b"1": _JPEG}, ["image-*"], "has no key 'image-*'. Its first and last keys are '0' and '1'"),
     ({}, ["*"], r"has no key '\*'. Its first and last keys are none"),
     ({b"0": _JPEG}, ["*", "label-*"], "sample '0' of .* has no key 'label-0'"),
     ({b"0": _JPEG}, ["0"], r"'0' must have one \*"), ({b"0": _JPEG}, ["*", "*-*"], r"'\*-\*' must have one \*"),
     ({b"0": _JPEG, b"l0": b"\xff"}, ["0*", "l0*"], r"'l0' in .* is not a text in UTF-8 but b'\\xff'"),
     ({b"0": _JPEG, b"l0": struct.pack("<i", 7)}, ["0*", "l0*"], r"'l0' in .* is not a text.*__key__"),
     ({b"0": _JPEG, b"l0": b" " * (1 << 20 | 1)}, ["0*", "l0*"], "has 1048577 bytes, too many"),
     ({b"0": _JPEG, b"0.cls": b"x"}, ["0*", "0*.cls"], r"has 'x' for '0\*.cls': invalid")],
    ids=lambda value: str(value)[:20] if isinstance(value, list) else "",
)  # fmt: skip
def test_values_that_do_not_fit_are_errors(
    tmp_path: Path, content: dict[bytes, bytes], names: list[str], said: str
) -> None:
    path = _write(tmp_path / "x.lmdb", content)
    with pytest.raises(OptionError, match=said.replace("'image-*'", r"'image-\*'")):
        _samples(path, *names)


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    def said(path: Path, message: str) -> None:
        with pytest.raises(OptionError, match=message) as raised:
            list(values_of(str(path)))
        assert repr(str(path)) in str(raised.value)

    path = tmp_path / "named"
    with lmdb.open(str(path), max_dbs=1, subdir=False) as env:
        images = env.open_db(b"images")
        with env.begin(write=True) as txn:
            txn.put(b"1", b"x", db=images)
    said(path, "has a database named 'images' in it")
    good = _write(
        tmp_path / "good", {b"%03d" % n: b"x" * 3000 for n in range(300)}, subdir=False
    ).read_bytes()
    path = tmp_path / "bad"

    def changed(place: int, value: int) -> bytes:
        """Change a byte of both pages that describe the file."""
        made = bytearray(good)
        made[place] = made[4096 + place] = value
        return bytes(made)

    for content, message in (
        (b"", "is no LMDB file"), (b"no LMDB" * 900, "is no LMDB file"), (good[:5000], "cut off or damaged"),
        (good[:50_000], "cut off or damaged"), (changed(20, 2), "has version 2 of LMDB's format"),
        (changed(45, 0x20), "is encrypted"), (changed(92, 4), "may have several values for a key"),
    ):  # fmt: skip
        path.write_bytes(content)
        said(path, message)
