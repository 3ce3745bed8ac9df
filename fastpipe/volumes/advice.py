"""Other chunks for a volume, tried on a part of it: what they would change."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.machine import available_cpus
from fastpipe.errors import OptionError
from fastpipe.volumes.bricks import finish_all, read_box
from fastpipe.volumes.inspecting import Cost, PatchFacts, Rates, VolumeFacts, stored_as
from fastpipe.volumes.measuring import Speed, decode_speed
from fastpipe.volumes.model import PatchModel, Stored
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import UnitGrid, Volume
from fastpipe.volumes.zarr_writing import Codec, ZarrLayout, encoder, metadata, write_chunk

__all__ = ["Rechunked", "command", "rechunked", "worthwhile", "worthwhile_uniform"]

_SECONDS = 0.25  # for each of the measurements
_TRIED_NBYTES = 24 << 20  # of the volume
_LEAST_CHUNK, _LARGEST_CHUNK = 1 << 16, 16 << 20
_MOST_FILES = 1_000_000
_WORTH = 1.25  # as many patches in a second
_WORTH_UNIFORM = 2.0  # in uniform order, which a tour may replace without a copy


@dataclass(frozen=True)
class Rechunked:
    """The volume as it is, or would be with other chunks.

    Attributes:
        chunk: of a chunk.
        chunks: how many there are; a copy has a file for each.
        codec, level: of the chunks; "" and 0 for the volume as it is.
        ratio: decoded bytes for each that is stored.
        unit: what would be decoded at once.
        alone, uniform, tour: what patches would cost in the same budget; of tours one from one place.
        gain: patches of a tour in a second, for each that there is now.
        uniform_gain: the same of uniform order.
    """

    chunk: tuple[int, ...]
    chunks: int
    codec: str
    level: int
    ratio: float
    unit: tuple[int, ...]
    alone: Cost
    uniform: Cost
    tour: Cost
    gain: float
    uniform_gain: float


def rechunked(
    volumes: Sequence[Volume], facts: Sequence[VolumeFacts], model: PatchModel, now: PatchFacts
) -> list[Rechunked]:
    """What some other chunks of the first volume would change.

    Some of it is compressed with each of them, into a folder for temporary files, and decoded; and decoded
    as it is, so that all is as near in the system's memory.

    Args:
        volumes: the arrays that are read at the same place, the volume first.
        facts: about each.
        model: of the patches.
        now: what patches cost now.

    Returns:
        The volume as it is, and others, the best first; nothing where none can be made.

    Raises:
        DamagedUnitError, OSError: the volume cannot be read, or there is no room for temporary files.
    """
    volume, codec = volumes[0], Codec.of("keep", None)
    try:
        layouts = [
            ZarrLayout.of(volume.shape, volume.dtype, chunk, codec)
            for chunk in _candidates(volume, model.patch)
        ]
    except OptionError:  # elements that Zarr has not
        return []
    with ThreadPoolExecutor(available_cpus(), "fastpipe-inspect") as pool:
        box = _middle(layouts[0])
        part = read_box(volume, volume.open(), box, layouts[0].dtype, pool)
        speeds = [(one.one, one.all) for one in facts[1:]]
        own = _speeds(volume, model.patch, box)
        rates = Rates(model, [own, *speeds], now.copying)
        room = now.fit.remembered
        as_it_is = Rechunked(
            facts[0].chunk, _count(volume.shape, facts[0].chunk), "", 0, facts[0].ratio or 1.0,
            facts[0].unit, rates.cost(now.alone.amplification),
            rates.cost(now.uniform.amplification), rates.cost(model.near(room)), 1.0, 1.0,
        )  # fmt: skip
        found = []
        for layout in layouts:
            with tempfile.TemporaryDirectory(prefix="fastpipe-inspect-") as folder:
                stored = _write(Path(folder), part, layout._replace(shape=part.shape), pool)
                copy = open_volume(Path(folder) / "array")
                unit, own = copy.grid.unit, _speeds(copy, model.patch, None)
            stored_other = [Stored(layout.shape, unit, layout.dtype.itemsize), *map(stored_as, volumes[1:])]
            other = PatchModel(stored_other, model.patch, model.threads)
            rates = Rates(other, [own, *speeds], now.copying)
            costs = (
                rates.cost(other.alone() / other.patch_nbytes),
                rates.cost(other.uniform(room)),
                rates.cost(other.near(room)),
            )
            gains = costs[2].all / as_it_is.tour.all, costs[1].all / as_it_is.uniform.all
            ratio = part.nbytes / max(1, stored)
            chunks = _count(layout.shape, layout.chunk)
            found.append(
                Rechunked(layout.chunk, chunks, codec.name, codec.level, ratio, unit, *costs, *gains)
            )
    return [as_it_is, *sorted(found, key=lambda one: -one.gain)]


def _speeds(volume: Volume, patch: Sequence[int], box: tuple[slice, ...] | None) -> tuple[Speed, Speed]:
    """How fast it is decoded by one thread, and by all, for patches as far as they fit."""
    fits = all(
        side <= size for side, size in zip(patch, volume.shape[len(volume.shape) - len(patch) :], strict=True)
    )
    wanted, cores = patch if fits else None, available_cpus()
    one = decode_speed(volume, wanted, 1, _SECONDS, box)
    return one, decode_speed(volume, wanted, cores, _SECONDS, box) if cores > 1 else one


def worthwhile(found: Sequence[Rechunked]) -> Rechunked | None:
    """The best of some, if it is worth a copy."""
    others = [one for one in found if one.codec]
    return others[0] if others and others[0].gain >= _WORTH else None


def worthwhile_uniform(found: Sequence[Rechunked]) -> Rechunked | None:
    """The best of some for uniform order, if it is worth a copy for that."""
    best = max((one for one in found if one.codec), key=lambda one: one.uniform_gain, default=None)
    return best if best is not None and best.uniform_gain >= _WORTH_UNIFORM else None


def command(path: str, one: Rechunked) -> str:
    """What makes a copy with other chunks."""
    sides = ",".join(map(str, one.chunk))
    return f"fastpipe repack {shlex.quote(path)} OUT.zarr --chunks {sides} --codec {one.codec}"


def _candidates(volume: Volume, patch: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes of chunks: powers of two, as long as the patch and as parts of it; not such that a copy would
    have more files than file systems like."""
    shape, itemsize = volume.shape, volume.dtype.itemsize
    lead = shape[: len(shape) - len(patch)]
    # A dimension of which patches take all is not cut.
    base = [
        side if side == size else 1 << (side.bit_length() - 1)
        for side, size in zip(patch, shape[len(lead) :], strict=True)
    ]
    # What lies in front is needed by every patch.
    front = lead if math.prod((*lead, *base)) * itemsize <= _LARGEST_CHUNK else (1,) * len(lead)
    while math.prod((*front, *base)) * itemsize > _LARGEST_CHUNK:
        longest = int(np.argmax(base))
        base[longest] = -(-base[longest] // 2)
    found: list[tuple[int, ...]] = []
    for part in (1, 2, 4):
        sides = [
            side if side == size else max(1, side // part)
            for side, size in zip(base, shape[len(lead) :], strict=True)
        ]
        whole = [*front, *sides]
        while math.prod(whole) * itemsize < _LEAST_CHUNK:
            dims = [dim for dim in range(len(lead), len(whole)) if whole[dim] < shape[dim]]
            if not dims:
                break
            dim = min(dims, key=lambda dim: whole[dim])
            whole[dim] = min(2 * whole[dim], shape[dim])
        if tuple(whole) not in found and (not found or _count(shape, whole) <= _MOST_FILES):
            found.append(tuple(whole))
    return found


def _count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """How many chunks an array has."""
    return math.prod(-(-size // side) for size, side in zip(shape, chunk, strict=True))


def _middle(layout: ZarrLayout) -> tuple[slice, ...]:
    """A part out of the middle: whole chunks of a layout."""
    sides = list(layout.chunk)
    while math.prod(sides) * layout.dtype.itemsize <= _TRIED_NBYTES // 2:
        dims = [dim for dim in range(len(sides)) if 2 * sides[dim] <= layout.shape[dim]]
        if not dims:
            break
        sides[min(dims, key=lambda dim: sides[dim] / layout.chunk[dim])] *= 2
    begins = [(size - side) // 2 for size, side in zip(layout.shape, sides, strict=True)]
    return tuple(slice(at, at + side) for at, side in zip(begins, sides, strict=True))


def _write(folder: Path, part: npt.NDArray[Any], layout: ZarrLayout, pool: ThreadPoolExecutor) -> int:
    """Write an array; the bytes of its chunks."""
    grid, encode = UnitGrid(layout.shape, layout.chunk), encoder(layout)
    array = folder / "array"
    array.mkdir()

    def write(number: int) -> int:
        chunk = np.zeros(layout.chunk, layout.dtype)
        some = part[grid.box(number)]
        chunk[tuple(slice(size) for size in some.shape)] = some
        data = encode(chunk)
        write_chunk(array, folder, grid.place(number), data)
        return len(data)

    total = sum(finish_all([pool.submit(write, number) for number in range(grid.count)]))
    (array / "zarr.json").write_bytes(metadata(layout, {}, None))
    return int(total)
