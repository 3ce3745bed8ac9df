"""Make the inputs with which fuzzing begins: python make_jpeg_corpus.py [folder].

Small JPEGs of all kinds, whole, cut off, damaged, and with hostile headers; and logs of a cache.  They are the
same each time, for one version of Pillow.
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


def segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body


def many_scans(bits: int = 13) -> bytes:
    """A grey progressive file of one block, which sends each bit of each coefficient in a scan of its own."""
    one_code = bytes((1, *bytes(15), 0))  # a single code of one bit: no more coefficients
    head = b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64) + segment(0xC2, b"\x08\0\x08\0\x08\1\1\x11\0")
    tables = segment(0xC4, b"\0" + one_code) + segment(0xC4, b"\x10" + one_code)
    scans = b""
    for coefficient in range(64):
        for after in range(bits, -1, -1):
            before = 0 if after == bits else after + 1
            spectrum = bytes((coefficient, coefficient, before << 4 | after))
            scans += segment(0xDA, b"\1\1\0" + spectrum) + b"\x7f"
    return head + tables + scans + b"\xff\xd9"


def directory(*entries: tuple[int, int, int, int], count: int | None = None, first: int = 8) -> bytes:
    """EXIF data of one directory: tags, types, lengths and values; ``count`` and ``first`` may lie."""
    numbers = [(first, 4), (len(entries) if count is None else count, 2)]
    for entry in entries:
        numbers += zip(entry, (2, 2, 4, 4), strict=True)
    return b"Exif\0\0II*\0" + b"".join(number.to_bytes(size, "little") for number, size in numbers) + bytes(4)


def hostile(base: bytes, progressive: bytes, restarts: bytes) -> dict[str, bytes]:
    """Files whose segments lie."""
    frame, files = frame_of(base), {}
    orientation, resolution = (0x0112, 3, 1, 6), (0x011A, 5, 1, 26)
    exifs = {
        "types": directory((0x0112, 2, 1, 6)), "long": directory((0x0112, 4, 1, 6)), "nine": directory((0x0112, 3, 1, 9)),
        "two": directory(orientation, (0x0112, 3, 1, 3)), "count": directory(orientation, count=0xFFFF),
        "beyond": directory(orientation, first=0xFFFFFFF0), "itself": directory((0x8769, 4, 1, 8), orientation),
        "lengths": directory((0x010E, 2, 0xFFFFFFFF, 8), orientation), "resolution": directory(resolution, orientation),
        "resolution-text": directory((0x011A, 2, 2, 0x3131)), "resolution-far": directory((0x011A, 5, 1, 0xFFFFFF)),
        "empty": b"Exif\0\0", "other-order": b"Exif\0\0XX*\0" + bytes(20), "big-tiff": b"Exif\0\0II+\0" + bytes(20),
    }  # fmt: skip
    for name, body in exifs.items():
        files[f"exif-{name}"] = with_segment(base, 0xE1, body)
    scan, start, end = base.index(b"\xff\xda"), base[: frame - 4], base[frame - 4 :]
    for name, body in {
        "none": b"\0" + bytes(16), "all-ones": b"\0\2" + bytes(17), "too-many": b"\0" + b"\xff" * 16 + bytes(240),
        "short": b"\0\0\1", "number": b"\x44\1" + bytes(16), "symbols": b"\0" + bytes(15) + b"\1\xff",
    }.items():  # fmt: skip
        files[f"huffman-{name}"] = base[:scan] + segment(0xC4, body) + base[scan:]
    for name, body in {
        "number": b"\4" + b"\1" * 64,
        "zeros": bytes(65),
        "words": b"\x10" + b"\1\0" * 64,
    }.items():
        files[f"quantisation-{name}"] = start + segment(0xDB, body) + end
    for name, body in {"one": b"\0\1", "most": b"\xff\xff", "zero": b"\0\0", "long": b"\0\3\0"}.items():
        files[f"interval-{name}"] = start + segment(0xDD, body) + end
    for name, code in {
        "extended": 0xC1,
        "lossless": 0xC3,
        "arithmetic": 0xC9,
        "progressive-frame": 0xC2,
    }.items():
        files[f"frame-{name}"] = patched(base, frame - 3, bytes((code,)))
    return files | {
        "exif-behind-tables": start + segment(0xE1, exif(6)) + end,
        "huffman-missing": base[: base.index(b"\xff\xc4")] + base[scan:],
        "quantisation-missing": base.replace(b"\xff\xdb", b"\xff\xfe"),
        "restart-twice": restarts.replace(b"\xff\xd1", b"\xff\xd1\xff\xd1", 1),
        "restart-order": restarts.replace(b"\xff\xd1", b"\xff\xd2", 1),
        "restart-last": restarts[:-2] + b"\xff\xd0" + restarts[-2:],
        "frame-sequential": patched(progressive, frame_of(progressive) - 3, b"\xc0"),
        "frame-twice": start + base[frame - 4 : frame + 15] + end,
        "frame-none": patched(base, frame - 3, b"\xfe"), "frame-12-bits": patched(base, frame, b"\x0c"),
        "frame-of-255": patched(base, frame + 5, b"\xff"), "no-width": patched(base, frame + 3, b"\0\0"),
        "narrow": patched(base, frame + 3, b"\0\1"),
        "number-of-lines": patched(base, frame + 1, b"\0\0")[:-2] + segment(0xDC, b"\0\x2d") + base[-2:],
        "scan-of-none": patched(base, scan + 4, b"\0"), "scan-of-one-twice": patched(base, scan + 7, b"\1"),
        "scan-of-others": patched(base, scan + 5, b"\x63"), "scan-tables": patched(base, scan + 6, b"\x33"),
        "scan-twice": base[:-2] + base[scan:], "scan-none": base[:scan] + b"\xff\xd9",
    }  # fmt: skip


def corpus() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, sampling in {"444": 0, "422": 1, "420": 2}.items():
        for kind in ("baseline", "progressive"):
            options = {"subsampling": sampling, "progressive": kind == "progressive"}
            files[f"{name}-{kind}"] = encoded(picture(67, 45), **options)
    for width, height in ((1, 1), (2, 3), (5, 1), (1, 17), (33, 16), (16, 33)):
        files[f"size-{width}x{height}"] = encoded(picture(width, height), subsampling=2)
    base, frame = files["420-baseline"], frame_of(files["420-baseline"])
    progressive, scans = files["420-progressive"], many_scans()
    restarts = encoded(picture(67, 45), subsampling=2, restart_marker_blocks=3)
    wide = encoded(Image.new("RGB", (65500, 1), (90, 20, 160)), quality=1, subsampling=2)
    resources = b"8BIM\4\4\0\0\0\0\0\2ab8BIM\3\xed\1x\0\0\0\2rr"
    return files | hostile(base, progressive, restarts) | {
        "large": encoded(picture(130, 110), subsampling=2, quality=20),
        "grey": encoded(picture(50, 41).convert("L")),
        "grey-progressive": encoded(picture(50, 41).convert("L"), progressive=True),
        "cmyk": encoded(picture(20, 20).convert("CMYK")), "rgb": encoded(picture(20, 20), keep_rgb=True),
        "optimised": encoded(picture(40, 40), optimize=True), "restart-blocks": restarts,
        "restart-rows": encoded(picture(67, 45), subsampling=1, restart_marker_rows=1),
        "restart-progressive": encoded(picture(67, 45), progressive=True, restart_marker_blocks=7),
        "exif-big": with_segment(base, 0xE1, exif(6)),
        "exif-little": with_segment(base, 0xE1, exif(3, "little")),
        "exif-twice": with_segment(with_segment(base, 0xE1, exif(6)), 0xE1, exif(3)),
        "exif-cut": with_segment(base, 0xE1, exif(6)[:-9]),
        "xmp": with_segment(base, 0xE1, b"http://ns.adobe.com/xap/1.0/\0<tiff:Orientation>3"),
        "icc": with_segment(base, 0xE2, b"ICC_PROFILE\0\1\1" + bytes(40)),
        "photoshop": with_segment(base, 0xED, b"Photoshop 3.0\0" + resources),
        "adobe": with_segment(base, 0xEE, b"Adobe\0\x64\0\0\0\0\1"),
        "adobe-rgb": with_segment(base, 0xEE, b"Adobe\0\x64\0\0\0\0\0"),
        "jfif-short": with_segment(base, 0xE0, b"JFIF\0\1"), "table-short": with_segment(base, 0xDB, bytes(30)),
        "segment-beyond": with_segment(base, 0xFE, b"end", 0xFFFF),
        "segment-of-one": with_segment(base, 0xFE, b"", 1), "fill-bytes": base[:2] + b"\xff\xff\xff" + base[2:],
        "cut-header": base[: frame + 4], "cut-scan": base[: len(base) * 2 // 3], "cut-end": base[:-2],
        "cut-progressive": progressive[: len(progressive) // 2] + b"\xff\xd9",
        "junk-behind": base + b"\xff\xd8\xff junk", "tables-behind": base[:-2] + b"\xff\xc4\0\4\0\0" + base[-2:],
        "marker-in-scan": patched(base, len(base) - 60, b"\xff\xd3"),
        "damaged-scan": patched(base, len(base) - 300, bytes(range(40, 80))),
        "damaged-progressive": patched(progressive, len(progressive) - 200, bytes(range(40, 80))),
        "damaged-dc": patched(base, len(base) - 500, b"\x3f\xfe\xf0" * 10),
        "restart-missing": restarts.replace(b"\xff\xd1", b"\x11\xd1", 1),
        "huge": patched(base, frame + 1, b"\xff\xff\xff\xff"),
        "huge-progressive": patched(progressive, frame_of(progressive) + 1, b"\xff\xdc\xff\xdc"),
        "taller": patched(base, frame + 1, b"\0\xc8"), "no-height": patched(base, frame + 1, b"\0\0"),
        "sampling-zero": patched(base, frame + 7, b"\0"), "sampling-411": patched(base, frame + 7, b"\x41"),
        "wide": wide, "wider": patched(wide, frame_of(wide) + 3, b"\xff\xff"),
        "tall": encoded(Image.new("L", (1, 65500), 99), quality=1), "many-scans": scans,
        "many-scans-cut": scans[:-13] + b"\xff\xd9", "many-scans-too-many": many_scans(15),
        "names-alike": patched(patched(base, frame + 9, b"\1"), frame + 12, b"\1"),
    }  # fmt: skip


def logs() -> dict[str, bytes]:
    """Options and records, as fuzz_kept.cpp takes them."""
    numbers, files = random.Random(0), {}
    for options in range(0, 256, 23):
        records = b""
        for number in range(6):
            height, width = numbers.randrange(1, 24), numbers.randrange(1, 24)
            offset = numbers.choice((0, 64, 700, 3072, 2**64 - 64))
            record = [numbers.randrange(3), number, offset, 3 * height * width, numbers.randrange(2)]
            shape = (height, width, 3, numbers.randrange(2), numbers.randrange(8), 0)
            records += b"".join(word.to_bytes(8, "little") for word in record)
            records += b"".join(word.to_bytes(4, "little") for word in shape)
        files[f"options-{options}"] = bytes((options,)) + records
    return files


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("fastpipe/native/fuzz/corpus")
    files = {f"jpeg/{name}.jpg": blob for name, blob in corpus().items()}
    files |= {f"kept/{name}": blob for name, blob in logs().items()}
    for name, blob in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(blob)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes in {folder}")


if __name__ == "__main__":
    main()
