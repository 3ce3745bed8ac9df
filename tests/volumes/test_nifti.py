"""NIfTI: what a header can say, as nibabel reads it, and the copies from which compressed images are read."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import nibabel
import numpy as np
import pytest
from volume_files import read_nifti
from volume_kit import same_bits, whole

from fastpipe import FastPatchDataset
from fastpipe.errors import CacheError, VolumeError
from fastpipe.sampling import Grid
from fastpipe.volumes import nifti
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import DamagedUnitError

SHAPE = (5, 6, 7)


def write(
    path: Path, kind: Any = "<u2", shape: tuple[int, ...] = SHAPE, order: str = "<", image: Any = None,
    scale: Any = None, extension: bool = False,
) -> None:  # fmt: skip
    dtype, count = np.dtype(kind), int(np.prod(shape))
    image = image or (nibabel.Nifti1Pair if path.suffix == ".img" else nibabel.Nifti1Image)
    values = np.random.default_rng(0).integers(0, 99, count * (3 if dtype.fields else 1))
    data = (values.astype("u1").view(dtype) if dtype.fields else values.astype(dtype)).reshape(shape)
    header = image.header_class(endianness=order)
    header.set_data_dtype(dtype if dtype.fields else dtype.newbyteorder(order))
    made = image(data, np.eye(4), header)
    if scale:
        made.header.set_slope_inter(*scale)
    if extension:
        made.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"hello" * 20))
    made.to_filename(path)


def put(path: Path, offset: int, form: str, *values: Any) -> None:
    file = path.with_suffix(".hdr") if path.suffix == ".img" else path
    content = bytearray(file.read_bytes())
    struct.pack_into(form, content, offset, *values)
    file.write_bytes(content)


def check(path: Path) -> None:
    """The array is nibabel's; or there is an error, where nibabel has one."""
    try:
        expected = read_nifti(path)
    except Exception:
        with pytest.raises(VolumeError, match=path.stem) as caught:
            open_volume(path, may_write=True)
        assert not isinstance(caught.value, DamagedUnitError)
    else:
        assert same_bits(whole(open_volume(path, may_write=True)), expected)


@pytest.mark.parametrize("kind", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16"])
def test_elements_are_scaled_as_nibabel_scales_them(tmp_path: Path, kind: str) -> None:
    scales = None, (1, 0), (2, 0), (2.5, -3), (1, 5), (1 / 85, 0), (-1, 0)
    for number, (order, scale) in enumerate(itertools.product("<>", scales)):
        write(tmp_path / f"{number}.nii", kind, order=order, scale=scale)
        check(tmp_path / f"{number}.nii")
        patch = FastPatchDataset(tmp_path / f"{number}.nii", SHAPE, sampling=Grid())[0]
        assert same_bits(patch, read_nifti(tmp_path / f"{number}.nii"))


def test_colours_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path / "x.nii", np.dtype([(colour, "u1") for colour in "RGB"]))
    with pytest.raises(VolumeError, match=r"x\.nii has elements of .*'R'.*, and not numbers"):
        open_volume(tmp_path / "x.nii")


@pytest.mark.parametrize("kind", ["i2", "f4"])
def test_slopes_that_say_nothing_and_impossible_intercepts_are_as_for_nibabel(
    tmp_path: Path, kind: str
) -> None:
    slopes = 0.0, -0.0, np.nan, np.inf, 1.0, 2.0, 1e-45, 3.4e38
    for slope, intercept in itertools.product(slopes, (0.0, -0.0, 5.0, np.nan, np.inf)):
        write(tmp_path / "x.nii", kind)
        put(tmp_path / "x.nii", 112, "<2f", slope, intercept)
        check(tmp_path / "x.nii")


@pytest.mark.parametrize("name", ["x.nii", "x.nii.gz", "x.img"])
def test_any_number_of_dimensions_is_read(tmp_path: Path, name: str) -> None:
    for shape in (
        (5,), (5, 6), (5, 6, 1), (5, 6, 7, 3), (5, 6, 7, 1, 3), (5, 6, 7, 1, 1), (2, 2, 2, 1, 1, 1, 2), (1, 1, 1)
    ):  # fmt: skip
        write(tmp_path / name, "i2", shape, scale=(2, 1))
        check(tmp_path / name)
    write(tmp_path / name, "i2", extension=True)
    check(tmp_path / name)
    if name == "x.img":
        check(tmp_path / "x.hdr")


