"""Memory of a training script's processes, in fresh ones.

The parent calls `memory_of_topologies`; the child is ``python -m benchmarks.studies.volume_memory``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import fastpipe
from benchmarks.studies.first import in_child
from benchmarks.studies.memory import Nothing, memory_entry, most_bytes
from fastpipe.bench.volume import Scroll, Sizes, patch_dataset
from fastpipe.core.extras import require

__all__ = ["TOPOLOGIES", "Topology", "memory_of_topologies"]


class Topology(NamedTuple):
    """Threads of each process that reads, and spawned worker processes."""

    threads: int
    workers: int


TOPOLOGIES = (Topology(1, 0), Topology(2, 0), Topology(4, 0), Topology(1, 2))


def memory_of_topologies(
    scroll: Scroll,
    batch_size: int,
    topologies: Sequence[Topology] = TOPOLOGIES,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the memory of a script's processes above that of a loader that does nothing.

    The proportional set size (PSS) of a process and its workers, the most of ten looks in each of two epochs:
    of a `FastLoader` over the volume, on a tour, which may remember a quarter of it; and of a `FastLoader`
    over a dataset that returns the same patch each time, with as many workers.  torch's loader over that, in
    processes that have not imported fastpipe's, says what the import takes.

    Args:
        scroll: what is read.
        batch_size: patches in a batch.
        topologies: threads and workers.
        say: told what is measured.

    Returns:
        ``rows``: for each ``threads``, ``workers``, ``budget_mb``, ``mb``, ``nothing_mb``, the difference
        ``above_mb``, and ``stock_mb`` of torch's loader over nothing.

    Raises:
        ContenderError: a process did not end well.
    """
    rows = []
    without: dict[int, tuple[float, float]] = {}
    budget = scroll.room
    for one in topologies:
        say(f"memory with {one.threads} threads and {one.workers} workers")
        job = {
            "folder": str(scroll.folder), "sizes": asdict(scroll.sizes), "batch": batch_size,
            "budget": budget, **one._asdict(),
        }  # fmt: skip
        if one.workers not in without:
            without[one.workers] = _mb({**job, "kind": "nothing"}), _mb({**job, "kind": "stock"})
        nothing, stock = without[one.workers]
        used = _mb({**job, "kind": "fast"})
        rows.append({**one._asdict(), **memory_entry(used, nothing, stock, budget)})
    return {"rows": rows}


def _mb(job: dict[str, Any]) -> float:
    return float(in_child("benchmarks.studies.volume_memory", job, dict(os.environ))) / 1e6


def _child() -> None:
    """Read a job from standard input, print the bytes."""
    job = json.load(sys.stdin)
    torch = require("torch", extra="torch")
    data = require("torch.utils.data", extra="torch")
    sizes = Sizes(**{name: tuple(side) for name, side in job["sizes"].items()})
    scroll, count = Scroll(Path(job["folder"]), sizes), job["workers"]
    workers: dict[str, Any] = {"num_workers": count, "persistent_workers": count > 0}
    workers["multiprocessing_context"] = "spawn" if count else None
    if job["kind"] == "fast":
        dataset = patch_dataset(scroll, job["budget"], threads=job["threads"])
        order = fastpipe.Shuffle(unit="group")
        loader: Any = fastpipe.FastLoader(dataset, job["batch"], order, workers="processes", **workers)
    else:
        kinds = (torch.uint16, torch.uint8)
        nothing = Nothing(scroll.epoch, tuple(torch.zeros(sizes.patch, dtype=kind) for kind in kinds))
        kind: Any = fastpipe.FastLoader if job["kind"] == "nothing" else data.DataLoader
        loader = kind(nothing, job["batch"], shuffle=True, **workers)
    print(most_bytes(loader))


if __name__ == "__main__":
    _child()
