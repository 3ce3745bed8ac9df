"""The cost of a window of groups in randomness, and its saving in decoding.

::

    python benchmarks/shuffle_quality.py --plot shuffle_quality.png

Samples of one chunk tend to be alike (a chunk holds what was recorded together).  If two samples of a
batch of B share a chunk with probability p, and samples of a chunk tell the same, the batch is worth

    B / (1 + (B - 1) p)

independent ones: the design effect of L. Kish, Survey Sampling (1965), with an intraclass correlation
of 1, the worst case.  p is measured over the batches of an epoch, beside what ``Shuffle`` states.
Decodes are those of one epoch with ``cache="off"``, counted by the reader, over the chunks there are.
Where a window has fewer rows than a batch, the batch is of several windows, and p less than stated.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastpipe import FastHDF5Dataset, FastLoader, Shuffle
from fastpipe.bench.synthetic import mel_rows, write_table

_WINDOWS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_SHAPE = (16, 64)


class Quality(NamedTuple):
    """Return the measured properties of an order.

    Attributes:
        window: groups at a time; None where all rows are shuffled.
        stated: probability that two samples of a batch share a group, as the documents say.
        measured: the same, counted over the batches.
        worth: what a batch is worth.
        worth_stated: the same by the stated probability.
        decodes: how often a chunk is decoded in an epoch.
    """

    window: int | None
    stated: float
    measured: float
    worth: float
    worth_stated: float
    decodes: float


def effective(batch_size: int, share: float) -> float:
    """Kish's effective size of a batch.

    >>> effective(256, 0.0), round(effective(256, 1 / 64), 1), effective(256, 1.0)
    (256.0, 51.4, 1.0)
    """
    return batch_size / (1 + (batch_size - 1) * share)


def sharing(groups: np.ndarray, batches: list[np.ndarray]) -> float:
    """The share of pairs in a batch whose samples are of the same group.

    >>> sharing(np.array([0, 0, 1, 1]), [np.array([0, 1, 2])])
    0.3333333333333333
    """
    same = pairs = 0
    for batch in batches:
        counts = np.unique(groups[batch], return_counts=True)[1]
        same += int((counts * (counts - 1)).sum())
        pairs += len(batch) * (len(batch) - 1)
    return same / pairs


def measure(path: Path, chunks: int, window: int | None, batch_size: int) -> Quality:
    """Go through one epoch.

    Args:
        path: a file of chunks.
        chunks: how many there are.
        window: groups at a time; None to shuffle all rows.
        batch_size: samples in a batch.
    """
    shuffle = True if window is None else Shuffle(window, "group")
    dataset = FastHDF5Dataset(path, "mels", cache="off", seed=0)
    order = dataset.batch_sampler(batch_size, shuffle=shuffle, drop_last=True)
    measured = sharing(dataset.locality_groups(), [np.asarray(batch) for batch in order])
    stated = 1 / (chunks if window is None else min(window, chunks))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples are compressed together")
        for _ in FastLoader(dataset, batch_size, shuffle):
            pass
    # What the reader counts has no public name.
    recent: Any = dataset._running().recent
    decodes = recent.decoded_nbytes / (dataset.group_nbytes * chunks)
    worth = effective(batch_size, measured), effective(batch_size, stated)
    return Quality(window, stated, measured, *worth, decodes)


def draw(found: list[Quality], batch_size: int, path: Path) -> None:
    """Two panels over the window: what a batch is worth, and decodes of a chunk."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    windows = [one for one in found if one.window is not None]
    whole = next(one for one in found if one.window is None)
    places = [one.window for one in windows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), dpi=160, layout="constrained")
    green, grey = "#0b8a6f", "#6a717b"
    left.plot(places, [one.worth_stated for one in windows], color=grey, lw=1.2, ls="--", label="p as stated")
    left.plot(places, [one.worth for one in windows], color=green, marker="o", lw=1.6, label="p as measured")
    left.axhline(whole.worth, color=grey, lw=1.2, ls=":", label="all rows shuffled, measured")
    left.set_ylabel(f"worth of a batch of {batch_size}, samples")
    left.set_ylim(0, batch_size * 1.05)
    right.plot(places, [one.decodes for one in windows], color=green, marker="o", lw=1.6, label="windows")
    right.axhline(whole.decodes, color=grey, lw=1.2, ls=":", label="all rows shuffled, no cache")
    right.set_ylabel("decodes of a chunk in an epoch")
    right.set_yscale("log", base=2)
    right.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    right.set_ylim(0.8, 20)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_xlabel("chunks mixed at a time")
        axes.legend(frameon=False, fontsize=8.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Print a table, and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=2048, help="chunks of the file (default: 2048)")
    parser.add_argument("--rows", type=int, default=16, help="rows in a chunk (default: 16)")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    count = args.chunks * args.rows
    print(f"{args.chunks} chunks of {args.rows} rows, batches of {args.batch_size}")
    print(f"{'window':>8} {'p stated':>10} {'p measured':>11} {'worth':>7} {'stated':>7} {'decodes':>8}")
    with tempfile.TemporaryDirectory() as folder:
        rows = mel_rows(np.random.default_rng(0), count, _SHAPE)
        path = write_table(
            Path(folder) / "mels.h5", "mels", [rows], rows.shape,
            chunk=(args.rows, *_SHAPE), compression="gzip",
        )  # fmt: skip
        found = []
        for window in (*(one for one in _WINDOWS if one <= args.chunks), None):
            one = measure(path, args.chunks, window, args.batch_size)
            found.append(one)
            print(
                f"{window or 'all':>8} {one.stated:10.5f} {one.measured:11.5f} {one.worth:7.1f}"
                f" {one.worth_stated:7.1f} {one.decodes:8.2f}"
            )
    if args.plot:
        draw(found, args.batch_size, args.plot)


if __name__ == "__main__":
    main()
