"""The one runner of what fastpipe measures for itself.

::

    python benchmarks/run.py CASE [--peers] [...]    the cases of ``fastpipe bench`` with memory, the first
                                                     batch, other libraries and what was asked for; s3; gpu
    python benchmarks/run.py SCRIPT [...]            a script of this folder: gil, never_slower, ...

``python benchmarks/run.py CASE --help`` has the options.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    import paths  # noqa: F401

from rich.console import Console

from benchmarks.cases import augment, generate, hdf5, images, s3, scaling, tf, volume
from benchmarks.gpu import case as gpu
from fastpipe.bench import cli
from fastpipe.bench.driver import Driver
from fastpipe.console import Progress, in_any_encoding, print_line
from fastpipe.errors import FastpipeError

PLAIN_WIDTH = 160
_NO_SCRIPTS = ("__init__", "floor", "paths", "run", "targets")

CASES: dict[str, type[Driver]] = {
    "all": cli.CASES["all"],
    **{
        module.Bench.case: module.Bench
        for module in (images, hdf5, volume, tf, scaling, generate, augment, s3, gpu)
    },
}


def scripts() -> dict[str, Path]:
    """Return the scripts of this folder, by name."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {file.stem: file for file in files if file.stem not in _NO_SCRIPTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a case, or a script; return the exit code as ``fastpipe bench`` does."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in scripts():
        sys.argv = [str(scripts()[given[0]]), *given[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    args = _parser().parse_args(given)
    errors = Console(stderr=True)
    try:
        output = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        with in_any_encoding(), Progress(errors) as progress:
            kind = scaling.JOBS[args.job] if args.what == "scaling" else CASES[args.what]
            return kind(args, progress).run(output)
    except (FastpipeError, OSError) as error:
        print_line(errors, f"benchmarks/run.py {args.what}: {error}", style="red")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py", description="Measure fastpipe, and what it is compared with.",
        epilog=f"Scripts: {', '.join(scripts())}.", allow_abbrev=False,
    )  # fmt: skip
    cases = parser.add_subparsers(dest="what", required=True, metavar="CASE")
    for name, case in CASES.items():
        made = cases.add_parser(name, help=case.about, description=case.about, allow_abbrev=False)
        case.add_arguments(made)
    return parser


if __name__ == "__main__":
    sys.exit(main())
