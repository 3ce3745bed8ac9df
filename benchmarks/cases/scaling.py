"""The case ``scaling`` with reading and decoding alone."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import ClassVar

from rich.console import Console

from benchmarks.floor import DecodeRow
from fastpipe.bench import scaling
from fastpipe.bench.results import RowInfo
from fastpipe.bench.scaling import Row, threads_label
from fastpipe.console import Progress

__all__ = ["Bench", "ImageJob", "run"]


def run(args: Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for; return 1 when outputs are not the replaced loader's."""
    return scaling.run(args, console, progress, Bench, ImageJob)


class Bench(scaling.Bench):
    """One run of the case."""

    program: ClassVar[str] = "python benchmarks/run.py"


class ImageJob(scaling.ImageJob):
    """Random crops of the photos of a folder, and decoding alone."""

    def rows(self, n: int) -> list[Row]:
        """Return the rows of n threads, or n worker processes, and what builds each."""
        key, label = f"floor-{n}", f"read and decode only, {threads_label(n)}"
        info = RowInfo(key, label, "floor", None, "crops", "", section=str(n), unit="images")
        make = partial(DecodeRow, self.photos.files, n, self.batch_size, key, from_memory=False)
        return [*super().rows(n), (info, make)]
