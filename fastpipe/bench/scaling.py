"""The case ``scaling``: images per second for each number of threads, and for as many worker processes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastpipe.bench import images
from fastpipe.bench.driver import DATA_HELP, Rows, add_run_arguments
from fastpipe.bench.images import LoaderRow, LoaderSpec
from fastpipe.bench.results import rounded
from fastpipe.bench.runner import Contender, Sample, Session, rates_by_round, ratios, summarise
from fastpipe.console import positive
from fastpipe.core.text import counted

BATCH = 64


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads to measure: powers of two, and all cores.

    >>> thread_counts(1), thread_counts(12)
    ((1,), (1, 2, 4, 8, 12))
    """
    return tuple(sorted({cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}))


class Bench(images.Bench):
    """One run of the case, for random crops of the photos of a folder.

    In the result, the replaced loader with n worker processes has the key ``replaced-n``, and fastpipe's
    loader with n threads has the key ``threads-n``.  A floor is the rate of only reading and decoding; if it
    is measured, its key is ``floor-n``.
    """

    case = "scaling"
    about = "images by number of threads, 1 to all cores, against as many workers"
    usual_rounds = 3  # there are up to three rows for each number of threads
    usual_size = BATCH
    counts: Sequence[int]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "job", nargs="?", choices=("images", "hdf5", "volume"), default="images",
            help="images (the default); hdf5 and volume only in a clone of fastpipe's repository",
        )  # fmt: skip
        add("--data", metavar="FOLDER", type=Path, help=f"image folder, one sub-folder per class{DATA_HELP}")
        add("--threads", type=_counts, metavar="N,N,…",
            help="numbers of threads (default: 1, 2, 4 … all cores)")  # fmt: skip
        add("--batch-size", type=positive(int), metavar="N", help=f"samples in a batch (default: {BATCH})")
        add_run_arguments(parser, cls.usual_rounds, has_peers=False)

    @property
    def size(self) -> int:
        return int(self.args.batch_size or self.usual_size)

    def prepare(self) -> None:
        self.photos = images.photos_to_use(self)

    def rows(self) -> Sequence[Contender]:
        self.counts = self.args.threads or thread_counts(self.cores)
        if self.counts[-1] > self.cores:
            self.warnings.append(f"there are {self.cores} cores: more threads than that only wait for them")
        return [row for count in self.counts for row in self.opened(self.rows_of(count))]

    def rows_of(self, n: int) -> Rows[Contender]:
        """Describe the loader with ``n`` processes and that with ``n`` threads; add their build functions."""
        more: dict[str, Any] = {"section": str(n), "unit": "images"}
        fast, photos = f"FastImageFolder(threads={n}) + FastLoader", self.photos
        specs = (
            LoaderSpec(f"replaced-{n}", f"ImageFolder + DataLoader(num_workers={n})", "replaced", n, **more),
            LoaderSpec(f"threads-{n}", fast, "fastpipe", threads=n, **more),
        )
        return [(spec, partial(LoaderRow, spec, photos.folder, photos.indices, self.size)) for spec in specs]

    def described(self, session: Session) -> dict[str, Any]:
        measured = {key for key, samples in session.samples.items() if samples}
        counts = [count for count in self.counts if {f"threads-{count}", f"replaced-{count}"} <= measured]
        self.main = f"threads-{counts[-1]}"
        return {
            "sections": {str(count): {"label": counted(count, "thread")} for count in counts},
            "scaling": scaling_of(counts, session.samples),
            **self.facts_of_data(),
        }

    def facts_of_data(self) -> dict[str, Any]:
        return images.facts_of(self.photos, self.size)

    def label_of(self, key: str) -> str:
        return self.infos[key].label  # the label contains the number of threads


def scaling_of(counts: Sequence[int], samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Return ratios, computed within rounds, that show how rates grow with the number of threads.

    - ``times_best`` is FastLoader's rate divided by the best rate of the replaced loader with any workers.
    - ``linear`` is FastLoader's rate per thread divided by its rate per thread with the fewest threads.
    - ``floor_share`` is FastLoader's rate divided by the floor's: the rate of only reading and decoding.
    - ``floor_linear`` is like ``linear``, for the floor.
    """
    replaced = [f"replaced-{count}" for count in counts if samples.get(f"replaced-{count}")]
    rows = []
    for count in counts:
        key, floor, first = f"threads-{count}", f"floor-{count}", counts[0]
        if not samples.get(key) or not replaced:
            continue
        found = {"times_best": ratios(samples, key, replaced)}
        if samples.get(f"threads-{first}"):
            found["linear"] = _linear(samples, key, f"threads-{first}", count / first)
        if samples.get(floor):
            found["floor_share"] = ratios(samples, key, [floor])
            if samples.get(f"floor-{first}"):
                found["floor_linear"] = _linear(samples, floor, f"floor-{first}", count / first)
        told = {name: rounded(summarise(figures)) for name, figures in found.items()}
        rows.append({"threads": count, **told})
    return {"rows": rows}


def _linear(samples: Mapping[str, Sequence[Sample]], key: str, first: str, times: float) -> list[float]:
    """Return, for each round, the rate of row ``key`` divided by ``times`` the rate of row ``first``."""
    base = rates_by_round(samples[first])
    return [rate / (times * base[number]) for number, rate in rates_by_round(samples[key]).items()]


def _counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1, separated by commas, for argparse; return them as a sorted tuple.

    >>> _counts("4,1,2")
    (1, 2, 4)
    """
    return tuple(sorted({positive(int)(part.strip()) for part in text.split(",")}))
