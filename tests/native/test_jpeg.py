"""The native decoder gives Pillow's pixels, for every kind of file that it is trusted with."""

from __future__ import annotations

import io
import os
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

from fastpipe.bench.synthetic import photograph
from fastpipe.core.native import native
from fastpipe.core.types import Box
from fastpipe.errors import MissingDependencyError
from fastpipe.images.reader import ImageReader, read_jpeg_header
from fastpipe.options import Decode

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


def decode(data: Any, box: Box) -> npt.NDArray[np.uint8] | None:
    made: npt.NDArray[np.uint8] | None = native.decode(data, *box)
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
def test_whole_images_equal_pillow(kind: str, size: tuple[int, int]) -> None:
    data = encoded(size, kind)
    header = read_jpeg_header(data)
    assert header is not None
    assert header.trusted
    made = decode(data, Box(0, 0, *size))
    assert made is not None
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, by_pillow(data))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(st.data())
def test_parts_equal_pillow(kind: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    blob = encoded(size, kind, data.draw(st.integers(0, 3)))
    box = data.draw(boxes(size))
    made = decode(blob, box)
    assert made is not None
    assert made.flags.c_contiguous
    assert made.dtype == np.uint8
    expected = by_pillow(blob)[box.top : box.top + box.height, box.left : box.left + box.width]
    np.testing.assert_array_equal(made, expected)


def test_large_parts_of_a_large_image() -> None:
    """Beyond one strip of rows, at every offset from the block grid."""
    for kind in ("4:2:0", "4:2:2", "4:4:4 progressive"):
        data = encoded((301, 403), kind)
        expected = by_pillow(data)
        for offset in range(0, 20, 3):
            box = Box(100 + offset, 57 + offset, 150 - offset, 201 + offset)
            made = decode(data, box)
            part = expected[box.top : box.top + box.height, box.left : box.left + box.width]
            np.testing.assert_array_equal(made, part)


@pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "4:4:4 progressive"])
@pytest.mark.parametrize("columns", range(32, 49))  # each place in a unit of 16 is the last one's
def test_narrow_parts_at_every_column(kind: str, columns: int) -> None:
    """libjpeg takes other ways for a column or two than for a whole image."""
    data = encoded((40, columns), kind)
    expected = by_pillow(data)
    for left in range(columns):
        for width in range(1, min(6, columns - left) + 1):
            made = decode(data, Box(3, left, 20, width))
            assert made is not None
            np.testing.assert_array_equal(made, expected[3:23, left : left + width])


def test_threads_do_not_disturb_each_other() -> None:
    blobs = [encoded(size, kind) for size in SIZES[5:] for kind in KINDS]
    expected = [by_pillow(blob) for blob in blobs]

    def is_right(number: int) -> bool:
        number %= len(blobs)
        height, width = expected[number].shape[:2]
        made = decode(blobs[number], Box(0, 0, height, width))
        return made is not None and np.array_equal(made, expected[number])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, range(4 * len(blobs))))


def test_the_result_outlives_the_next_one() -> None:
    first = decode(encoded((40, 50), "4:2:0"), Box(0, 0, 40, 50))
    assert first is not None
    kept = first.copy()
    for seed in range(1, 20):
        decode(encoded((40, 50), "4:2:0", seed), Box(0, 0, 40, 50))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("damage", ["cut", "empty", "no jpeg"])
