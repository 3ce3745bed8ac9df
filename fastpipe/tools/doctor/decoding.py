"""Check which image decoders are available, and how fast they are on this machine."""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fastpipe.bench.synthetic import photograph
from fastpipe.core.extras import require
from fastpipe.core.files import read_file
from fastpipe.core.types import Box
from fastpipe.images.reader import ImageReader, read_jpeg_header
from fastpipe.options import Decode
from fastpipe.tools.doctor.child import ask
from fastpipe.tools.doctor.report import Examined, Finding, ok, problem, warning

# ---- code that runs in a process of its own

_SECONDS = 0.3  # seconds of measurement for each decoder
_LOOK_S = 1.0  # seconds for reading files
_PHOTOS, _SIZE, _QUALITY = 4, (375, 500), 90
_MOST_NBYTES, _MOST_PIXELS = 32 << 20, 30_000_000  # limits: bytes of all files, pixels of an image
_AREA = (0.08, 1.0)  # range of the area of RandomResizedCrop

_Image = tuple[bytes, Box]  # a JPEG and the box of a random crop


def measure(files: Sequence[str]) -> dict[str, Any]:
    blobs = _opened(files)
    of = f"{len(blobs)} JPEGs of the folder"
    if not blobs:
        blobs, of = 4 * _made(), f"synthetic photographs of {_SIZE[0]} × {_SIZE[1]} pixels"
    rng = np.random.default_rng(0)
    images = [(blob, _crop(rng, read_jpeg_header(blob))) for blob in blobs]
    found: dict[str, Any] = {"of": of, "decoders": {}}
    reader = ImageReader(Decode())
    for name in ("native core", "pillow"):
        try:
            found["decoders"][name] = _measured(name, reader, images)
        except Exception as error:
            found["decoders"][name] = {"why": f"{type(error).__name__}: {error}"}
    found["chosen"] = "native core" if reader.is_native else "pillow"
    found["used"] = reader.describe()
    return found


def _measured(name: str, reader: ImageReader, images: Sequence[_Image]) -> dict[str, Any]:
    if name == "pillow":
        image = require("PIL.Image", extra="image")
        version = require("PIL", extra="image").__version__
        rate = _rate(lambda one: image.open(io.BytesIO(one[0])).convert("RGB"), images)
        kind = "Pillow-SIMD" if ".post" in version else "Pillow"
        return {"what": f"{kind} {version}, the whole image", "rate": rate}
    rate = _rate(lambda one: reader.fast_region(*one), images)
    return {"what": "the native core, the needed region only (random crops)", "rate": rate}


def _rate(decode: Callable[[_Image], Any], images: Sequence[_Image]) -> float:
    if decode(images[0]) is None:  # a warm-up: the first call takes longest
        raise ValueError("it does not decode these images")
    begun, count = time.perf_counter(), 0
    for one in itertools.cycle(images):
        passed = time.perf_counter() - begun
        if passed > _SECONDS:
            break
        count += decode(one) is not None
    return count / passed


def _opened(files: Sequence[str]) -> list[bytes]:
    found: list[bytes] = []
    until = time.perf_counter() + _LOOK_S
    for path in files:
        if time.perf_counter() > until or sum(map(len, found)) > _MOST_NBYTES:
            break
        with contextlib.suppress(OSError):
            blob = read_file(path)
            header = read_jpeg_header(blob)
            if header is not None and header.trusted and header.height * header.width <= _MOST_PIXELS:
                found.append(blob)
    return found


def _made() -> list[bytes]:
    rng, pil, found = np.random.default_rng(0), require("PIL.Image", extra="image"), []
    for _ in range(_PHOTOS):
        file = io.BytesIO()
        pil.fromarray(photograph(rng, _SIZE)).save(file, "JPEG", quality=_QUALITY, subsampling="4:2:0")
        found.append(file.getvalue())
    return found


def _crop(rng: np.random.Generator, header: Any) -> Box:
    """Return a random crop box, similar to those of ``RandomResizedCrop``."""
    sides = np.array([header.height, header.width])
    part = np.maximum(1, np.sqrt(rng.uniform(*_AREA)) * sides).astype(int)
    return Box(*map(int, (*rng.integers(0, sides - part + 1), *part)))


# ---- findings about the decoders, and their speed on this machine ----------------------------------------

_TOPIC = "decoders"
_PATIENCE_S = 60.0
_CODE = """
from fastpipe.tools.doctor.decoding import measure
answer(measure(_asked))
"""
_INSTALL = "pip install pillow"
_CLEARLY = 1.2  # ratio of speeds: larger than the noise of short measurements


def check(examined: Examined) -> Iterator[Finding]:
    answer = ask(_CODE, list(examined.photos), seconds=_PATIENCE_S)
    if answer.value is None:
        yield problem(_TOPIC, f"decoders cannot be used: {_first(answer.why)}", _INSTALL)
        return
    found: dict[str, Any] = answer.value
    rates: dict[str, float] = {}
    for name, one in found["decoders"].items():
        if "rate" in one:
            rates[name] = one["rate"]
            yield ok(_TOPIC, f"{one['what']}: {one['rate']:,.0f} images/s a core")
        elif name == "pillow":
            yield problem(_TOPIC, f"Pillow: {one['why']}", _INSTALL)
        else:
            yield warning(_TOPIC, f"{name} cannot be used: {_first(one['why'])}", _INSTALL)
    yield ok(_TOPIC, f"measured on {found['of']}")
    chosen = found["chosen"]
    examined.images_s = rates.get(chosen)
    if chosen in rates:
        yield from _choice(chosen, rates, found["used"])


def _choice(chosen: str, rates: dict[str, float], used: str) -> Iterator[Finding]:
    best = max(rates, key=lambda name: rates[name])
    why = {
        "native core": "it decodes only the part of an image that a crop needs, bit for bit as Pillow does",
        "pillow": "the installed Pillow has plugins or pixels of its own",
    }[chosen]
    yield ok(_TOPIC, f"fastpipe uses: {used}. For JPEGs: {why}")
    if rates[best] > _CLEARLY * rates[chosen]:
        yield warning(
            _TOPIC,
            f"{best} decodes {rates[best] / rates[chosen]:.1f} times as many of these images a second",
            f"FastImageFolder(…, decode=Decode(backend={best!r})), and run fastpipe bench to compare whole "
            "pipelines",
        )


def _first(why: str) -> str:
    return why.rpartition("MissingDependencyError: ")[2].partition(" Install it with:")[0]
