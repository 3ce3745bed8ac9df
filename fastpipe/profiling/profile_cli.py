"""``fastpipe profile SCRIPT``: its options."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from rich.console import Console

import fastpipe
from fastpipe.console import Progress, in_any_encoding, positive
from fastpipe.core.files import write_output
from fastpipe.errors import OptionError
from fastpipe.profiling.report import Report
from fastpipe.profiling.script import profile_script

__all__ = ["add_arguments", "run"]


_RUNNING = (str(Path(fastpipe.__file__).parent), contextlib.__file__)  # what runs a script

EPILOG = """\
SCRIPT runs as python SCRIPT ARGUMENTS would, until enough is known of its training loop;
that ends it, after a minute at most. For a while the loop gets one batch again and again,
which shows how long a step takes that need not wait: what is trained is not worth keeping.
Then other settings and fastpipe's loaders are measured on the same data.

exit codes: 0 done, 1 an error of the script's own, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--seconds", type=positive(float), default=6.0, metavar="S",
        help="how long the loop is measured as it is (default: 6)")  # fmt: skip
    add("--limit", type=positive(float), default=50.0, metavar="S",
        help="when the script is ended, or after what is being measured then (default: 50)")  # fmt: skip
    add("--try", dest="try_advice", action="store_true",
        help="try the best advice: the script's loop gets batches of the loader that it names")  # fmt: skip
    add("--json", type=Path, default=None, metavar="FILE", help="write everything there, as JSON")
    add("--html", type=Path, default=None, metavar="FILE", help="write a page with pictures there")
    add("--trace", type=Path, default=None, metavar="FILE",
        help="write a timeline there, to be opened in https://ui.perfetto.dev")  # fmt: skip
    add("-m", dest="is_module", action="store_true",
        help="SCRIPT is the name of a module, which runs as by python -m")  # fmt: skip
    add("script", metavar="SCRIPT", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's own")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Run the script and show what was found.

    Returns:
        Exit code.
    """
    progress.stop()
    for path in (args.json, args.html, args.trace):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"there is no folder for {str(path)!r}: make {str(path.parent)!r} first")
    try:
        return _run(args, console, progress)
    finally:
        # What the script has left, in circles too, while there is an interpreter: TensorFlow's threads may
        # have to run Python before what they prepare is freed; who frees it later waits for them for ever.
        gc.collect()


def _run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    try:
        report = profile_script(
            args.script, args.arguments, seconds=args.seconds, limit_s=args.limit, try_advice=args.try_advice,
            is_module=args.is_module, leave=partial(_leave, args, console, progress),
        )  # fmt: skip
    except Exception as error:
        trace = _within_script(error.__traceback__)
        if trace is None and not isinstance(error, SyntaxError):
            raise
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # as Python shows it
        return 1
    _tell(report, args, console, progress)
    return 0


def _tell(report: Report, args: argparse.Namespace, console: Console, progress: Progress) -> None:
    with in_any_encoding():
        report.show(console)
    for path, content in ((args.json, report.json), (args.html, report.html), (args.trace, report.trace)):
        if path is not None:
            write_output(path, content())
            progress.done(f"wrote {path}")


def _leave(args: argparse.Namespace, console: Console, progress: Progress, report: Report) -> NoReturn:
    """For a script that goes on: nothing of this process is left that could."""
    try:
        _tell(report, args, console, progress)
        progress.done(f"{args.script} goes on whatever ends it, as after 'except:', and was left")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _within_script(trace: TracebackType | None) -> TracebackType | None:
    """What of a traceback is not of what runs the script; None where the error is no script's."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_RUNNING):
        trace = trace.tb_next
    return trace
