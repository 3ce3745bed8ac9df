"""Make the inputs with which fuzzing of JPEGs begins: python make_jpeg_corpus.py [folder].

Small files of all kinds, whole, cut off, damaged, and with hostile headers.  They are the same each time, for
one version of Pillow.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile

ImageFile.MAXBLOCK = 1 << 20  # so that tiny, optimised images can be written


def picture(width: int, height: int) -> Image.Image:
    """A picture with edges, slopes and some noise."""
    noise = random.Random(width * 1000 + height)
    data = bytearray()
    for y in range(height):
        for x in range(width):
            bright = 160 if (x // 7 + y // 5) % 2 else 60
            data += bytes((bright + noise.randrange(24), (x * 5) % 256, (y * 7 + x) % 256))
    return Image.frombytes("RGB", (width, height), bytes(data))


def encoded(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=options.pop("quality", 60), **options)
    return out.getvalue()


def with_segment(blob: bytes, marker: int, body: bytes, length: int | None = None) -> bytes:
    """The file with one more segment behind its start marker; ``length`` may lie."""
    size = len(body) + 2 if length is None else length
    return blob[:2] + bytes((0xFF, marker)) + size.to_bytes(2, "big") + body + blob[2:]


def frame_of(blob: bytes) -> int:
    """Where the body of the frame header begins."""
    return next(at for at in range(2, len(blob)) if blob[at] == 0xFF and blob[at + 1] in (0xC0, 0xC2)) + 4


def patched(blob: bytes, at: int, new: bytes) -> bytes:
    return blob[:at] + new + blob[at + len(new) :]


def exif(orientation: int, order: str = "big") -> bytes:
    mark = b"MM\0*" if order == "big" else b"II*\0"
    numbers = ((8, 4), (1, 2), (0x0112, 2), (3, 2), (1, 4), (orientation, 2), (0, 2), (0, 4))
    return b"Exif\0\0" + mark + b"".join(n.to_bytes(size, order) for n, size in numbers)  # type: ignore[arg-type]


def corpus() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    samplings = {"444": 0, "422": 1, "420": 2}
    for name, sampling in samplings.items():
        for kind in ("baseline", "progressive"):
            files[f"{name}-{kind}"] = encoded(
                picture(67, 45), subsampling=sampling, progressive=kind == "progressive"
            )
    for width, height in ((1, 1), (2, 3), (5, 1), (1, 17), (33, 16), (16, 33)):
        files[f"size-{width}x{height}"] = encoded(picture(width, height), subsampling=2)
    large = encoded(picture(130, 110), subsampling=2, quality=20)
    files["large"] = large
    files["grey"] = encoded(picture(50, 41).convert("L"))
    files["grey-progressive"] = encoded(picture(50, 41).convert("L"), progressive=True)
    files["cmyk"] = encoded(picture(20, 20).convert("CMYK"))
    files["rgb"] = encoded(picture(20, 20), keep_rgb=True)
    files["optimised"] = encoded(picture(40, 40), optimize=True)
    files["restart-blocks"] = encoded(picture(67, 45), subsampling=2, restart_marker_blocks=3)
    files["restart-rows"] = encoded(picture(67, 45), subsampling=1, restart_marker_rows=1)
    files["restart-progressive"] = encoded(picture(67, 45), progressive=True, restart_marker_blocks=7)

    base, frame = files["420-baseline"], frame_of(files["420-baseline"])
    progressive = files["420-progressive"]
    files["exif-big"] = with_segment(base, 0xE1, exif(6))
    files["exif-little"] = with_segment(base, 0xE1, exif(3, "little"))
    files["exif-twice"] = with_segment(with_segment(base, 0xE1, exif(6)), 0xE1, exif(3))
    files["exif-cut"] = with_segment(base, 0xE1, exif(6)[:-9])
    files["xmp"] = with_segment(base, 0xE1, b"http://ns.adobe.com/xap/1.0/\0<tiff:Orientation>3")
    files["icc"] = with_segment(base, 0xE2, b"ICC_PROFILE\0\1\1" + bytes(40))
    resources = b"8BIM\4\4\0\0\0\0\0\2ab8BIM\3\xed\1x\0\0\0\2rr"
    files["photoshop"] = with_segment(base, 0xED, b"Photoshop 3.0\0" + resources)
    files["adobe"] = with_segment(base, 0xEE, b"Adobe\0\x64\0\0\0\0\1")
    files["adobe-rgb"] = with_segment(base, 0xEE, b"Adobe\0\x64\0\0\0\0\0")
    files["jfif-short"] = with_segment(base, 0xE0, b"JFIF\0\1")
    files["table-short"] = with_segment(base, 0xDB, bytes(30))
    files["segment-beyond"] = with_segment(base, 0xFE, b"end", 0xFFFF)
    files["segment-of-one"] = with_segment(base, 0xFE, b"", 1)
    files["fill-bytes"] = base[:2] + b"\xff\xff\xff" + base[2:]

    files["cut-header"] = base[: frame + 4]
    files["cut-scan"] = base[: len(base) * 2 // 3]
    files["cut-end"] = base[:-2]
    files["cut-progressive"] = progressive[: len(progressive) // 2] + b"\xff\xd9"
    files["junk-behind"] = base + b"\xff\xd8\xff junk"
    files["tables-behind"] = base[:-2] + b"\xff\xc4\0\4\0\0" + base[-2:]
    files["marker-in-scan"] = patched(base, len(base) - 60, b"\xff\xd3")
    files["damaged-scan"] = patched(base, len(base) - 300, bytes(range(40, 80)))
    files["damaged-progressive"] = patched(progressive, len(progressive) - 200, bytes(range(40, 80)))
    files["damaged-dc"] = patched(base, len(base) - 500, b"\x3f\xfe\xf0" * 10)
    files["restart-missing"] = files["restart-blocks"].replace(b"\xff\xd1", b"\x11\xd1", 1)

    files["huge"] = patched(base, frame + 1, b"\xff\xff\xff\xff")
    files["huge-progressive"] = patched(progressive, frame_of(progressive) + 1, b"\xff\xdc\xff\xdc")
    files["taller"] = patched(base, frame + 1, b"\0\xc8")
    files["no-height"] = patched(base, frame + 1, b"\0\0")
    files["sampling-zero"] = patched(base, frame + 7, b"\0")
    files["sampling-411"] = patched(base, frame + 7, b"\x41")
    files["names-alike"] = patched(patched(base, frame + 9, b"\1"), frame + 12, b"\1")
    return files


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("fastpipe/native/fuzz/corpus/jpeg")
    folder.mkdir(parents=True, exist_ok=True)
    files = corpus()
    for name, blob in files.items():
        (folder / f"{name}.jpg").write_bytes(blob)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes in {folder}")


if __name__ == "__main__":
    main()
