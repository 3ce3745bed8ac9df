"""Time to the first batch, each time in a fresh process.

Of images the parent calls `first_batch_seconds`, and the child is ``python -m benchmarks.studies.first``.
Other cases have children of their own for `first_batches`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fastpipe
from fastpipe.bench.images import LoaderSpec, build, make_dataset, train_transform
from fastpipe.bench.runner import ContenderError, Draws, touch
from fastpipe.core.extras import require

RUNS = 5
WARM_RUNS = 3


def first_batch_seconds(
    spec: LoaderSpec, folder: Path, batch_size: int, warm_runs: int = WARM_RUNS
) -> dict[str, Any]:
    """Seconds from building the dataset to the first batch, in new processes.

    torch and torchvision are imported before the clock starts, since the replaced script
    imports them too; fastpipe's own imports, the folder's scan and the start of threads or
    workers are inside.

    Returns:
        ``cold_s``: the first run, with an empty cache folder.  ``warm_s``: the
        median of the following ones.  ``warm_raw_s``: each of those.

    Raises:
        ContenderError: a process did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as kept:
        environment = {**os.environ, "XDG_CACHE_HOME": kept}
        job = {"spec": asdict(spec), "folder": str(folder), "batch_size": batch_size}
        times = [float(in_child("benchmarks.studies.first", job, environment)) for _ in range(1 + warm_runs)]
    warm = times[1:]
    return {"cold_s": times[0], "warm_s": statistics.median(warm), "warm_raw_s": warm}


def in_child(module: str, job: dict[str, Any], environment: dict[str, str]) -> str:
    """Run a module in a new process; the last line that it prints.

    Raises:
        ContenderError: the process did not end well.
    """
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command, input=json.dumps(job), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ContenderError(f"the process ended with code {done.returncode}: {lines[-1]}")
    return done.stdout.splitlines()[-1]


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


def _child() -> None:
    """Read a job from standard input, print the seconds."""
    job = json.load(sys.stdin)
    spec = LoaderSpec(**job["spec"] | {"decode": fastpipe.Decode(**job["spec"]["decode"])})
    require("torchvision", extra="torch")
    transform = train_transform(spec.output)
    start = time.perf_counter()
    dataset = make_dataset(spec, Path(job["folder"]), transform)
    draws = Draws(range(len(dataset)), 4 * job["batch_size"] * max(1, spec.num_workers))
    batches = iter(build(spec, dataset, job["batch_size"], draws))
    touch(next(batches))
    print(time.perf_counter() - start)


if __name__ == "__main__":
    _child()
