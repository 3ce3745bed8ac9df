"""The cost of filling a cache of decoded images, and its gain afterwards: epochs in turn.

::

    python benchmarks/cache.py --data FOLDER --rounds 5

An epoch goes through every photograph a few times at random places of the order, so that a small folder
is long enough to measure; in a first epoch each comes once.  Ratios are of runs next to each other.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from fastpipe import Cache, Decode, FastImageFolder, FastLoader
from fastpipe.bench.images import train_transform
from fastpipe.bench.synthetic import photo_tree

BATCH = 64
TRANSFORM = train_transform("float32")


def main() -> None:
    """Print the first epoch with a cache over that without, and the second one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", help="image folder (default: photographs made up for the occasion)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument(
        "--copies", type=int, default=8, help="copies of the folder, for longer epochs (default: 8)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "photos"
        source = (
            Path(args.data) if args.data else photo_tree(Path(temporary) / "made", classes=2, per_class=100)
        )
        for number in range(args.copies):
            shutil.copytree(source, root / f"copy{number}")
        for short_side in (256, None):
            _measure(root, Path(temporary) / "kept", Decode(short_side=short_side), args.rounds)


def _measure(root: Path, folder: Path, decode: Decode, rounds: int) -> None:
    places: dict[str, Callable[[], Any]] = {
        "ram": lambda: Cache("ram"), "disk": lambda: Cache("disk", dir=folder), "auto": lambda: Cache("auto"),
    }  # fmt: skip
    _epochs(root, decode, "off", 1)
    print(
        f"Decode(short_side={decode.short_side}), images/s without a cache, "
        "× of it in epochs 1, 2, 3 (median, range)"
    )
    for name, cache in places.items():
        ratios: list[list[float]] = [[], [], []]
        rates = []
        for _ in range(rounds):
            (before,) = _epochs(root, decode, "off", 1)
            epochs = _epochs(root, decode, cache(), 3)
            (after,) = _epochs(root, decode, "off", 1)
            rates += [before, after]
            for kept, rate in zip(ratios, epochs, strict=True):
                kept.append(rate / ((before + after) / 2))
            shutil.rmtree(folder, ignore_errors=True)
        cells = [f"{statistics.median(kept):.2f} ({min(kept):.2f} to {max(kept):.2f})" for kept in ratios]
        print(f"  {name:6} {statistics.median(rates):6.0f}   " + "   ".join(cells))


def _epochs(root: Path, decode: Decode, cache: Any, count: int) -> list[float]:
    """Images a second of so many epochs of a new dataset."""
    dataset = FastImageFolder(str(root), TRANSFORM, decode=decode, cache=cache)
    loader = FastLoader(dataset, BATCH, shuffle=True)
    dataset[0]  # threads and decoders are there
    rates = []
    for _ in range(count):
        start = perf_counter()
        images = sum(len(labels) for _, labels in loader)
        rates.append(images / (perf_counter() - start))
    return rates


if __name__ == "__main__":
    main()