# Where in the header, and what: dimensions, codes of elements, and what does not change the array.
HEADERS: list[tuple[int, str, tuple[Any, ...]]] = [
    *((40, f"<{len(dims)}h", dims) for dims in (
        (0, 5, 6, 7), (1, 5, 6, 7), (3, 5, 6, 7, 9, 9, 9, 9), (4, 5, 6, 7, 0), (7, 5, 6, 7, 1, 1, 1, 1), (8, 5, 6, 7),
        (-1, 5, 6, 7), (3, -5, 6, 7), (3, 5, 6, 0), (5, 5, 6, 7, 1, 1))),
    *((70, "<h", (code,)) for code in (0, 1, 2, 4, 16, 256, 768, 1536, 2048, 999)),
    *((68, "<h", (intent,)) for intent in (1001, 1002, 1005, 1007, 2003)), *((72, "<h", (bits,)) for bits in (0, 8, 32)),
    *((252, "<2h", pair) for pair in ((0, 0), (1, 0), (0, 1), (2, 4))), (123, "b", (10,)), (124, "<2f", (10.0, 5.0)),
    (344, "4s", (b"ni1\0",)), (344, "4s", (b"xxxx",)),
    *((108, "<f", (offset,)) for offset in (0.0, 16.0, 348.0, 352.5, 353.0, 1e9, -16.0, np.nan)),
]  # fmt: skip


@pytest.mark.parametrize(("offset", "form", "values"), HEADERS)
def test_a_header_is_understood_as_nibabel_understands_it(
    tmp_path: Path, offset: int, form: str, values: Any
) -> None:
    kind, shape = "u1" if offset == 70 else "i2", SHAPE if offset in (40, 108) else (5, 6, 7, 1, 3)
    for name in ("x.nii", "x.img") if offset == 108 else ("x.nii",):
        write(tmp_path / name, kind, shape)
        put(tmp_path / name, offset, form, *values)
        check(tmp_path / name)


@pytest.mark.parametrize("image", [nibabel.Nifti1Pair, nibabel.Nifti2Image, nibabel.Nifti2Pair, nibabel.AnalyzeImage,
                                   nibabel.Spm99AnalyzeImage, nibabel.Spm2AnalyzeImage])  # fmt: skip
def test_relatives_of_the_format_are_read(tmp_path: Path, image: Any) -> None:
    for order, ending in itertools.product("<>", ("", ".gz")):
        path = tmp_path / (("x.nii" if image is nibabel.Nifti2Image else "x.img") + ending)
        write(path, "i2", order=order, image=image, scale=None if image is nibabel.AnalyzeImage else (2, 0))
        check(path)


def test_a_packed_image_under_another_name_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "y.nii")
    content = (tmp_path / "y.nii").read_bytes()
    (tmp_path / "x.nii").write_bytes(gzip.compress(content))
    check(tmp_path / "x.nii")
    (tmp_path / "z.nii.gz").write_bytes(content)
    check(tmp_path / "z.nii.gz")


def test_no_more_is_unpacked_than_the_header_says(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "x.nii")
    image = (tmp_path / "x.nii").read_bytes()
    (tmp_path / "x.nii.gz").write_bytes(gzip.compress(image + bytes(20 << 20), 1))
    volume = open_volume(tmp_path / "x.nii.gz", may_write=True)
    np.testing.assert_array_equal(whole(volume), read_nifti(tmp_path / "x.nii"))
    (copy,) = folder.glob("*.raw")
    assert copy.stat().st_size == len(image)


def test_the_end_of_a_compressed_image_is_checked(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(bytes(1000)))
    content[-6] ^= 1  # of its checksum
    (tmp_path / "x.nii.gz").write_bytes(content)
    with pytest.raises(VolumeError, match=r"x\.nii\.gz is damaged"):
        nifti.unpack(os.fspath(tmp_path / "x.nii.gz"), io.BytesIO(), 1000)


def test_without_a_place_for_a_copy_the_remedy_is_named(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "x.nii.gz")
    said = r'which cache="off" forbids: give cache="auto".*gunzip .*x\.nii\.gz'
    with pytest.raises(VolumeError, match=said):
        open_volume(tmp_path / "x.nii.gz")
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # others might write to it
    with pytest.raises(CacheError):
        open_volume(tmp_path / "x.nii.gz", may_write=True)


