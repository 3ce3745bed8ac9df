"""What a NIfTI header can say: the array is nibabel's, bit for bit, or an error where nibabel has one."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from volume_kit import same_bits, whole

from fastpipe.errors import VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import DamagedUnitError

SHAPE = (5, 6, 7)
RGB = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])


def write(
    path: Path,
    kind: Any,
    shape: tuple[int, ...] = SHAPE,
    order: str = "<",
    image: Any = nibabel.Nifti1Image,
    scale: Any = (None, None),
    extension: bool = False,
) -> None:
    dtype = np.dtype(kind)
    count = int(np.prod(shape))
    values = np.random.default_rng(0).integers(0, 99, count * (3 if dtype.fields else 1))
    data = (values.astype("u1").view(dtype) if dtype.fields else values.astype(dtype)).reshape(shape)
    header = image.header_class(endianness=order)
    header.set_data_dtype(dtype if dtype.fields else dtype.newbyteorder(order))
    made = image(data, np.eye(4), header)
    if scale != (None, None):
        made.header.set_slope_inter(*scale)
    if extension:
        made.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"hello" * 20))
    made.to_filename(path)


def put(path: Path, offset: int, form: str, *values: Any) -> None:
    """Other bytes in the header."""
    file = path.with_suffix(".hdr") if path.suffix == ".img" else path
    content = bytearray(file.read_bytes())
    struct.pack_into(form, content, offset, *values)
    file.write_bytes(content)


def is_nibabel_s(path: Path) -> None:
    """The array; or an error, where nibabel has one."""

    def opened() -> Any:
        return open_volume(path, may_write=True)

    try:
        expected = np.asanyarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]
    except Exception:
        with pytest.raises(VolumeError, match=path.stem) as caught:
            opened()
        assert not isinstance(caught.value, DamagedUnitError)
    else:
        assert same_bits(whole(opened()), expected)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16"])
def test_elements_and_scales(tmp_path: Path, kind: str, order: str) -> None:
    for number, scale in enumerate(((None, None), (1, 0), (2, 0), (2.5, -3), (1, 5), (1 / 85, 0), (-1, 0))):
        write(tmp_path / f"{number}.nii", kind, order=order, scale=scale)
        is_nibabel_s(tmp_path / f"{number}.nii", whole, same_bits)


@pytest.mark.parametrize("kind", ["i2", "f4"])
@pytest.mark.parametrize("slope", [0.0, -0.0, np.nan, np.inf, 1.0, 2.0, 1e-45, 3.4e38])
def test_slopes_that_say_nothing_and_intercepts_that_cannot_be(
    tmp_path: Path, slope: float, kind: str
) -> None:
    for number, intercept in enumerate((0.0, -0.0, 5.0, np.nan, np.inf)):
        write(tmp_path / f"{number}.nii", kind)
        put(tmp_path / f"{number}.nii", 112, "<2f", slope, intercept)
        is_nibabel_s(tmp_path / f"{number}.nii", whole, same_bits)


@pytest.mark.parametrize("name", ["x.nii", "x.nii.gz"])
@pytest.mark.parametrize(
    "shape", [(5,), (5, 6), (5, 6, 1), (5, 6, 7, 3), (5, 6, 7, 1, 3), (5, 6, 7, 1, 1), (2, 2, 2, 1, 1, 1, 2), (1, 1, 1)]
)  # fmt: skip
def test_any_number_of_dimensions(tmp_path: Path, shape: tuple[int, ...], name: str) -> None:
    write(tmp_path / name, "i2", shape, scale=(2, 1))
    is_nibabel_s(tmp_path / name, whole, same_bits)


@pytest.mark.parametrize(
    "dims",
    [
        (0, 5, 6, 7), (1, 5, 6, 7), (3, 5, 6, 7, 9, 9, 9, 9), (4, 5, 6, 7, 0), (7, 5, 6, 7, 1, 1, 1, 1), (8, 5, 6, 7),
        (-1, 5, 6, 7), (3, -5, 6, 7), (3, 5, 6, 0), (5, 5, 6, 7, 1, 1),
    ],
)  # fmt: skip
def test_what_dim_says(tmp_path: Path, dims: tuple[int, ...]) -> None:
    write(tmp_path / "x.nii", "i2")
    put(tmp_path / "x.nii", 40, f"<{len(dims)}h", *dims)
    is_nibabel_s(tmp_path / "x.nii", whole, same_bits)


@pytest.mark.parametrize("image", [nibabel.Nifti1Pair, nibabel.Nifti2Image, nibabel.Nifti2Pair, nibabel.AnalyzeImage,
                                   nibabel.Spm99AnalyzeImage, nibabel.Spm2AnalyzeImage])  # fmt: skip
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_relatives(tmp_path: Path, image: Any, order: str, ending: str) -> None:
    path = tmp_path / (("x.nii" if image is nibabel.Nifti2Image else "x.img") + ending)
    write(
        path, "i2", order=order, image=image, scale=(None, None) if image is nibabel.AnalyzeImage else (2, 0)
    )
    is_nibabel_s(path, whole, same_bits)


@pytest.mark.parametrize("name", ["x.nii", "x.nii.gz", "x.img"])
def test_extensions_move_the_elements(tmp_path: Path, name: str) -> None:
    image = nibabel.Nifti1Pair if name == "x.img" else nibabel.Nifti1Image
    write(tmp_path / name, "i2", image=image, extension=True)
    is_nibabel_s(tmp_path / name, whole, same_bits)


@pytest.mark.parametrize("name", ["x.nii", "x.img"])
@pytest.mark.parametrize("offset", [0.0, 16.0, 348.0, 352.5, 353.0, 1e9, -16.0, np.nan])
def test_where_the_elements_begin(tmp_path: Path, name: str, offset: float) -> None:
    write(tmp_path / name, "i2", image=nibabel.Nifti1Pair if name == "x.img" else nibabel.Nifti1Image)
    put(tmp_path / name, 108, "<f", offset)
    is_nibabel_s(tmp_path / name, whole, same_bits)


@pytest.mark.parametrize("code", [0, 1, 2, 4, 16, 256, 768, 1536, 2048, 999])
def test_codes_of_elements(tmp_path: Path, code: int) -> None:
    write(tmp_path / "x.nii", "u1")
    put(tmp_path / "x.nii", 70, "<h", code)
    is_nibabel_s(tmp_path / "x.nii", whole, same_bits)


@pytest.mark.parametrize(
    ("offset", "form", "values"),
    [
        *((68, "<h", [intent]) for intent in (1001, 1002, 1005, 1007, 2003)), *((72, "<h", [bits]) for bits in (0, 8, 32)),
        *((252, "<2h", pair) for pair in ((0, 0), (1, 0), (0, 1), (2, 4))), (123, "b", [10]), (124, "<2f", [10.0, 5.0]),
        (344, "4s", [b"ni1\0"]), (344, "4s", [b"xxxx"]),
    ],
)  # fmt: skip
def test_what_does_not_change_the_array(tmp_path: Path, offset: int, form: str, values: Any) -> None:
    """Intents, bits, coordinates, units and ranges of display."""
    write(tmp_path / "x.nii", "f4", (5, 6, 7, 1, 3))
    put(tmp_path / "x.nii", offset, form, *values)
    is_nibabel_s(tmp_path / "x.nii", whole, same_bits)


def test_colours_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path / "x.nii", RGB)
    with pytest.raises(VolumeError, match=r"x\.nii has elements of .*'R'.*, and not numbers"):
        open_volume(tmp_path / "x.nii")


def test_a_packed_image_under_another_name_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "y.nii", "i2")
    content = (tmp_path / "y.nii").read_bytes()
    (tmp_path / "x.nii").write_bytes(gzip.compress(content))
    is_nibabel_s(tmp_path / "x.nii", whole, same_bits)
    (tmp_path / "z.nii.gz").write_bytes(content)
    is_nibabel_s(tmp_path / "z.nii.gz", whole, same_bits)
