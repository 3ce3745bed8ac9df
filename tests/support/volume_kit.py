"""What tests of ``fastpipe.volumes`` share: volumes read as a whole and in boxes, and arrays to compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe.core.shared_chunks import UnitFile
from fastpipe.volumes.reader import Counts, PatchReader
from fastpipe.volumes.volume import Volume

_CANARY = 0xA5
_GAP = 64  # bytes between units, which must not be written


class _NoClock:
    def add(self, stage: str, nanoseconds: int) -> None:
        """Not asked for."""


def whole(volume: Volume, seed: int = 0) -> Any:
    """Reads all of a volume by its units, in any order and some at a time."""
    random, nbytes = np.random.default_rng(seed), volume.unit_nbytes
    out = np.zeros(volume.shape, volume.dtype)
    step = -(-nbytes // 16) * 16 + _GAP
    numbers = random.permutation(volume.grid.count)
    some = max(1, int(random.integers(1, 6)))
    reader = volume.open()
    for begin in range(0, len(numbers), some):
        part = numbers[begin : begin + some]
        memory = np.full(step * len(part) + 16, _CANARY, np.uint8)
        memory = memory[-memory.__array_interface__["data"][0] % 16 :]
        outs = [memory[place * step :][:nbytes] for place in range(len(part))]
        reader.read(part, outs)
        for place, (number, made) in enumerate(zip(part.tolist(), outs, strict=True)):
            assert (memory[place * step + nbytes : (place + 1) * step] == _CANARY).all(), "beyond its end"
            box = volume.grid.box(number)
            unit = made.view(volume.dtype).reshape(volume.grid.unit)
            out[box] = unit[tuple(slice(side.stop - side.start) for side in box)]
    return out


def reader_of(volume: Volume, units: Any = None, first_key: int = 0) -> PatchReader:
    """Returns a volume's reader of boxes."""
    return PatchReader(volume, _NoClock(), Counts(), units, first_key)


def random_box(random: Any, shape: Any) -> tuple[slice, ...]:
    low = [int(random.integers(0, size)) for size in shape]
    return tuple(slice(at, int(random.integers(at, size)) + 1) for at, size in zip(low, shape, strict=True))


def boxes_equal(reader: PatchReader, expected: Any, seed: int, count: int = 12) -> None:
    """Checks that random boxes are those of the array, and that memory around them is not touched."""
    random = np.random.default_rng(seed)
    if expected.dtype.kind in "iufc":  # in the volume's byte order
        expected = expected.astype(reader._volume.dtype)
    for _ in range(count):
        box = random_box(random, expected.shape)
        sizes = [side.stop - side.start for side in box]
        memory = np.full([size + 2 for size in sizes], 1, np.uint8).astype(expected.dtype)
        untouched = memory.copy()
        inner = tuple(slice(1, size + 1) for size in sizes)
        reader.read([side.start for side in box], memory[inner])
        untouched[inner] = expected[box]
        assert memory.tobytes() == untouched.tobytes(), f"{box} of {expected.shape}"


def boxes_equal_with_memory(volume: Volume, expected: Any, seed: int, slots: int, count: int = 4) -> None:
    """Checks boxes without remembered units, and with room for so many of them."""
    boxes_equal(reader_of(volume), expected, seed, count)
    first = seed % 3
    memory = UnitFile(first + max(1, volume.grid.count), slots, volume.unit_nbytes)
    boxes_equal(reader_of(volume, memory.opened(), first), expected, seed, count)
    memory.close()


def same_bits(found: Any, expected: Any) -> bool:
    """Whether arrays have one shape and type, but for byte order, and are equal to the last bit."""
    found, expected = (np.asarray(one).astype(one.dtype.newbyteorder("=")) for one in (found, expected))
    return bool(
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and found.tobytes() == expected.tobytes()
    )


def random_array(shape: Any, dtype: Any, seed: int = 0) -> Any:
    """Returns numbers of few different bytes, so that they compress."""
    dtype = np.dtype(dtype)
    values = np.array([0, 1] if dtype.kind == "b" else [0, 1, 7, 255], np.uint8)
    raw = np.random.default_rng(seed).choice(values, math.prod(shape) * dtype.itemsize)
    return raw.view(dtype).reshape(shape)
