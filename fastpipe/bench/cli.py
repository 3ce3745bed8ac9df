"""``fastpipe bench``: run a benchmark, or print tables of its results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fastpipe.bench import augment, generate, hdf5, images, overview, scaling, swap, tf, volume
from fastpipe.bench.driver import Driver
from fastpipe.bench.report import markdown, short_markdown
from fastpipe.bench.results import load
from fastpipe.console import Progress
from fastpipe.errors import OptionError

DEFAULT_CASE = "all"
# Cases that need a test server or are only for the project; `benchmarks/run.py` measures them.
ELSEWHERE = ("gpu", "s3")
_CHECKOUT = "in a clone of fastpipe's repository: python benchmarks/run.py"

CASES: dict[str, type[Driver]] = {
    module.Bench.case: module.Bench
    for module in (overview, images, swap, scaling, hdf5, volume, augment, tf, generate)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands ``bench CASE …`` and ``bench table FILE`` to the parser."""
    more = f"More cases, and comparisons with other libraries, {_CHECKOUT}"
    parser.epilog = f"Without a case: {DEFAULT_CASE}.  {more}."
    cases = parser.add_subparsers(dest="what", required=True, metavar="CASE")
    for name, case in CASES.items():
        case.add_arguments(cases.add_parser(name, help=case.about, description=case.about))
    for name in ELSEWHERE:  # accept any options, so that `run` can report where the case is measured
        cases.add_parser(name, add_help=False, prefix_chars="\0").add_argument("rest", nargs="*")
    table = cases.add_parser("table", help="print a result file as a Markdown table")
    table.add_argument("--short", action="store_true", help="only fastpipe's rows beside what they replace")
    table.add_argument("file", type=Path, metavar="RESULT.json", help="written by --json")


def prepare(arguments: list[str]) -> list[str]:
    """Return the command's arguments; if they name no case, put the default case in front.

    >>> prepare(["--quick"])
    ['all', '--quick']
    """
    if arguments and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help")):
        return arguments
    return [DEFAULT_CASE, *arguments]


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Run a case, or print a table; return the exit code.

    Raises:
        OptionError: the case, the job or other libraries need a clone of fastpipe's repository.
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
    return CASES[args.what](args, progress).run(console)
