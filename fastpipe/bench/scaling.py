"""The case ``scaling``: images, rows or patches by the number of threads, beside as many worker processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.check import Check, RowCheck
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.hdf5 import (
    LAYOUTS,
    QUICK_ROWS,
    ROWS,
    WINDOW,
    Table,
    TableRow,
    TableSpec,
    check_rows,
    made_tables,
)
from fastpipe.bench.hdf5 import (
    described as described_table,
)
from fastpipe.bench.images import LoaderRow, LoaderSpec, run_check
from fastpipe.bench.results import RowInfo, entries, floor_share, verdict
from fastpipe.bench.runner import Contender, Sample, rates_by_round, ratios, summarise
from fastpipe.bench.volume import (
    COLD,
    FULL,
    QUICK,
    PatchSpec,
    Scroll,
    SlicedRow,
    WholeEpochs,
    check_patches,
    made_scroll,
    sliced_loader,
)
from fastpipe.bench.volume import (
    described as described_scroll,
)
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = [
    "ImageJob",
    "PatchJob",
    "RowJob",
    "ScalingJob",
    "add_arguments",
    "run",
    "scaling_of",
    "thread_counts",
    "threads_label",
]


# ---- What is read ----------------------------------------------------------------------------------

Row = tuple[RowInfo, Callable[[], Contender]]


class ScalingJob(Protocol):
    """What is read, and by which loaders.

    The rows of n threads have the keys ``replaced-n``, ``threads-n`` and, with a floor, ``floor-n``.
    """

    def warm(self) -> None:
        """Read everything once, so that the page cache has it."""

    def rows(self, n: int) -> list[Row]:
        """Return the rows of n threads, or n worker processes, and what builds each."""

    def check(self, rows: Sequence[Contender], workers: int, say: Callable[[str], None]) -> Check | RowCheck:
        """Compare the outputs of fastpipe's loaders with those of the source."""

    def facts(self) -> dict[str, Any]:
        """Return ``data`` and ``job`` of the result file."""


@dataclass
class ImageJob:
    """Random crops of the photos of a folder."""

    photos: Photos
    batch_size: int

    def warm(self) -> None:
        """Read every photo once."""
        self.photos.warm()

    def rows(self, n: int) -> list[Row]:
        """Return ``ImageFolder``'s row, ``FastImageFolder``'s."""
        photos, size = self.photos, self.batch_size
        specs = (
            LoaderSpec(f"replaced-{n}", f"ImageFolder + DataLoader(num_workers={n})", "replaced", n),
            LoaderSpec(f"threads-{n}", f"FastImageFolder(threads={n}) + FastLoader", "fastpipe", threads=n),
        )

        def made(spec: LoaderSpec) -> Callable[[], Contender]:
            return lambda: LoaderRow(spec, photos.folder, photos.indices, size)

        rows: list[Row] = []
        for spec in specs:
            workers = spec.num_workers or None
            info = RowInfo(
                spec.key, spec.label, spec.group, workers, spec.output, "", section=str(n), unit="images"
            )
            rows.append((info, made(spec)))
        return rows

    def check(self, rows: Sequence[Contender], workers: int, say: Callable[[str], None]) -> Check:
        """Compare all photos with torchvision's."""
        return run_check(self.photos, workers, lambda images: None)

    def facts(self) -> dict[str, Any]:
        """Return the photos and what is made of them."""
        photos, size = self.photos, self.batch_size
        return {
            "data": {
                "name": photos.name, "classes": photos.classes, "total": photos.total,
                "photos": len(photos.files), "bytes": photos.bytes,
            },
            "job": {
                "text": "RandomResizedCrop(224), RandomHorizontalFlip, ToTensor, Normalize;"
                f" batches of {size}, shuffled",
                "short": f"RandomResizedCrop(224) + flip + normalise, batch {size}",
                "batch_size": size,
            },
        }  # fmt: skip


