"""Damaged files: fastpipe gives what ``ImageFolder`` and Pillow give, pixels or an error, whatever the file.

``FASTPIPE_PHOTOS=folder`` also damages the JPEGs of a folder.  ``FASTPIPE_PILLOW_IMAGES=folder`` compares the files of
a folder as they are, such as ``Tests/images`` of Pillow's sdist.
"""

from __future__ import annotations

import io
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms as v1
from torchvision.datasets.folder import default_loader

from fastpipe import FastImageFolder
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.native import native
from fastpipe.errors import BadSampleError

CORPUS = Path(native.__file__).with_name("fuzz") / "corpus" / "jpeg"
PICTURE = v1.PILToTensor()
REASONS = ["", "unreadable", "no JPEG", "untrusted", "too large", "turned", "damaged", "not folded", "no memory", "internal",
           "asked", "kept"]  # fmt: skip


def segments_of(blob: bytes) -> list[tuple[int, int]]:
    """Where the segments before the first scan begin and end."""
    found, at = [], 2
    while at + 4 <= len(blob) and blob[at] == 0xFF and blob[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(blob[at + 2 : at + 4], "big")
        found.append((at, min(end, len(blob))))
        at = end
    return found


def flip_bits(blob: bytes, rng: random.Random) -> bytes:
    spoilt = bytearray(blob)
    for _ in range(rng.choice((1, 1, 2, 8))):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


DAMAGE = (
    "flip bits", "flip bits of the header", "cut", "cut near the end", "splice a segment", "drop a segment",
    "splice files", "change a length", "insert", "leave",
)  # fmt: skip


def spoilt(how: str, blob: bytes, other: bytes, rng: random.Random) -> bytes:
    place, (start, end) = rng.randrange(len(blob)), rng.choice(segments_of(blob) or [(0, 0)])
    match how:
        case "flip bits":
            return flip_bits(blob, rng)
        case "flip bits of the header":
            behind = max((end for _, end in segments_of(blob)), default=2) + 14
            return flip_bits(blob[:behind], rng) + blob[behind:]
        case "cut":
            return blob[:place] + rng.choice((b"", b"\xff\xd9"))
        case "cut near the end":
            return blob[: -rng.randrange(1, 20)] + rng.choice((b"", b"\xff\xd9", b"\0\xff\xd9"))
        case "splice a segment":
            first, last = rng.choice(segments_of(other) or [(0, 0)])
            return blob[: start or 2] + other[first:last] + blob[start or 2 :]
        case "drop a segment":
            return blob[:start] + blob[end:]
        case "splice files":
            return blob[:place] + other[rng.randrange(len(other)) :]
        case "change a length":
            length = int.from_bytes(blob[start + 2 : start + 4], "big") + rng.choice((-2, -1, 1, 2, 300))
            return blob[: start + 2] + (length & 0xFFFF).to_bytes(2, "big") + blob[start + 4 :]
        case "insert":
            return (
                blob[:place] + rng.choice((rng.randbytes(3), b"\xff", b"\xff\xd0", bytes(40))) + blob[place:]
            )
        case _:
            return blob + rng.choice((b"", b"", b"\0", b"behind the end"))


def damaged(files: Sequence[bytes], count: int) -> Iterator[bytes]:
    rng = random.Random(0)
    for number in range(count):
        blob = spoilt(DAMAGE[number % len(DAMAGE)], rng.choice(files), rng.choice(files), rng)
        yield (
            blob
            if rng.random() < 0.8
            else spoilt(rng.choice(DAMAGE), blob or b"\xff", rng.choice(files), rng)
        )


def answer(ask: Callable[[], Any]) -> tuple[Any, ...]:
    """Pixels, or an error's type and text; and the warnings that were given."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            pixels = np.asarray(ask())
            found: tuple[Any, ...] = (pixels.shape, pixels.tobytes())
        except Exception as error:
            real = error.__cause__ if isinstance(error, BadSampleError) else error
            found = (type(real), str(real))
    # The core does not read the index of a file with several pictures, of which it takes the first one.
    texts = sorted(str(one.message) for one in given if "malformed MPO" not in str(one.message))
    return (*found, *texts)


def by_pillow(path: str) -> tuple[Any, ...]:
    found = answer(lambda: PICTURE(default_loader(path)))
    if found[1] == "[Errno 22] Invalid argument":  # from a file; from memory this is another error
        return answer(lambda: PICTURE(Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB")))
    if isinstance(found[1], str):  # an error names the file, not the object that reads it
        return (found[0], found[1].replace(f"<_io.BufferedReader name={path!r}>", repr(path)), *found[2:])
    return found


def reasons(dataset: Any) -> Iterator[str]:
    """What the core alone makes of each file."""
    paths = [os.fsencode(path) for path, _ in dataset.samples]
    lengths, count, draws = np.array([len(path) for path in paths]), len(paths), dataset.plan.draws
    ends, statuses = np.cumsum(lengths), np.zeros((count, 8), np.uint8)
    native.run_here(native.image_batch(
        dataset.plan.native(Image.MAX_IMAGE_PIXELS, False, False), b"", b"".join(paths), ends - lengths, ends,
        np.zeros((count, draws)), None, np.zeros(count, np.int64), (0, 0), False, statuses, None,
    ))  # fmt: skip
    for outcome, reason, *_ in statuses:
        yield "made" if outcome == 1 else REASONS[reason]


def compare(files: Iterator[bytes], folder: Path, at_once: int = 500) -> tuple[Counter[str], list[str]]:
    """Ask both for each file; how many were made or declined, by reasons, and those whose answers differ."""
    (folder / "class").mkdir(parents=True)
    figures, differences = Counter[str](), list[str]()
    for number in range(at_once):
        (folder / "class" / f"{number:04}.jpg").touch()
    dataset = FastImageFolder(folder, PICTURE, cache="off", threads=1)
    while blobs := list(islice(files, at_once)):
        for (path, _), blob in zip(dataset.samples, blobs, strict=False):
            Path(path).write_bytes(blob)
        for index, reason in enumerate(islice(reasons(dataset), len(blobs))):
            path = dataset.samples[index][0]
            expected = by_pillow(path)
            figures[reason] += 1
            figures["errors"] += isinstance(expected[1], str)
            figures["warnings"] += len(expected) > 2
            if answer(lambda index=index: dataset.__getitems__([index])[0][0]) != expected:
                kept = folder / f"differs-{len(differences)}.jpg"
                kept.write_bytes(Path(path).read_bytes())
                differences.append(f"{kept}: {reason}, {expected[:1]}, {expected[2:]}")
    dataset.close()
    return figures, differences


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Whole files to be damaged; Pillow's limit is low, so that damaged sizes cost no time."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1 << 20)
    made = photo_tree(tmp_path / "photos", classes=1, per_class=20, sizes=(61, 143))
    paths = [*CORPUS.iterdir(), *made.rglob("*.jpg")]
    if "FASTPIPE_PHOTOS" in os.environ:
        paths += Path(os.environ["FASTPIPE_PHOTOS"]).rglob("*.jpg")
    # Formats that Pillow knows by name only: they have no size before they are loaded.
    known = [begins + bytes(60) for begins in (b"\x89HDF\r\n\x1a\n", b"BUFR", b"GRIB\0\0\0\1")]
    return [*(path.read_bytes() for path in sorted(paths)), *known]


def test_the_corpus_of_the_fuzzers_is_as_pillow_has_it(sources: list[bytes], tmp_path: Path) -> None:
    figures, differences = compare(iter(sources), tmp_path / "files", len(sources))
    assert not differences
    assert figures["made"] > 20
    assert figures["errors"] > 20


@pytest.mark.hang_after(3600)
@pytest.mark.parametrize("count", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_files_are_as_pillow_has_them(
    sources: list[bytes], tmp_path: Path, count: int, record_property: Callable[[str, object], None]
) -> None:
    figures, differences = compare(damaged(sources, count), tmp_path / "files")
    record_property("figures", dict(figures))
    print(f"{count:,} files: {dict(figures)}")
    assert not differences
    assert figures["made"] > count / 10
    assert figures["errors"] > count / 10


@pytest.mark.slow
@pytest.mark.hang_after(1800)
def test_pillows_own_images_are_as_pillow_has_them(tmp_path: Path) -> None:
    """Of all formats, many of them broken."""
    if "FASTPIPE_PILLOW_IMAGES" not in os.environ:
        pytest.skip("pip download --no-binary pillow pillow; FASTPIPE_PILLOW_IMAGES=<it>/Tests/images")
    paths = sorted(path for path in Path(os.environ["FASTPIPE_PILLOW_IMAGES"]).rglob("*") if path.is_file())
    figures, differences = compare((path.read_bytes() for path in paths), tmp_path / "files")
    print(f"{len(paths):,} files: {dict(figures)}")
    assert not differences
