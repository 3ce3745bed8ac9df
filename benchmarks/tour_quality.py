"""The cost of a tour of patches in randomness, and its saving in decoding.

::

    python benchmarks/tour_quality.py --plot tour_quality.png

Two patches tell the same as far as they are of the same voxels.  If the pairs of B patches share, on average,
a part p of a patch, then these are worth

    B / (1 + (B - 1) p)

independent ones: the design effect of L. Kish, Survey Sampling (1965), with p for the intraclass correlation.
It is counted over batches, and over the batches of a stretch of training, such as those of which an optimizer
with a momentum of 0.9 remembers most.  What is decoded for each byte that is used is that of the first epoch
with a budget of a part of the volume.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle
from fastpipe.bench.synthetic import scroll_slabs, write_zarr
from fastpipe.sampling import Uniform

_WINDOWS = (1, 2, 4, 8, 16, 32, 64)
_SHAPE, _CHUNK, _PATCH = (384, 768, 768), (64, 128, 128), (72, 136, 136)


class Quality(NamedTuple):
    """Return the measured properties of an order.

    Attributes:
        budget: an n-th of the volume is remembered.
        window: places at a time; None where all patches are shuffled.
        batch, stretch: what these are worth, in patches.
        decoded: bytes for each that is used.
    """

    budget: int
    window: int | None
    batch: float
    stretch: float
    decoded: float


def effective(count: int, share: float) -> float:
    """Kish's effective number of patches.

    >>> effective(32, 0.0), effective(32, 1.0)
    (32.0, 1.0)
    """
    return count / (1 + (count - 1) * share)


def shared(starts: np.ndarray, size: int) -> float:
    """The part of a patch that two have in common, on average over the pairs of so many successive ones.

    Args:
        starts: int64 (N, D): where patches begin, in the order in which they come.
        size: how many are looked at together.

    >>> shared(np.array([[0, 0, 0], [36, 0, 0]]), 2)
    0.5
    """
    whole = starts[: len(starts) // size * size].reshape(-1, size, starts.shape[1])
    apart = np.abs(whole[:, :, None] - whole[:, None])
    common = (np.maximum(0, _PATCH - apart) / _PATCH).prod(axis=-1)
    pairs = ~np.eye(size, dtype=bool)
    return float(common[:, pairs].mean()) if size > 1 else 0.0


def measure(path: Path, budget: int, window: int | None, args: argparse.Namespace) -> Quality:
    """Go through the first epochs of some datasets.

    Args:
        path: the volume.
        budget: an n-th of it is remembered.
        window: places at a time; None to shuffle all patches.
        args: of the command line.
    """
    shuffle = True if window is None else Shuffle(window, "group")
    nbytes = 2 * int(np.prod(_SHAPE))
    found = []
    for seed in range(args.seeds):
        dataset = FastPatchDataset(
            path, _PATCH, sampling=Uniform(args.patches), seed=seed,
            cache=Cache("ram", max_bytes=nbytes // budget),
        )  # fmt: skip
        sampler = dataset.batch_sampler(args.batch_size, shuffle=shuffle)
        order = [int(index) for batch in sampler for index in batch]
        starts = dataset.places()[1][order]
        for _ in FastLoader(dataset, args.batch_size, shuffle):
            pass
        shares = shared(starts, args.batch_size), shared(starts, args.stretch)
        found.append((*shares, dataset.amplification))
    batch, stretch, decoded = np.mean(found, axis=0).tolist()
    return Quality(
        budget, window, effective(args.batch_size, batch), effective(args.stretch, stretch), decoded
    )


def draw(found: list[Quality], args: argparse.Namespace) -> None:
    """Two panels over the window: what a stretch is worth, and bytes decoded for each that is used."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), dpi=160, layout="constrained")
    for budget, color in zip(args.budgets, ("#0b8a6f", "#b3541e", "#3b5b92"), strict=False):
        some = [one for one in found if one.budget == budget]
        whole = next(one for one in some if one.window is None)
        tours = [one for one in some if one.window is not None]
        places, label = [one.window for one in tours], f"a budget of 1/{budget}"
        line: dict[str, Any] = {"color": color, "marker": "o", "lw": 1.6, "label": f"tours, {label}"}
        flat: dict[str, Any] = {"color": color, "lw": 1.2, "ls": ":", "label": f"all shuffled, {label}"}
        left.plot(places, [one.stretch for one in tours], **line)
        left.axhline(whole.stretch, **flat)
        right.plot(places, [one.decoded for one in tours], **line)
        right.axhline(whole.decoded, **flat)
    left.set_ylabel(f"worth of {args.stretch} successive patches")
    left.set_ylim(0, args.stretch * 1.05)
    right.set_ylabel("bytes decoded for each that is used")
    right.set_ylim(0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_xlabel("places at a time: Shuffle(window, unit=\"group\")")  # fmt: skip
        axes.legend(frameon=False, fontsize=8.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot)


def main() -> None:
    """Print a table, and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--patches", type=int, default=170, help="in an epoch (default: 170, as large as the volume)"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[10, 4], metavar="N",
                        help="an N-th of the volume is remembered (default: 10 4)")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--stretch", type=int, default=32, help="successive patches (default: 32)")
    parser.add_argument("--seeds", type=int, default=3, help="epochs for each figure (default: 3)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    print(f"{args.patches} patches of {_PATCH} in {_SHAPE}")
    worths = f"worth of {args.batch_size}", f"of {args.stretch}"
    print(f"{'budget':>8} {'window':>8} {worths[0]:>12} {worths[1]:>8} {'decoded':>8}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scroll.zarr"
        write_zarr(path, (values for values, _ in scroll_slabs(_SHAPE, _CHUNK[0])), _SHAPE, _CHUNK)
        found = []
        for budget, window in itertools.product(args.budgets, (*_WINDOWS, None)):
            one = measure(path, budget, window, args)
            found.append(one)
            told = f"{one.batch:12.2f} {one.stretch:8.1f} {one.decoded:8.2f}"
            print(f"{f'1/{budget}':>8} {window or 'all':>8} {told}", flush=True)
    if args.plot:
        draw(found, args)


if __name__ == "__main__":
    main()