@dataclass
class RowJob:
    """Rows of an HDF5 file, gzip and shuffle, in windows of chunks."""

    table: Table
    batch_size: int

    def warm(self) -> None:
        """Read the file once."""
        self.table.warm()

    def rows(self, n: int) -> list[Row]:
        """Return the row of h5py in each worker, and ``FastHDF5Dataset``'s."""
        replaced = f"row by row + DataLoader(num_workers={n})"
        ours = f"FastHDF5Dataset(threads={n}) + FastLoader, windows"
        specs = (
            TableSpec(f"replaced-{n}", replaced, "replaced", "rows", self.batch_size, n),
            TableSpec(f"threads-{n}", ours, "fastpipe", "window", self.batch_size, threads=n),
        )

        def made(spec: TableSpec) -> Callable[[], Contender]:
            return lambda: TableRow(spec, self.table)

        return [(replace(spec.info(self.table), section=str(n)), made(spec)) for spec in specs]

    def check(self, rows: Sequence[Contender], workers: int, say: Callable[[str], None]) -> RowCheck:
        """Compare an epoch of each of fastpipe's loaders with what h5py reads."""
        specs = [row.spec for row in rows if isinstance(row, TableRow)]
        return check_rows([(self.table, spec) for spec in specs if spec.group == "fastpipe"], say)

    def facts(self) -> dict[str, Any]:
        """Return the file and what is read of it."""
        table, size = self.table, self.batch_size
        shape = "×".join(map(str, table.shape[1:]))
        return {
            "data": {"name": "made-up log-mels", **described_table(table)},
            "job": {
                "text": f"HDF5: rows of {shape} {table.dtype}, {table.label}, in windows of {WINDOW} chunks,"
                f" batches of {size}",
                "short": f"HDF5 rows of {shape}, {table.label}, batch {size}",
                "batch_size": size,
            },
        }


@dataclass
class PatchJob:
    """Patches of a volume and its labels, in first epochs."""

    scroll: Scroll
    batch_size: int

    def warm(self) -> None:
        """Read every chunk once."""
        self.scroll.warm()

    def rows(self, n: int) -> list[Row]:
        """Return the row of zarr-python in each worker, and ``FastPatchDataset``'s."""
        replaced = f"zarr-python + DataLoader(num_workers={n})"
        ours = f'FastPatchDataset(threads={n}) + FastLoader, Shuffle(unit="group")'
        before = PatchSpec(COLD, "zarr", replaced, "replaced", n, "spawned", name=f"replaced-{n}")
        after = PatchSpec(COLD, "tour", ours, "fastpipe", threads=n, name=f"threads-{n}")
        return [
            (
                replace(before.info, section=str(n)),
                lambda: SlicedRow(before, sliced_loader(before, self.scroll, self.batch_size)),
            ),
            (
                replace(after.info, section=str(n)),
                lambda: WholeEpochs(after, self.scroll, self.batch_size),
            ),
        ]

    def check(self, rows: Sequence[Contender], workers: int, say: Callable[[str], None]) -> RowCheck:
        """Compare the patches of each loader with slices of the volume in memory."""
        return check_patches(
            self.scroll, [row for row in rows if isinstance(row, (WholeEpochs, SlicedRow))], say
        )

    def facts(self) -> dict[str, Any]:
        """Return the volume and what is read of it."""
        patch, size = "×".join(map(str, self.scroll.sizes.patch)), self.batch_size
        return {
            "data": described_scroll(self.scroll),
            "job": {
                "text": f"Volume: patches of {patch} uint16 with labels, anywhere, first epochs,"
                f" batches of {size}",
                "short": f"patches of {patch}, batch {size}",
                "batch_size": size,
            },
        }


def threads_label(count: int) -> str:
    """Return a number of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"


# ---- The case --------------------------------------------------------------------------------------

_ROUNDS = 3  # there are up to three rows for each number of threads
_BATCH_SIZES = {"images": 64, "hdf5": 64, "volume": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("job", nargs="?", choices=tuple(_BATCH_SIZES), default="images",
        help="an image folder (the default), rows of an HDF5 file, or patches of a volume")  # fmt: skip
    add("--data", metavar="FOLDER", help="image folder, one sub-folder per class (default: $FASTPIPE_PHOTOS, "
        "else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--folder", metavar="FOLDER", type=Path,
        help="where the made-up file or volume is kept (default: the user's cache folder)")  # fmt: skip
    add("--threads", type=_counts, metavar="N,N,…", help="numbers of threads (default: 1, 2, 4 … all cores)")
    add("--batch-size", type=positive(int), metavar="N", help="samples in a batch (default: 64, patches: 2)")
    add_run_arguments(parser, rounds=_ROUNDS)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of threads that are measured: powers of two, and all cores.

    >>> thread_counts(1), thread_counts(12)
    ((1,), (1, 2, 4, 8, 12))
    """
    return tuple(sorted({cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}))


