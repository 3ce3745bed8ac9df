"""Members of tar and zip archives, against the files of the same archives after unpacking."""

from __future__ import annotations

import errno
import io
import os
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import folder as reference

from fastpipe.core import archives, shards
from fastpipe.core.archive_paths import Member, find_member, place_of, version_of
from fastpipe.core.archives import ArchiveFolder, members_of
from fastpipe.core.file_identity import identify, is_stale
from fastpipe.core.files import read_file
from fastpipe.core.native import native
from fastpipe.core.shards import read_shards, shard_paths
from fastpipe.errors import OptionError

FOLDERS = ["cat", "dog", "cat/more", "cat-", "cat/é", "train/cat", "train/dog/x", "train"]
NAMES = ["", "1.jpg", "10.jpg", "2.JPG", "a.png", "notes.txt", "x" * 120 + ".jpg", "日本.webp", ".hidden.jpg"]
contents = st.binary(max_size=300) | st.integers(0, 9).map(lambda n: bytes([n]) * 5000)
trees = st.dictionaries(
    st.builds("{}/{}".format, st.sampled_from(FOLDERS), st.sampled_from(NAMES)), contents, max_size=12
)
FORMATS: dict[str, Any] = {
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
    "ustar": tarfile.USTAR_FORMAT,
}


def _tar(path: Path, files: Mapping[str, bytes], kind: str = "pax", prefix: str = "") -> Path:
    """Write an archive.  A name that ends in a slash is a folder's."""
    with tarfile.open(path, "w", format=FORMATS[kind]) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
                continue
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _zip(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, content) in enumerate(files.items()):
            content = b"" if name.endswith("/") else content
            archive.writestr(name, content, [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED][number % 2])
    return path


MAKE: dict[str, Callable[[Path, Mapping[str, bytes]], Path]] = {
    "gnu.tar": lambda path, files: _tar(path, files, "gnu"),
    "pax.tar": lambda path, files: _tar(path, files, "pax", "./"),
    "x.zip": _zip,
}


def _paths(archive: Path) -> dict[str, str]:
    version = version_of(os.stat(archive))
    return {
        name: f"{archive}/@{place_of(*place, version)}/{name}"
        for name, place in members_of(str(archive)).items()
    }


def _native(path: str) -> bytes | None:
    (found,) = native.read_files([os.fsencode(path)])
    return None if found is None else found[0]


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_members_have_the_bytes_of_unpacked_files(kind: str, tree: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = MAKE[kind](Path(folder, kind), tree)
        paths = _paths(archive)
        assert list(paths) == list(tree)
        paths = {name: path for name, path in paths.items() if not name.endswith("/")}
        for name, path in paths.items():
            assert read_file(path) == _native(path) == tree[name]
        identities = [identify(path, b"") for path in paths.values() if find_member(path)]
        places = {find_member(path) for path in paths.values()}
        assert len({one.digest for one in identities}) == len(places)
        assert not any(is_stale(one.note()) for one in identities)
        _zip(archive, {"other": b"x" * 999})
        assert all(is_stale(one.note()) for one in identities)


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=60, deadline=None)
@given(tree=trees, inside=st.sampled_from(["", "train", "train/dog", "none"]), by_function=st.booleans())
def test_a_folder_in_an_archive_has_the_samples_of_the_unpacked_folder(
    kind: str, tree: dict[str, bytes], inside: str, by_function: bool
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        archive, unpacked = MAKE[kind](Path(place, kind), tree), Path(place, "unpacked")
        unpacked.mkdir()
        for name, content in tree.items():
            os.makedirs(os.path.dirname(unpacked / f"{name}x"), exist_ok=True)
            if not name.endswith("/"):
                (unpacked / name).write_bytes(content)
        (unpacked / inside).mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"extensions": reference.IMG_EXTENSIONS}
        if by_function:
            options = {"is_valid_file": lambda path: "1" in os.path.basename(path), "extensions": None}

        def outcome(find: Callable[[], Any], scan: Callable[..., Any]) -> Any:
            try:
                classes, indices = find()
                samples = scan(class_to_idx=indices, allow_empty=len(tree) % 2 == 0, **options)
                return classes, [
                    (read_file(path), os.path.basename(path), target) for path, target in samples
                ]
            except (FileNotFoundError, ValueError) as error:
                return type(error), str(error).split(" in ")[0]

        root = ArchiveFolder.at(archive / inside, keeps=False)
        assert root is not None
        theirs = str(unpacked / inside)
        assert outcome(lambda: root.find_classes(None), root.scan) == outcome(
            lambda: reference.find_classes(theirs),
            lambda **options: reference.make_dataset(theirs, **options),
        )