def test_damaged_data_is_declined(damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = encoded((70, 93), "4:2:0")
    blob = {"cut": data[: len(data) // 2], "empty": b"", "no jpeg": b"GIF89a" + bytes(99)}[damage]
    made = decode(blob, Box(0, 0, 70, 93))
    assert made is None
    assert capfd.readouterr().err == ""


def test_libjpeg_prints_nothing_about_damage(capfd: pytest.CaptureFixture[str]) -> None:
    data = encoded((120, 150), "4:2:0 progressive")
    start, declined = data.index(b"\xff\xda") + 14, 0
    for at in range(start, len(data) - 40, 37):
        spoilt = data[:at] + bytes(20) + data[at + 20 :]
        declined += decode(spoilt, Box(10, 10, 50, 60)) is None
    assert capfd.readouterr().err == ""
    assert declined


BEYOND = (
    Box(0, 0, 11, 12), Box(0, 0, 10, 13), Box(-1, 0, 5, 5), Box(0, -1, 5, 5), Box(9, 0, 2, 5), Box(0, 11, 5, 2),
    Box(0, 0, 0, 5), Box(0, 0, 5, 0), Box(0, 0, -1, 5), Box(2**31 - 1, 0, 2, 2), Box(2, 2, 2**31 - 1, 2**31 - 1),
)  # fmt: skip


@pytest.mark.parametrize("box", BEYOND, ids=str)
def test_a_box_that_is_not_inside_the_image_is_declined(box: Box) -> None:
    assert decode(encoded((10, 12), "4:2:0"), box) is None


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_contiguous_memory_is_decoded(wrap: Any) -> None:
    data = encoded((40, 50), "4:2:0")
    np.testing.assert_array_equal(decode(wrap(data), Box(0, 0, 40, 50)), by_pillow(data))


@pytest.mark.parametrize(
    "other", ["text", 7, None, np.zeros((8, 8), np.uint8)[:, ::2]], ids=lambda x: type(x).__name__
)
def test_objects_without_memory_are_refused(other: Any) -> None:
    with pytest.raises((TypeError, BufferError, ValueError)):
        decode(other, Box(0, 0, 1, 1))


def test_every_instruction_set_decodes_the_same() -> None:
    data, before, made = encoded((130, 90), "4:2:0"), native.level(), []
    try:
        for level in range(3):
            if native.force_level(level):
                made.append(decode(data, Box(3, 4, 100, 80)))
    finally:
        assert native.force_level(before)
    assert all(np.array_equal(one, by_pillow(data)[3:103, 4:84]) for one in made)


# ---- other packages ---------------------------------------------------------------------------

SCRIPT = """
import logging, sys
for name in {missing}:
    sys.modules[name] = None
logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
import io
import numpy as np
from PIL import Image
from fastpipe.images.reader import ImageReader
from fastpipe.options import Decode
from fastpipe.core.types import Box
file = io.BytesIO()
pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
Image.fromarray(pixels).save(file, "JPEG", quality=80)
expected = np.asarray(Image.open(file).convert("RGB"))[5:25, 7:30]
for backend in ("auto", "simplejpeg", "nvimgcodec"):
    reader = ImageReader(Decode(backend=backend))
    image = reader.open(file.getvalue(), "x.jpg")
    assert np.array_equal(image.region(Box(5, 7, 20, 23)), expected)
    print(reader.describe())
print([name for name in ("nvidia", "simplejpeg", "torch") if sys.modules.get(name)])
"""


def run(script: str) -> list[str]:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "missing", [(), ("nvidia", "nvidia.nvimgcodec", "simplejpeg")], ids=["all", "without"]
)
def test_no_other_package_is_needed_or_loaded(missing: tuple[str, ...]) -> None:
    *said, loaded = run(SCRIPT.format(missing=missing))
    assert len(said) == 3
    assert all(line.startswith("JPEG  →  libjpeg-turbo, only the region that is needed") for line in said)
    assert loaded == "[]"


def test_a_core_that_cannot_be_loaded_says_how_to_have_it() -> None:
    script = """
import sys
sys.modules["fastpipe.native._native"] = None
from fastpipe.errors import MissingDependencyError
try:
    import fastpipe.images.reader
except MissingDependencyError as error:
    print(error)
"""
    (said,) = run(script)
    assert "native core cannot be loaded" in said
    assert "pip install" in said
    assert "apt-get install g++ libjpeg-dev libdeflate-dev libzstd-dev liblz4-dev" in said
    assert issubclass(MissingDependencyError, ImportError)


def test_pillow_alone_decodes_where_it_is_asked_for() -> None:
    reader = ImageReader(Decode(backend="pillow"))
    assert "JPEG" not in reader.describe()
    assert not reader.is_native
    assert type(reader.open(encoded((40, 50), "4:2:0"), "x.jpg")).__name__ == "PillowImage"


def test_a_pillow_that_decodes_otherwise_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that was built with another libjpeg."""
    from fastpipe.images import pillow_rules as installed
    from fastpipe.images import reader as images

    fresh = installed.decodes_as_pillow.__wrapped__
    assert fresh()
    assert not caplog.text
    real = Image.Image.convert
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "convert", lambda self, mode: real(self, mode).point(lambda v: v ^ 1))
        assert not fresh()
    assert "Pillow decodes all images" in caplog.text
    monkeypatch.setattr(images, "decodes_as_pillow", lambda: False)
    reader = ImageReader(Decode())
    assert not reader.is_native
    assert "JPEG" not in reader.describe()


def test_a_reader_used_by_threads_that_end() -> None:
    """What is kept for a thread goes with the thread."""
    data = encoded((40, 50), "4:2:0")
    found: list[Any] = []
    for _ in range(5):
        thread = threading.Thread(target=lambda: found.append(decode(data, Box(0, 0, 40, 50))))
        thread.start()
        thread.join()
    assert len(found) == 5
    assert all(np.array_equal(made, by_pillow(data)) for made in found)


def test_views_keep_their_memory() -> None:
    data = encoded((130, 90), "4:2:0")
    expected = by_pillow(data)
    kept = [decode(data, Box(top, 3, 50, 60)) for top in range(40)]
    parts = [array[10:, ::2] for array in kept if array is not None]
    assert len(parts) == 40
    del kept
    for _ in range(40):
        decode(data, Box(0, 0, 50, 60))
    for top, part in enumerate(parts):
        np.testing.assert_array_equal(part, expected[top : top + 50, 3:63][10:, ::2])


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
    rows = native.decode_reduced(data, factor, count)
    whole = Image.open(io.BytesIO(data))
    whole.draft("RGB", (width // factor, height // factor))
    expected = np.asarray(whole.convert("RGB"))
    assert rows is not None
    needed = -(-count // factor)
    assert len(rows) >= needed
    assert rows.shape[1:] == expected.shape[1:]
    np.testing.assert_array_equal(rows[:needed], expected[:needed])


@pytest.mark.parametrize("kind", ["4:2:0", "4:2:0 progressive"])
def test_no_more_rows_are_made_than_are_asked_for(kind: str) -> None:
    rows = native.decode_reduced(encoded((130, 40), kind), 2, 8)
    assert rows is not None
    assert rows.shape == (8, 20, 3)


@pytest.mark.parametrize("damage", ["cut", "empty", "no jpeg"])
def test_damaged_data_is_declined_at_a_part_of_its_size_too(
    damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = encoded((70, 93), "4:2:0")
    blob = {"cut": data[: len(data) // 2], "empty": b"", "no jpeg": b"GIF89a" + bytes(99)}[damage]
    assert native.decode_reduced(blob, 2, 35) is None
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match="2, 4 or 8"):
        native.decode_reduced(data, 3, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc: run it on Linux")
def test_nothing_is_kept_of_what_was_decoded() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    good = encoded((300, 400), "4:2:0 progressive")
    bad = good[: len(good) // 2]
    for _ in range(30):
        decode(good, Box(0, 0, 300, 400))
    before = resident()
    for number in range(400):
        decode(bad if number % 2 else good, Box(0, 0, 300, 400))
    assert resident() - before < 20 << 20
