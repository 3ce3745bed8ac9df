"""Fixtures of the tests of ``fastpipe.volumes``: volumes read as a whole, and in boxes."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from fastpipe.core.shared_chunks import UnitFile
from fastpipe.volumes.reader import Counts, PatchReader
from fastpipe.volumes.volume import Volume

_CANARY = 0xA5
_GAP = 64  # bytes between units, which nobody may write


class _NoClock:
    def add(self, stage: str, nanoseconds: int) -> None:
        """Nobody asks."""


@pytest.fixture(scope="session", autouse=True)
def _zarr_has_its_threads() -> Iterator[None]:
    """zarr-python starts threads when it is first used, and keeps them: let that be before any test."""
    with zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1}):
        zarr.create_array({}, shape=(4,), chunks=(2,), dtype="u1")[:] = 1  # type: ignore[arg-type]
        yield


def _whole(volume: Volume, seed: int = 0) -> Any:
    """All of a volume by its units, which are read in any order, some at a time."""
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


def _reader_of(volume: Volume, units: Any = None, first_key: int = 0) -> PatchReader:
    return PatchReader(volume, _NoClock(), Counts(), units, first_key)


def _boxes_equal(reader: PatchReader, expected: Any, seed: int, count: int = 12) -> None:
    """Boxes anywhere, of any size, are those of the array; what is around them is not touched."""
    random = np.random.default_rng(seed)
    if expected.dtype.kind in "iufc":  # in the volume's order of bytes
        expected = expected.astype(reader._volume.dtype)
    for _ in range(count):
        low = [int(random.integers(0, size)) for size in expected.shape]
        high = [int(random.integers(at, size)) + 1 for at, size in zip(low, expected.shape, strict=True)]
        sizes = [stop - start for start, stop in zip(low, high, strict=True)]
        memory = np.full([size + 2 for size in sizes], 1, np.uint8).astype(expected.dtype)
        untouched = memory.copy()
        inner = tuple(slice(1, size + 1) for size in sizes)
        box = tuple(slice(start, stop) for start, stop in zip(low, high, strict=True))
        reader.read(low, memory[inner])
        untouched[inner] = expected[box]
        assert memory.tobytes() == untouched.tobytes(), f"{box} of {expected.shape}"


@pytest.fixture(scope="session")
def whole() -> Callable[..., Any]:
    """Reads all of a volume by its units: ``whole(volume, seed)``."""
    return _whole


@pytest.fixture(scope="session")
def reader_of() -> Callable[..., PatchReader]:
    """A volume's reader of boxes: ``reader_of(volume, units, first_key)``."""
    return _reader_of


@pytest.fixture(scope="session")
def boxes_equal() -> Callable[..., None]:
    """Compares boxes with an array's: ``boxes_equal(reader, expected, seed, count)``."""
    return _boxes_equal


@pytest.fixture(scope="session")
def memory_for() -> Callable[..., UnitFile]:
    """Memory for a volume's units, to be closed: ``memory_for(volume, slots, first_key)``."""

    def made(volume: Volume, slots: int, first_key: int = 0) -> UnitFile:
        return UnitFile(first_key + max(1, volume.grid.count), slots, volume.unit_nbytes)

    return made


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any], bool]:
    """Whether arrays are of one shape and type, but for the order of bytes, and equal to the last bit."""

    def same(found: Any, expected: Any) -> bool:
        found, expected = (np.asarray(one).astype(one.dtype.newbyteorder("=")) for one in (found, expected))
        return bool(
            found.shape == expected.shape
            and found.dtype == expected.dtype
            and found.tobytes() == expected.tobytes()
        )

    return same


@pytest.fixture(scope="session")
def random_array() -> Callable[..., Any]:
    """Numbers of few different bytes, so that they compress: ``random_array(shape, dtype, seed)``."""

    def made(shape: Any, dtype: Any, seed: int = 0) -> Any:
        dtype = np.dtype(dtype)
        values = np.array([0, 1] if dtype.kind == "b" else [0, 1, 7, 255], np.uint8)
        raw = np.random.default_rng(seed).choice(values, math.prod(shape) * dtype.itemsize)
        return raw.view(dtype).reshape(shape)

    return made


@pytest.fixture
def replaced_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path, Path], None]:
    """Replaces a file as soon as a function has returned: ``replaced_after("module.function", path, new)``."""

    def patch(target: str, path: Path, new: Path) -> None:
        module, name = target.rsplit(".", 1)
        function = getattr(importlib.import_module(module), name)

        def called(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            if new.exists():
                os.replace(new, path)
            return found

        monkeypatch.setattr(target, called)

    return patch
