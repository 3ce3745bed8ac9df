"""Every kind of image file that turns up in real folders, good and bad, one small file each."""

from __future__ import annotations

import io
import os
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from jpeg_surgery import (
    bmp_rle8,
    exif_block,
    icc_profile,
    jpeg_edit_frame,
    jpeg_insert,
    jpeg_payload,
    jpeg_replace,
    jpeg_scan_span,
    jpeg_without,
    png,
    png_chunk,
)

from fastpipe.bench.synthetic import photograph
from fastpipe.core.extras import require

__all__ = ["OddImage", "damaged_at_random", "odd_images", "pngs", "write_fifo"]

UInt8Array = npt.NDArray[np.uint8]
Case = tuple[str, str, bytes, str]  # a name, a file's name, its bytes, a note


def _image_of(pixels: npt.NDArray[Any]) -> Any:
    return require("PIL.Image", extra="image").fromarray(pixels)


def _saved(image: Any, kind: str, **options: Any) -> bytes:
    """The file Pillow writes for an image or an array."""
    file = io.BytesIO()
    (_image_of(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def _jpeg(photo: UInt8Array, **options: Any) -> bytes:
    return _saved(photo, "JPEG", **{"quality": 85, "subsampling": "4:2:0"} | options)


# ---- Files that are whole, however odd -----------------------------------------------------------


def _jpeg_samplings(photo: UInt8Array) -> Iterator[Case]:
    for chroma in ("4:4:4", "4:2:2", "4:2:0"):
        for kind, progressive in (("", False), (" progressive", True)):
            file = f"jpeg_{chroma.replace(':', '')}{kind.strip()}.jpg"
            data = _jpeg(photo, subsampling=chroma, progressive=progressive)
            yield f"jpeg {chroma}{kind}", file, data, "chroma sampling"
    # The same blocks in the same order, read as another sampling: as many units across and down.
    tall = jpeg_edit_frame(_jpeg(photo[:64], subsampling="4:2:2"), size=(125, 44), sampling=(1, 2))
    yield "jpeg 4:4:0", "jpeg_440.jpg", tall, "chroma halved in height only"
    wide = jpeg_edit_frame(_jpeg(photo[:64]), size=(30, 185), sampling=(4, 1))
    yield "jpeg 4:1:1", "jpeg_411.jpg", wide, "chroma quartered in width"


def _jpeg_shapes(photo: UInt8Array) -> Iterator[Case]:
    odd = ((1, 1), (1, 7), (7, 1), (2, 2), (8, 8), (17, 33), (31, 32), (33, 31))
    for height, width in (*odd, (15, 15), (16, 16), (17, 17)):
        size, data = f"{height}x{width}", _jpeg(photo[:height, :width])
        yield f"jpeg {size}", f"jpeg_{size}.jpg", data, "edges off the block grid"
    for name, file, note, options in (
        ("progressive", "progressive", "several scans", {"progressive": True}),
        ("optimised", "optimised", "its own Huffman tables", {"optimize": True}),
        ("quality 100", "q100", "fine quantisation", {"quality": 100}),
        ("quality 1", "q1", "coarse quantisation", {"quality": 1}),
        ("restarts by block", "restart_blocks", "a restart marker every 3 units", {"restart_marker_blocks": 3}),
        ("restarts by row", "restart_rows", "a restart marker every row of units", {"restart_marker_rows": 1}),
    ):  # fmt: skip
        yield f"jpeg {name}", f"jpeg_{file}.jpg", _jpeg(photo, **options), note


def _jpeg_colours(photo: UInt8Array) -> list[Case]:
    grey, progressive = (_jpeg(photo[:, :, 1], progressive=is_so) for is_so in (False, True))
    cmyk = _saved(_image_of(photo).convert("CMYK"), "JPEG", quality=85)
    rgb = _jpeg(photo, keep_rgb=True, subsampling="4:4:4")
    ycc = jpeg_without(_jpeg(photo), 0xE0)
    adobe = [jpeg_payload(cmyk, 0xEE)[:-1] + bytes([transform]) for transform in (0, 1, 2)]
    return [
        ("jpeg grey", "jpeg_grey.jpg", grey, "one component"),
        ("jpeg grey 2x2", "jpeg_grey_2x2.jpg", jpeg_edit_frame(grey, sampling=(2, 2)),
         "one component that claims sampling factors 2×2"),
        ("jpeg grey progressive", "jpeg_grey_progressive.jpg", progressive, "one component, several scans"),
        ("jpeg cmyk", "jpeg_cmyk.jpg", cmyk, "four components, Adobe transform 0"),
        ("jpeg ycck", "jpeg_ycck.jpg", jpeg_replace(cmyk, 0xEE, adobe[2]), "Adobe transform 2"),
        ("jpeg cmyk without adobe", "jpeg_cmyk_bare.jpg", jpeg_without(cmyk, 0xEE), "no Adobe marker"),
        ("jpeg rgb", "jpeg_rgb.jpg", rgb, "stored as RGB, Adobe transform 0, components named R, G, B"),
        ("jpeg rgb without adobe", "jpeg_rgb_bare.jpg", jpeg_without(rgb, 0xEE), "known by the names only"),
        ("jpeg without jfif", "jpeg_no_jfif.jpg", ycc, "no APP0; colours known by the component numbers"),
        ("jpeg adobe 0", "jpeg_adobe_0.jpg", jpeg_insert(ycc, 0xEE, adobe[0]), "1, 2, 3 said to be RGB"),
        ("jpeg adobe 1", "jpeg_adobe_1.jpg", jpeg_insert(ycc, 0xEE, adobe[1]), "said to be YCbCr"),
    ]  # fmt: skip


def _jpeg_metadata(photo: UInt8Array) -> list[Case]:
    data, thumbnail = _jpeg(photo), _jpeg(photo[::4, ::4])
    padded = data
    for _ in range(4):
        padded = jpeg_insert(padded, 0xED, bytes(65_533))
    mirrored = _image_of(np.ascontiguousarray(photo[:, ::-1]))
    return [
        *((f"jpeg exif {n}", f"jpeg_exif_{n}.jpg", jpeg_insert(data, 0xE1, exif_block(n, thumbnail)),
           "orientation tag and a thumbnail, itself a JPEG") for n in range(1, 9)),
        ("jpeg broken exif", "jpeg_exif_broken.jpg", jpeg_insert(data, 0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
         "the EXIF directory lies outside the block"),
        ("jpeg icc", "jpeg_icc.jpg", _jpeg(photo, icc_profile=icc_profile()), "a colour profile"),
        ("jpeg comment", "jpeg_comment.jpg",
         jpeg_insert(data, 0xFE, "caf\u00e9 \uffff".encode() + b"\xff\xd9\xff\xd8"), "holds markers"),
        ("jpeg long header", "jpeg_long_header.jpg", padded, "256 KiB of segments before the frame header"),
        ("jpeg fill bytes", "jpeg_fill.jpg", data[:2] + b"\xff\xff\xff" + data[2:], "before a marker"),
        ("jpeg trailing", "jpeg_trailing.jpg", data + b"trailing \xff\xd8\xff", "garbage behind the end"),
        ("jpeg twice", "jpeg_twice.jpg", data + thumbnail, "a second, smaller image behind the first"),
        ("mpo", "multi_picture.jpg", _saved(photo, "MPO", save_all=True, append_images=[mirrored]),
         "two pictures in a JPEG, as cameras write them"),
    ]  # fmt: skip


def pngs(photo: UInt8Array) -> list[Case]:
    """PNGs of every kind, whole and with chunks that may be refused."""
    image, wide = _image_of(photo), photo.astype(np.uint16) * 257
    palette, alpha = image.quantize(32), _image_of(np.ascontiguousarray(photo[:, :, 0]))

    def of_mode(mode: str) -> bytes:
        converted = image.convert(mode)
        if mode in ("RGBA", "LA"):
            converted.putalpha(alpha)
        return _saved(converted, "PNG")

    def text(words: bytes, kind: bytes = b"tEXt") -> bytes:
        return png_chunk(kind, words)

    profile = zlib.compress(icc_profile() + bytes(1 << 20))
    filtered = {"filters": b"\1\2\3\4\0", "piece": 100}
    gamma, colour = png_chunk(b"gAMA", (30_000).to_bytes(4, "big")), tuple(map(int, photo[0, 0]))
    rgba, opacities = np.concatenate([wide, wide[:, :, :1]], axis=2), bytes(range(0, 256, 8))
    pages = {"save_all": True, "append_images": [image.rotate(90)]}
    return [
        *((f"png {mode}", f"png_{mode}.png", of_mode(mode), f"mode {mode}")
          for mode in ("1", "L", "RGB", "RGBA", "LA")),
        ("png palette", "png_palette.png", _saved(palette, "PNG"), "a palette of 32 colours"),
        ("png palette 2 bits", "png_palette_2.png", _saved(image.quantize(4), "PNG", bits=2), "four in a byte"),
        ("png palette transparent", "png_palette_transparent.png", _saved(palette, "PNG", transparency=3),
         "one colour is transparent"),
        ("png palette alphas", "png_palette_alphas.png", _saved(palette, "PNG", transparency=opacities),
         "an opacity for each colour"),
        ("png transparent colour", "png_transparent_rgb.png", _saved(image, "PNG", transparency=colour),
         "RGB with one transparent colour"),
        *((f"png 16-bit {name}", f"png_16_{name}.png", png(samples, colour=kind), "16 bits a sample")
          for name, samples, kind in (("L", wide[:, :, :1], 0), ("RGB", wide, 2), ("LA", wide[:, :, :2], 4),
                                      ("RGBA", rgba, 6))),
        *((f"png interlaced {name}", f"png_interlaced_{name}.png", png(pixels, colour=2, interlaced=True), "seven passes")
          for name, pixels in (("8-bit", photo), ("16-bit", wide))),
        ("png gamma", "png_gamma.png", png(photo, colour=2, extra=gamma), "a gamma Pillow ignores"),
        ("png animated", "png_animated.png", _saved(image, "PNG", **pages), "two frames"),
        *((f"png filters {name}", f"png_filters_{name}.png", png(samples, colour=kind, **filtered), "each filter")
          for name, samples, kind in (("L", photo[:, :, :1], 0), ("LA", photo[:, :, :2], 4), ("RGB", photo, 2),
                                      ("RGBA", rgba.astype(np.uint8), 6), ("16 L", wide[:, :, :1], 0),
                                      ("16 RGB", wide, 2), ("16 RGBA", rgba, 6))),
        ("png filter 5", "png_filter_5.png", png(photo, colour=2, filters=b"\0" * 60 + b"\5"), "no such filter"),
        ("png palette filters", "png_palette_filters.png",
         png(photo[:, :, :1] % 16, colour=3, extra=png_chunk(b"PLTE", bytes(range(48))), **filtered), "16 colours"),
        ("png palette short", "png_palette_short.png",
         png(photo[:, :, :1], colour=3, extra=png_chunk(b"PLTE", bytes(range(48)))), "colours that are not there"),
        ("png palette missing", "png_palette_missing.png", png(photo[:, :, :1], colour=3), "no palette"),
        ("png grey 4 bits", "png_grey_4.png", _saved(image.convert("L"), "PNG", bits=4), "two in a byte"),
        ("png texts", "png_texts.png",
         png(photo, colour=2, extra=text(b"Title\0here"), behind=text(b"date:create\x002026") +
             text(b"Comment\0\0\0\0\0none", b"iTXt") + text(b"Note\0\0" + zlib.compress(b"text"), b"zTXt")), "texts"),
        *((f"png text {name}", f"png_text_{name}.png", png(photo, colour=2, **{where: text(name.encode() + b"\x001")}),
           "a name that Pillow uses")
          for name, where in (("interlace", "extra"), ("transparency", "behind"), ("bbox", "behind"))),
        *((f"png profile {name}", f"png_profile_{name.replace(' ', '_')}.png", png(photo, colour=2, extra=png_chunk(b"iCCP", content)),
           "a colour profile")
          for name, content in (("small", b"x\0\0" + zlib.compress(icc_profile())), ("large", b"x\0\0" + profile),
                                ("damaged", b"x\0\0" + profile[:-9]), ("of another method", b"x\0\1" + profile),
                                ("empty", b"x"))),
        ("png unknown chunks", "png_unknown.png",
         png(photo, colour=2, extra=png_chunk(b"abCd", b"1"), behind=png_chunk(b"abCd", b"2")), "private chunks"),
        ("png chunk without a name", "png_nameless.png", png(photo, colour=2, behind=png_chunk(b"\1\2\3\4", b"2")), ""),
        ("png data behind", "png_behind.png", png(photo, colour=2, behind=png_chunk(b"tIME", b"") + png_chunk(b"IDAT", b"")),
         "pixels after another chunk"),
        *((f"png gamma {size}", f"png_gamma_{size}.png", png(photo, colour=2, extra=png_chunk(b"gAMA", bytes(size))),
           "a gamma that is too short") for size in (0, 3)),
        ("png exif", "png_exif.png", _saved(image, "PNG", exif=exif_block(6, b"")[6:]), "orientation tag 6"),
    ]  # fmt: skip


def _other(photo: UInt8Array) -> Iterator[Case]:
    image = _image_of(photo)
    alpha = image.copy()
    alpha.putalpha(_image_of(np.ascontiguousarray(photo[:, :, 0])))
    frames: dict[str, Any] = {"save_all": True, "append_images": [image.rotate(90)]}
    grey16 = _image_of(photo[:, :, 1].astype(np.uint16) * 257)
    cases: list[tuple[str, str, Any, str, dict[str, Any]]] = [
        ("webp lossy", "webp_lossy.webp", image, "WEBP", {"quality": 80}),
        ("webp lossless", "webp_lossless.webp", image, "WEBP", {"lossless": True}),
        ("webp alpha", "webp_alpha.webp", alpha, "WEBP", {"quality": 80}),
        ("webp animated", "webp_animated.webp", image, "WEBP", frames),
        ("gif", "gif.gif", image.quantize(64), "GIF", {}),
        ("gif animated", "gif_animated.gif", image, "GIF", frames),
        ("bmp RGB", "bmp_24.bmp", image, "BMP", {}),
        ("bmp palette", "bmp_8.bmp", image.quantize(256), "BMP", {}),
        ("bmp 1-bit", "bmp_1.bmp", image.convert("1"), "BMP", {}),
        ("bmp RGBA", "bmp_32.bmp", alpha, "BMP", {}),
        ("tiff RGB", "tiff_rgb.tif", image, "TIFF", {}),
        ("tiff lzw", "tiff_lzw.tiff", image, "TIFF", {"compression": "tiff_lzw"}),
        ("tiff deflate", "tiff_deflate.tif", image, "TIFF", {"compression": "tiff_adobe_deflate"}),
        ("tiff jpeg", "tiff_jpeg.tif", image, "TIFF", {"compression": "jpeg"}),
        ("tiff 16-bit", "tiff_16.tif", grey16, "TIFF", {}),
        ("tiff cmyk", "tiff_cmyk.tif", image.convert("CMYK"), "TIFF", {}),
        ("tiff 1-bit", "tiff_1.tif", image.convert("1"), "TIFF", {"compression": "group4"}),
        ("tiff float", "tiff_float.tif", image.convert("F"), "TIFF", {}),
        ("tiff pages", "tiff_pages.tif", image, "TIFF", frames),
        ("ppm", "ppm.ppm", image, "PPM", {}),
        ("pgm", "pgm.pgm", image.convert("L"), "PPM", {}),
        ("pbm in .ppm", "pbm.ppm", image.convert("1"), "PPM", {}),
        ("ico", "ico.ico", image, "ICO", {"sizes": [(32, 32), (16, 16)]}),
    ]
    for name, file, source, kind, options in cases:
        note = f"{kind} as Pillow writes it, options: {', '.join(options) or 'none'}"
        yield name, file, _saved(source, kind, **options), note
    small = photo[:5, :4]
    colours, greys = (" ".join(map(str, one.ravel())) for one in (small, small[:, :, 0]))
    yield "ppm ascii", "ppm_ascii.ppm", f"P3\n# comment\n4 5\n255\n{colours}\n".encode(), "numbers as text"
    yield "pgm ascii", "pgm_ascii.pgm", f"P2 4 5 200 {greys}".encode(), "values above the stated maximum"
    data = b"P5 93 70 65535\n" + np.asarray(grey16).astype(">u2").tobytes()
    yield "pgm 16-bit", "pgm_16.pgm", data, "two bytes a pixel"
    data = b"P6 93 70 65535\n" + (photo.astype(">u2") * 257).tobytes()
    yield "ppm 16-bit", "ppm_16.ppm", data, "two bytes a sample"
    yield "bmp rle", "bmp_rle.bmp", bmp_rle8(photo[:, :, 0]), "run-length coded"


def _named(photo: UInt8Array) -> list[Case]:
    plain, gif, other = _jpeg(photo), _image_of(photo).quantize(64), "content and extension differ"
    return [
        ("png named jpg", "is_png.jpg", _saved(photo, "PNG"), other), ("jpeg named png", "is_jpeg.png", plain, other),
        ("gif named jpeg", "is_gif.jpeg", _saved(gif, "GIF"), other),
        ("upper-case extension", "UPPER.JPEG", plain, "extensions are compared without case"),
        ("space in name", "with space .jpg", plain, "spaces, one before the extension"),
        ("percent in name", "100%25 %s {0}.jpg", plain, "percent signs and braces"),
        ("unicode in name", "fa\u00e7ade \u732b \U0001f408.jpg", plain, "letters outside ASCII"),
        ("decomposed name", "cafe\u0301.jpg", plain, "an accent as a character of its own"),
        ("dot in front", ".hidden.jpg", plain, "hidden on POSIX, which ImageFolder does not mind"),
        ("newline in name", "two\nlines.jpg", plain, "a line break"),
        ("quotes in name", "a'b\"c\\d*.jpg", plain, "quotes, a backslash and a star"),
    ]  # fmt: skip


# ---- Files that are cut, spoilt, or not images at all; Pillow reads some of them nevertheless -----


def _damaged_jpegs(photo: UInt8Array) -> Iterator[Case]:
    data = _jpeg(photo)
    for kind, whole in (("jpeg", data), ("progressive", _jpeg(photo, progressive=True))):
        for percent in (10, 50, 90, 99):
            cut = whole[: len(whole) * percent // 100]
            yield f"{kind} cut at {percent} %", f"cut_{kind}_{percent}.jpg", cut, "the end is missing"
        yield f"{kind} without end", f"cut_{kind}_end.jpg", whole[:-2], "all but the end marker"
    first, last = jpeg_scan_span(data)
    middle, length = (first + last) // 2, (last - first) // 5
    noise = np.random.default_rng(1).integers(0, 255, length, dtype=np.uint8).tobytes()  # never 0xFF
    for name, filling in (("garbage", noise), ("zeros", bytes(length)), ("ones", b"\xff" * length)):
        spoilt = data[:middle] + filling + data[middle + length :]
        yield f"jpeg {name} inside", f"inside_{name}.jpg", spoilt, "part of the scan overwritten"
    half = data[:middle] + data[last:]
    yield "jpeg half scan", "half_scan.jpg", half, "half the scan is missing, the end marker is there"
    for name, marker in (("huffman", 0xC4), ("quantisation", 0xDB)):
        payload = jpeg_payload(data, marker)
        for kind, claimed in (("short", 5), ("long", len(payload) + 300), ("zero", 0)):
            broken = jpeg_replace(data, marker, payload, claimed=claimed)
            note = f"the length of a {name} table is wrong"
            yield f"jpeg {name} length {kind}", f"length_{name}_{kind}.jpg", broken, note
        yield f"jpeg without {name}", f"no_{name}.jpg", jpeg_without(data, marker), "a table is missing"
    yield "jpeg markers only", "markers_only.jpg", b"\xff\xd8\xff\xd9", "start and end, nothing between"
    yield "jpeg headers only", "headers_only.jpg", data[:first], "cut before the first coded byte"
    for name, edit, note in (
        ("bomb", {"size": (60_000, 60_000)}, "claims 60,000 by 60,000 pixels"),
        ("taller", {"size": (700, 93)}, "claims ten times the rows it has"),
        ("zero size", {"size": (70, 0)}, "no columns"), ("no rows", {"size": (0, 93)}, "rows unknown"),
        ("12-bit", {"precision": 12}, "claims 12 bits a sample"),
    ):  # fmt: skip
        file = {"zero size": "zero", "no rows": "no_rows", "12-bit": "deep"}.get(name, name)
        yield f"jpeg {name}", f"{file}.jpg", jpeg_edit_frame(data, **edit), note  # type: ignore[arg-type]


def _damaged_others(photo: UInt8Array) -> Iterator[Case]:
    whole = _saved(photo, "PNG")
    at = whole.index(b"IDAT") + 40
    garbage = np.random.default_rng(2).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    yield from [
        ("empty", "empty.jpg", b"", "no bytes"), ("one byte", "one.jpg", b"\xff", "one byte"),
        ("garbage", "garbage.jpg", b"\0" + garbage, "random bytes"),
        ("text", "text.jpg", b"This is not an image.\n" * 20, "a text file"),
        ("html", "page.jpg", b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
         "the error page a download left behind"),
        *((f"png cut at {part} %", f"cut_{part}.png", whole[: len(whole) * part // 100], "cut")
          for part in (10, 50, 90)),
        ("png without end", "cut_end.png", whole[:-12], "no IEND"),
        ("png bad data", "flipped.png", whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :],
         "a flipped bit in the pixels: bad checksum"),
        ("png bad header", "header.png", whole[:16] + (71).to_bytes(4, "big") + whole[20:],
         "the header's checksum is wrong"),
        ("png bomb", "bomb.png", png(photo, colour=2, claimed_size=(60_000, 60_000)), "claims a huge size"),
    ]  # fmt: skip
    for kind in ("WEBP", "TIFF", "BMP", "PPM"):
        data = _saved(photo, kind)
        yield f"{kind.lower()} cut", f"cut.{kind.lower()}", data[: len(data) // 2], "cut in the middle"


def damaged_at_random(data: bytes, rng: np.random.Generator) -> bytes:
    """A JPEG with damage somewhere in its coded data: a bit, some bytes, a marker, or its end is gone."""
    start, made = data.index(b"\xff\xda") + 14, bytearray(data)
    at = int(rng.integers(start, len(data) - 60))
    kind = rng.integers(6)
    if kind == 0:
        made[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        made[at : at + 20] = rng.integers(0, 256, 20, np.uint8).tobytes()
    elif kind == 2:
        made[at : at + 2] = bytes([0xFF, int(rng.integers(1, 256))])
    elif kind == 3:
        del made[at : at + int(rng.integers(1, 50))]
    elif kind == 4:
        made[at:at] = b"\xff\xd9"
    else:
        del made[at:]
    return bytes(made)


# ---- All of them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OddImage:
    """One file of :func:`odd_images`.

    Attributes:
        name: short, unique, such as ``"jpeg 4:2:2"``.
        path: the file.
        expect: ``"ok"`` where ``PIL.Image.open(f).convert("RGB")`` works, ``"bad"`` where it raises: what the
            installed Pillow says when the file is written.
        note: what is odd about it.
    """

    name: str
    path: Path
    expect: Literal["ok", "bad"]
    note: str


def odd_images(root: Path, seed: int = 0) -> list[OddImage]:
    """Write one file for each odd case into a folder, and say which of them Pillow can read.

    The bytes depend on ``seed`` and on the installed Pillow only.  Extensions are those that
    ``ImageFolder`` accepts, plus ``.gif`` and ``.ico``.
    """
    root.mkdir(parents=True, exist_ok=True)
    photo = photograph(np.random.default_rng(seed), (70, 93))
    listed = []
    for make in (
        _jpeg_samplings, _jpeg_shapes, _jpeg_colours, _jpeg_metadata, pngs, _other, _named, _damaged_jpegs,
        _damaged_others,
    ):  # fmt: skip
        for name, file, data, note in make(photo):
            (root / file).write_bytes(data)
            listed.append((name, root / file, note))
    listed += _special(root, photo)
    return [OddImage(name, path, _ask_pillow(path), note) for name, path, note in listed]


def write_fifo(root: Path) -> Path:
    """Make the named pipe ``root/pipe.jpg``: a reader that just opens it waits for ever.

    Not one of :func:`odd_images`, as a test that reads it needs a time limit.
    """
    path = root / "pipe.jpg"
    os.mkfifo(path)
    return path


def _ask_pillow(path: Path) -> Literal["ok", "bad"]:
    pil = require("PIL.Image", extra="image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with path.open("rb") as file:
                pil.open(file).convert("RGB")
        except Exception:  # whatever it is, a loader built on Pillow fails with it
            return "bad"
    return "ok"


def _special(root: Path, photo: UInt8Array) -> list[tuple[str, Path, str]]:
    """What is more than a name and bytes: a folder, links, a file without permissions."""
    (root / "folder.jpg").mkdir(exist_ok=True)
    (root / "link_target.bin").write_bytes(_jpeg(photo))
    for name, to in (("dangling", "nowhere.jpg"), ("loop", "loop.jpg"), ("link", "link_target.bin")):
        (root / f"{name}.jpg").unlink(missing_ok=True)
        (root / f"{name}.jpg").symlink_to(to)
    locked = root / "locked.jpg"
    if locked.exists():
        locked.chmod(0o600)
    locked.write_bytes(_jpeg(photo))
    locked.chmod(0)
    return [
        ("folder", root / "folder.jpg", "a folder with an image's name"),
        ("dangling link", root / "dangling.jpg", "a symbolic link to nothing"),
        ("link loop", root / "loop.jpg", "a symbolic link to itself"),
        ("link", root / "link.jpg", "a symbolic link to a good file"),
        ("no permission", locked, "mode 000: good for the superuser, bad for everyone else"),
    ]
