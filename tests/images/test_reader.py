"""Limits of pixels, EXIF's turns, and what a cache has to know of the decoders; tests/parity/test_formats.py has files."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fastpipe.bench.synthetic import photograph
from fastpipe.core.types import Box, Size
from fastpipe.errors import OptionError
from fastpipe.images.reader import ImageReader
from fastpipe.options import Decode

BACKENDS = ["auto", "nvimgcodec", "simplejpeg", "pillow"]
PHOTO = photograph(np.random.default_rng(3), (70, 93))


def encoded(kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PHOTO).save(file, kind, **options)
    return file.getvalue()


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


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "XMP"])
def test_images_are_turned_as_exif_and_xmp_say(backend: Any, kind: str) -> None:
    files = []
    for orientation in range(10) if kind != "XMP" else ():
        exif = Image.Exif()
        exif[0x0112] = orientation
        files.append(encoded(kind, exif=exif))
    plain = encoded()
    for data in files or [plain[:2] + b"\xff\xe1" + (len(XMP) + 2).to_bytes(2, "big") + XMP + plain[2:]]:
        opened = Image.open(io.BytesIO(data))  # Pillow turns TIFF by itself
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


def test_settings_name_the_versions_of_all_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ImageReader(Decode()).settings()
    assert before == ImageReader(Decode()).settings()
    monkeypatch.setattr("PIL.features.version", lambda name: "0.1" if name == "libjpeg_turbo" else "1")
    assert "'libjpeg_turbo': '0.1'" in ImageReader(Decode()).settings()
    assert ImageReader(Decode(exif=True)).settings() != ImageReader(Decode()).settings()
    reader = pickle.loads(pickle.dumps(ImageReader(Decode(backend="simplejpeg", max_pixels=10))))
    assert reader.decode == Decode(backend="simplejpeg", max_pixels=10)


def test_a_png_plugin_that_is_being_imported_changes_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader(Decode())
    rules = reader.rules()
    monkeypatch.setitem(sys.modules, "PIL.PngImagePlugin", ModuleType("PIL.PngImagePlugin"))
    assert reader.rules() == rules
