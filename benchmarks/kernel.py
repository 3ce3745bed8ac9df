"""How long the kernels take for one image, beside Pillow.

::

    python benchmarks/kernel.py --rounds 50

One thread, 300×340 → 224×224 RGB, bilinear.  The variants are measured in turn, many calls at a
time, so that a busy neighbour meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image
from rounds import rounds_asked

from fastpipe.transform import kernels, weights

_SIZE, _TO, _CALLS = (300, 340), (224, 224), 50
_VALUES = 3 * _TO[0] * _TO[1]


def variants() -> dict[str, Callable[[], Any]]:
    """What is measured: a name, and a call that does it once."""
    noise = np.random.default_rng(0).integers(0, 256, (*_SIZE, 3), np.uint8)
    image = Image.fromarray(noise)
    y, x = (kernels.axis(weights.BILINEAR, size, to) for size, to in zip(_SIZE, _TO, strict=True))
    numbers, scratch = kernels.scratch_sizes(*_SIZE, 3, x, y)
    memory = np.empty(numbers, np.int32), np.empty(scratch, np.uint8)
    rows, raw = np.empty(_VALUES, np.uint8), np.empty(_VALUES, np.uint8)
    floats, words = np.empty(_VALUES, np.float32), np.empty(_VALUES, np.uint32)
    mean, std = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    table = np.arange(3 * 256, dtype=np.uint32)
    source, size = noise.reshape(-1), _TO
    return {
        "Pillow's resize": lambda: image.resize((_TO[1], _TO[0]), Image.Resampling.BILINEAR),
        "resample, weights included": lambda: kernels.resample(
            source, 0, 3 * _SIZE[1], *_SIZE, 3, weights.BILINEAR, tuple(x), tuple(y), False, *memory, rows
        ),
        "to float32 planes": lambda: kernels.to_affine(rows, *size, 3, True, mean, std, False, floats),
        "to float32 planes, by a table": lambda: kernels.to_table(rows, *size, 3, table, False, words),
        "to float32, channels-last": lambda: kernels.to_affine(rows, *size, 3, True, mean, std, True, floats),
        "to uint8 planes": lambda: kernels.to_bytes(rows, *size, 3, False, raw),
    }


def main() -> None:
    """Print median and range of each variant in milliseconds a call."""
    rounds = rounds_asked(__doc__, 50, "each variant")
    calls = variants()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = perf_counter()
            for _ in range(_CALLS):
                call()
            taken[name].append((perf_counter() - start) / _CALLS * 1000)
    for name, ms in taken.items():
        print(f"{name:30} {statistics.median(ms):.3f} ms ({min(ms):.3f} to {max(ms):.3f})")


if __name__ == "__main__":
    main()
