"""Bytes that are decoded for each byte that is used, in an epoch as large as the volume."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from fastpipe.bench.runner import touch
from fastpipe.bench.volume import Scroll, patch_dataset, patch_loader

SEEDS = 3


def amplifications(
    scroll: Scroll, batch_size: int, seeds: int = SEEDS, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Count the chunks decoded again if a tenth of the volume fits into memory.

    Args:
        scroll: the volume.
        batch_size: patches in a batch.
        seeds: epochs of other patches for each figure; nothing is remembered when one begins.
        say: told what is measured.

    Returns:
        ``budget_mb``, and for ``"tour"`` and ``"uniform"``: ``median`` and ``raw``.
    """
    budget = scroll.nbytes // 10
    told: dict[str, Any] = {"budget_mb": round(budget / 1e6, 1)}
    for kind in ("tour", "uniform"):
        say(f"bytes decoded for each that is used: {kind}")
        found = []
        for seed in range(seeds):
            dataset = patch_dataset(scroll, budget, seed)
            for batch in patch_loader(dataset, batch_size, kind):
                touch(batch)
            found.append(round(dataset.amplification, 4))
        told[kind] = {"median": statistics.median(found), "raw": found}
    return told
