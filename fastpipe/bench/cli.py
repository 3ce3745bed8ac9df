"""``fastpipe bench``: which benchmark runs, and tables of what was measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fastpipe.bench import augment, generate, hdf5, images, overview, scaling, tf, volume
from fastpipe.bench.driver import check_files
from fastpipe.bench.report import markdown, short_markdown
from fastpipe.bench.results import load
from fastpipe.console import Progress
from fastpipe.errors import OptionError

__all__ = ["CASES", "Case", "add_arguments", "prepare", "run", "run_case"]

DEFAULT_CASE = "all"
# Cases that need test servers, or measure for the project alone.
ELSEWHERE = ("gpu", "s3")
_CHECKOUT = "in a clone of fastpipe's repository: python benchmarks/run.py"


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        about: one line of help.
        add_arguments: adds its options to a parser.
        run: does it; returns the exit code.
    """

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console, Progress], int]


CASES = {
    "all": Case(
        "five training pipelines before and after: tf.data, HDF5, generation, volumes, images",
        overview.add_arguments, overview.run,
    ),
    "images": Case(
        "ImageFolder + DataLoader against FastImageFolder + FastLoader", images.add_arguments, images.run
    ),
    "scaling": Case(
        "images by number of threads, 1 to all cores, against as many workers",
        scaling.add_arguments, scaling.run,
    ),
    "hdf5": Case(
        "rows of HDF5 files: h5py + DataLoader against FastHDF5Dataset + FastLoader",
        hdf5.add_arguments, hdf5.run,
    ),
    "volume": Case(
        "patches of a Zarr volume: zarr-python + DataLoader against FastPatchDataset + FastLoader",
        volume.add_arguments, volume.run,
    ),
    "augment": Case(
        "augmentation of batches: torchvision sample by sample, and others, against fastpipe.augment",
        augment.add_arguments, augment.run,
    ),
    "tf": Case(
        "TensorFlow: tf.py_function + Pillow, and Keras's loader and layers against fastpipe.tf",
        tf.add_arguments, tf.run,
    ),
    "generate": Case(
        "rows that a function makes, stored: a script's loop against fastpipe.generate",
        generate.add_arguments, generate.run,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``bench CASE …`` and ``bench table FILE``."""
    more = f"More cases, and comparisons with other libraries, {_CHECKOUT}"
    parser.epilog = f"Without a case: {DEFAULT_CASE}.  {more}."
    cases = parser.add_subparsers(dest="what", required=True, metavar="CASE")
    for name, case in CASES.items():
        case.add_arguments(cases.add_parser(name, help=case.about, description=case.about))
    for name in ELSEWHERE:  # whatever options are given, `run` says where it is
        cases.add_parser(name, add_help=False, prefix_chars="\0").add_argument("rest", nargs="*")
    table = cases.add_parser("table", help="print a result file as a Markdown table")
    table.add_argument("--short", action="store_true", help="only fastpipe's rows beside what they replace")
    table.add_argument("file", type=Path, metavar="RESULT.json", help="written by --json")


def prepare(arguments: list[str]) -> list[str]:
    """Return the command's arguments with the case that they leave out.

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

    Raises:
        OptionError: a case or peers are asked for that are not in the package.
    """
    if args.what == "table":
        make = short_markdown if args.short else markdown
        sys.stdout.write(make(load(args.file)))
        return 0
    if args.what in ELSEWHERE:
        raise OptionError(f"the case {args.what!r} is measured {_CHECKOUT} {args.what}")
    if args.what == "scaling" and args.job != "images":
        raise OptionError(f"the job {args.job!r} is measured {_CHECKOUT} scaling {args.job}")
    if args.peers:
        raise OptionError(
            f"--peers compares with other libraries {_CHECKOUT} {args.what} --peers (after make peers)"
        )
    return run_case(CASES[args.what], args, console, progress)


def run_case(case: Case, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Run a case whose files can be written; return its exit code."""
    check_files(args, progress.done)
    return case.run(args, console, progress)
