"""Memory of a training script's processes, in fresh ones.

The parent calls `memory_of_trees`; the child is ``python -m benchmarks.studies.hdf5_memory``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastpipe
from benchmarks.studies.first import in_child
from benchmarks.studies.memory import Nothing, memory_entry, most_bytes
from fastpipe.bench.hdf5 import WINDOW, Table, look
from fastpipe.core.extras import require

__all__ = ["WORKERS", "memory_of_trees"]


WORKERS = (0, 1, 4)


def memory_of_trees(
    table: Table,
    batch_size: int,
    budget_bytes: int,
    workers: Sequence[int] = WORKERS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the memory of a script's processes above that of a loader that does nothing.

    The proportional set size (PSS) of a process and its workers, the most of ten looks in each of two epochs:
    of a `FastLoader` over the table, windows of chunks shuffled, without a cache and with one in memory; and
    of a `FastLoader` over a dataset that returns the same array each time, with as many workers.  torch's
    loader over that, in processes that have not imported fastpipe's, says what the import takes.

    Args:
        table: what is read.
        batch_size: samples in a batch.
        budget_bytes: the most that the cache may keep.
        workers: numbers of worker processes.
        say: told what is measured.

    Returns:
        ``rows``: for each number of workers without a cache and with one ``workers``, ``budget_mb``, ``mb``,
        ``nothing_mb``, the difference ``above_mb``, and ``stock_mb`` of torch's loader over nothing.

    Raises:
        ContenderError: a process did not end well.
    """
    rows = []
    for count in workers:
        job = {
            "path": str(table.path), "dataset": table.dataset, "batch": batch_size, "workers": count,
        }  # fmt: skip
        say(f"memory with {count} workers")
        stock, nothing = (_mb({**job, "kind": kind}) for kind in ("stock", "nothing"))
        for budget in (0, budget_bytes):
            used = _mb({**job, "kind": "fast", "budget": budget})
            rows.append({"workers": count, **memory_entry(used, nothing, stock, budget)})
    return {"rows": rows}


def _mb(job: dict[str, Any]) -> float:
    return float(in_child("benchmarks.studies.hdf5_memory", job, dict(os.environ))) / 1e6


def _child() -> None:
    """Read a job from standard input, print the bytes."""
    job = json.load(sys.stdin)
    torch = require("torch", extra="torch")
    data = require("torch.utils.data", extra="torch")
    table = look(Path(job["path"]), job["dataset"], "memory")
    workers: dict[str, Any] = {"num_workers": job["workers"], "persistent_workers": job["workers"] > 0}
    if job["kind"] != "fast":
        sample = torch.zeros(table.shape[1:], dtype=getattr(torch, table.dtype))
        kind: Any = fastpipe.FastLoader if job["kind"] == "nothing" else data.DataLoader
        loader: Any = kind(Nothing(table.samples, sample), job["batch"], shuffle=True, **workers)
    else:
        cache: Any = fastpipe.Cache("ram", max_bytes=job["budget"]) if job["budget"] else "off"
        dataset = fastpipe.FastHDF5Dataset(str(table.path), table.dataset, cache=cache, seed=0)
        window = fastpipe.Shuffle(WINDOW, "group")
        loader = fastpipe.FastLoader(dataset, job["batch"], window, workers="processes", **workers)
    print(most_bytes(loader))


if __name__ == "__main__":
    _child()
