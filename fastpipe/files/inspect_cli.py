"""``fastpipe inspect FILE.h5``: its options."""

from __future__ import annotations

import argparse

from rich.console import Console

from fastpipe import files
from fastpipe.bench.command import positive
from fastpipe.bench.progress import Progress

__all__ = ["ABOUT", "add_arguments", "run"]

ABOUT = "say how an HDF5 file's datasets are stored, and what that costs in training"

EPILOG = """\
For uniform order, the epoch's order is random and a chunk is decoded once for each
batch that has one of its samples. With Shuffle(window=W, unit="group") chunks are in
random order, and samples are within W chunks: each chunk is decoded once. Without
filters nothing is decoded, and samples are read by themselves.

exit codes: 0 done, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("file", metavar="FILE.h5", help="HDF5 file")
    add("--sample-dims", type=positive(int), default=1, metavar="N",
        help="how many first dimensions of a dataset count samples (default: 1)")  # fmt: skip
    add("--batch-size", type=positive(int), default=256, metavar="N",
        help="samples of a batch (default: 256)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Print what is found.

    Returns:
        0.
    """
    return files.inspect(args, console, progress)
