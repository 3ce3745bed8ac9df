"""The cost of one slow image: epochs with and without a photograph of 50 megapixels, as PNG, now and then.

::

    python benchmarks/tail.py --data FOLDER --rounds 5

Each loader goes through the same photographs in the same order, batches of 64; in every tenth batch the
large image stands for one of them.  What it costs beyond its own decoding, spread over the cores, is
what it made others wait.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.images import train_transform
from fastpipe.bench.synthetic import photo_tree, photograph

SIZE, BATCH, EVERY = (6144, 8192), 64, 10
TRANSFORM = train_transform("float32")


def main() -> None:
    """Print each loader's epoch with and without the slow image."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", help="image folder (default: photographs made up for the occasion)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each loader (default: 5)")
    parser.add_argument("--batches", type=int, default=60, help="batches in an epoch (default: 60)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "photos"
        if args.data:
            root.mkdir()
            for folder in sorted(Path(args.data).resolve().iterdir()):
                (root / folder.name).symlink_to(folder)
        else:
            photo_tree(root, classes=2, per_class=100)
        slow = _write_slow(root)
        _measure(root, slow, args.rounds, args.batches)


def _write_slow(root: Path) -> str:
    """The image of 50 megapixels, in a class of its own; its path."""
    pixels = photograph(np.random.default_rng(0), (SIZE[0] // 8, SIZE[1] // 8))
    (root / "slow").mkdir()
    path = root / "slow" / "slow.png"
    Image.fromarray(pixels).resize(SIZE[::-1], Image.Resampling.BICUBIC).save(path, compress_level=1)
    return str(path)


def _measure(root: Path, slow: str, rounds: int, batches: int) -> None:
    stock = ImageFolder(str(root), TRANSFORM)
    number = next(n for n, (path, _) in enumerate(stock.samples) if path == slow)
    rng, usual = random.Random(0), [n for n in range(len(stock)) if n != number]
    plain = [rng.choice(usual) for _ in range(batches * BATCH)]
    with_slow = [
        number if n % (EVERY * BATCH) == BATCH * EVERY // 2 else index for n, index in enumerate(plain)
    ]
    start = perf_counter()
    stock[number]
    alone = perf_counter() - start
    fast = FastImageFolder(str(root), TRANSFORM, cache="off")
    cores = len(os.sched_getaffinity(0))
    workers: dict[str, Any] = {"num_workers": cores, "persistent_workers": True}
    loaders: dict[str, tuple[Any, dict[str, Any]]] = {
        f"ImageFolder + DataLoader(num_workers={cores})": (DataLoader, {"dataset": stock, **workers}),
        "FastLoader(prefetch_batches=2)": (FastLoader, {"dataset": fast, "prefetch_batches": 2}),
        "FastLoader": (FastLoader, {"dataset": fast}),
    }
    made = {
        name: [kind(**options, batch_size=BATCH, sampler=order) for order in (plain, with_slow)]
        for name, (kind, options) in loaders.items()
    }
    for pair in made.values():
        _epoch(pair[1])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, pair in made.items():
            times[name].append((_epoch(pair[0]), _epoch(pair[1])))
    slows = sum(index == number for index in with_slow)
    print(
        f"{slows} slow images of {alone:.2f} s among {len(plain)}: "
        f"on {cores} cores {slows * alone / cores:.2f} s of work"
    )
    print(f"{'':44} {'without':>8} {'with':>8} {'more':>8}  (s an epoch; median, range)")
    for name, pairs in times.items():
        more = sorted(b - a for a, b in pairs)
        medians = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        cells = " ".join(f"{value:8.2f}" for value in (*medians, statistics.median(more)))
        print(f"{name:44} {cells}  ({more[0]:.2f} to {more[-1]:.2f})")


def _epoch(loader: Any) -> float:
    start = perf_counter()
    for _ in loader:
        pass
    return perf_counter() - start


if __name__ == "__main__":
    main()
