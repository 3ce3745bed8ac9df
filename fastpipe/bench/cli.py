"""``fastpipe bench``: which benchmark runs, and tables of what was measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.cases import s3
from benchmarks.gpu import case as gpu
from fastpipe.bench import augment, generate, hdf5, images, overview, scaling, tf, volume
from fastpipe.bench.driver import check_files
from fastpipe.bench.report import markdown, short_markdown
from fastpipe.bench.results import load
from fastpipe.console import Progress

__all__ = ["CASES", "Command", "add_arguments", "prepare", "run"]


# ----------------------------------------------------------------------------------------------------
# A part of the command line: what ``fastpipe`` is put together from, and ``fastpipe bench`` in turn.


@dataclass(frozen=True)
class Command:
    """A part of the command.

    Attributes:
        about: one line of help.
        add_arguments: adds its options to a parser.
        run: does it; returns the exit code.
    """

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console, Progress], int]


# ---- ``fastpipe bench``: which benchmark runs, and tables of what was measured ----------------------

DEFAULT_CASE = "all"


CASES = {
    "all": Command(
        "five training pipelines before and after: tf.data, HDF5, generation, volumes, images",
        overview.add_arguments,
        overview.run,
    ),
    "images": Command(
        "ImageFolder + DataLoader against FastImageFolder + FastLoader", images.add_arguments, images.run
    ),
    "scaling": Command(
        "images, rows or patches by number of threads, 1 to all cores, against as many workers",
        scaling.add_arguments,
        scaling.run,
    ),
    "hdf5": Command(
        "rows of HDF5 files: h5py + DataLoader against FastHDF5Dataset + FastLoader",
        hdf5.add_arguments,
        hdf5.run,
    ),
    "volume": Command(
        "patches of a Zarr volume: zarr-python + DataLoader against FastPatchDataset + FastLoader",
        volume.add_arguments,
        volume.run,
    ),
    "s3": Command(
        "images of a bucket: ImageFolder over a mount + DataLoader against FastImageFolder + FastLoader",
        s3.add_arguments,
        s3.run,
    ),
    "augment": Command(
        "augmentation of batches: torchvision sample by sample, and kornia, against fastpipe.augment",
        augment.add_arguments,
        augment.run,
    ),
    "tf": Command(
        "TensorFlow: tf.py_function + Pillow, tf.io, and Keras's loader and layers against fastpipe.tf",
        tf.add_arguments,
        tf.run,
    ),
    "generate": Command(
        "rows that a function makes, stored: a script's loop, joblib and others against fastpipe.generate",
        generate.add_arguments,
        generate.run,
    ),
    "gpu": Command(
        "on a CUDA device: decoders, ResNet-50 steps by loader, augmentation and steps on 3D patches",
        gpu.add_arguments,
        gpu.run,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``bench CASE …`` and ``bench table FILE``."""
    parser.epilog = f"Without a case: {DEFAULT_CASE}."
    cases = parser.add_subparsers(dest="what", required=True, metavar="CASE")
    for name, case in CASES.items():
        case.add_arguments(cases.add_parser(name, help=case.about, description=case.about))
    table = cases.add_parser("table", help="print a result file as a Markdown table")
    table.add_argument("--short", action="store_true", help="only fastpipe's rows beside what they replace")
    table.add_argument("file", type=Path, metavar="RESULT.json", help="written by --json")


def prepare(arguments: list[str]) -> list[str]:
    """The command's arguments with the case that they leave out.

    >>> prepare(["--quick"])
    ['all', '--quick']
    """
    if arguments and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help")):
        return arguments
    return [DEFAULT_CASE, *arguments]


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Run a case, or print a table.

    Returns:
        0, or 1 when outputs differ from the replaced loader's, or figures are worse than
        those to compare with.
    """
    if args.what == "table":
        make = short_markdown if args.short else markdown
        sys.stdout.write(make(load(args.file)))
        return 0
    check_files(args, progress.done)
    return CASES[args.what].run(args, console, progress)
