"""Time to the first batch of some rows, each time in a fresh process."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastpipe.bench.images import in_child

__all__ = ["RUNS", "first_batches"]

RUNS = 5


def first_batches(
    module: str,
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    runs: int,
    say: Callable[[str], None],
    kept: Collection[str] = (),
) -> dict[str, Any]:
    """Seconds to the first batch of some rows, in new processes.

    Args:
        module: the child; it prints ``first_s`` and ``import_s`` as JSON.
        rows: by name, the label and what the child reads.
        runs: processes for each figure; one more comes before them and is not counted.
        say: told what is measured.
        kept: names of rows whose processes share the user's cache folder; the others have a new one each.

    Returns:
        By name: ``label``, ``median_s``, ``raw_s`` and the median ``import_s``.

    Raises:
        ContenderError: a process did not end well.
    """
    told: dict[str, Any] = {}
    for name, (label, job) in rows.items():
        say(f"time to the first batch: {label}")
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as folder:
            found = []
            for run in range(1 + runs):
                place = os.path.join(folder, "kept" if name in kept else str(run))
                environment = {**os.environ, "XDG_CACHE_HOME": place}
                found.append(json.loads(in_child(module, dict(job), environment)))
        seconds = [round(one["first_s"], 4) for one in found[1:]]
        told[name] = {
            "label": label,
            "median_s": statistics.median(seconds),
            "raw_s": seconds,
            "import_s": round(statistics.median(one["import_s"] for one in found[1:]), 4),
        }
    return told