def test_links_in_a_tar_file_are_the_files_that_they_lead_to(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / "x" / folder).mkdir(parents=True)
    (tmp_path / "x/a/1.jpg").write_bytes(b"1234")
    os.link(tmp_path / "x/a/1.jpg", tmp_path / "x/b/2.jpg")
    (tmp_path / "x/b/3.jpg").symlink_to("../a/1.jpg")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("a/1.jpg", "b/2.jpg", "b/3.jpg"):
            archive.add(tmp_path / "x" / name, name)
    assert [read_file(path) for path in _paths(tmp_path / "x.tar").values()] == [b"1234"] * 3
    (tmp_path / "x/b/3.jpg").unlink()
    (tmp_path / "x/b/3.jpg").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x/b/3.jpg", "b/3.jpg")
    with pytest.raises(OptionError, match=r"'b/3.jpg' is a link to '/etc/passwd'.*--dereference"):
        members_of(str(tmp_path / "x.tar"))


def test_the_last_of_equal_names_counts(tmp_path: Path) -> None:
    _tar(tmp_path / "x.tar", {"a/1.jpg": b"old"})
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        member = tarfile.TarInfo("./a/1.jpg")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"new"))
    assert read_file(_paths(tmp_path / "x.tar")["a/1.jpg"]) == b"new"


def _bad(tmp_path: Path, kind: str) -> Path:
    path, files = tmp_path / "x.tar", {"a/1.jpg": b"1" * 9000, "a/2.jpg": b"2" * 9000}
    if kind == "gzip":
        with tarfile.open(path, "w:gz") as archive:
            archive.add(__file__, "a/1.jpg")
    elif kind == "cut tar":
        data = _tar(path, files).read_bytes()
        path.write_bytes(data[:15000])
    elif kind == "cut zip":
        data = _zip(path, files).read_bytes()
        path.write_bytes(data[:-30])
    elif kind == "lzma":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as members:
            members.writestr("a/1.jpg", b"1" * 9000)
    elif kind == "moved":
        data = bytearray(_zip(path, files).read_bytes())
        at = data.index(b"PK\x01\x02")
        data[at + 42 : at + 46] = struct.pack("<I", 77)
        path.write_bytes(data)
    else:
        path.write_bytes(b"no archive" * 100)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [("gzip", "is compressed as a whole.*gunzip"), ("cut tar", "unexpected end of data"), ("cut zip", "not a zip file"),
     ("lzma", "another method than deflate.*zip -0"), ("moved", "not where the list of members says"),
     ("text", "cannot be read as an archive")],
)  # fmt: skip
def test_an_archive_that_cannot_be_read_is_an_error(tmp_path: Path, kind: str, said: str) -> None:
    path = _bad(tmp_path, kind)
    with pytest.raises(OptionError, match=said) as raised:
        members_of(str(path))
    assert repr(str(path)) in str(raised.value)


def test_bytes_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    archive = _zip(tmp_path / "x.zip", {"0": b"0", "a": b"a" * 5000})
    version, place = version_of(os.stat(archive)), members_of(str(archive))["a"]
    for other, said in {
        place._replace(size=4999): "not inflated to 4999", place._replace(size=5001): "not inflated to 5001",
        place._replace(nbytes=place.nbytes - 1): "damaged in the archive", place._replace(offset=0): "damaged",
        place._replace(nbytes=10**6): "the archive ends after", place._replace(offset=10**17): "the archive ends after 0",
    }.items():  # fmt: skip
        path = f"{archive}/@{place_of(*other, version)}/a"
        with pytest.raises(OSError, match=said) as raised:
            read_file(path)
        assert raised.value.errno == errno.EIO and _native(path) is None
    path = f"{archive}/@{place_of(*place, version ^ 1)}/a"
    with pytest.raises(OSError, match="changed since it was listed") as raised:
        read_file(path)
    assert raised.value.errno == errno.ESTALE and _native(path) is None


@given(
    st.tuples(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1), st.none() | st.integers(0, 10**18 - 1),
              st.integers(0, 2**32 - 1))
)  # fmt: skip
def test_a_path_gives_back_its_place(place: tuple[int, int, int | None, int]) -> None:
    assert find_member(f"/no such/x.tar/@{place_of(*place)}/a/@1+2.01234567/b") == Member(
        "/no such/x.tar", *place
    )


def test_a_path_through_a_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    (tmp_path / "@1+2.01234567").mkdir()
    path = tmp_path / "@1+2.01234567" / "x"
    path.write_bytes(b"12345")
    assert find_member(str(path)) is None and read_file(str(path)) == _native(str(path)) == b"12345"
    assert not is_stale(identify(str(path), b"").note())


