"""Time to the first batch of a file with many chunks, each time in a fresh process.

The parent calls `first_batches`; the child is ``python -m benchmarks.studies.hdf5_first``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastpipe
from benchmarks.studies import first
from fastpipe.bench.hdf5 import WINDOW, RowByRow, Table, look, table_dataset
from fastpipe.bench.runner import touch
from fastpipe.core.extras import require

__all__ = ["first_batches"]


_NAMES = {
    "replaced": "row by row + DataLoader(num_workers=0)",
    "cold": "FastHDF5Dataset + FastLoader, the file not seen before",
    "kept": "FastHDF5Dataset + FastLoader, opened again",
}


def first_batches(
    table: Table, batch_size: int, runs: int = first.RUNS, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Seconds from building the dataset to the first batch, in new processes.

    torch, h5py and fastpipe are imported before the clock starts, and what fastpipe compiles is there from
    earlier runs; ``import_s`` is what importing fastpipe took, in the same processes.  The file is in the
    page cache.

    Args:
        table: what is read.
        batch_size: samples in a batch.
        runs: processes for each figure; one more comes before them and is not counted.
        say: told what is measured.

    Returns:
        ``chunks``, and for ``replaced``, ``cold`` and ``kept``: ``label``, ``median_s``, ``raw_s`` and the
        median ``import_s``.

    Raises:
        ContenderError: a process did not end well.
    """
    table.warm()
    job = {"path": str(table.path), "dataset": table.dataset, "batch": batch_size}
    rows = {name: (label, {**job, "kind": name}) for name, label in _NAMES.items()}
    # Where chunks are is kept in the user's cache folder.
    found = first.first_batches("benchmarks.studies.hdf5_first", rows, runs, say, kept=["kept"])
    return {"chunks": table.samples, **found}


def _child() -> None:
    """Read a job from standard input, print the seconds."""
    job = json.load(sys.stdin)
    data = require("torch.utils.data", extra="torch")
    require("h5py", extra="hdf5")
    table = look(Path(job["path"]), job["dataset"], "chunks")
    is_fast = job["kind"] != "replaced"
    start = time.perf_counter()
    if is_fast:
        fastpipe.FastLoader, fastpipe.FastHDF5Dataset  # noqa: B018 (which import what they need)
    imported = time.perf_counter()
    if is_fast:
        dataset = table_dataset(table, "auto")
        loader: Any = fastpipe.FastLoader(dataset, job["batch"], fastpipe.Shuffle(WINDOW, "group"))
    else:
        loader = data.DataLoader(RowByRow(table), job["batch"], shuffle=True)
    touch(next(iter(loader)))
    print(json.dumps({"first_s": time.perf_counter() - imported, "import_s": imported - start}))


if __name__ == "__main__":
    _child()
