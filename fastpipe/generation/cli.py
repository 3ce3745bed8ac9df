"""The command ``fastpipe generate``."""

from __future__ import annotations

import argparse
import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fastpipe.console import Progress, positive, print_line, size
from fastpipe.errors import OptionError
from fastpipe.generation.run import generate, probe

EPILOG = """\
FUNCTION(index, rng) returns a dict of arrays, numbers and strings. It is imported from
MODULE; the current folder is searched first. Row i is the result for i and
numpy.random.default_rng([SEED, i]), and depends on nothing else.

While the file grows, its rows are in the folder FILE.partial. After a kill or a full disk,
the same command continues from there; with a larger N it makes the missing rows.

exit codes: 0 done, 2 bad input or a row failed, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("function", metavar="MODULE:FUNCTION", help="what makes a sample")
    add("-n", "--rows", type=positive(int), required=True, metavar="N", help="how many samples")
    add("--out", metavar="FILE.h5", help="file to make")
    add("--seed", type=int, default=0, metavar="SEED", help="of all rows (default: 0)")
    add("--workers", type=_workers, default="auto", metavar="N",
        help="processes; 0 for none (default: one for each core, if they help)")  # fmt: skip
    add("--threads", action="store_true", help="threads instead of processes")
    add("--chunk-rows", type=positive(int), default=None, metavar="N",
        help="rows of a chunk (default: as many as make 64 KiB)")  # fmt: skip
    add("--max-bytes", type=size, default=None, metavar="SIZE",
        help="largest size of a file, such as 4GiB; more rows go to further files")  # fmt: skip
    add("--bad-samples", choices=("raise", "skip", "retry"), default="raise",
        help="what to do if FUNCTION raises (default: raise)")  # fmt: skip
    add("--seed-globals", action="store_true", help="seed random, numpy.random and torch for each row, too")
    resume = parser.add_mutually_exclusive_group().add_argument
    resume("--no-resume", dest="resume", action="store_const", const=False, default=True,
        help="begin again, without the rows of an interrupted run")  # fmt: skip
    resume("--resume-changed", dest="resume", action="store_const", const="changed",
        help="continue although the function's code has changed since")  # fmt: skip
    add("--dry-run", action="store_true",
        help="only report how long it would take, and where the time goes; make no file")  # fmt: skip


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Make the file of samples; with ``--dry-run``, only print an estimate of the time and the size."""
    progress.stop()
    options: dict[str, Any] = {
        "seed": args.seed, "workers": args.workers, "executor": "threads" if args.threads else None,
        "seed_globals": args.seed_globals,
    }  # fmt: skip
    fn = _imported(args.function)
    if args.dry_run:
        for text in probe(fn, args.rows, args.out or "rows.h5", **options).lines():
            print_line(console, text)
        return 0
    if args.out is None:
        raise OptionError("--out is missing: name the file to write, or use --dry-run")
    generate(
        fn, args.rows, args.out, chunk_rows=args.chunk_rows or "auto", resume=args.resume,
        max_bytes=args.max_bytes, bad_samples=args.bad_samples, **options,
    )  # fmt: skip
    return 0


def _imported(name: str) -> Callable[..., Any]:
    """Import the function named ``MODULE:FUNCTION``."""
    module, _, path = name.partition(":")
    if not (module and path):
        raise OptionError(f"name a function as MODULE:FUNCTION, such as scenes:sample; got {name!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = operator.attrgetter(path)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that MODULE itself imports is missing
        raise OptionError(f"there is no module {module!r} in {folder}, nor among those installed") from None
    except AttributeError as error:
        raise OptionError(f"{module} has no {path!r}: {error}") from None
    if not callable(found):
        raise OptionError(f"{name} is no function: {found!r}")
    return found  # type: ignore[no-any-return]


def _workers(text: str) -> int | str:
    """Parse the argument of ``--workers`` for argparse: a whole number, or ``"auto"``."""
    return text if text == "auto" else int(text)
