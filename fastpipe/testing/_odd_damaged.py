"""The files of ``odd_images`` that are cut, spoilt, or not images at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fastpipe.testing import _surgery as surgery
from fastpipe.testing._encode import Case, jpeg, saved

__all__ = ["damaged_at_random", "damaged_files"]

UInt8Array = npt.NDArray[np.uint8]


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
