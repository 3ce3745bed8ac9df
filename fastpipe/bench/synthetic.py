"""Generated data that compresses and decodes like real data: photographs, log-mels and volumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require

# ---- Photographs -----------------------------------------------------------------------------------
#
# The spectrum of a photograph falls roughly as 1/frequency.  A photograph has edges between regions, and its
# fine texture is strong in some regions and absent in others.  JPEG files of plain noise or of gradients are
# several times larger or smaller than photographs of the same size.  With such files, benchmarks would
# measure another balance between reading, decoding and resizing.

Floats = npt.NDArray[np.float32]

# The most frequent heights and widths in collections of photos that were scaled to 500 pixels.
_COMMON_SIZES = ((375, 500), (333, 500), (500, 375), (500, 333), (500, 500), (334, 500), (400, 300))
_COMMON_SHARE = (0.42, 0.24, 0.14, 0.08, 0.05, 0.05, 0.02)


def photograph(rng: np.random.Generator, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Make an image like a photograph: uint8 (H, W, 3), RGB; ``size`` is (H, W).

    The image depends only on the state of ``rng`` and on ``size``.  As a JPEG of quality 90 with 4:2:0
    chroma, an image of a few hundred pixels a side takes about 2 bits per pixel (mean over many images).

    >>> photograph(np.random.default_rng(0), (30, 40)).shape
    (30, 40, 3)
    """
    luma = 128 + 52 * _clouds(rng, size, finest=3.0)
    blue = 128 + 22 * _clouds(rng, size, finest=24.0)
    red = 128 + 22 * _clouds(rng, size, finest=24.0)
    for _ in range(int(rng.integers(5, 14))):
        mask = _region(rng, size)
        shift = rng.uniform(-1, 1, 3)
        luma += mask * np.float32(70 * shift[0])
        blue += mask * np.float32(30 * shift[1])
        red += mask * np.float32(30 * shift[2])
    luma += _texture(rng, size)
    pil = _pil()
    planes = [pil.fromarray(np.clip(plane, 0, 255).astype(np.uint8)) for plane in (luma, blue, red)]
    return np.array(pil.merge("YCbCr", planes).convert("RGB"), dtype=np.uint8)


def imagenet_size(rng: np.random.Generator) -> tuple[int, int]:
    """Return a random height and width, distributed like those of ImageNet's files.

    The mean is about 390 by 470 pixels.  Four in five images have one of a few common sizes, mostly with 500
    pixels on the longer side.  The remaining sizes go from thumbnails to 1000 pixels, with aspects between
    1:2 and 2:1.

    >>> height, width = imagenet_size(np.random.default_rng(0))
    """
    if rng.random() < 0.8:
        return _COMMON_SIZES[int(rng.choice(len(_COMMON_SIZES), p=_COMMON_SHARE))]
    side = min(max(np.exp(rng.normal(np.log(380), 0.45)), 80.0), 1000.0)
    aspect = min(max(np.exp(rng.normal(0.2, 0.3)), 0.5), 2.0)
    return round(side / np.sqrt(aspect)), round(side * np.sqrt(aspect))


def photo_tree(
    root: Path, *, classes: int = 4, per_class: int = 6, seed: int = 0, sizes: tuple[int, int] | None = None
) -> Path:
    """Write class folders of JPEG files, as ``ImageFolder`` reads them; return ``root``.

    The files are ``root/class_000/0000.jpg`` and so on, with 4:2:0 chroma.  A file depends only on ``seed``,
    its class and its number, so a larger tree contains the files of a smaller tree.  ``sizes`` is the height
    and width of every image.  If ``sizes`` is None, each image has a random size from `imagenet_size`.

    >>> import tempfile
    >>> root = photo_tree(Path(tempfile.mkdtemp()), classes=2, per_class=1, sizes=(32, 48))
    >>> sorted(path.relative_to(root).as_posix() for path in root.rglob("*.jpg"))
    ['class_000/0000.jpg', 'class_001/0000.jpg']
    """
    for label in range(classes):
        folder = root / f"class_{label:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            rng = np.random.default_rng([seed, label, number])
            image = _pil().fromarray(photograph(rng, sizes or imagenet_size(rng)))
            image.save(folder / f"{number:04d}.jpg", quality=90, subsampling="4:2:0")
    return root


def _clouds(rng: np.random.Generator, size: tuple[int, int], *, finest: float) -> Floats:
    """Return smooth noise with a 1/frequency spectrum and a standard deviation near 1.

    The finest details have a size of about ``finest`` pixels.
    """
    cell = max(size) / 2
    total, power, weight = _noise(rng, size, cell), 1.0, 1.0
    while cell / 2 >= finest:
        # Each step halves the cell.  Enlarging the array is cheap, except in the last step.
        cell, weight = cell / 2, weight * 0.55
        detail = _noise(rng, size, cell)
        total = _enlarged(total, (detail.shape[0], detail.shape[1])) + np.float32(weight) * detail
        power += weight**2
    return _enlarged(total, size) / np.float32(power**0.5)


