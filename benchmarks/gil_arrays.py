"""Measure how long the GIL is held for an HDF5 row and for a patch, and estimate the rate on many cores.

::

    python benchmarks/gil_arrays.py --rounds 3 --json gil-arrays.json

Measured as ``gil.py`` does: the CPU time of all of Python's threads, an upper bound; and by a probe that
always wants the lock.  Simulated cores: filters are replaced by 1 ms of waiting for a chunk, so that n
threads act like n cores that decode; the limit should be what two cores read and copy.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import paths  # noqa: F401
from gil import print_simulated, probed, python_seconds
from rounds import figures, save_facts

from benchmarks.cases.hdf5 import made_cells
from fastpipe import Cache, FastHDF5Dataset, FastLoader, FastPatchDataset, Shuffle
from fastpipe.bench.hdf5 import LAYOUTS, ROWS, Table, made_tables
from fastpipe.bench.volume import FULL, made_scroll
from fastpipe.core.machine import available_cpus
from fastpipe.core.native import native

_WAIT_NS = 1_000_000


class Case(NamedTuple):
    """A loader whose batches are timed under the lock.

    Attributes:
        label: its name.
        batch: samples of a batch.
        asked_us: that the lock may be held for a sample.
        loader: makes the loader, for a number of threads.
    """

    label: str
    batch: int
    asked_us: float
    loader: Callable[[int], Any]


class Epochs:
    """A loader, and as many of its batches as are wanted.

    Args:
        case: which.
        threads: that it reads with.
    """

    def __init__(self, case: Case, threads: int) -> None:
        self.batch, self._loader = case.batch, case.loader(threads)
        for _ in range(2):  # what is to be kept is kept after the second
            for _ in self._loader:
                pass

    def epoch(self, samples: int) -> float:
        """Read at least so many samples, in whole epochs and batches; return the seconds for so many."""
        start, seen = time.perf_counter(), 0
        while seen < samples:
            for batch in self._loader:
                seen += len(batch[0] if isinstance(batch, (list, tuple)) else batch)
                if seen >= samples:
                    break
        return (time.perf_counter() - start) * samples / seen

    def samples_for(self, seconds: float) -> int:
        """Return the number of samples, in whole batches, that take about this long."""
        took = self.epoch(4 * self.batch)
        samples = 4 * self.batch
        while took < seconds / 4:
            samples *= 2
            took = self.epoch(samples)
        return max(4, round(samples * seconds / took / self.batch)) * self.batch


def cases(folder: Path | None) -> tuple[list[Case], Table]:
    """Return the cases, and the table whose filters are replaced by waiting."""
    (gzip,) = made_tables(ROWS, folder, print, {"gzip": LAYOUTS["gzip"]})
    cells = made_cells(704, (10, 20, 16, 16), "cells", folder, print)
    scroll = made_scroll(FULL, folder, print)

    def windows(batch: int) -> Callable[[int], Any]:
        return lambda threads: FastLoader(
            FastHDF5Dataset(str(gzip.path), gzip.dataset, cache="off", seed=0, threads=threads),
            batch, shuffle=Shuffle(64, "group"),
        )  # fmt: skip

    def kept(batch: int) -> Callable[[int], Any]:
        everything = 2 * cells.samples * (cells.sample_bytes + 64)
        return lambda threads: FastLoader(
            FastHDF5Dataset(
                str(cells.path), [cells.dataset, str(cells.labels)], sample_dims=3, seed=0, threads=threads,
                cache=Cache("ram", max_bytes=everything),
            ),
            batch, shuffle=True,
        )  # fmt: skip

    def patches(batch: int) -> Callable[[int], Any]:
        values, labels = scroll.paths
        return lambda threads: FastLoader(
            FastPatchDataset(
                values, scroll.sizes.patch, labels=labels, seed=0, threads=threads,
                cache=Cache("ram", max_bytes=2 * scroll.nbytes),
            ),
            batch, shuffle=True,
        )  # fmt: skip

    rows = f"a row of 32 kB, gzip, windows of {64} chunks"
    cell, patch = "a row of 1 KiB, from memory", "a patch of 72×136×136 and its labels, from memory"
    found = [Case(rows, batch, 3, windows(batch)) for batch in (64, 256)]
    found += [Case(cell, batch, 0.2, kept(batch)) for batch in (256, 5632)]
    found += [Case(patch, batch, 60, patches(batch)) for batch in (2, 8, 32)]
    return found, gzip


def held(case: Case, rounds: int, seconds: float, cores: int) -> dict[str, Any]:
    """Measure the lock for a case; return its row."""
    epochs = Epochs(case, cores)
    count = epochs.samples_for(seconds)
    us, main, rates = [], [], []
    for _ in range(rounds):
        gc.collect()
        before, own = python_seconds(), time.thread_time()
        took = epochs.epoch(count)
        us.append((python_seconds() - before) / count * 1e6)
        main.append((time.thread_time() - own) / count * 1e6)
        rates.append(count / took)
    few = Epochs(case, max(1, cores - 1))
    count = few.samples_for(seconds)
    lost = [value for value, _ in (probed(few, count) for _ in range(rounds)) if value is not None]
    return {
        "label": case.label, "batch": case.batch, "asked_us": case.asked_us, "us_a_sample": figures(us, 3),
        "us_main_thread": figures(main, 3), "us_by_probe": figures(lost, 3) if lost else None,
        "samples_per_s": figures(rates, 1),
    }  # fmt: skip


def simulated(table: Table, rounds: int, seconds: float, cores: int, threads: list[int]) -> dict[str, Any]:
    """Measure with filters replaced by waiting; return the ceiling and a row for each number of threads."""

    def epochs_of(count: int) -> Epochs:
        def loader(threads: int) -> Any:
            dataset = FastHDF5Dataset(str(table.path), table.dataset, cache="off", seed=0, threads=threads)
            return FastLoader(dataset, 256, shuffle=Shuffle(64, "group"))

        return Epochs(Case("", 256, 0, loader), count)

    native.simulate_decoding(1)
    try:
        epochs = epochs_of(cores)
        count, ceilings = epochs.samples_for(seconds), []
        for _ in range(rounds):
            before = time.process_time() - python_seconds()
            epochs.epoch(count)
            ceilings.append(cores / ((time.process_time() - python_seconds() - before) / count))
        ceiling = statistics.median(ceilings)
        native.simulate_decoding(_WAIT_NS)
        rows = []
        for number in threads:
            epochs = epochs_of(number)
            count = epochs.samples_for(seconds)
            rates = [count / epochs.epoch(count) for _ in range(rounds)]
            share = figures([rate / ceiling for rate in rates], 4)
            rows.append({"threads": number, "samples_per_s": figures(rates, 1), "share": share})
    finally:
        native.simulate_decoding(0)
    return {"waiting_ns": _WAIT_NS, "ceiling": figures(ceilings, 1), "cores": cores, "rows": rows}


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement (default: 2)")
    parser.add_argument("--folder", type=Path, help="where made data is kept (default: the user's cache)")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    cores = available_cpus()
    some, table = cases(args.folder)
    rows = [held(case, args.rounds, args.seconds, cores) for case in some]
    print(f"{'':52} {'batch':>5} {'samples/s':>10} {'µs a sample':>12} {'main':>7} {'probe':>7} {'asked':>6}")
    for row in rows:
        probe = row["us_by_probe"]
        print(
            f"{row['label']:52} {row['batch']:5} {row['samples_per_s']['median']:10,.0f} "
            f"{row['us_a_sample']['median']:12.2f} {row['us_main_thread']['median']:7.2f} "
            f"{probe['median'] if probe else float('nan'):7.2f} {row['asked_us']:6.1f}"
        )
    waited = simulated(table, args.rounds, args.seconds, cores, args.threads)
    ceiling = waited["ceiling"]["median"]
    print(
        f"\nfilters replaced by {_WAIT_NS / 1e6:.0f} ms; {cores} cores read and copy {ceiling:,.0f} samples/s"
    )
    print_simulated(waited, "samples", 16)
    save_facts(args.json, None, {"rounds": args.rounds, "held": rows, "simulated": waited})


if __name__ == "__main__":
    main()
