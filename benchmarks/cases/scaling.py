"""The case ``scaling`` with decoding alone, and over rows of an HDF5 file or patches of a volume."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from benchmarks.floor import DecodeRow, floor_share
from benchmarks.lines import Studied
from fastpipe.bench import hdf5, scaling, volume
from fastpipe.bench.check import RowCheck
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
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Session
from fastpipe.bench.scaling import Row, threads_label
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
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus
from fastpipe.errors import OptionError

__all__ = ["Bench", "PatchBench", "RowBench", "add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the case."""
    parser.add_argument("--folder", metavar="FOLDER", type=Path,
        help="where the made-up file or volume is kept (default: the user's cache folder)")  # fmt: skip
    scaling.add_arguments(parser)


def run(args: Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for; return 1 when outputs are not the replaced loader's.

    Raises:
        OptionError: options do not go together.
    """
    if args.job == "images":
        if args.folder is not None:
            raise OptionError("--folder is for 'hdf5' and 'volume': an image folder is named by --data")
        return scaling.run(args, console, progress, Bench)
    if args.data is not None:
        raise OptionError(f"--data is a folder of images: leave it out with {args.job!r}")
    cores = available_cpus()
    if args.job == "hdf5":
        layouts, rows = {"gzip": LAYOUTS["gzip"]}, QUICK_ROWS if args.quick else ROWS
        (table,) = made_tables(rows, args.folder, progress.done, layouts)
        return RowBench(args, cores, progress, table=table).run(console)
    require("zarr", extra="bench")
    scroll = made_scroll(QUICK if args.quick else FULL, args.folder, progress.done)
    return PatchBench(args, cores, progress, scroll=scroll).run(console)


class Bench(Studied, scaling.Bench):
    """One run over images, and decoding alone."""

    def rows(self, n: int) -> list[Row]:
        """Return the rows of n threads, or n worker processes, and what builds each."""
        key, label = f"floor-{n}", f"read and decode only, {threads_label(n)}"
        info = RowInfo(key, label, "floor", None, "crops", "", section=str(n), unit="images")
        make = partial(DecodeRow, self.photos.files, n, self.size, key, from_memory=False)
        return [*super().rows(n), (info, make)]

    def studies(self, session: Session) -> dict[str, Any]:
        """Return how near the most threads are to decoding alone."""
        counts = [int(key.split("-")[1]) for key in session.samples if key.startswith("threads-")]
        return {"floor_share": floor_share(session.samples, f"threads-{max(counts)}", f"floor-{max(counts)}")}


class _Made(Studied, scaling.ScalingBench):
    """One run over data that is made up."""

    usual_size: ClassVar[int]

    @property
    def size(self) -> int:
        """Samples in a batch."""
        return int(self.args.batch_size or self.usual_size)

    def words(self) -> list[str]:
        """Return the case's own options."""
        return [self.args.job, *super().words()]


@dataclass
class RowBench(_Made):
    """Rows of an HDF5 file, gzip and shuffle, in windows of chunks."""

    usual_size: ClassVar[int] = 64
    table: Table = field(kw_only=True)

    def warm(self) -> None:
        """Read the file once."""
        self.table.warm()

    def rows(self, n: int) -> list[Row]:
        """Return the row of h5py in each worker, and ``FastHDF5Dataset``'s."""
        replaced = f"row by row + DataLoader(num_workers={n})"
        ours = f"FastHDF5Dataset(threads={n}) + FastLoader, windows"
        size = min(self.size, self.table.samples)
        specs = (
            TableSpec(f"replaced-{n}", replaced, "replaced", "rows", size, n),
            TableSpec(f"threads-{n}", ours, "fastpipe", "window", size, threads=n),
        )

        def made(spec: TableSpec) -> Callable[[], Contender]:
            return lambda: TableRow(spec, self.table)

        return [(replace(spec.info(self.table), section=str(n)), made(spec)) for spec in specs]

    def compared(self, rows: Sequence[Contender]) -> RowCheck:
        """Compare an epoch of each of fastpipe's loaders with what h5py reads."""
        specs = [row.spec for row in rows if isinstance(row, TableRow)]
        return check_rows(
            [(self.table, spec) for spec in specs if spec.group == "fastpipe"], self.progress.now
        )

    def described(self) -> dict[str, Any]:
        """Return the file and what is read of it."""
        table, size = self.table, min(self.size, self.table.samples)
        shape = "×".join(map(str, table.shape[1:]))
        return {
            "data": {"name": "made-up log-mels", **hdf5.described(table)},
            "job": {
                "text": f"HDF5: rows of {shape} {table.dtype}, {table.label}, in windows of {WINDOW} chunks,"
                f" batches of {size}",
                "short": f"HDF5 rows of {shape}, {table.label}, batch {size}",
                "batch_size": size,
            },
        }


@dataclass
class PatchBench(_Made):
    """Patches of a volume and its labels, in first epochs."""

    usual_size: ClassVar[int] = 2
    scroll: Scroll = field(kw_only=True)

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
                lambda: SlicedRow(before, sliced_loader(before, self.scroll, self.size)),
            ),
            (
                replace(after.info, section=str(n)),
                lambda: WholeEpochs(after, self.scroll, self.size),
            ),
        ]

    def compared(self, rows: Sequence[Contender]) -> RowCheck:
        """Compare the patches of each loader with slices of the volume in memory."""
        return check_patches(
            self.scroll, [row for row in rows if isinstance(row, (WholeEpochs, SlicedRow))], self.progress.now
        )

    def described(self) -> dict[str, Any]:
        """Return the volume and what is read of it."""
        patch, size = "×".join(map(str, self.scroll.sizes.patch)), self.size
        return {
            "data": volume.described(self.scroll),
            "job": {
                "text": f"Volume: patches of {patch} uint16 with labels, anywhere, first epochs,"
                f" batches of {size}",
                "short": f"patches of {patch}, batch {size}",
                "batch_size": size,
            },
        }
