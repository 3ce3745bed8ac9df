"""The native decoder gives Pillow's pixels, for every kind of file that it is trusted with."""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scripts import ran

from fastpipe.bench.synthetic import photograph
from fastpipe.core.native import native
from fastpipe.core.types import Box
from fastpipe.images.reader import ImageReader
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
SIZES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (2, 2),
    (8, 8),
    (15, 17),
    (16, 16),
    (17, 33),
    (33, 31),
    (70, 93),
    (130, 40),
    (301, 403),
]


def decode(data: Any, box: Box) -> npt.NDArray[np.uint8] | None:
    made: npt.NDArray[np.uint8] | None = native.decode(data, *box)
    return made


@functools.cache
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
@settings(max_examples=25)
@given(st.data())
def test_parts_equal_pillow(kind: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    blob = encoded(size, kind, data.draw(st.integers(0, 3)))
    box = data.draw(boxes(size))
    made = decode(blob, box)
    assert made is not None and made.flags.c_contiguous and made.dtype == np.uint8
    expected = by_pillow(blob)[box.top : box.top + box.height, box.left : box.left + box.width]
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("damage", ["cut", "empty", "no jpeg"])
def test_damaged_data_is_declined(damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = encoded((70, 93), "4:2:0")
    blob = {"cut": data[: len(data) // 2], "empty": b"", "no jpeg": b"GIF89a" + bytes(99)}[damage]
    assert decode(blob, Box(0, 0, 70, 93)) is native.decode_reduced(blob, 2, 35) is None
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match="2, 4 or 8"):
        native.decode_reduced(data, 3, 10)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_contiguous_memory_is_decoded(wrap: Any) -> None:
    data = encoded((40, 50), "4:2:0")
    np.testing.assert_array_equal(decode(wrap(data), Box(0, 0, 40, 50)), by_pillow(data))


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
    done = ran("-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "missing", [(), ("nvidia", "nvidia.nvimgcodec", "simplejpeg")], ids=["all", "without"]
)
def test_no_other_package_is_needed_or_loaded(missing: tuple[str, ...]) -> None:
    *said, loaded = run(SCRIPT.format(missing=missing))
    assert len(said) == 3
    assert all(line.startswith("JPEG  →  native core, only the region that is needed") for line in said)
    assert loaded == "[]"


WITHOUT_CORE = """
import sys
sys.modules["fastpipe.native._native"] = None
from fastpipe.errors import MissingDependencyError
assert issubclass(MissingDependencyError, ImportError)
try:
    import fastpipe.images.reader
except MissingDependencyError as error:
    print(error)
"""


def test_a_core_that_cannot_be_loaded_says_how_to_have_it() -> None:
    (said,) = run(WITHOUT_CORE)
    assert "native core cannot be loaded" in said
    assert "pip install" in said
    assert "apt-get install g++ libjpeg-dev libdeflate-dev libzstd-dev liblz4-dev" in said


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
    for backend in ("auto", "pillow"):
        reader = ImageReader(Decode(backend=backend))
        assert not reader.is_native
        assert "JPEG" not in reader.describe()
        assert type(reader.open(encoded((40, 50), "4:2:0"), "x.jpg")).__name__ == "PillowImage"


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
