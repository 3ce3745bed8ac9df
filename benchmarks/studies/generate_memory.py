"""Memory of the process that calls ``generate``, in fresh ones.

The parent calls `peaks`; the child is ``python -m benchmarks.studies.generate_memory``.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastpipe
from benchmarks.studies.first import in_child
from benchmarks.studies.made_rows import counted
from fastpipe.bench.samples import SEED

COUNTS = (10**4, 10**6)
TIMES = 3


def peaks(
    folder: Path, workers: int, counts: Sequence[int] = COUNTS, times: int = TIMES,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """The most memory that a process has had in which rows of 8 bytes were made through ``fn.batch``.

    Args:
        folder: in which files are made.
        workers: processes that make the rows; theirs is not counted.
        counts: of rows; few, and many.
        times: how often.
        say: told what is measured.

    Returns:
        ``rows``: for each count ``rows`` and the ``mb`` of each time.

    Raises:
        ContenderError: a process did not end well.
    """
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(times):
        for count, raw in found.items():
            say(f"memory: {count:,} rows")
            job = {"rows": count, "workers": workers, "folder": str(folder)}
            used = int(in_child("benchmarks.studies.generate_memory", job, dict(os.environ)))
            raw.append(round(used / 1e6, 2))
    return {"rows": [{"rows": count, "mb": raw} for count, raw in found.items()]}


def peak_bytes() -> int:
    """The most memory that this process has had since it began."""
    try:
        # Not `getrusage`: it starts with what the parent had.
        told = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        told = None
    if told is not None:
        return 1024 * int(told[1])
    most = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return most if sys.platform == "darwin" else 1024 * most


def _child() -> None:
    """Read a job from standard input, print the bytes."""
    job = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(dir=job["folder"]) as folder:
        out = Path(folder, "rows.h5")
        fastpipe.generate(counted, job["rows"], out, seed=SEED, workers=job["workers"], progress=False)
    print(peak_bytes())


if __name__ == "__main__":
    _child()
