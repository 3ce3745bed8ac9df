"""``fastpipe stage URL DIR``: its options."""

from __future__ import annotations

import argparse

from rich.console import Console

from fastpipe import files
from fastpipe.console import Progress, positive
from fastpipe.errors import OptionError
from fastpipe.files.arguments import size

__all__ = ["add_arguments", "run"]


EPILOG = """\
What is in the stage DIR is not downloaded again: stopped or killed, the same command
goes on; and a training with FastImageFolder(URL, stage=DIR) finds it there. Credentials
come from the environment or a credentials file, and are no options.

--verify reads every staged image again and compares it with the checksum that its store
listed, where that has one (an MD5 as ETag), else with its length; what differs is
downloaded anew.

exit codes: 0 done, 1 some images could not be copied, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.usage = (
        "fastpipe stage URL DIR [options]\n"
        "       fastpipe stage --status DIR\n"
        "       fastpipe stage --clear DIR"
    )
    add = parser.add_argument
    add(
        "places",
        nargs="+",
        metavar="URL DIR",
        help="class folders, such as s3://bucket/train; a local folder",
    )
    what = parser.add_mutually_exclusive_group()
    add = what.add_argument
    add("--status", action="store_true", help="say what the stage DIR holds")
    add("--clear", action="store_true", help="remove what the stage DIR holds")
    add("--verify", action="store_true", help="also compare what is staged with what was listed")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--classes", type=_names, default=None, metavar="NAME,…", help="these classes only")
    add("--subset", type=positive(int), default=None, metavar="N",
        help="so many classes, drawn by --seed as Subset(num, seed) draws them")  # fmt: skip
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of --subset (default: 0)")
    add("--max-bytes", type=size, default=None, metavar="SIZE",
        help="what the stage may hold, such as 200GiB (default: what is there, and nine tenths of the free "
        "disk)")  # fmt: skip
    add("--connections", type=positive(int), default=None, metavar="N",
        help="requests at a time (default: as many as latency and bandwidth need)")  # fmt: skip
    add("--refresh", action="store_true", help="list the bucket anew, not as it was listed before")
    add("--endpoint-url", default=None, metavar="URL", help="of a store that is not Amazon's")
    add("--anon", action="store_true", help="ask without credentials")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Do it.

    Returns:
        0; 1 where some images could not be copied.
    """
    if args.status or args.clear:
        if len(args.places) != 1:
            raise OptionError("--status and --clear take the stage's folder alone")
        act = files.stage_status if args.status else files.clear_stage
        return act(args.places[0], console)
    if len(args.places) != 2:
        raise OptionError("name a URL, such as s3://bucket/train, and a folder on a local disk")
    return files.fill_stage(args, console, progress)


def _names(text: str) -> list[str]:
    """An argparse type: names between commas."""
    return [name for name in text.split(",") if name]
