"""The case ``scaling`` with decoding alone, and over rows of an HDF5 file or patches of a volume."""

from __future__ import annotations

from abc import abstractmethod
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.floor import DecodeRow, floor_share
from benchmarks.lines import Studied
from fastpipe.bench import scaling
from fastpipe.bench.check import RowCheck
from fastpipe.bench.driver import Rows
from fastpipe.bench.hdf5 import (
    LAYOUTS,
    QUICK_ROWS,
    ROWS,
    WINDOW,
    TableRow,
    TableSpec,
    check_rows,
    made_tables,
)
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Session
from fastpipe.bench.volume import (
    FULL,
    QUICK,
    PatchSpec,
    SlicedRow,
    WholeEpochs,
    check_patches,
    made_scroll,
    sliced_loader,
)
from fastpipe.core.extras import require
from fastpipe.core.text import counted
from fastpipe.errors import OptionError


class Bench(Studied, scaling.Bench):
    """One run over images, and decoding alone."""

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Add the options of the case."""
        super().add_arguments(parser)
        parser.add_argument("--folder", metavar="FOLDER", type=Path,
            help="where the made-up file or volume is kept (default: the user's cache folder)")  # fmt: skip

    def prepare(self) -> None:
        """Find the photos."""
        if self.args.folder is not None:
            raise OptionError("--folder is for 'hdf5' and 'volume': an image folder is named by --data")
        super().prepare()

    def rows_of(self, n: int) -> Rows[Contender]:
        """Return the rows of n threads, or n worker processes, and what builds each."""
        key, label = f"floor-{n}", f"read and decode only, {counted(n, 'thread')}"
        info = RowInfo(key, label, "floor", output="crops", section=str(n), unit="images")
        make = partial(DecodeRow, self.photos.files, n, self.size, key, from_memory=False)
        return [*super().rows_of(n), (info, make)]

    def studies(self, session: Session) -> dict[str, Any]:
        """Return how near the most threads are to decoding alone."""
        counts = [int(key.split("-")[1]) for key in session.samples if key.startswith("threads-")]
        return {"floor_share": floor_share(session.samples, f"threads-{max(counts)}", f"floor-{max(counts)}")}


class _Made(Bench):
    """One run over data that is made up."""

    def prepare(self) -> None:
        """Make the data.

        Raises:
            OptionError: other data is named.
        """
        if self.args.data is not None:
            raise OptionError(f"--data is a folder of images: leave it out with {self.args.job!r}")
        self.make()

    @abstractmethod
    def make(self) -> None:
        """Make the data, and read it once."""

    def studies(self, session: Session) -> dict[str, Any]:
        """Return nothing: there is no floor."""
        return {}


class RowBench(_Made):
    """Rows of an HDF5 file, gzip and shuffle, in windows of chunks."""

    def make(self) -> None:
        """Make the file."""
        layouts, rows = {"gzip": LAYOUTS["gzip"]}, QUICK_ROWS if self.args.quick else ROWS
        (self.table,) = made_tables(rows, self.args.folder, self.progress.done, layouts)
        self.table.warm()

    def rows_of(self, n: int) -> Rows[Contender]:
        """Return the row of h5py in each worker, and ``FastHDF5Dataset``'s."""
        table, size = self.table, min(self.size, self.table.samples)
        more: dict[str, Any] = {
            "output": table.dtype,
            "section": str(n),
            "unit": "samples",
            "batch_size": size,
        }
        specs = (
            TableSpec(f"replaced-{n}", f"row by row + DataLoader(num_workers={n})", "replaced", n, **more),
            TableSpec(f"threads-{n}", f"FastHDF5Dataset(threads={n}) + FastLoader, windows", "fastpipe",
                      kind="window", threads=n, **more),
        )  # fmt: skip
        return [(spec, partial(TableRow, spec, table)) for spec in specs]

    def compared(self, rows: Sequence[Any]) -> RowCheck:
        """Compare an epoch of each of fastpipe's loaders with what h5py reads."""
        own = [row.spec for row in rows if row.spec.group == "fastpipe"]
        return check_rows([(self.table, spec) for spec in own], self.progress.now)

    def facts_of_data(self) -> dict[str, Any]:
        """Return the file and what is read of it."""
        table, size = self.table, min(self.size, self.table.samples)
        shape = "×".join(map(str, table.shape[1:]))
        return {
            "data": {"name": "made-up log-mels", **table.described},
            "job": {
                "text": f"HDF5: rows of {shape} {table.dtype}, {table.label}, in windows of {WINDOW} chunks,"
                f" batches of {size}",
                "short": f"HDF5 rows of {shape}, {table.label}, batch {size}",
                "batch_size": size,
            },
        }


class PatchBench(_Made):
    """Patches of a volume and its labels, in first epochs."""

    usual_size = 2

    def make(self) -> None:
        """Make the volume."""
        require("zarr", extra="bench")
        self.scroll = made_scroll(QUICK if self.args.quick else FULL, self.args.folder, self.progress.done)
        self.scroll.warm()

    def rows_of(self, n: int) -> Rows[Contender]:
        """Return the row of zarr-python in each worker, and ``FastPatchDataset``'s."""
        replaced = f"zarr-python + DataLoader(num_workers={n})"
        ours = f'FastPatchDataset(threads={n}) + FastLoader, Shuffle(unit="group")'
        before = PatchSpec(f"replaced-{n}", replaced, "replaced", n, note="spawned")
        after = PatchSpec(f"threads-{n}", ours, "fastpipe", kind="tour", threads=n)

        def sliced() -> SlicedRow:
            return SlicedRow(before, sliced_loader(before, self.scroll, self.size))

        section = str(n)
        return [
            (replace(before, section=section), sliced),
            (replace(after, section=section), partial(WholeEpochs, after, self.scroll, self.size)),
        ]

    def compared(self, rows: Sequence[Any]) -> RowCheck:
        """Compare the patches of each loader with slices of the volume in memory."""
        return check_patches(self.scroll, rows, self.progress.now)

    def facts_of_data(self) -> dict[str, Any]:
        """Return the volume and what is read of it."""
        patch, size = "×".join(map(str, self.scroll.sizes.patch)), self.size
        return {
            "data": self.scroll.described,
            "job": {
                "text": f"Volume: patches of {patch} uint16 with labels, anywhere, first epochs,"
                f" batches of {size}",
                "short": f"patches of {patch}, batch {size}",
                "batch_size": size,
            },
        }


JOBS: dict[str, type[Bench]] = {"images": Bench, "hdf5": RowBench, "volume": PatchBench}
