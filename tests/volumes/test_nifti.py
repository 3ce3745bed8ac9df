"""NIfTI: what nibabel reads, of single files and of pairs, and of compressed ones from a copy."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kit import same_bits, whole

from fastpipe.errors import VolumeError
from fastpipe.volumes.nifti import unpack
from fastpipe.volumes.opening import open_volume

SHAPE = (5, 6, 7)


def write(path: Path, kind: str = "<u2", scale: tuple[float, float] = (1, 0)) -> Any:
    """An image, and what nibabel reads of it."""
    data = np.random.default_rng(0).integers(0, 99, SHAPE).astype(kind)
    header = nibabel.Nifti1Header(endianness=">" if kind[0] == ">" else "<")
    header.set_data_dtype(data.dtype)
    make = nibabel.Nifti1Pair if path.suffix == ".img" else nibabel.Nifti1Image
    image = make(data, np.eye(4), header)
    image.header.set_slope_inter(*scale)
    image.to_filename(path)
    return np.asanyarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["u1", "<i2", ">i2", "<f4", ">f4", "<f8"]),
    scale=st.sampled_from([(1, 0), (2.5, 0), (0.1, -7)]), name=st.sampled_from(["x.nii", "x.nii.gz", "x.img"]),
)  # fmt: skip
def test_any_image_is_as_nibabel_reads_it(
    kind: str, scale: tuple[float, float], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("nifti")
    expected = write(folder / name, kind, scale)
    assert same_bits(whole(open_volume(folder / name, may_write=True)), expected)


@pytest.mark.parametrize("name", ["x.hdr", "x.img"])
def test_the_elements_of_a_pair_are_those_of_its_second_file(tmp_path: Path, name: str) -> None:
    expected = write(tmp_path / "x.img")
    np.testing.assert_array_equal(whole(open_volume(tmp_path / name)), expected)


def test_no_more_is_unpacked_than_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    expected = write(tmp_path / "x.nii")
    image = (tmp_path / "x.nii").read_bytes()
    with gzip.open(tmp_path / "x.nii.gz", "wb", compresslevel=1) as file:
        file.write(image + bytes(20 << 20))
    volume = open_volume(tmp_path / "x.nii.gz", may_write=True)
    np.testing.assert_array_equal(whole(volume), expected)
    (copy,) = (tmp_path / "kept").rglob("*.raw")
    assert copy.stat().st_size == len(image)


def test_the_end_of_a_compressed_image_is_checked(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(bytes(1000)))
    content[-6] ^= 1  # of its checksum
    (tmp_path / "x.nii.gz").write_bytes(content)
    with pytest.raises(VolumeError, match=r"x\.nii\.gz is damaged"):
        unpack(os.fspath(tmp_path / "x.nii.gz"), io.BytesIO(), 1000)


def test_without_a_place_for_a_copy_the_remedy_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x.nii.gz")
    with pytest.raises(
        VolumeError, match=r'which cache="off" forbids: give cache="auto".*gunzip .*x\.nii\.gz'
    ):
        open_volume(tmp_path / "x.nii.gz")


def test_an_image_that_was_replaced_is_an_error_once_its_copy_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "x.nii.gz"
    write(path)
    before = open_volume(path, may_write=True)
    write(path, "<f8")
    open_volume(path, may_write=True)
    with pytest.raises(VolumeError, match=r"x\.nii\.gz has changed since it was opened"):
        whole(before)


@pytest.mark.parametrize("name", ["x.nii", "x.nii.gz"])
def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, name: str, replaced_after: Any) -> None:
    (tmp_path / "new").mkdir()
    write(tmp_path / name)
    write(tmp_path / "new" / name, "<f8")
    replaced_after("nibabel.load", tmp_path / name, tmp_path / "new" / name)
    volume = open_volume(tmp_path / name, may_write=True)
    with pytest.raises(VolumeError, match="has changed since it was opened"):
        whole(volume)
