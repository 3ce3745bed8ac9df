"""Measure how long the native core and Pillow take to resample and convert one image.

::

    python benchmarks/kernel.py --rounds 50

One thread, 300×340 → 224×224 RGB, bilinear, weights included, with each instruction set of the processor.
The variants are measured in turn, many calls at a time, so that a busy neighbour meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image
from rounds import rounds_asked

from fastpipe.bench.images import MEAN, STD
from fastpipe.core.native import native
from fastpipe.images import kernels

_SIZE, _TO, _CALLS = (300, 340), (224, 224), 50
_LEVELS = ("baseline", "AVX2", "AVX-512")
_BYTES, _AFFINE, _TABLE = 0, 1, 2  # kinds of a native.Conversion


@contextmanager
def forced(level: int) -> Iterator[bool]:
    """Use an instruction set for a time; whether the processor has it."""
    before = native.level()
    try:
        yield native.force_level(level)
    finally:
        native.force_level(before)


def variants() -> dict[str, Callable[[], Any]]:
    """Return what is measured: a name, and a call that does it once."""
    noise = np.random.default_rng(0).integers(0, 256, (*_SIZE, 3), np.uint8)
    image = Image.fromarray(noise)
    y, x = (kernels.axis(kernels.BILINEAR, size, to) for size, to in zip(_SIZE, _TO, strict=True))
    conversions = {
        "to uint8, as Pillow": (1, (_BYTES, 3, True, 1, True, [], [], b"")),
        "to uint8 planes": (1, (_BYTES, 3, False, 1, True, [], [], b"")),
        "to float32 planes": (4, (_AFFINE, 3, False, 4, True, list(MEAN), list(STD), b"")),
        "to float32, channels-last": (4, (_AFFINE, 3, True, 4, True, list(MEAN), list(STD), b"")),
        "to 16 bits, planes, by a table": (2, (_TABLE, 3, False, 2, True, [], [], bytes(2 * 3 * 256))),
    }
    calls: dict[str, Callable[[], Any]] = {
        "Pillow's resize": lambda: image.resize((_TO[1], _TO[0]), Image.Resampling.BILINEAR)
    }
    for name, (word, arguments) in conversions.items():
        how, out = native.conversion(*arguments), np.empty(3 * _TO[0] * _TO[1] * word, np.uint8)

        def call(how: Any = how, out: Any = out) -> None:
            kernels.resample(noise, kernels.BILINEAR, x, y, False, 0, how, out)

        calls[name] = call
    return calls


def main() -> None:
    """Print median and range of each variant in milliseconds a call."""
    rounds = rounds_asked(__doc__, 50, "each variant")
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for level, word in enumerate(_LEVELS):
            with forced(level) as is_there:
                for name, call in variants().items() if is_there else ():
                    is_pillow = name.startswith("Pillow")
                    if is_pillow and level:
                        continue
                    call()
                    start = perf_counter()
                    for _ in range(_CALLS):
                        call()
                    took = (perf_counter() - start) / _CALLS * 1000
                    taken.setdefault(name if is_pillow else f"{word}: {name}", []).append(took)
    for name, ms in taken.items():
        print(f"{name:42} {statistics.median(ms):.3f} ms ({min(ms):.3f} to {max(ms):.3f})")


if __name__ == "__main__":
    main()
