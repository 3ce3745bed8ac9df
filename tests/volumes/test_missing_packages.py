"""A package that is missing, or lacks a codec, is named with its pip command, and never taken for damaged data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numcodecs
import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image
from volume_files import FORMATS

from fastpipe import FastLoader, FastPatchDataset
from fastpipe.errors import BadSampleError, MissingDependencyError, VolumeError
from fastpipe.sampling import Grid
from fastpipe.volumes import tiff
from fastpipe.volumes.blosc2 import _library
from fastpipe.volumes.opening import open_volume

DATA = (np.arange(64 * 64) % 251).reshape(64, 64).astype("u1")


def to_zarr(**options: Any) -> Callable[[Path], Any]:
    return lambda path: zarr.create_array(path, data=DATA, chunks=(16, 16), **options)


def to_zip(path: Path) -> None:
    with zarr.storage.ZipStore(path, mode="w") as store:
        zarr.create_array(store, data=DATA, chunks=(16, 16))


def to(name: str) -> Callable[[Path], Any]:
    return lambda path: FORMATS[name].write(path, DATA, (16, 16))


def to_spm(path: Path) -> None:
    """An image that has its place in space in a file of MATLAB's, which nibabel reads by scipy."""
    nibabel.save(nibabel.Spm99AnalyzeImage(DATA[..., None].astype("f4"), np.diag([2, 3, 4, 1.0])), path)


def to_zfpy(path: Path) -> None:
    to_zarr(zarr_format=2, compressors=None)(path)
    text = (path / ".zarray").read_text()
    text = text.replace('"compressor": null', '"compressor": {"id": "zfpy", "mode": 4}')
    (path / ".zarray").write_text(text)


