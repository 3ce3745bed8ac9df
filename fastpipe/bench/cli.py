"""The command ``fastpipe``; so far its one part is ``fastpipe bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import fastpipe
from fastpipe.bench import images
from fastpipe.bench.progress import Progress
from fastpipe.bench.report import markdown
from fastpipe.bench.results import load
from fastpipe.errors import FastpipeError

__all__ = ["CASES", "main"]

DEFAULT_CASE = "images"

# Wide enough for a table where the output is a file or a pipe.
PLAIN_WIDTH = 160


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Attributes:
        about: one line of help.
        add_arguments: adds its options to a parser.
        run: does it; returns the exit code.
    """

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console, Progress], int]


CASES = {
    "images": Case(
        "ImageFolder + DataLoader against FastImageFolder + FastLoader", images.add_arguments, images.run
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; ``None`` takes the process's own.

    Returns:
        Exit code: 0 done, 1 outputs differ from the replaced loader's, 2 bad input,
        130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(_with_default_case(arguments))
    errors = Console(stderr=True)
    try:
        if args.what == "table":
            sys.stdout.write(markdown(load(args.file)))
            return 0
        output = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        with Progress(errors) as progress:
            return CASES[args.what].run(args, output, progress)
    except BrokenPipeError:
        return 0
    except (FastpipeError, OSError) as error:
        errors.print(f"fastpipe bench: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("fastpipe bench: interrupted")
        return 130


def _with_default_case(arguments: list[str]) -> list[str]:
    """``bench --peers`` means ``bench images --peers``."""
    if arguments[:1] != ["bench"]:
        return arguments
    rest = arguments[1:]
    if rest and (not rest[0].startswith("-") or rest[0] in ("-h", "--help")):
        return arguments
    return ["bench", DEFAULT_CASE, *rest]


def _parser() -> argparse.ArgumentParser:
    """``fastpipe bench CASE …`` and ``fastpipe bench table FILE``."""
    parser = argparse.ArgumentParser(
        "fastpipe", description="Make the input pipeline of a training script fast."
    )
    parser.add_argument("--version", action="version", version=f"fastpipe {fastpipe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench = commands.add_parser(
        "bench",
        help="measure fastpipe against the loader it replaces, on this machine",
        description="Measure fastpipe against the loader it replaces, on this machine and on your data.",
        epilog=f"Without a case: {DEFAULT_CASE}.",
    )
    cases = bench.add_subparsers(dest="what", required=True, metavar="CASE")
    for name, case in CASES.items():
        case.add_arguments(cases.add_parser(name, help=case.about, description=case.about))
    table = cases.add_parser("table", help="print a result file as a Markdown table")
    table.add_argument("file", type=Path, metavar="RESULT.json", help="written by --json")
    return parser
