"""What is odd about an image that can be decoded: nothing that stops a training, and worth knowing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fastpipe.core.class_folders import IMG_EXTENSIONS

__all__ = ["content_kind", "extensions_of", "name_fits", "oddities", "orientation"]

_ORIENTATION = 0x0112
_HEAD = 1 << 16  # where EXIF data are, if there are any
_EXIF_WORDS = (b"Exif\0\0", b"eXIf", b"EXIF", b"rientation")
_ZEROS = bytes(4096)  # a page: what a write that never came leaves
_JPEG_SCAN = b"\xff\xda"
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"
_NETPBM = tuple(b"P%d" % number for number in range(1, 7))

_EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "WebP": (".webp",),
    "Netpbm": (".ppm", ".pgm"),
    "GIF": (".gif",),
}


def content_kind(blob: bytes) -> str:
    """The kind of image, by the first bytes; empty where they are none that ``ImageFolder`` has names for.

    >>> content_kind(b"\\xff\\xd8\\xff\\xe0"), content_kind(b"GIF89a"), content_kind(b"text")
    ('JPEG', 'GIF', '')
    """
    if blob[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if blob[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if blob[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if blob[:4] == b"RIFF" and blob[8:12] == b"WEBP":
        return "WebP"
    if blob[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if blob[:2] in _NETPBM and blob[2:3].isspace():
        return "Netpbm"
    return "BMP" if blob[:2] == b"BM" else ""


def extensions_of(kind: str) -> tuple[str, ...]:
    """The endings of a kind's names that ``ImageFolder`` takes, the usual one first.

    >>> extensions_of("JPEG"), extensions_of("GIF")
    (('.jpg', '.jpeg'), ())
    """
    return tuple(ending for ending in _EXTENSIONS.get(kind, ()) if ending in IMG_EXTENSIONS)


def name_fits(path: str, kind: str) -> bool:
    """Whether a name's ending is one of a kind of image; of no known kind any is.

    >>> name_fits("a.JPEG", "JPEG"), name_fits("a.png", "JPEG")
    (True, False)
    """
    return not kind or os.path.splitext(path)[1].lower() in _EXTENSIONS[kind]


def oddities(path: str, blob: bytes, kind: str, turned: int) -> list[str]:
    """What is odd.

    Args:
        path: the file's.
        blob: its content, which has been decoded.
        kind: of image.
        turned: its EXIF orientation.
    """
    found = []
    if not name_fits(path, kind):
        found.append(f"the name says {os.path.splitext(path)[1]}, the content is {kind}")
    if turned != 1:
        found.append(f"EXIF orientation {turned}, which ImageFolder ignores")
    end = {"JPEG": _JPEG_END, "PNG": _PNG_END}.get(kind)
    if end is not None:
        at = blob.rfind(end)
        behind = len(blob) - at - len(end)
        if at < 0:
            found.append("it has no end marker: its last bytes may be missing")
        elif behind:
            found.append(f"{behind:,} bytes follow its end")
    if blob.endswith(_ZEROS):
        found.append("it ends in zeros: a copy that was not finished, or a block that was lost")
    return found


def orientation(blob: bytes, kind: str, opened: Callable[[], Any]) -> int:
    """The EXIF orientation that the loader leaves out of account; 1 without one.

    Args:
        blob: the file.
        kind: of image.
        opened: opens it with Pillow; called where there may be such a thing.
    """
    first_scan = blob.find(_JPEG_SCAN, 0, _HEAD) if kind == "JPEG" else -1  # behind which there are none
    head = blob[: _HEAD if first_scan < 0 else first_scan]
    if kind == "TIFF" or not any(word in head for word in _EXIF_WORDS):  # a TIFF is turned by Pillow
        return 1
    try:
        value = opened().getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged metadata, which the loader does not look at
        return 1
    return value if value in range(1, 9) else 1
