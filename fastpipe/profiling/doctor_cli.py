"""``fastpipe doctor``: its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from fastpipe.console import Progress
from fastpipe.core.files import write_output
from fastpipe.errors import OptionError
from fastpipe.profiling import doctor

__all__ = ["add_arguments", "run"]


EPILOG = """\
Looks at decoders and their speed here, at torch, torchvision, TensorFlow, DALI and CUDA
and whether they fit together, at the cores and the memory that this process really has,
/dev/shm, ulimits, threads and fastpipe's cache folder. Of FOLDER it says on which file
system it is, and how fast its files are read, from memory and past it; of a URL how long
its store takes to answer, and how many requests at a time that asks for. It only reads.
Of FOLDER's files up to some hundred MiB are dropped from the system's memory first, as
far as it lets go of them.

Credentials come from the environment or a credentials file, and are no options.

exit codes: 0 no problem (there may be warnings), 1 a problem, 2 bad input,
130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("target", metavar="FOLDER|URL", nargs="?", default=None,
        help="your data: a folder, or a URL such as s3://bucket/train")  # fmt: skip
    add("--json", type=Path, default=None, metavar="FILE", help="write everything there, as JSON")
    add("--endpoint-url", default=None, metavar="URL", help="of a store that is not Amazon's")
    add("--anon", action="store_true", help="ask without credentials")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Look, and say what was found.

    Returns:
        0; 1 where there is a problem.
    """
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise OptionError(f"--json {args.json}: there is no folder {args.json.absolute().parent}")
    options: dict[str, Any] = {}
    if args.endpoint_url:
        options["endpoint_url"] = args.endpoint_url
    if args.anon:
        options["anon"] = True
    report = doctor.examine(args.target, storage_options=options, on_progress=progress.now)
    progress.stop()
    report.show(console)
    if args.json is not None:
        write_output(args.json, report.json())
        progress.done(f"wrote {args.json}")
    return report.exit_code