def test_lists_are_kept_until_an_archive_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_KEEP_FROM_S", -1.0)
    monkeypatch.setattr(archives, "default_folder", lambda: tmp_path / "cache")
    read: list[str] = []
    tar_members = archives.tar_members
    monkeypatch.setattr(
        shards, "tar_members", lambda file, path: read.append(path) or tar_members(file, path)
    )
    for number in range(2):
        _tar(tmp_path / f"{number}.tar", {f"{number}.jpg": b"j", f"{number}.txt": f"é{number}\n".encode()})
    paths = shard_paths(f"{tmp_path}/?.tar")

    def found(keeps: bool = True) -> Any:
        found = read_shards(paths, "jpg", ["txt", "__key__"], keeps)
        return found.images, found.columns

    first = found()  # the archives are new: a further change might not show
    assert first[1] == {"__key__": ["0", "1"], "txt": ["é0\n", "é1\n"]} and len(read) == 2
    monkeypatch.setattr(archives, "is_settled", lambda changed, now: True)
    assert found() == first and len(read) == 4
    assert found() == first and len(read) == 4
    assert found(keeps=False) == first and len(read) == 6
    _tar(tmp_path / "1.tar", {"9.jpg": b"", "9.txt": b"new"})
    assert found()[1]["txt"] == ["é0\n", "new"] and len(read) == 8
    (kept,) = (tmp_path / "cache").glob("*.npz")
    kept.write_bytes(b"damaged")
    assert found()[1]["txt"] == ["é0\n", "new"] and len(read) == 10
    shutil.rmtree(tmp_path / "cache")
    assert found(keeps=False)[1]["txt"] == ["é0\n", "new"] and not (tmp_path / "cache").exists()


def test_values_of_shards(tmp_path: Path) -> None:
    files = {
        "__info__/x.json": b"no sample", "a/1.seg.png": b"p", "a/1.jpeg": b"j", "a/1.id": b" 7\n", "a/1.left.cls": b"3",
        "a/1.JSON": b'{"x": [1, null]}', "README": b"", "b.2.png": b"x", "b.png": b"q", "b.id": b"8",
        "b.left.cls": b"4", "b.json": b"5",
    }  # fmt: skip
    path = _tar(tmp_path / "x.tar", files)
    found = read_shards([str(path)], "jpg;jpeg;png", ["id", "left.cls", "json", "__key__"], False)
    assert [read_file(image) for image in found.images] == [b"j", b"q"]
    assert found.columns == {
        "id": [7, 8], "left.cls": [3, 4], "json": [{"x": [1, None]}, 5], "__key__": ["a/1", "b"]
    }  # fmt: skip
    assert found.where(1) == f"sample 'b' of {path}"


@pytest.mark.parametrize(
    ("files", "names", "said"),
    [({"a.jpg": b"", "b.txt": b""}, [], r"sample 'b' of .*x.tar' has no file 'jpg'; it has txt"),
     ({"a.jpg": b"", "a.txt": b""}, ["cls"], "sample 'a' .* has no file 'cls'; it has jpg, txt"),
     ({"a.jpg": b"", "a.cls": b"x"}, ["cls"], r"sample 'a' of .*x.tar has 'x' for 'cls': invalid literal"),
     ({"a.jpg": b"", "a.json": b"{"}, ["json"], "has '{' for 'json'"),
     ({"a.jpg": b"", "a.txt": b"\xff"}, ["txt"], "'a.txt' in .* is not a text in UTF-8"),
     ({"a.jpg": b"", "a.txt": b"1" * (1 << 20 | 1)}, ["txt"], "has 1048577 bytes, too many"),
     ({"a.jpg": b"", "a.pyd": b""}, ["pyd"], "values of 'pyd' are not known")],
)  # fmt: skip
def test_a_sample_that_lacks_a_value_is_an_error(
    tmp_path: Path, files: dict[str, bytes], names: list[str], said: str
) -> None:
    path = _tar(tmp_path / "x.tar", files)
    with pytest.raises(OptionError, match=said):
        read_shards([str(path)], "jpg", names, False)


def test_patterns_name_shards(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        (tmp_path / f"x-{number:03}.tar").touch()
    there = [f"{tmp_path}/x-{number:03}.tar" for number in (9, 10, 11)]
    assert shard_paths(f"{tmp_path}/x-*.tar") == shard_paths(f"{tmp_path}/x-{{009..011}}.tar") == there
    assert shard_paths("{a,b}-{0..1}.tar") == ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]
    (tmp_path / "{1..2}.tar").touch()
    assert shard_paths(f"{tmp_path}/{{1..2}}.tar") == [f"{tmp_path}/{{1..2}}.tar"]
    with pytest.raises(FileNotFoundError, match="no file matches"):
        shard_paths(f"{tmp_path}/y-*.tar")
    with pytest.raises(OptionError, match="must be a file of this machine: copy it"):
        shard_paths("s3://x/{0..2}.tar")


def test_zlib_and_the_native_core_agree_about_deflate(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for level in (0, 1, 9):
        data = rng.integers(0, 3, 70_000, np.uint8).tobytes()
        packer = zlib.compressobj(level, wbits=-15)
        packed = packer.compress(data) + packer.flush()
        (tmp_path / "x").write_bytes(packed)
        version = version_of(os.stat(tmp_path / "x"))
        path = f"{tmp_path}/x/@{place_of(0, len(packed), len(data), version)}/y"
        assert read_file(path) == _native(path) == data
