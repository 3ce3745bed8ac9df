from __future__ import annotations

import os
import stat
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from odd_images import OddImage, odd_images, write_fifo
from PIL import Image


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OddImage]:
    made = odd_images(tmp_path_factory.mktemp("odd"))
    by_name = {case.name: case for case in made}
    assert len(by_name) == len(made) == len({case.path for case in made}), "names or paths repeat"
    return by_name


def _load(path: Path) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with path.open("rb") as file:
            return Image.open(file).convert("RGB")


def test_labels_are_true(cases: dict[str, OddImage]) -> None:
    for case in cases.values():
        if case.expect == "ok":
            assert _load(case.path).mode == "RGB", case
        else:
            with pytest.raises(Exception):  # noqa: B017 - any exception is what the label says
                _load(case.path)


def test_labels_that_do_not_depend_on_pillow(cases: dict[str, OddImage]) -> None:
    good = {
        "jpeg 4:2:0",
        "jpeg 4:4:0",
        "jpeg 4:1:1",
        "jpeg ycck",
        "jpeg rgb",
        "jpeg exif 6",
        "jpeg garbage inside",
    }
    good |= {
        "png 16-bit RGB",
        "png interlaced 16-bit",
        "png named jpg",
        "gif named jpeg",
        "mpo",
        "bmp rle",
        "link",
    }
    bad = {"empty", "one byte", "text", "html", "garbage", "jpeg cut at 50 %", "progressive cut at 50 %"}
    bad |= {
        "png cut at 50 %",
        "png bad data",
        "jpeg bomb",
        "png bomb",
        "dangling link",
        "link loop",
        "folder",
    }
    bad |= {"jpeg markers only", "jpeg huffman length short", "jpeg quantisation length long"}
    assert {name for name in good if cases[name].expect != "ok"} == set()
    assert {name for name in bad if cases[name].expect != "bad"} == set()
    counts = [case.expect for case in cases.values()]
    assert counts.count("ok") > 100 and counts.count("bad") > 35


def test_bytes_are_deterministic(cases: dict[str, OddImage], tmp_path: Path) -> None:
    again = {case.name: case for case in odd_images(tmp_path)}
    assert list(again) == list(cases)
    for name, case in cases.items():
        assert again[name].expect == case.expect and again[name].note == case.note
        if case.path.is_file() and os.access(case.path, os.R_OK):
            assert again[name].path.read_bytes() == case.path.read_bytes(), name


def test_another_seed_gives_other_pixels_and_writing_twice_works(tmp_path: Path) -> None:
    first = {
        case.name: case.path.read_bytes() for case in odd_images(tmp_path) if case.name.startswith("jpeg 4")
    }
    second = {case.name: case.path.read_bytes() for case in odd_images(tmp_path, 1) if case.name in first}
    assert len(first) == 8 and not set(first.values()) & set(second.values())


def test_modes_and_formats_are_the_intended_ones(cases: dict[str, OddImage]) -> None:
    wanted = {
        "jpeg grey": ("JPEG", "L"),
        "jpeg cmyk": ("JPEG", "CMYK"),
        "jpeg ycck": ("JPEG", "CMYK"),
        "jpeg rgb": ("JPEG", "RGB"),
        "mpo": ("MPO", "RGB"),
        "png 1": ("PNG", "1"),
        "png palette": ("PNG", "P"),
        "png 16-bit L": ("PNG", "I;16"),
        "png RGBA": ("PNG", "RGBA"),
        "tiff cmyk": ("TIFF", "CMYK"),
        "tiff 16-bit": ("TIFF", "I;16"),
        "png named jpg": ("PNG", "RGB"),
        "jpeg named png": ("JPEG", "RGB"),
        "gif named jpeg": ("GIF", "P"),
        "bmp rle": ("BMP", "P"),
        "webp alpha": ("WEBP", "RGBA"),
    }
    for name, (kind, mode) in wanted.items():
        with Image.open(cases[name].path) as image:
            assert (image.format, image.mode) == (kind, mode), name


def test_hand_made_pixels_decode_as_intended(cases: dict[str, OddImage]) -> None:
    plain = np.asarray(_load(cases["png RGB"].path))
    for name in (
        "png interlaced 8-bit",
        "png 16-bit RGB",
        "png interlaced 16-bit",
        "png gamma",
        "ppm 16-bit",
    ):
        np.testing.assert_array_equal(np.asarray(_load(cases[name].path)), plain, err_msg=name)
    with Image.open(cases["bmp rle"].path) as image:
        np.testing.assert_array_equal(np.asarray(image), plain[:, :, 0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_holds_orientation_and_thumbnail(cases: dict[str, OddImage], orientation: int) -> None:
    with Image.open(cases[f"jpeg exif {orientation}"].path) as image:
        exif = image.getexif()
        assert exif[0x0112] == orientation
        assert exif.get_ifd(0x8769) == {}
    data = cases[f"jpeg exif {orientation}"].path.read_bytes()
    tiff = data.index(b"II*\0")
    (second,) = struct.unpack_from("<I", data, tiff + 8 + 2 + 12)
    entries = [struct.unpack_from("<HHII", data, tiff + second + 2 + 12 * i) for i in range(3)]
    assert [entry[0] for entry in entries] == [0x0103, 0x0201, 0x0202]
    start = tiff + entries[1][3]
    assert data[start : start + 2] == b"\xff\xd8"
    assert data[start + entries[2][3] - 2 : start + entries[2][3]] == b"\xff\xd9"


def test_samplings_are_written_in_the_frame_header(cases: dict[str, OddImage]) -> None:
    wanted = {"4:4:4": 0x11, "4:2:2": 0x21, "4:2:0": 0x22, "4:4:0": 0x12, "4:1:1": 0x41}
    for name, factors in wanted.items():
        data = cases[f"jpeg {name}"].path.read_bytes()
        at = data.index(b"\xff\xc0")
        assert (data[at + 11], data[at + 14], data[at + 17]) == (factors, 0x11, 0x11)


def test_special_files_are_special(cases: dict[str, OddImage]) -> None:
    assert cases["folder"].path.is_dir()
    assert cases["dangling link"].path.is_symlink() and not cases["dangling link"].path.exists()
    assert cases["link"].path.is_symlink() and cases["link"].path.exists()
    locked = cases["no permission"]
    assert stat.S_IMODE(locked.path.stat().st_mode) == 0
    assert locked.expect == ("ok" if os.access(locked.path, os.R_OK) else "bad")
    assert cases["empty"].path.stat().st_size == 0


def test_the_pipe_is_a_helper_of_its_own(cases: dict[str, OddImage], tmp_path: Path) -> None:
    assert not any(stat.S_ISFIFO(case.path.lstat().st_mode) for case in cases.values())
    path = write_fifo(tmp_path)
    assert path.name == "pipe.jpg" and stat.S_ISFIFO(path.stat().st_mode)
    with pytest.raises(FileExistsError):
        write_fifo(tmp_path)
