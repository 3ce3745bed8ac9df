"""The fast decoders give Pillow's pixels, for every kind of file that they are trusted with."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.read import decoders
from fastpipe.read.decoders import Decoder, NvImageCodecDecoder, SimpleJpegDecoder, make_decoder
from fastpipe.read.jpeg_header import read_jpeg_header
from fastpipe.testing import photograph
from fastpipe.types import Box

KINDS: dict[str, dict[str, Any]] = {
    f"{sampling}{kind}": {"subsampling": sampling, "progressive": bool(kind)}
    for sampling in ("4:4:4", "4:2:2", "4:2:0")
    for kind in ("", " progressive")
} | {
    "grey": {"grey": True},
    "grey progressive": {"grey": True, "progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "progressive restarts": {"progressive": True, "restart_marker_rows": 1},
    "optimised": {"optimize": True},
    "quality 1": {"quality": 1},
    "quality 100": {"quality": 100, "subsampling": "4:2:0"},
}
SIZES = [(1, 1), (1, 7), (7, 1), (2, 2), (8, 8), (15, 17), (16, 16), (17, 33), (33, 31), (70, 93), (130, 40)]


@pytest.fixture(scope="module", params=["nvimgcodec", "simplejpeg"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    made = make_decoder(request.param)
    assert made is not None
    assert isinstance(made, (NvImageCodecDecoder, SimpleJpegDecoder))
    assert request.param in type(made).__name__.lower().replace("image", "img")
    return made


def encoded(size: tuple[int, int], kind: str, seed: int = 0) -> bytes:
    options = dict(KINDS[kind])
    image = Image.fromarray(photograph(np.random.default_rng((*size, seed)), size))
    file = io.BytesIO()
    (image.convert("L") if options.pop("grey", False) else image).save(file, "JPEG", **options)
    return file.getvalue()


def by_pillow(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@st.composite
def boxes(draw: st.DrawFn, size: tuple[int, int]) -> Box:
    height, width = draw(st.integers(1, size[0])), draw(st.integers(1, size[1]))
    return Box(draw(st.integers(0, size[0] - height)), draw(st.integers(0, size[1] - width)), height, width)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_whole_images_equal_pillow(decoder: Decoder, kind: str, size: tuple[int, int]) -> None:
    data = encoded(size, kind)
    header = read_jpeg_header(data)
    assert header is not None
    assert header.trusted
    made = decoder.decode(data, Box(0, 0, *size))
    if made is None:
        assert isinstance(decoder, NvImageCodecDecoder)
        assert size[1] == 1, "declined only where libjpeg would not interpolate"
        return
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, by_pillow(data))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(st.data())
def test_parts_equal_pillow(decoder: Decoder, kind: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    blob = encoded(size, kind, data.draw(st.integers(0, 3)))
    box = data.draw(boxes(size))
    made = decoder.decode(blob, box)
    if made is None:
        assert isinstance(decoder, NvImageCodecDecoder)
        assert box.width == 1
        return
    assert made.flags.c_contiguous
    assert made.dtype == np.uint8
    expected = by_pillow(blob)[box.top : box.top + box.height, box.left : box.left + box.width]
    np.testing.assert_array_equal(made, expected)


def test_large_parts_of_a_large_image(decoder: Decoder) -> None:
    """Beyond one strip of rows, at every offset from the block grid."""
    for kind in ("4:2:0", "4:2:2", "4:4:4 progressive"):
        data = encoded((301, 403), kind)
        expected = by_pillow(data)
        for offset in range(0, 20, 3):
            box = Box(100 + offset, 57 + offset, 150 - offset, 201 + offset)
            made = decoder.decode(data, box)
            part = expected[box.top : box.top + box.height, box.left : box.left + box.width]
            np.testing.assert_array_equal(made, part)


@pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "4:4:4 progressive"])
@pytest.mark.parametrize("columns", range(32, 49))  # each place in a unit of 16 is the last one's
def test_narrow_parts_at_every_column(decoder: Decoder, kind: str, columns: int) -> None:
    """libjpeg takes other ways for a column or two than for a whole image."""
    data = encoded((40, columns), kind)
    expected = by_pillow(data)
    for left in range(columns):
        for width in range(1, min(6, columns - left) + 1):
            made = decoder.decode(data, Box(3, left, 20, width))
            if made is not None:
                np.testing.assert_array_equal(made, expected[3:23, left : left + width])
            else:
                assert width == 1


def test_threads_do_not_disturb_each_other(decoder: Decoder) -> None:
    blobs = [encoded(size, kind) for size in SIZES[5:] for kind in KINDS]
    expected = [by_pillow(blob) for blob in blobs]

    def decode(number: int) -> bool:
        number %= len(blobs)
        height, width = expected[number].shape[:2]
        made = decoder.decode(blobs[number], Box(0, 0, height, width))
        return made is not None and np.array_equal(made, expected[number])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(decode, range(4 * len(blobs))))


def test_the_result_outlives_the_next_one(decoder: Decoder) -> None:
    first = decoder.decode(encoded((40, 50), "4:2:0"), Box(0, 0, 40, 50))
    assert first is not None
    kept = first.copy()
    for seed in range(1, 20):
        decoder.decode(encoded((40, 50), "4:2:0", seed), Box(0, 0, 40, 50))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("damage", ["cut", "empty", "no jpeg"])
def test_damaged_data_is_declined(decoder: Decoder, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = encoded((70, 93), "4:2:0")
    blob = {"cut": data[: len(data) // 2], "empty": b"", "no jpeg": b"GIF89a" + bytes(99)}[damage]
    made = decoder.decode(blob, Box(0, 0, 70, 93))
    assert made is None
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="messages are kept back on Linux only: run it there")
def test_libjpeg_does_not_talk_about_damage(decoder: Decoder, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the first library that tries nor the one that is asked next."""
    data = encoded((120, 150), "4:2:0 progressive")
    start, declined = data.index(b"\xff\xda") + 14, 0
    for at in range(start, len(data) - 40, 37):
        spoilt = data[:at] + bytes(20) + data[at + 20 :]
        declined += decoder.decode(spoilt, Box(10, 10, 50, 60)) is None
    assert capfd.readouterr().err == ""
    assert declined


