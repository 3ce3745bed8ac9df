"""Before anything is timed: are the patches those of the volume, each once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fastpipe.bench.places import box_at, start_of
from fastpipe.bench.samples import RowCheck, digests_of_samples
from fastpipe.bench.volume.data import Scroll
from fastpipe.bench.volume.rows import SlicedRow, WholeEpochs

__all__ = ["check_patches", "differing", "expected_patches"]

_EPOCHS = 2


def check_patches(
    scroll: Scroll,
    rows: Iterable[WholeEpochs | SlicedRow],
    say: Callable[[str], None] = lambda text: None,
) -> RowCheck:
    """Compare each row with slices of the volume in memory: of fastpipe's rows two epochs, of the others one.

    Args:
        scroll: the volume.
        rows: the rows; what is remembered for those of fastpipe is not that of a measurement.
        say: told what is compared.
    """
    check = RowCheck("the source's slices")
    sizes = scroll.sizes
    drawn = [start_of(sizes.shape, sizes.patch, index) for index in range(scroll.epoch)]
    by_number = expected_patches(scroll, drawn)
    for row in rows:
        what = f"{row.spec.section}: {row.spec.label}"
        say(f"comparing: {what}")
        if isinstance(row, SlicedRow):
            check.add(what, by_number, row.batches(scroll.epoch))
            continue
        dataset, loader = row.made(seed=0)
        for epoch in range(_EPOCHS):
            _, starts = dataset.places(epoch)
            check.add(f"{what}, epoch {epoch}", expected_patches(scroll, starts), loader)
    return check


def expected_patches(scroll: Scroll, starts: Iterable[Any]) -> Counter[bytes]:
    """Digests of patches of the arrays in memory, and how often each comes.

    Args:
        scroll: the volume.
        starts: where they begin.
    """
    found: Counter[bytes] = Counter()
    for start in starts:
        box = box_at(start, scroll.sizes.patch)
        values, labels = (array[box][np.newaxis] for array in scroll.arrays)
        found.update(digests_of_samples(values, labels))
    return found


def differing(scroll: Scroll, told: Sequence[Mapping[str, Any]]) -> int:
    """How many of the patches that a peer told of are not those of the volume.

    Args:
        scroll: the volume.
        told: of each its ``start``, and ``digests`` of its values and its labels.
    """
    strange = 0
    for one in told:
        box = box_at(one["start"], scroll.sizes.patch)
        expected = [next(digests_of_samples(array[box][np.newaxis], None)).hex() for array in scroll.arrays]
        strange += expected != one["digests"]
    return strange
