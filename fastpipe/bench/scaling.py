"""The case ``scaling``: images by the number of threads, beside as many worker processes."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench.check import Check, RowCheck
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.images import LoaderRow, LoaderSpec, facts_of, run_check
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Sample, rates_by_round, ratios, summarise
from fastpipe.console import Progress, positive
from fastpipe.core.machine import available_cpus

Row = tuple[RowInfo, Callable[[], Contender]]
BATCH = 64
_ROUNDS = 3  # there are up to three rows for each number of threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("job", nargs="?", choices=("images", "hdf5", "volume"), default="images",
        help="images (the default); hdf5 and volume only in a clone of fastpipe's repository")  # fmt: skip
    add("--data", metavar="FOLDER", help="image folder, one sub-folder per class (default: $FASTPIPE_PHOTOS, "
        "else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--threads", type=_counts, metavar="N,N,…", help="numbers of threads (default: 1, 2, 4 … all cores)")
    add("--batch-size", type=positive(int), metavar="N", help=f"samples in a batch (default: {BATCH})")
    add_run_arguments(parser, rounds=_ROUNDS, has_peers=False)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of threads that are measured: powers of two, and all cores.

    >>> thread_counts(1), thread_counts(12)
    ((1,), (1, 2, 4, 8, 12))
    """
    return tuple(sorted({cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}))


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for; return 1 when outputs are not the replaced loader's.

    Raises:
        OptionError: there is nothing to measure.
    """
    folder, name, generated = folder_to_use(args.data, progress.done)
    bench = (kind or Bench)(args, available_cpus(), progress, photos=scan(folder, name))
    if generated:
        bench.warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
        progress.done(f"photos: made up, kept in {folder}")
    return bench.run(console)


@dataclass
class ScalingBench(Driver):
    """One run of the case, whatever is read.

    The rows of n threads have the keys ``replaced-n``, ``threads-n`` and, with a floor, ``floor-n``.
    """

    case: ClassVar[str] = "scaling"
    usual_rounds: ClassVar[int] = _ROUNDS

    @abstractmethod
    def warm(self) -> None:
        """Read everything once, so that the page cache has it."""

    @abstractmethod
    def rows(self, n: int) -> list[Row]:
        """Return the rows of n threads, or n worker processes, and what builds each."""

    @abstractmethod
    def compared(self, rows: Sequence[Contender]) -> Check | RowCheck:
        """Compare the outputs of fastpipe's loaders with those of the source."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return ``data`` and ``job`` of the result file."""

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        self.begin()
        self.warm()
        counts = self.args.threads or thread_counts(self.cores)
        if counts[-1] > self.cores:
            self.warnings.append(f"there are {self.cores} cores: more threads than that only wait for them")
        with ExitStack() as stack:
            built = [self.open(stack, info, make) for count in counts for info, make in self.rows(count)]
            contenders = [one for one in built if one is not None]
            self.progress.step("comparing outputs")
            if not self.passed(check := self.compared(contenders)):
                return None
            session = self.measure(contenders)
        measured = {info.key for info in self.infos.values() if session.samples.get(info.key)}
        counts = [count for count in counts if {f"threads-{count}", f"replaced-{count}"} <= measured]
        return self.content(
            session, check, self.words(), **self.described(),
            main=f"threads-{counts[-1]}",
            sections={str(count): {"label": threads_label(count)} for count in counts},
            scaling=scaling_of(counts, session.samples),
        )  # fmt: skip

    def label_of(self, key: str) -> str:
        """Return the name of a row, which has its number of threads."""
        return self.infos[key].label

    def words(self) -> list[str]:
        """Return the case's own options."""
        args = self.args
        words = [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--threads {','.join(map(str, args.threads))}"] if args.threads else []
        return words + ([f"--batch-size {args.batch_size}"] if args.batch_size else [])


@dataclass
class Bench(ScalingBench):
    """One run of the case over images: random crops of the photos of a folder."""

    photos: Photos = field(kw_only=True)

    @property
    def size(self) -> int:
        """Images in a batch."""
        return self.args.batch_size or BATCH

    def warm(self) -> None:
        self.photos.warm()

    def rows(self, n: int) -> list[Row]:
        """Return ``ImageFolder``'s row, ``FastImageFolder``'s."""
        photos, rows = self.photos, list[Row]()
        for spec in (
            LoaderSpec(f"replaced-{n}", f"ImageFolder + DataLoader(num_workers={n})", "replaced", n),
            LoaderSpec(f"threads-{n}", f"FastImageFolder(threads={n}) + FastLoader", "fastpipe", threads=n),
        ):
            workers = spec.num_workers or None
            info = RowInfo(
                spec.key, spec.label, spec.group, workers, spec.output, "", section=str(n), unit="images"
            )
            rows.append((info, partial(LoaderRow, spec, photos.folder, photos.indices, self.size)))
        return rows

    def compared(self, rows: Sequence[Contender]) -> Check | RowCheck:
        workers = 0 if self.args.quick else min(self.cores, 8)
        return run_check(self.photos, workers, lambda images: None)

    def described(self) -> dict[str, Any]:
        return facts_of(self.photos, self.size)


def threads_label(count: int) -> str:
    """Return a number of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"


def scaling_of(counts: Sequence[int], samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """How rates grow with the number of threads.

    Returns:
        ``rows``, one for each number that was measured.  Each has ``threads`` and, as ``median``, ``low`` and
        ``high`` of ratios within rounds: ``times_best``, FastLoader over the best replaced loader
        of any number of workers; ``linear``, its rate for each thread over that with the fewest threads;
        ``floor_share``, its rate over the floor's; ``floor_linear``, as ``linear`` of the floor.
    """
    replaced = [f"replaced-{count}" for count in counts if samples.get(f"replaced-{count}")]
    rows = []
    for count in counts:
        key, floor, first = f"threads-{count}", f"floor-{count}", counts[0]
        if not samples.get(key) or not replaced:
            continue
        row: dict[str, Any] = {"threads": count, "times_best": ratios(samples, key, replaced)}
        if samples.get(f"threads-{first}"):
            row["linear"] = _linear(samples, key, f"threads-{first}", count / first)
        if samples.get(floor):
            row["floor_share"] = ratios(samples, key, [floor])
            if samples.get(f"floor-{first}"):
                row["floor_linear"] = _linear(samples, floor, f"floor-{first}", count / first)
        rows.append({
            name: value if name == "threads" else {
                part: round(figure, 4) for part, figure in summarise(value)._asdict().items()
            }
            for name, value in row.items()
        })  # fmt: skip
    return {"rows": rows}


def _linear(samples: Mapping[str, Sequence[Sample]], key: str, first: str, times: float) -> list[float]:
    """Round by round, the rate over so many times that of another row."""
    base = rates_by_round(samples[first])
    return [rate / (times * base[number]) for number, rate in rates_by_round(samples[key]).items()]


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers from 1, with commas between.

    >>> _counts("4,1,2")
    (1, 2, 4)
    """
    return tuple(sorted({positive(int)(part.strip()) for part in text.split(",")}))