def run(
    args: argparse.Namespace,
    console: Console,
    progress: Progress,
    kind: type[Bench] | None = None,
    image_job: type[ImageJob] = ImageJob,
) -> int:
    """Measure, report, and write what was asked for; return 1 when outputs are not the replaced loader's.

    Raises:
        OptionError: there is nothing to measure.
    """
    warnings: list[str] = []
    job = _job(args, progress, warnings, image_job)
    bench = (kind or Bench)(args, machine.cores_allowed(), progress, warnings=warnings, job=job)
    return bench.run(console)


def _job(
    args: argparse.Namespace, progress: Progress, warnings: list[str], image_job: type[ImageJob]
) -> ScalingJob:
    """Return what is measured; make made-up data, and warn of made-up photos."""
    size, quick = args.batch_size or _BATCH_SIZES[args.job], args.quick
    if args.job == "images":
        if args.folder is not None:
            raise OptionError("--folder is for 'hdf5' and 'volume': an image folder is named by --data")
        folder, name, generated = folder_to_use(args.data, progress.done)
        if generated:
            warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
            progress.done(f"photos: made up, kept in {folder}")
        return image_job(scan(folder, name), size)
    if args.data is not None:
        raise OptionError(f"--data is a folder of images: leave it out with {args.job!r}")
    if args.job == "hdf5":
        layouts = {"gzip": LAYOUTS["gzip"]}
        (table,) = made_tables(QUICK_ROWS if quick else ROWS, args.folder, progress.done, layouts)
        return RowJob(table, min(size, table.samples))
    require("zarr", extra="bench")
    return PatchJob(made_scroll(QUICK if quick else FULL, args.folder, progress.done), size)


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


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "scaling"
    usual_rounds: ClassVar[int] = _ROUNDS
    job: ScalingJob = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        self.job.warm()
        counts = self.args.threads or thread_counts(self.cores)
        if counts[-1] > self.cores:
            self.warnings.append(f"there are {self.cores} cores: more threads than that only wait for them")
        with ExitStack() as stack:
            rows = [row for count in counts for row in self.job.rows(count)]
            built = [self.open(stack, info, make) for info, make in rows]
            contenders = [one for one in built if one is not None]
            self.progress.step("comparing outputs")
            workers = 0 if self.args.quick else min(self.cores, 8)
            check = self.job.check(contenders, workers, self.progress.now)
            self.progress.done(f"check: {check.sentence()}")
            if not check.ok:
                return None
            session = self.measure(contenders)
        measured = entries(list(self.infos.values()), session)
        keys = {entry["key"] for entry in measured}
        counts = [count for count in counts if {f"threads-{count}", f"replaced-{count}"} <= keys]
        main = f"threads-{counts[-1]}"
        alone = {"fastloader-float32": session.samples[main]}
        alone["floor"] = session.samples.get(f"floor-{counts[-1]}", [])
        result = self.facts(self._words(), busy) | self.job.facts() | {
            "method": self.method(session.rounds),
            "check": {**check.as_json(), "text": check.sentence()},
            "rows": measured,
            "main": main,
            "best": {str(count): f"replaced-{count}" for count in counts},
            "sections": {str(count): {"label": threads_label(count)} for count in counts},
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": floor_share(alone),
            "scaling": scaling_of(counts, session.samples),
            "plan": "",
        }  # fmt: skip
        result["verdict"] = verdict(result)
        return result

    def label_of(self, key: str) -> str:
        """Return the name of a row, which has its number of threads."""
        return self.infos[key].label

    def _words(self) -> list[str]:
        """Return the case's own options."""
        args = self.args
        words = [] if args.job == "images" else [args.job]
        words += [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--threads {','.join(map(str, args.threads))}"] if args.threads else []
        words += [f"--batch-size {args.batch_size}"] if args.batch_size else []
        return words