def test_a_box_larger_than_the_image_is_declined(decoder: Decoder) -> None:
    assert decoder.decode(encoded((10, 12), "4:2:0"), Box(0, 0, 11, 12)) is None


def test_pillow_and_unknown_back_ends() -> None:
    assert make_decoder("pillow") is None
    with pytest.raises(OptionError, match="'no such'"):
        make_decoder("no such")  # type: ignore[arg-type]


def test_auto_takes_the_fastest() -> None:
    assert isinstance(make_decoder("auto"), NvImageCodecDecoder)


# ---- without the packages ----------------------------------------------------------------------

SCRIPT = """
import logging, sys
{block}
logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
import io
import numpy as np
from PIL import Image
from fastpipe.read.images import ImageReader
from fastpipe.options import Decode
from fastpipe.types import Box
file = io.BytesIO()
pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
Image.fromarray(pixels).save(file, "JPEG", quality=80)
for _ in range(3):
    reader = ImageReader(Decode())
    image = reader.open(file.getvalue(), "x.jpg")
    expected = np.asarray(Image.open(file).convert("RGB"))[5:25, 7:30]
    assert np.array_equal(image.region(Box(5, 7, 20, 23)), expected)
print("decoder:", reader.describe())
{more}
"""


def run_without(*modules: str, more: str = "") -> list[str]:
    block = "\n".join(f"sys.modules[{module!r}] = None" for module in modules)
    script = SCRIPT.format(block=block, more=more)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_with_everything_nothing_is_said() -> None:
    (decoder,) = run_without()
    assert "nvImageCodec" in decoder


def test_without_nvimgcodec() -> None:
    said, decoder = run_without("nvidia.nvimgcodec")
    assert "simplejpeg" in decoder
    assert said.startswith("WARNING fastpipe.read decoding without nvimgcodec")
    assert "pip install 'fastpipe[image]'" in said


def test_without_any_package_of_nvidia() -> None:
    said, decoder = run_without("nvidia")
    assert "simplejpeg" in decoder
    assert "decoding without nvimgcodec" in said


def test_without_any_fast_decoder() -> None:
    first, second, decoder = run_without("nvidia.nvimgcodec", "simplejpeg")
    assert "JPEG" not in decoder
    assert "without nvimgcodec" in first
    assert "without simplejpeg" in second