def _region(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return the mask of one object, values from 0 to 1: a shaded ellipse or polygon with a crisp edge."""
    height, width = size
    pil = _pil()
    canvas = pil.new("L", (width // 2 + 1, height // 2 + 1))
    draw = require("PIL.ImageDraw", extra="image").Draw(canvas)
    centre = rng.random(2) * canvas.size
    radius = (0.05 + 0.3 * rng.random(2)) * max(canvas.size)
    if rng.random() < 0.5:
        low, high = centre - radius, centre + radius
        draw.ellipse([*map(float, low), *map(float, high)], fill=255)
    else:
        angles = np.sort(rng.random(int(rng.integers(3, 8)))) * 2 * np.pi
        corners = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        draw.polygon([(float(x), float(y)) for x, y in corners], fill=255)
    # The shape is drawn at half the size, so that enlarging it gives an edge of two pixels.
    soft = canvas.resize((width, height), pil.Resampling.BILINEAR)
    slope = np.linspace(rng.uniform(0.4, 1), rng.uniform(0.4, 1), width, dtype=np.float32)
    return np.asarray(soft, dtype=np.float32) * (slope / np.float32(255))


def _texture(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return fine grain whose strength varies within the image and between images."""
    grain = rng.random(size, dtype=np.float32) - np.float32(0.5)
    coarse = _enlarged(_noise(rng, size, 2.0), size)
    patches = _enlarged(_noise(rng, size, max(size) / 5), size)
    strength = np.clip(patches, 0, None) * np.float32(rng.uniform(6, 22))
    return strength * (coarse + 2 * grain) + grain * np.float32(rng.uniform(3, 10))


def _noise(rng: np.random.Generator, size: tuple[int, int], cell: float) -> Floats:
    """Return independent random values on a grid with nodes ``cell`` pixels apart; standard deviation 1."""
    shape = [max(2, round(side / cell) + 1) for side in size]
    return (rng.random(shape, dtype=np.float32) - np.float32(0.5)) * np.float32(12**0.5)


def _enlarged(grid: Floats, size: tuple[int, int]) -> Floats:
    pil = _pil()
    enlarged = pil.fromarray(grid).resize((size[1], size[0]), pil.Resampling.BICUBIC)
    return np.asarray(enlarged, dtype=np.float32)


def _pil() -> Any:
    return require("PIL.Image", extra="image")


# ---- Log-mels --------------------------------------------------------------------------------------

# Power below this value is silence.
_FLOOR = 1e-6
# Values are rounded to multiples of this step.  Then gzip with shuffle compresses float32 rows 1.3 times, and
# LZF 1.2 times, like real speech.
_STEP = np.float32(2.0**-20)
_MADE_AT_ONCE = 256


def mel_rows(rng: np.random.Generator, count: int, shape: tuple[int, int] = (64, 128)) -> Floats:
    """Make arrays like log-mel spectrograms, float32 (count, bands, frames): smooth values plus noise.

    >>> mel_rows(np.random.default_rng(0), 3, (8, 10)).shape
    (3, 8, 10)
    """
    bands, frames = shape
    made = np.empty((count, bands, frames), np.float32)
    for first in range(0, count, _MADE_AT_ONCE):
        part = made[first : first + _MADE_AT_ONCE]
        part[:] = rng.standard_normal(part.shape, np.float32)
        part *= np.float32(0.6)
        part -= np.float32(5)
        for nodes, weight in (((5, 9), 3.0), ((17, 33), 1.8)):
            coarse = rng.standard_normal((len(part), *nodes), np.float32) * np.float32(weight)
            part += _between(bands, nodes[0]) @ coarse @ _between(frames, nodes[1]).T
        np.round(part / _STEP, out=part)
        part *= _STEP
        np.maximum(part, np.float32(np.log(_FLOOR)), out=part)
    return made


def write_table(
    path: Path,
    key: str,
    parts: Sequence[Floats] | Any,
    shape: Sequence[int],
    *,
    chunk: Sequence[int] | None = None,
    compression: str | None = None,
    labels: npt.NDArray[Any] | None = None,
) -> Path:
    """Write an HDF5 file with a float32 dataset ``key`` and an optional dataset ``labels``; return ``path``.

    The arrays in ``parts`` are concatenated along the first dimension.  If ``chunk`` is None, the dataset has
    no chunks.
    ``compression`` is ``"gzip"`` (level 4, with shuffled bytes), ``"lzf"`` (with shuffled bytes) or
    ``"bitshuffle"`` (with LZ4).  The shape of ``labels`` is the beginning of ``shape``.
    """
    h5py = require("h5py", extra="hdf5")
    options: dict[str, Any] = {} if chunk is None else {"chunks": tuple(chunk)}
    if compression == "bitshuffle":
        options |= require("hdf5plugin", extra="hdf5").Bitshuffle(cname="lz4")
    elif compression is not None:
        options |= {"compression": compression, "shuffle": True}
        options |= {"compression_opts": 4} if compression == "gzip" else {}
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(key, shape=tuple(shape), dtype=np.float32, **options)
        first = 0
        for part in parts:
            dataset[first : first + len(part)] = part
            first += len(part)
        if labels is not None:
            file["labels"] = labels
    return path


def _between(count: int, nodes: int) -> Floats:
    """Return a matrix (count, nodes) that interpolates smoothly between values at equally spaced nodes."""
    place = np.linspace(0, nodes - 1, count)
    left = np.minimum(place.astype(int), nodes - 2)
    share = place - left
    share = share * share * (3 - 2 * share)
    matrix = np.zeros((count, nodes), np.float32)
    matrix[np.arange(count), left] = 1 - share
    matrix[np.arange(count), left + 1] += share
    return matrix


# ---- Volumes ---------------------------------------------------------------------------------------

_PITCH = 18.0  # voxels between sheets
_LEVEL_STEP = 32  # resolution of detectors for such volumes, in levels of 16 bits
_NOISE = 900.0
# A voxel belongs to a sheet if the sine across the sheets is above this value.
_SHEET = 0.6


def scroll_slabs(
    shape: Sequence[int], thickness: int = 64, seed: int = 0
) -> Iterator[tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]]:
    """Yield a volume like a rolled scroll, ``thickness`` planes at a time.

    The sheets of the scroll form a spiral whose axis bends.  The density changes smoothly.  The noise is that
    of a sensor with steps of 32 levels.

    Yields:
        Densities, uint16 (planes, height, width), and labels, uint8 of this shape: 1 in sheets, otherwise 0.

    >>> [(values.shape, int(labels.max())) for values, labels in scroll_slabs((5, 30, 40), 3)]
    [((3, 30, 40), 1), ((2, 30, 40), 1)]
    """
    rng = np.random.default_rng(seed)
    depth, height, width = shape
    y = np.arange(height, dtype=np.float32)[:, None]
    x = np.arange(width, dtype=np.float32)
    for first in range(0, depth, thickness):
        z = np.arange(first, min(first + thickness, depth), dtype=np.float32)[:, None, None]
        from_axis_y = y - height * np.float32(0.52) + height * np.float32(0.04) * np.sin(z / 90)
        from_axis_x = x - width * np.float32(0.49) + width * np.float32(0.03) * np.cos(z / 70)
        turns = np.arctan2(from_axis_y, from_axis_x) / np.float32(2 * np.pi)
        turns += np.hypot(from_axis_y, from_axis_x) / np.float32(_PITCH)
        across = np.sin(np.float32(2 * np.pi) * turns)
        values = 20_000 + 14_000 * across + 3000 * np.sin(z / 13) * np.cos(y / 17)
        values += np.float32(_NOISE) * rng.standard_normal(values.shape, np.float32)
        levels = np.clip(values, 0, 65_535).astype(np.uint16) // _LEVEL_STEP * _LEVEL_STEP
        yield levels, (across > _SHEET).astype(np.uint8)


def write_zarr(
    path: Path,
    parts: Iterable[npt.NDArray[np.generic]],
    shape: Sequence[int],
    chunk: Sequence[int],
    *,
    compressed: bool = True,
) -> Path:
    """Write a Zarr array of version 3, and return ``path``.

    ``parts`` are concatenated along the first dimension.  If ``compressed`` is true, bytes are shuffled and
    compressed by blosc with zstd (level 5).
    """
    tensorstore = require("tensorstore", extra="volume")
    array, first = None, 0
    for part in parts:
        if array is None:
            compression = {"cname": "zstd", "clevel": 5, "shuffle": "shuffle", "typesize": part.itemsize}
            metadata = {
                "shape": list(shape),
                "data_type": str(part.dtype),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    *([{"name": "blosc", "configuration": compression}] if compressed else []),
                ],
            }
            store = {"driver": "file", "path": str(path)}
            spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
            array = tensorstore.open(spec, create=True).result()
        array[first : first + len(part)].write(part).result()
        first += len(part)
    return path
