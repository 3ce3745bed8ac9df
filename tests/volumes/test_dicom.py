"""Series of DICOM images: read as by pydicom, and typed as by SimpleITK; what is not supported is named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_files import read_dicom, write_dicom
from volume_kit import same_bits, whole

from fastpipe import Cache, FastLoader, FastPatchDataset
from fastpipe.errors import OptionError, VolumeError
from fastpipe.sampling import Grid, Uniform
from fastpipe.volumes.dicom import DicomVolume, dicom_folder
from fastpipe.volumes.opening import open_volume

DATA = np.random.default_rng(0).integers(0, 4096, (6, 5, 7)).astype("u2")
AXIAL, CORONAL, SAGITTAL = (1, 0, 0, 0, 1, 0), (1, 0, 0, 0, 0, -1), (0, 1, 0, 0, 0, -1)


def stored(kind: str, shape: Any, seed: int) -> Any:
    """Return elements of any bits, also of those that are not used."""
    size = np.prod(shape) * np.dtype(kind).itemsize
    return np.random.default_rng(seed).integers(0, 256, size).astype("u1").view(kind).reshape(shape)


@st.composite
def series(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["u1", "i1", "u2", "i2", "u4", "i4"]))
    most = 8 * np.dtype(kind).itemsize
    scales = [None, (1, 0), (1, -1024), (2, 5), (-1, 100), (0.5, 3), (1, -0.5), (70000, 1)]
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 300)))
    options = {
        "scale": draw(st.sampled_from(scales)), "bits": draw(st.integers(max(1, most // 2), most)),
        "directions": draw(st.sampled_from([AXIAL, CORONAL, SAGITTAL])), "step": draw(st.sampled_from([0.5, 3.0])),
        "syntax": draw(st.sampled_from([pydicom.uid.ExplicitVRLittleEndian, pydicom.uid.ImplicitVRLittleEndian])),
    }  # fmt: skip
    return stored(kind, shape, draw(st.integers(0, 99))), options


@settings(max_examples=60)
@given(case=series())
def test_a_series_has_the_values_of_pydicom(case: Any) -> None:
    """By the native core, by Python, and by pydicom in a stock dataset; bits that are not used are ignored."""
    data, options = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        write_dicom(path, data, **options)
        expected, volume = read_dicom(path), open_volume(path)
        dataset = FastPatchDataset(path, data.shape, sampling=Grid(), cache=Cache("ram", 1 << 20))
        for found in (whole(volume), dataset[0], dataset._stock()[0]):
            assert found.dtype == volume.dtype and np.array_equal(found, expected)


# The dtypes that ImageSeriesReader of SimpleITK 2.5.7 returned for these series.
@pytest.mark.parametrize(
    ("kind", "bits", "scale", "expected"),
    [
        ("u2", 12, None, "u2"), ("i2", 16, None, "i2"), ("u2", 12, (1, 0), "u2"), ("u2", 8, (1, 0), "u2"),
        ("u2", 12, (1, -1024), "i2"), ("i2", 13, (1, -1000), "i2"), ("i2", 16, (1, -1024), "i4"),
        ("u2", 16, (2, 5), "u4"), ("u2", 15, (-1, 0), "i2"), ("u2", 8, (1, 100), "u2"), ("u1", 8, (1, -100), "i2"),
        ("u1", 8, (2, 0), "u2"), ("u4", 32, (1, -5), "f8"), ("u2", 12, (0.5, 3), "f8"), ("u2", 12, (1, -1024.5), "f8"),
    ],
)  # fmt: skip
def test_values_have_the_type_of_simpleitk(
    tmp_path: Path, kind: str, bits: int, scale: Any, expected: str
) -> None:
    write_dicom(tmp_path / "x", stored(kind, (2, 3, 4), 0), bits=bits, scale=scale)
    assert open_volume(tmp_path / "x").dtype == expected


def test_slices_may_be_scaled_each_in_its_own_way(tmp_path: Path) -> None:
    """As those of PET are."""

    def change(number: int, header: Any) -> None:
        header.RescaleSlope, header.RescaleIntercept = 0.25 * (number + 1), 0

    write_dicom(tmp_path / "x", DATA, change=change)
    dataset = FastPatchDataset(tmp_path / "x", (3, 4, 5), sampling=Grid(2))
    expected = read_dicom(tmp_path / "x")
    for start, patch in zip(dataset.places()[1].tolist(), dataset, strict=True):
        box = tuple(slice(at, at + side) for at, side in zip(start, (3, 4, 5), strict=True))
        assert same_bits(patch, expected[box])


@pytest.mark.parametrize("options", [{}, {"bits": 12, "scale": (1, -1024)}, {"scale": (0.5, 1)}])
@pytest.mark.parametrize("orientation", [None, "RAS"])
def test_the_native_core_reads_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, orientation: str | None
) -> None:
    write_dicom(tmp_path / "x", DATA, **options)
    monkeypatch.delattr(DicomVolume, "open")
    monkeypatch.setattr(DicomVolume, "__abstractmethods__", frozenset())
    dataset = FastPatchDataset(
        tmp_path / "x", (2, 2, 2), sampling=Uniform(9), seed=1, orientation=orientation
    )
    assert len(list(FastLoader(dataset, batch_size=3))) == 3


@settings(max_examples=40)
@given(
    st.integers(0, 9999),
    st.sampled_from(["RAS", "LPS", "ASR", "PIL"]),
    st.sampled_from([None, (1, -1024), (0.5, 0)]),
)
def test_orientation_is_that_of_nibabel(seed: int, orientation: str, scale: Any) -> None:
    """For an image of the same array, with the affine that the standard defines."""
    random = np.random.default_rng(seed)
    axes = np.eye(3)[random.permutation(3)] * random.choice([-1, 1], 3)[:, None]
    angle = random.uniform(-0.1, 0.1)
    row = axes[0] * np.cos(angle) + axes[1] * np.sin(angle)
    column = axes[1] * np.cos(angle) - axes[0] * np.sin(angle)
    step, start = float(random.uniform(0.5, 5)), random.uniform(-99, 99, 3)
    affine = np.eye(4)
    affine[:3] = np.stack([np.cross(row, column) * step, column * 0.7, row * 0.9, start], axis=1)
    affine[:2] *= -1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        write_dicom(path, DATA, scale=scale, directions=(*row, *column), step=step, start=start)
        volume: Any = dicom_folder(str(path))
        image: Any = nibabel.Nifti1Image(read_dicom(path).astype("f8"), affine)
        np.testing.assert_allclose(volume.affine, affine, atol=1e-5)
        change = nibabel.orientations.ornt_transform(
            nibabel.io_orientation(affine), nibabel.orientations.axcodes2ornt(orientation)
        )
        expected = np.asanyarray(image.as_reoriented(change).dataobj)
        dataset = FastPatchDataset(path, expected.shape, sampling=Grid(), orientation=orientation)
        for found in (dataset[0], dataset._stock()[0]):
            assert np.array_equal(found, expected)


def test_lists_patterns_pairs_and_files_name_series(tmp_path: Path) -> None:
    for number in range(2):
        write_dicom(tmp_path / f"case{number}" / "ct", DATA + number)
        write_dicom(tmp_path / f"case{number}" / "seg", (DATA % 3).astype("u1"))
    cases = [(f"{tmp_path}/case{number}/ct/", f"{tmp_path}/case{number}/seg") for number in range(2)]
    files = [[str(file) for file in Path(image).iterdir()] for image, _ in cases]
    images, labels = (list(column) for column in zip(*cases, strict=True))
    for volume, others in (
        (cases, None), (images, labels), (files, labels), (f"{tmp_path}/*/ct", f"{tmp_path}/*/seg"),
    ):  # fmt: skip
        dataset = FastPatchDataset(volume, DATA.shape, labels=others, sampling=Grid())
        for number, (image, seg) in enumerate(dataset):
            assert same_bits(image, DATA + number) and same_bits(seg, (DATA % 3).astype("u1"))


def test_a_series_of_several_is_named_behind_the_folder(tmp_path: Path) -> None:
    write_dicom(tmp_path / "x", DATA, series="1.2.3")
    write_dicom(tmp_path / "x", DATA[:4] + 1, series="1.2.4")
    with pytest.raises(
        VolumeError, match=rf"2 series; name one of these: .*{tmp_path}/x/1\.2\.4 \(4 files, CT a scan"
    ):
        open_volume(tmp_path / "x")
    with pytest.raises(VolumeError, match=r"no series 1\.2\.5; name one of these"):
        open_volume(tmp_path / "x" / "1.2.5")
    write_dicom(tmp_path / "x", DATA[:1], series="1.2.6", change=compressed)  # another one may be of any kind
    assert same_bits(whole(open_volume(tmp_path / "x" / "1.2.4")), DATA[:4] + 1)
    (tmp_path / "empty").mkdir()
    for missing in ("empty/1.2.3", "missing", "x/missing"):
        with pytest.raises(FileNotFoundError, match=missing):
            open_volume(tmp_path / missing)


def test_other_files_are_left_out(tmp_path: Path) -> None:
    """Such as reports, folders, and objects without an image."""
    path = tmp_path / "x"
    write_dicom(path, DATA)
    (path / "README").write_text("no image")
    (path / ".hidden.dcm").write_bytes(b"no image")
    (path / "folder.dcm").mkdir()
    report = pydicom.dcmread(next(path.glob("*-1.2.3.dcm")))
    del report.Rows, report.PixelData
    report.SeriesInstanceUID = "1.2.9"
    report.file_meta.MediaStorageSOPClassUID = report.SOPClassUID = pydicom.uid.BasicTextSRStorage
    report.save_as(path / "report")
    assert same_bits(whole(open_volume(path)), DATA)
    with pytest.raises(VolumeError, match="report has no image"):
        open_volume([path / "report"])  # type: ignore[list-item]


def test_one_file_is_no_volume(tmp_path: Path) -> None:
    write_dicom(tmp_path / "x", DATA[:1])
    file = next((tmp_path / "x").iterdir())
    with pytest.raises(VolumeError, match="is a DICOM file, and a volume is a series of these"):
        open_volume(file)
    assert same_bits(whole(open_volume([str(file)])), DATA[:1])


def at(slice_: int, **values: Any) -> Callable[[int, Any], None]:
    """Return a function that sets values in the header of a slice; those that are None are removed."""

    def change(number: int, header: Any) -> None:
        for name, value in values.items() if number == slice_ else ():
            if value is None:
                delattr(header, name)
            else:
                setattr(header, name, value)

    return change


def compressed(number: int, header: Any) -> None:
    header.compress(pydicom.uid.RLELossless, generate_instance_uid=False)


def floats(number: int, header: Any) -> None:
    header.FloatPixelData = header.PixelData
    del header.PixelData


def table(number: int, header: Any) -> None:
    header.ModalityLUTSequence = [pydicom.Dataset()]


BAD: dict[str, tuple[Callable[[int, Any], None], str]] = {
    "compressed": (compressed, r"transfer syntax RLE Lossless, .*decompress the series once"),
    "frames": (at(1, NumberOfFrames=6), "6 frames, and not one image"),
    "colours": (at(1, SamplesPerPixel=3), "3 samples for each pixel"),
    "no position": (at(2, ImagePositionPatient=None), "no ImagePositionPatient: it is no slice"),
    "no spacing": (at(2, PixelSpacing=None), "no PixelSpacing"),
    "a table": (table, "Modality LUT"),
    "floats": (floats, "no pixel data of integers"),
    "bits": (at(0, BitsStored=12), "16 bits, of which 12 up to bit 15"),
    "slope": (at(0, RescaleSlope="nan", RescaleIntercept=0), "rescale slope nan"),
    "a short image": (at(0, PixelData=b"\0" * 40), r"is cut off: its image has 40 B of 70 B"),
    "size": (at(3, Rows=7, Columns=5), r"several kinds: the size of .* is \(7, 5\), and of .* \(5, 7\)"),
    "elements": (at(3, PixelRepresentation=1), "the elements of .* is int16, and of .* uint16"),
    "pixel spacing": (at(3, PixelSpacing=[1, 1]), "the pixel spacing of"),
    "directions": (at(3, ImageOrientationPatient=list(CORONAL)), "the directions of"),
    "no directions": (lambda _, header: setattr(header, "ImageOrientationPatient", [1, 0, 0, 1, 0, 0]), "no orientation"),
    "numbers": (at(3, ImagePositionPatient=[1, 2]), "instead of 3 numbers"),
    "position": (at(3, ImagePositionPatient=[-10, 20.5, 35]), "several images at one position, such as"),
    "gap": (at(5, ImagePositionPatient=[-10, 20.5, 45]), r"uneven gaps: slices are 2\.5 mm apart, but .* 5 mm"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*:UserWarning:pydicom")
@pytest.mark.parametrize("case", BAD)
def test_a_series_that_cannot_be_read_is_named(tmp_path: Path, case: str) -> None:
    change, said = BAD[case]
    write_dicom(tmp_path / "x", DATA, change=change)
    with pytest.raises(VolumeError, match=said) as caught:
        open_volume(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_missing_slice_is_an_error(tmp_path: Path) -> None:
    write_dicom(tmp_path / "x", DATA)
    (tmp_path / "x" / "17-1.2.3.dcm").unlink()
    with pytest.raises(VolumeError, match=r"uneven gaps: .*If slices are missing, copy them again"):
        open_volume(tmp_path / "x")


@pytest.mark.filterwarnings("ignore:.*:UserWarning:pydicom")
def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    write_dicom(tmp_path / "x", DATA)
    file = tmp_path / "x" / "10-1.2.3.dcm"
    content = file.read_bytes()
    for length in (*range(0, len(content), 29), len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(VolumeError, match=r"10-1\.2\.3\.dcm"):
            open_volume(tmp_path / "x")


def test_a_slice_that_changes_is_noticed(tmp_path: Path) -> None:
    write_dicom(tmp_path / "x", DATA)
    volume = open_volume(tmp_path / "x")
    dataset = FastPatchDataset(tmp_path / "x", DATA.shape, sampling=Grid())
    shutil.copy(tmp_path / "x" / "3-1.2.3.dcm", tmp_path / "x" / "10-1.2.3.dcm")
    for read in (lambda: whole(volume), lambda: dataset[0]):
        with pytest.raises(VolumeError, match=r"10-1\.2\.3\.dcm has changed"):
            read()


def test_an_orientation_needs_a_format_with_an_affine() -> None:
    with pytest.raises(OptionError, match="orientation= is for DICOM series"):
        FastPatchDataset(DATA, (2, 2, 2), orientation="RAS")
