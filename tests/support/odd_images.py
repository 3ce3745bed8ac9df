"""Every kind of image file that turns up in real folders, good and bad, one small file each."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jpeg_surgery as surgery
import numpy as np
import numpy.typing as npt

from fastpipe.bench.synthetic import photograph
from fastpipe.core.extras import require

__all__ = [
    "Case",
    "OddImage",
    "damaged_at_random",
    "damaged_files",
    "good_files",
    "image_of",
    "jpeg",
    "odd_images",
    "saved",
    "write_fifo",
]


# ---- What the makers of odd files share: a case, and encoding with Pillow ---------------------------


class Case(NamedTuple):
    """One odd file before it is written: its case's name, its file name, its bytes, a note."""

    name: str
    file: str
    data: bytes
    note: str


def image_of(pixels: npt.NDArray[Any]) -> Any:
    """A Pillow image from an array."""
    return require("PIL.Image", extra="image").fromarray(pixels)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    """The file Pillow writes for an image or an array."""
    file = io.BytesIO()
    (image_of(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def jpeg(photo: npt.NDArray[np.uint8], **options: Any) -> bytes:
    """The JPEG file Pillow writes: quality 85 and 4:2:0 chroma unless told otherwise."""
    return saved(photo, "JPEG", **{"quality": 85, "subsampling": "4:2:0"} | options)


# ---- The files of ``odd_images`` that are whole, however odd ----------------------------------------

UInt8Array = npt.NDArray[np.uint8]


def good_files(photo: UInt8Array) -> Iterator[Case]:
    """Whole files of every kind, from a photograph of at least 64 by 64 pixels."""
    yield from _jpeg_samplings(photo)
    yield from _jpeg_shapes(photo)
    yield from _jpeg_colours(photo)
    yield from _jpeg_metadata(photo)
    yield from _png(photo)
    yield from _other(photo)
    yield from _named(photo)


def _jpeg_samplings(photo: UInt8Array) -> Iterator[Case]:
    for chroma in ("4:4:4", "4:2:2", "4:2:0"):
        name = chroma.replace(":", "")
        for kind, progressive in (("", False), (" progressive", True)):
            data = jpeg(photo, subsampling=chroma, progressive=progressive)
            yield Case(f"jpeg {chroma}{kind}", f"jpeg_{name}{kind.strip()}.jpg", data, "chroma sampling")
    # The same blocks in the same order, read as another sampling: as many units across and down.
    tall = surgery.jpeg_edit_frame(jpeg(photo[:64], subsampling="4:2:2"), size=(125, 44), sampling=(1, 2))
    yield Case("jpeg 4:4:0", "jpeg_440.jpg", tall, "chroma halved in height only")
    wide = surgery.jpeg_edit_frame(jpeg(photo[:64]), size=(30, 185), sampling=(4, 1))
    yield Case("jpeg 4:1:1", "jpeg_411.jpg", wide, "chroma quartered in width")


def _jpeg_shapes(photo: UInt8Array) -> Iterator[Case]:
    odd = ((1, 1), (1, 7), (7, 1), (2, 2), (8, 8), (17, 33), (31, 32), (33, 31))
    for height, width in (*odd, (15, 15), (16, 16), (17, 17)):
        data = jpeg(photo[:height, :width])
        yield Case(f"jpeg {height}x{width}", f"jpeg_{height}x{width}.jpg", data, "edges off the block grid")
    yield Case("jpeg progressive", "jpeg_progressive.jpg", jpeg(photo, progressive=True), "several scans")
    yield Case("jpeg optimised", "jpeg_optimised.jpg", jpeg(photo, optimize=True), "its own Huffman tables")
    yield Case("jpeg quality 100", "jpeg_q100.jpg", jpeg(photo, quality=100), "fine quantisation")
    yield Case("jpeg quality 1", "jpeg_q1.jpg", jpeg(photo, quality=1), "coarse quantisation")
    restarts = jpeg(photo, restart_marker_blocks=3)
    yield Case(
        "jpeg restarts by block", "jpeg_restart_blocks.jpg", restarts, "a restart marker every 3 units"
    )
    restarts = jpeg(photo, restart_marker_rows=1)
    yield Case(
        "jpeg restarts by row", "jpeg_restart_rows.jpg", restarts, "a restart marker every row of units"
    )


def _jpeg_colours(photo: UInt8Array) -> Iterator[Case]:
    grey = jpeg(photo[:, :, 1])
    yield Case("jpeg grey", "jpeg_grey.jpg", grey, "one component")
    odd = surgery.jpeg_edit_frame(grey, sampling=(2, 2))
    yield Case("jpeg grey 2x2", "jpeg_grey_2x2.jpg", odd, "one component that claims sampling factors 2×2")
    data = jpeg(photo[:, :, 1], progressive=True)
    yield Case("jpeg grey progressive", "jpeg_grey_progressive.jpg", data, "one component, several scans")
    cmyk = saved(image_of(photo).convert("CMYK"), "JPEG", quality=85)
    yield Case("jpeg cmyk", "jpeg_cmyk.jpg", cmyk, "four components, Adobe transform 0")
    adobe = surgery.jpeg_payload(cmyk, 0xEE)
    ycck = surgery.jpeg_replace(cmyk, 0xEE, adobe[:-1] + b"\2")
    yield Case("jpeg ycck", "jpeg_ycck.jpg", ycck, "four components, Adobe transform 2")
    bare = surgery.jpeg_without(cmyk, 0xEE)
    yield Case("jpeg cmyk without adobe", "jpeg_cmyk_bare.jpg", bare, "four components, no Adobe marker")
    rgb = jpeg(photo, keep_rgb=True, subsampling="4:4:4")
    yield Case("jpeg rgb", "jpeg_rgb.jpg", rgb, "stored as RGB, Adobe transform 0, components named R, G, B")
    bare = surgery.jpeg_without(rgb, 0xEE)
    yield Case(
        "jpeg rgb without adobe", "jpeg_rgb_bare.jpg", bare, "known as RGB by the components' names only"
    )
    ycc = surgery.jpeg_without(jpeg(photo), 0xE0)
    yield Case(
        "jpeg without jfif", "jpeg_no_jfif.jpg", ycc, "no APP0; colours known by the component numbers"
    )
    as_rgb = surgery.jpeg_insert(ycc, 0xEE, adobe[:-1] + b"\0")
    yield Case(
        "jpeg adobe 0", "jpeg_adobe_0.jpg", as_rgb, "components 1, 2, 3 said to be RGB by Adobe's marker"
    )
    as_ycc = surgery.jpeg_insert(ycc, 0xEE, adobe[:-1] + b"\1")
    yield Case("jpeg adobe 1", "jpeg_adobe_1.jpg", as_ycc, "components said to be YCbCr by Adobe's marker")


def _jpeg_metadata(photo: UInt8Array) -> Iterator[Case]:
    data = jpeg(photo)
    thumbnail = jpeg(photo[::4, ::4])
    for orientation in range(1, 9):
        tagged = surgery.jpeg_insert(data, 0xE1, surgery.exif_block(orientation, thumbnail))
        note = "orientation tag and a thumbnail, itself a JPEG"
        yield Case(f"jpeg exif {orientation}", f"jpeg_exif_{orientation}.jpg", tagged, note)
    broken = surgery.jpeg_insert(data, 0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff")
    yield Case(
        "jpeg broken exif", "jpeg_exif_broken.jpg", broken, "the EXIF directory lies outside the block"
    )
    data_icc = jpeg(photo, icc_profile=surgery.icc_profile())
    yield Case("jpeg icc", "jpeg_icc.jpg", data_icc, "a colour profile")
    comment = surgery.jpeg_insert(data, 0xFE, "caf\u00e9 \uffff".encode() + b"\xff\xd9\xff\xd8")
    yield Case("jpeg comment", "jpeg_comment.jpg", comment, "a comment that holds markers")
    padded = data
    for _ in range(4):
        padded = surgery.jpeg_insert(padded, 0xED, bytes(65_533))
    yield Case(
        "jpeg long header", "jpeg_long_header.jpg", padded, "256 KiB of segments before the frame header"
    )
    filled = data[:2] + b"\xff\xff\xff" + data[2:]
    yield Case("jpeg fill bytes", "jpeg_fill.jpg", filled, "fill bytes before a marker")
    yield Case(
        "jpeg trailing", "jpeg_trailing.jpg", data + b"trailing \xff\xd8\xff", "garbage behind the end"
    )
    yield Case("jpeg twice", "jpeg_twice.jpg", data + thumbnail, "a second, smaller image behind the first")
    pages = [image_of(np.ascontiguousarray(photo[:, ::-1]))]
    multi = saved(photo, "MPO", save_all=True, append_images=pages)
    yield Case("mpo", "multi_picture.jpg", multi, "two pictures in a JPEG, as cameras write them")


def _png(photo: UInt8Array) -> Iterator[Case]:
    image = image_of(photo)
    palette = image.quantize(32)
    for mode in ("1", "L", "RGB", "RGBA", "LA"):
        converted = image.convert(mode)
        if mode in ("RGBA", "LA"):
            converted.putalpha(image_of(np.ascontiguousarray(photo[:, :, 0])))
        yield Case(f"png {mode}", f"png_{mode}.png", saved(converted, "PNG"), f"mode {mode}")
    yield Case("png palette", "png_palette.png", saved(palette, "PNG"), "a palette of 32 colours")
    small = saved(image.quantize(4), "PNG", bits=2)
    yield Case("png palette 2 bits", "png_palette_2.png", small, "four pixels in a byte")
    data = saved(palette, "PNG", transparency=3)
    yield Case("png palette transparent", "png_palette_transparent.png", data, "one colour is transparent")
    data = saved(palette, "PNG", transparency=bytes(range(0, 256, 8)))
    yield Case("png palette alphas", "png_palette_alphas.png", data, "an opacity for each colour")
    data = saved(image, "PNG", transparency=tuple(int(v) for v in photo[0, 0]))
    yield Case("png transparent colour", "png_transparent_rgb.png", data, "RGB with one transparent colour")
    wide = photo.astype(np.uint16) * 257
    for name, samples, colour in (("L", wide[:, :, :1], 0), ("RGB", wide, 2), ("LA", wide[:, :, :2], 4)):
        data = surgery.png(samples, colour=colour)
        yield Case(f"png 16-bit {name}", f"png_16_{name}.png", data, "16 bits a sample")
    rgba = np.concatenate([wide, wide[:, :, :1]], axis=2)
    yield Case("png 16-bit RGBA", "png_16_RGBA.png", surgery.png(rgba, colour=6), "16 bits a sample")
    interlaced: tuple[tuple[str, npt.NDArray[Any]], ...] = (("8-bit", photo), ("16-bit", wide))
    for name, pixels in interlaced:
        data = surgery.png(pixels, colour=2, interlaced=True)
        yield Case(f"png interlaced {name}", f"png_interlaced_{name}.png", data, "seven passes")
    gamma = surgery.png_chunk(b"gAMA", (30_000).to_bytes(4, "big"))
    yield Case(
        "png gamma", "png_gamma.png", surgery.png(photo, colour=2, extra=gamma), "a gamma Pillow ignores"
    )
    data = saved(image, "PNG", save_all=True, append_images=[image.rotate(90)])
    yield Case("png animated", "png_animated.png", data, "two frames")
    data = saved(image, "PNG", exif=surgery.exif_block(6, b"")[6:])
    yield Case("png exif", "png_exif.png", data, "orientation tag 6")


def _other(photo: UInt8Array) -> Iterator[Case]:
    image = image_of(photo)
    alpha = image.copy()
    alpha.putalpha(image_of(np.ascontiguousarray(photo[:, :, 0])))
    frames: dict[str, Any] = {"save_all": True, "append_images": [image.rotate(90)]}
    grey16 = image_of(photo[:, :, 1].astype(np.uint16) * 257)
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
        yield Case(name, file, saved(source, kind, **options), note)
    small = photo[:5, :4]
    text = " ".join(map(str, small.ravel()))
    yield Case("ppm ascii", "ppm_ascii.ppm", f"P3\n# comment\n4 5\n255\n{text}\n".encode(), "numbers as text")
    text = " ".join(map(str, small[:, :, 0].ravel()))
    yield Case("pgm ascii", "pgm_ascii.pgm", f"P2 4 5 200 {text}".encode(), "values above the stated maximum")
    data = b"P5 93 70 65535\n" + np.asarray(grey16).astype(">u2").tobytes()
    yield Case("pgm 16-bit", "pgm_16.pgm", data, "two bytes a pixel")
    data = b"P6 93 70 65535\n" + (photo.astype(">u2") * 257).tobytes()
    yield Case("ppm 16-bit", "ppm_16.ppm", data, "two bytes a sample")
    yield Case("bmp rle", "bmp_rle.bmp", surgery.bmp_rle8(photo[:, :, 0]), "run-length coded")


def _named(photo: UInt8Array) -> Iterator[Case]:
    png, gif = saved(photo, "PNG"), saved(image_of(photo).quantize(64), "GIF")
    plain = jpeg(photo)
    yield Case("png named jpg", "is_png.jpg", png, "content and extension differ")
    yield Case("jpeg named png", "is_jpeg.png", plain, "content and extension differ")
    yield Case("gif named jpeg", "is_gif.jpeg", gif, "content and extension differ")
    yield Case("upper-case extension", "UPPER.JPEG", plain, "extensions are compared without case")
    yield Case("space in name", "with space .jpg", plain, "spaces, one before the extension")
    yield Case("percent in name", "100%25 %s {0}.jpg", plain, "percent signs and braces")
    yield Case("unicode in name", "fa\u00e7ade \u732b \U0001f408.jpg", plain, "letters outside ASCII")
    yield Case("decomposed name", "cafe\u0301.jpg", plain, "an accent as a character of its own")
    yield Case("dot in front", ".hidden.jpg", plain, "hidden on POSIX, which ImageFolder does not mind")
    if os.name != "nt":
        yield Case("newline in name", "two\nlines.jpg", plain, "a line break")
        yield Case("quotes in name", "a'b\"c\\d*.jpg", plain, "quotes, a backslash and a star")


# ---- The files of ``odd_images`` that are cut, spoilt, or not images at all -------------------------


def damaged_files(photo: UInt8Array) -> Iterator[Case]:
    """Damaged files.  Pillow reads some of them nevertheless."""
    yield from _jpegs(photo)
    yield from _others(photo)


def _jpegs(photo: UInt8Array) -> Iterator[Case]:
    for kind, data in (("jpeg", jpeg(photo)), ("progressive", jpeg(photo, progressive=True))):
        for percent in (10, 50, 90, 99):
            cut = data[: len(data) * percent // 100]
            yield Case(f"{kind} cut at {percent} %", f"cut_{kind}_{percent}.jpg", cut, "the end is missing")
        yield Case(f"{kind} without end", f"cut_{kind}_end.jpg", data[:-2], "all but the end marker")
    data = jpeg(photo)
    first, last = surgery.jpeg_scan_span(data)
    middle, length = (first + last) // 2, (last - first) // 5
    noise = np.random.default_rng(1).integers(0, 255, length, dtype=np.uint8).tobytes()  # never 0xFF
    for name, filling in (("garbage", noise), ("zeros", bytes(length)), ("ones", b"\xff" * length)):
        spoilt = data[:middle] + filling + data[middle + length :]
        yield Case(f"jpeg {name} inside", f"inside_{name}.jpg", spoilt, "part of the scan overwritten")
    cut = data[:middle] + data[last:]
    yield Case("jpeg half scan", "half_scan.jpg", cut, "half the scan is missing, the end marker is there")
    for name, marker in (("huffman", 0xC4), ("quantisation", 0xDB)):
        payload = surgery.jpeg_payload(data, marker)
        for kind, claimed in (("short", 5), ("long", len(payload) + 300), ("zero", 0)):
            broken = surgery.jpeg_replace(data, marker, payload, claimed=claimed)
            note = f"the length of a {name} table is wrong"
            yield Case(f"jpeg {name} length {kind}", f"length_{name}_{kind}.jpg", broken, note)
        broken = surgery.jpeg_without(data, marker)
        yield Case(f"jpeg without {name}", f"no_{name}.jpg", broken, "a table is missing")
    yield Case("jpeg markers only", "markers_only.jpg", b"\xff\xd8\xff\xd9", "start and end, nothing between")
    yield Case("jpeg headers only", "headers_only.jpg", data[:first], "cut before the first coded byte")
    bomb = surgery.jpeg_edit_frame(data, size=(60_000, 60_000))
    yield Case("jpeg bomb", "bomb.jpg", bomb, "claims 60,000 by 60,000 pixels")
    taller = surgery.jpeg_edit_frame(data, size=(700, 93))
    yield Case("jpeg taller", "taller.jpg", taller, "claims ten times the rows it has")
    yield Case("jpeg zero size", "zero.jpg", surgery.jpeg_edit_frame(data, size=(70, 0)), "no columns")
    yield Case("jpeg no rows", "no_rows.jpg", surgery.jpeg_edit_frame(data, size=(0, 93)), "rows unknown")
    deep = surgery.jpeg_edit_frame(data, precision=12)
    yield Case("jpeg 12-bit", "deep.jpg", deep, "claims 12 bits a sample")


def _others(photo: UInt8Array) -> Iterator[Case]:
    png = saved(photo, "PNG")
    yield Case("empty", "empty.jpg", b"", "no bytes")
    yield Case("one byte", "one.jpg", b"\xff", "one byte")
    garbage = np.random.default_rng(2).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    yield Case("garbage", "garbage.jpg", b"\0" + garbage, "random bytes")
    yield Case("text", "text.jpg", b"This is not an image.\n" * 20, "a text file")
    page = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"
    yield Case("html", "page.jpg", page, "the error page a download left behind")
    for percent in (10, 50, 90):
        yield Case(f"png cut at {percent} %", f"cut_{percent}.png", png[: len(png) * percent // 100], "cut")
    yield Case("png without end", "cut_end.png", png[:-12], "no IEND")
    at = png.index(b"IDAT") + 40
    flipped = png[:at] + bytes((png[at] ^ 1,)) + png[at + 1 :]
    yield Case("png bad data", "flipped.png", flipped, "a flipped bit in the pixels: bad checksum")
    header = png[:16] + (71).to_bytes(4, "big") + png[20:]
    yield Case("png bad header", "header.png", header, "the header's checksum is wrong")
    bomb = surgery.png(photo, colour=2, claimed_size=(60_000, 60_000))
    yield Case("png bomb", "bomb.png", bomb, "claims 60,000 by 60,000 pixels")
    for kind in ("WEBP", "TIFF", "BMP", "PPM"):
        data = saved(photo, kind)
        cut = data[: len(data) // 2]
        yield Case(f"{kind.lower()} cut", f"cut.{kind.lower()}", cut, "cut in the middle")


def damaged_at_random(data: bytes, rng: np.random.Generator) -> bytes:
    """A JPEG with damage somewhere in its coded data: a bit, some bytes, a marker, or its end is gone.

    Args:
        data: the file.
        rng: says where, and which damage.
    """
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


# ----------------------------------------------------------------------------------------------------
# Every kind of image file that turns up in real folders, good and bad, one small file each.
#
# Whether a file is good is what Pillow says when the file is written, so the labels hold for the Pillow
# that is installed.


@dataclass(frozen=True)
class OddImage:
    """One file of :func:`odd_images`.

    Attributes:
        name: short, unique, such as ``"jpeg 4:2:2"``.
        path: the file.
        expect: ``"ok"`` where ``PIL.Image.open(f).convert("RGB")`` works, ``"bad"`` where
            it raises.
        note: what is odd about it.
    """

    name: str
    path: Path
    expect: Literal["ok", "bad"]
    note: str


def odd_images(root: Path, seed: int = 0) -> list[OddImage]:
    """Write one file for each odd case and say which of them Pillow can read.

    The bytes depend on ``seed`` and on the installed Pillow only.  Extensions are those that
    ``ImageFolder`` accepts, plus ``.gif`` and ``.ico``.

    Args:
        root: a folder; made when it does not exist.  All files lie directly in it.
        seed: any integer ≥ 0, for the pixels.

    Returns:
        The cases, good ones and bad ones mixed, in a fixed order.
    """
    root.mkdir(parents=True, exist_ok=True)
    photo = photograph(np.random.default_rng(seed), (70, 93))
    listed = []
    for case in (*good_files(photo), *damaged_files(photo)):
        path = root / case.file
        path.write_bytes(case.data)
        listed.append((case.name, path, case.note))
    listed += _special(root, photo)
    return [OddImage(name, path, _ask_pillow(path), note) for name, path, note in listed]


def write_fifo(root: Path) -> Path:
    """Make the named pipe ``root/pipe.jpg``: a reader that just opens it waits for ever.

    Not one of :func:`odd_images`, as a test that reads it needs a time limit.

    Raises:
        OSError: the file exists, or the file system has no pipes.
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


def _special(root: Path, photo: npt.NDArray[np.uint8]) -> list[tuple[str, Path, str]]:
    """What is more than a name and bytes: a folder, links, a file without permissions."""
    folder, dangling, loop, link, locked = (
        root / name for name in ("folder.jpg", "dangling.jpg", "loop.jpg", "link.jpg", "locked.jpg")
    )
    target = root / "link_target.bin"
    target.write_bytes(jpeg(photo))
    folder.mkdir(exist_ok=True)
    for path, to in ((dangling, "nowhere.jpg"), (loop, "loop.jpg"), (link, target.name)):
        path.unlink(missing_ok=True)
        path.symlink_to(to)
    if locked.exists():
        locked.chmod(0o600)
    locked.write_bytes(jpeg(photo))
    locked.chmod(0)
    return [
        ("folder", folder, "a folder with an image's name"),
        ("dangling link", dangling, "a symbolic link to nothing"),
        ("link loop", loop, "a symbolic link to itself"),
        ("link", link, "a symbolic link to a good file"),
        ("no permission", locked, "mode 000: good for the superuser, bad for everyone else"),
    ]