OF_VOLUMES = "'.[volume]'"
CASES: dict[str, tuple[str, Callable[[Path], Any], str, str]] = {
    "tiff": ("x.tif", to("tiff"), "tifffile", OF_VOLUMES), "nifti": ("x.nii", to("nifti"), "nibabel", OF_VOLUMES),
    "nifti packed": ("x.nii.gz", to("nifti"), "nibabel", OF_VOLUMES), "spm": ("x.img", to_spm, "scipy.io", "scipy"),
    "blosc2": ("x.b2nd", to("blosc2"), "blosc2", OF_VOLUMES), "blosc2 header": ("x.b2nd", to("blosc2"), "msgpack", OF_VOLUMES),
    "dicom": ("x", lambda path: FORMATS["dicom"].write(path, DATA[None]), "pydicom", OF_VOLUMES),
    "hdf5": ("x.h5", to("hdf5"), "h5py", "'.[hdf5]'"), "n5": ("x.n5", to("n5"), "tensorstore", OF_VOLUMES),
    "zarr order": ("x.zarr", to_zarr(zarr_format=2, order="F"), "tensorstore", OF_VOLUMES),
    "zarr filter": ("x.zarr", to_zarr(zarr_format=2, filters=[numcodecs.Delta("|u1")]), "zarr", OF_VOLUMES),
    "zarr zip": ("x.zarr.zip", to_zip, "zarr", OF_VOLUMES), "zarr zfpy": ("x.zarr", to_zfpy, "zfpy", "zfpy"),
    "zarr crc32c": ("x.zarr", to_zarr(zarr_format=2, compressors=[numcodecs.registry.get_codec({"id": "crc32c"})]),
                    "google_crc32c", "google-crc32c"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_missing_package_is_named_when_the_dataset_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, write, package, command = CASES[case]
    write(tmp_path / name)
    np.save(tmp_path / "good.npy", DATA if case != "spm" else DATA[..., None].astype("f4"))
    monkeypatch.setitem(sys.modules, package, None)
    _library.cache_clear()  # as in a process that has read none of these files yet
    for policy in ("raise", "skip", "replace"):
        for given in (tmp_path / name, [tmp_path / "good.npy", tmp_path / name]):
            with pytest.raises(MissingDependencyError) as caught:
                FastPatchDataset(given, (1,) * (3 if case in ("spm", "dicom") else 2), bad_samples=policy)
            assert f"pip install {command}" in str(caught.value)


@pytest.mark.parametrize("error", [AttributeError, OSError, ImportError])
def test_a_broken_package_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A package too old for NumPy fails while it is imported: no reason to call a file damaged."""
    to("nifti")(tmp_path / "x.nii")

    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "nibabel":
                raise error("libx.so: undefined symbol")

    for name in [name for name in sys.modules if name.partition(".")[0] == "nibabel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    # An AttributeError would say that fastpipe has not the name that is being looked up.
    expected = ImportError if error is AttributeError else error
    with pytest.raises(expected, match=r"libx\.so") as caught:
        open_volume(tmp_path / "x.nii")
    assert not isinstance(caught.value, VolumeError)


def without_lzw(monkeypatch: pytest.MonkeyPatch, *, is_installed: bool) -> str:
    """Leave tifffile without a codec: without imagecodecs, or with one that was built without it."""

    def stub(*_: Any, **__: Any) -> None:
        raise ImportError("could not import name 'lzw_decode' from 'imagecodecs'")

    codecs: Any = tifffile._imagecodecs  # type: ignore[attr-defined]
    if is_installed:
        codecs = SimpleNamespace(lzw_decode=stub, __version__="1.2.3")
    monkeypatch.setattr(tifffile.tifffile, "imagecodecs", codecs)
    monkeypatch.setattr(tifffile.TIFF.DECOMPRESSORS, "_codecs", {1: bytes})
    monkeypatch.setitem(sys.modules, "imagecodecs", codecs if is_installed else None)
    monkeypatch.setattr(tiff, "_decoded", set())
    return "pip install --upgrade 'imagecodecs[all]'" if is_installed else "pip install imagecodecs"


def to_lzw(path: Path) -> None:
    Image.fromarray(DATA).save(path, compression="tiff_lzw")


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_codec_of_tiff_that_is_missing_is_named_when_the_dataset_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    to_lzw(tmp_path / "lzw.tif")
    tifffile.imwrite(tmp_path / "raw.tif", DATA, photometric="minisblack")
    command = without_lzw(monkeypatch, is_installed=is_installed)
    for policy in ("raise", "skip", "replace"):
        with pytest.raises(MissingDependencyError) as caught:
            FastPatchDataset([tmp_path / "raw.tif", tmp_path / "lzw.tif"], (32, 32), bad_samples=policy)
        assert command in str(caught.value)


def test_a_slice_that_needs_a_missing_codec_is_no_bad_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of a folder are looked at when they are read."""
    tifffile.imwrite(tmp_path / "1.tif", DATA, photometric="minisblack", compression="zlib", rowsperstrip=64)
    to_lzw(tmp_path / "2.tif")
    command = without_lzw(monkeypatch, is_installed=False)
    dataset = FastPatchDataset(tmp_path, (1, 64, 64), sampling=Grid(), bad_samples="skip")
    with pytest.raises(MissingDependencyError) as caught:
        list(FastLoader(dataset, batch_size=1))
    assert command in str(caught.value)


def test_a_damaged_first_strip_is_still_a_bad_sample(tmp_path: Path) -> None:
    """Looking whether a strip can be decoded must not turn damage into an error of the whole file."""
    tifffile.imwrite(
        tmp_path / "x.tif", DATA, photometric="minisblack", compression="zlib", predictor=2, rowsperstrip=32
    )
    with tifffile.TiffFile(tmp_path / "x.tif") as file:
        first = file.pages[0].dataoffsets[0]  # type: ignore[union-attr]
    content = bytearray((tmp_path / "x.tif").read_bytes())
    content[first : first + 8] = bytes(8)
    (tmp_path / "x.tif").write_bytes(content)
    dataset = FastPatchDataset(tmp_path / "x.tif", (32, 64), sampling=Grid())
    with pytest.raises(BadSampleError, match=r"x\.tif"):
        dataset[0]
    assert np.array_equal(dataset[1], DATA[32:])


def test_a_package_that_a_url_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[s3\]'"):
        FastPatchDataset("az://container/x.zarr", (2, 2))