def test_a_named_back_end_that_is_missing_is_an_error() -> None:
    more = """
from fastpipe.errors import MissingDependencyError
for name in ("nvimgcodec", "simplejpeg"):
    try:
        ImageReader(Decode(backend=name))
    except MissingDependencyError as error:
        print(error)
"""
    lines = run_without("nvidia.nvimgcodec", "simplejpeg", more=more)[3:]
    assert len(lines) == 2
    assert all("pip install 'fastpipe[image]'" in line for line in lines)
    assert issubclass(MissingDependencyError, ImportError)


def test_an_nvimgcodec_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codec = pytest.importorskip("nvidia.nvimgcodec", reason="pip install 'fastpipe[image]'")
    monkeypatch.delattr(codec, "NVIMGCODEC_DEVICE_CPU_ONLY")
    monkeypatch.setattr(decoders, "_said", set())
    assert isinstance(make_decoder("auto"), SimpleJpegDecoder)
    assert "pip install -U 'fastpipe[image]'" in caplog.text
    with pytest.raises(MissingDependencyError, match=codec.__version__):
        make_decoder("nvimgcodec")


def test_descriptor_2_is_left_alone_once_the_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be about to turn it as well."""
    pytest.importorskip("nvidia.nvimgcodec", reason="pip install 'fastpipe[image]'")
    monkeypatch.setattr(decoders, "_quiet_stderr", None)
    data = encoded((40, 50), "4:2:0")
    assert NvImageCodecDecoder().decode(data, Box(0, 0, 40, 50)) is not None


def test_a_reader_used_by_threads_that_end(decoder: Decoder) -> None:
    """What is kept for a thread goes with the thread."""
    data = encoded((40, 50), "4:2:0")
    found: list[Any] = []
    for _ in range(5):
        thread = threading.Thread(target=lambda: found.append(decoder.decode(data, Box(0, 0, 40, 50))))
        thread.start()
        thread.join()
    assert len(found) == 5
    assert all(np.array_equal(made, by_pillow(data)) for made in found)


def test_simplejpeg_alone_needs_no_nvimgcodec() -> None:
    assert "simplejpeg" in SimpleJpegDecoder().describe()


def test_memory_is_used_again_once_nobody_has_it(decoder: Decoder) -> None:
    data = encoded((130, 90), "4:2:0")
    expected = by_pillow(data)
    kept = [decoder.decode(data, Box(top, 3, 50, 60)) for top in range(40)]
    parts = [array[10:, ::2] for array in kept if array is not None]
    assert len(parts) == 40
    del kept
    for _ in range(40):
        decoder.decode(data, Box(0, 0, 50, 60))
    for top, part in enumerate(parts):
        np.testing.assert_array_equal(part, expected[top : top + 50, 3:63][10:, ::2])
    if isinstance(decoder, NvImageCodecDecoder):
        places = set()
        for top in range(40):
            array = decoder.decode(data, Box(top, 0, 50, 60))
            assert array is not None
            places.add(array.__array_interface__["data"][0])
            del array
        assert len(places) == 1


# ---- reduced while decoding -------------------------------------------------------------------


@settings(max_examples=40)
@given(
    kind=st.sampled_from(list(KINDS)), height=st.integers(8, 130), width=st.integers(8, 90),
    count=st.integers(1, 130), factor=st.sampled_from([2, 4, 8]),
)  # fmt: skip
def test_the_first_rows_are_those_of_the_whole_image_reduced(
    kind: str, height: int, width: int, count: int, factor: int
) -> None:
    data, count = encoded((height, width), kind), min(count, height)
    header = read_jpeg_header(data)
    assert header is not None
    rows = SimpleJpegDecoder().rows(data, header, count, factor)
    whole = Image.open(io.BytesIO(data))
    whole.draft("RGB", (width // factor, height // factor))
    expected = np.asarray(whole.convert("RGB"))
    assert rows is not None
    needed = -(-count // factor)
    assert len(rows) >= needed
    assert rows.shape[1:] == expected.shape[1:]
    np.testing.assert_array_equal(rows[:needed], expected[:needed])


@pytest.mark.parametrize(("kind", "height"), [("4:2:0", 16), ("4:2:0 progressive", 65)])
def test_decoding_ends_early_where_rows_are_sent_in_order(kind: str, height: int) -> None:
    data = encoded((130, 40), kind)
    header = read_jpeg_header(data)
    assert header is not None
    rows = SimpleJpegDecoder().rows(data, header, 8, 2)
    assert rows is not None
    assert rows.shape == (height, 20, 3)
