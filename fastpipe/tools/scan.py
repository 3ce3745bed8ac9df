"""``fastpipe scan``: which samples a training could not read, and what can be done about them."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fastpipe.console import Progress, positive
from fastpipe.core.extras import load_part

EPILOG = """\
Every image that ImageFolder would find, or else that lies in the folder itself, is
decoded, in threads, by the decoders of FastImageFolder. Corrupt is what torchvision's
loader raises for; what is odd and is read all the same (a PNG that is a JPEG, an EXIF
orientation, bytes behind the end) is noted. Of an HDF5 file every chunk of every
dataset is decoded.

--quarantine moves corrupt images to DIR, under the same relative paths; nothing is
overwritten, and DIR/bad_samples.jsonl says where each came from. Files that cannot be
read at all (permissions, links to nothing) stay, as the disk may be at fault. A link is
moved as a link. What it leads to stays.

--fix gives images whose name says another kind than they are the ending of their kind:
x.png becomes x.jpg. Nothing else can be repaired without loss: the end of a truncated
JPEG is gone. Lists that have the old names must be changed, and a class whose files sort
otherwise now has them in another order.

exit codes: 0 everything can be read, or was moved; 1 something remains that cannot be
read; 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "fastpipe scan FOLDER [--fix | --quarantine DIR] [options]\n"
        "       fastpipe scan --restore DIR [FOLDER]"
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?", default=None,
        help="class folders with images, or images, or an HDF5 file")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    add = what.add_argument
    add("--quarantine", metavar="DIR", default=None, help="move corrupt images there")
    add("--fix", action="store_true", help="correct endings that are another kind's")
    add("--restore", metavar="DIR", default=None,
        help="move everything from the quarantine DIR back, to FOLDER if that is named")  # fmt: skip
    add = parser.add_argument
    add("--json", type=Path, default=None, metavar="FILE", help="write everything there, as JSON")
    add("--threads", type=positive(int), default=None, metavar="N",
        help="that read and decode (default: all cores; on a network more may be faster)")  # fmt: skip


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    return int(load_part("fastpipe.tools.scan_report").run(args, console, progress))