def test_an_image_that_was_replaced_is_an_error_once_its_copy_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "x.nii.gz"
    write(path)
    before = open_volume(path, may_write=True)
    write(path, "<f8")
    open_volume(path, may_write=True)
    with pytest.raises(VolumeError, match=r"x\.nii\.gz has changed since it was opened"):
        whole(before)


def filling(data: bytes) -> Mock:
    """Writes a copy, and counts how often."""
    return Mock(side_effect=lambda file: file.write(data))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fastpipe" / "converted"


def copy_of(source: Path | str, nbytes: int, fill: Any) -> str:
    path, status = nifti.converted_file(str(source), nbytes, fill)
    now = os.stat(path)
    assert (status.st_ino, status.st_size, status.st_mtime_ns) == (now.st_ino, now.st_size, now.st_mtime_ns)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source.gz").write_bytes(b"packed")
    return tmp_path / "source.gz"


def test_a_copy_is_made_once_for_each_state_of_a_file(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = filling(b"unpacked")
    path = copy_of(source, 8, fill)
    monkeypatch.chdir(source.parent)
    assert {path} == {copy_of(name, 8, fill) for name in (source, source, "source.gz")}
    assert (fill.call_count, Path(path).read_bytes(), Path(path).parent) == (1, b"unpacked", folder)
    assert [os.stat(one).st_mode & 0o077 for one in (folder, path)] == [0, 0]
    (folder / "notes.txt").write_text("mine")
    os.utime(folder / "notes.txt", (0, 0))
    source.write_bytes(b"packed anew")
    second = copy_of(source, 3, filling(b"two"))
    assert Path(second).read_bytes() == b"two"
    assert set(os.listdir(folder)) == {"locks", os.path.basename(second), "notes.txt"}
    os.truncate(second, 2)
    assert Path(copy_of(source, 3, filling(b"two"))).read_bytes() == b"two"
    other = source.with_name("other.gz")
    other.write_bytes(b"packed anew")
    assert Path(copy_of(other, 3, filling(b"one"))).read_bytes() == b"one"


def test_an_error_leaves_no_copy(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        copy_of(source, 8, failing)
    with pytest.raises(FileNotFoundError):
        copy_of(source.with_name("none.gz"), 3, filling(b"one"))
    with monkeypatch.context() as patch:
        patch.setattr(nifti, "free_disk", lambda descriptor: (1 << 28) + (3 << 20))
        said = r"source\.gz is read from a copy of 4 MiB .* has room for 3 MiB.*XDG_CACHE_HOME"
        with pytest.raises(CacheError, match=said):
            copy_of(source, 4 << 20, filling(b""))
    assert set(os.listdir(folder)) <= {"locks"}
    assert Path(copy_of(source, 8, filling(b"unpacked"))).read_bytes() == b"unpacked"


def test_copies_not_used_for_long_are_removed_when_another_is_made(source: Path, folder: Path) -> None:
    paths, long_ago = [source.with_name(f"{number}.gz") for number in range(3)], time.time() - 31 * 86400
    for path in paths:
        path.write_bytes(b"packed")
    copies = [copy_of(path, 3, filling(b"one")) for path in paths]
    for copy in copies[:2]:
        os.utime(copy, (long_ago, long_ago))
    copy_of(paths[0], 3, filling(b"one"))  # used: it stays
    kept = copies[0], copies[2], copy_of(source, 3, filling(b"new"))
    assert {str(path) for path in folder.glob("*.raw")} == set(kept)


def test_a_copy_that_several_want_at_once_is_made_once(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, comes, others = nifti.LockFile.take, threading.Event(), filling(b"another!")
    found: list[Any] = []

    def counted(lock: nifti.LockFile, byte: int, **how: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            comes.set()
        return take(lock, byte, **how)

    def fill(file: BinaryIO) -> None:
        found.append(pool.submit(copy_of, source, 8, others))
        assert comes.wait(30)
        file.write(b"unpacked")

    monkeypatch.setattr(nifti.LockFile, "take", counted)
    with ThreadPoolExecutor(4) as pool:
        path = copy_of(source, 8, fill)
        found += [pool.submit(copy_of, source, 8, others) for _ in range(20)]
        assert {one.result(30) for one in found} == {path}
    assert (others.call_count, Path(path).read_bytes()) == (0, b"unpacked")
    assert set(os.listdir(folder)) == {"locks", os.path.basename(path)}
