"""What the case ``scaling`` reads: an image folder, rows of an HDF5 file, or patches of a volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastpipe.bench.check import Check, run_check
from fastpipe.bench.data import Photos
from fastpipe.bench.floor import DecodeRow
from fastpipe.bench.hdf5.check import check_rows
from fastpipe.bench.hdf5.data import Table
from fastpipe.bench.hdf5.data import described as described_table
from fastpipe.bench.hdf5.rows import WINDOW, TableRow, TableSpec
from fastpipe.bench.loaders import LoaderRow, LoaderSpec
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender
from fastpipe.bench.samples import RowCheck
from fastpipe.bench.volume.check import check_patches
from fastpipe.bench.volume.data import Scroll
from fastpipe.bench.volume.data import described as described_scroll
from fastpipe.bench.volume.rows import COLD, PatchSpec, SlicedRow, WholeEpochs, sliced_loader

__all__ = ["ImageJob", "PatchJob", "RowJob", "ScalingJob", "threads_label"]

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
        """Compare the outputs of fastpipe's loaders with those of the source.

        Args:
            rows: all that were built.
            workers: processes that a replaced loader may have.
            say: told what is compared.
        """

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
        """Return ``ImageFolder``'s row, ``FastImageFolder``'s, and that of reading and decoding alone."""
        photos, size, floor = self.photos, self.batch_size, f"floor-{n}"
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
        label = f"read and decode only, {threads_label(n)}"
        info = RowInfo(floor, label, "floor", None, "crops", "", section=str(n), unit="images")
        return [*rows, (info, lambda: DecodeRow(photos.files, n, size, floor, from_memory=False))]

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
