"""Opening images: which decoder gets a file, what Pillow judges, limits and EXIF turns."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import PIL
import pytest
from odd_images import OddImage, odd_images
from PIL import Image, ImageOps

from fastpipe.bench.synthetic import photograph
from fastpipe.core.types import Box, EncodedImage, Size
from fastpipe.errors import OptionError
from fastpipe.images.reader import ImageReader
from fastpipe.options import Decode

BACKENDS = ["auto", "nvimgcodec", "simplejpeg", "pillow"]
PHOTO = photograph(np.random.default_rng(3), (70, 93))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[OddImage]:
    return odd_images(tmp_path_factory.mktemp("odd"))


def encoded(kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PHOTO).save(file, kind, **options)
    return file.getvalue()


def bytes_of(case: OddImage) -> bytes | None:
    try:
        return case.path.read_bytes()
    except OSError:
        return None


@pytest.mark.parametrize("exif", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_odd_file_is_as_pillow_has_it(
    odd: list[OddImage], backend: Any, exif: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = ImageReader(Decode(backend=backend, exif=exif))
    for case in odd:
        blob = bytes_of(case)
        if blob is None:
            continue
        try:
            opened = Image.open(io.BytesIO(blob))
            expected = (ImageOps.exif_transpose(opened) if exif else opened).convert("RGB")
        except Exception:
            with pytest.raises(Exception) as raised:
                image = reader.open(blob, str(case.path))
                image.region(Box(0, 0, *image.size))
            assert not isinstance(raised.value, OptionError), case
            continue
        image = reader.open(blob, str(case.path))
        assert isinstance(image, EncodedImage)
        pixels = np.asarray(expected)
        assert image.size == pixels.shape[:2], case
        np.testing.assert_array_equal(image.region(Box(0, 0, *image.size)), pixels, str(case))
        height, width = image.size
        box = Box(height // 3, width // 4, (height + 2) // 3, (width + 1) // 2)
        part = reader.open(blob, str(case.path)).region(box)
        assert part.flags.c_contiguous
        np.testing.assert_array_equal(
            part, pixels[box.top : box.top + box.height, box.left : box.left + box.width], str(case)
        )
        whole = reader.open(blob, str(case.path)).pil()
        assert (whole.mode, whole.size) == (expected.mode, expected.size), case
        assert whole.tobytes() == expected.tobytes(), case
        assert set(whole.info) == set(expected.info), case
    assert capfd.readouterr().err == ""


def test_trusted_files_go_to_the_fast_decoder_and_all_others_to_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, data, box = ImageReader(Decode()), encoded(), Box(1, 2, 3, 4)
    asked: list[Box] = []
    monkeypatch.setattr(reader, "fast_region", lambda blob, box: asked.append(box))  # declines
    expected = np.asarray(Image.open(io.BytesIO(data)))[1:4, 2:6]
    np.testing.assert_array_equal(reader.open(data, "x.jpg").region(box), expected)
    reader.open(encoded("PNG"), "x.png").region(box)
    reader.open(data.replace(b"\xff\xd9", b""), "x.jpg")
    assert asked == [box]


def test_an_unknown_file_is_named() -> None:
    with pytest.raises(Image.UnidentifiedImageError, match=r"/some/where/x\.jpg"):
        ImageReader(Decode()).open(b"nothing", "/some/where/x.jpg")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_limits_of_pixels_hold(backend: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, pixels = encoded(kind), 70 * 93
    assert ImageReader(Decode(backend=backend, max_pixels=pixels)).open(data, "x").size == Size(70, 93)
    with pytest.raises(OptionError, match=rf"'/a/x.img' has {pixels} pixels.*max_pixels={pixels - 1}"):
        ImageReader(Decode(backend=backend, max_pixels=pixels - 1)).open(data, "/a/x.img")
    reader = ImageReader(Decode(backend=backend))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels // 2 - 1)  # Pillow's own
    with pytest.raises(Image.DecompressionBombError):
        reader.open(data, "x")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        assert reader.open(data, "x").size == Size(70, 93)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.open(data, "x").size == Size(70, 93)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_as_exif_says(backend: Any, kind: str) -> None:
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(kind, exif=exif)
        opened = Image.open(io.BytesIO(data))
        # Pillow turns TIFF by itself.
        for turn, expected in (
            (True, ImageOps.exif_transpose(opened)),
            (False, Image.open(io.BytesIO(data))),
        ):
            image, expected = (
                ImageReader(Decode(backend=backend, exif=turn)).open(data, "x"),
                expected.convert("RGB"),
            )
            assert image.size == (expected.height, expected.width)
            np.testing.assert_array_equal(image.region(Box(0, 0, *image.size)), np.asarray(expected))
            assert image.pil().tobytes() == expected.tobytes()


PILLOW = tuple(int(part) for part in PIL.__version__.split(".")[:2])
XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_are_turned_by_xmp_as_pillow_does(backend: Any) -> None:
    data = encoded()
    data = data[:2] + b"\xff\xe1" + (len(XMP) + 2).to_bytes(2, "big") + XMP + data[2:]
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if PILLOW >= (11, 3):  # earlier ones do not look for an orientation there
        assert expected.size == (70, 93)
    image = ImageReader(Decode(backend=backend, exif=True)).open(data, "x")
    np.testing.assert_array_equal(image.region(Box(0, 0, *image.size)), np.asarray(expected))


def test_settings_name_the_versions_of_all_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ImageReader(Decode()).settings()
    assert before == ImageReader(Decode()).settings()
    monkeypatch.setattr("PIL.features.version", lambda name: "0.1" if name == "libjpeg_turbo" else "1")
    assert "'libjpeg_turbo': '0.1'" in ImageReader(Decode()).settings()
    assert ImageReader(Decode(exif=True)).settings() != ImageReader(Decode()).settings()
    reader = pickle.loads(pickle.dumps(ImageReader(Decode(backend="simplejpeg", max_pixels=10))))
    assert reader.decode == Decode(backend="simplejpeg", max_pixels=10)


def test_a_png_plugin_that_is_being_imported_changes_no_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = ImageReader(Decode())
    rules = reader.rules()
    monkeypatch.setitem(sys.modules, "PIL.PngImagePlugin", ModuleType("PIL.PngImagePlugin"))
    assert reader.rules() == rules
