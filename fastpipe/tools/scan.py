"""``fastpipe scan``: find samples that a training could not read, and rename or move their files."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fastpipe.console import Progress, positive
from fastpipe.core.extras import load_part

EPILOG = """\
Decodes every image that ImageFolder would find, or, without class folders, every image in
the folder itself, in threads, with the decoders of FastImageFolder. An image is corrupt if
torchvision's loader raises an error for it; oddities that are read all the same (a PNG that
is a JPEG, an EXIF orientation, bytes after the end) are noted. In an HDF5 file, every chunk
of every dataset is decoded.

--quarantine moves corrupt images to DIR, under the same relative paths. Nothing is
overwritten, and DIR/bad_samples.jsonl lists where each came from. Files that cannot be read
at all (permissions, dangling links) stay, because the disk may be at fault. A link is moved
as a link; its target stays.

--fix renames images whose extension belongs to another format: x.png becomes x.jpg. Nothing
else can be repaired without loss: the end of a truncated JPEG is gone. Update lists that
contain the old names; the order of a class changes if its files sort differently now.

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
    add("--fix", action="store_true", help="rename files whose extension belongs to another format")
    add("--restore", metavar="DIR", default=None,
        help="move everything from the quarantine DIR back, to FOLDER if that is named")  # fmt: skip
    add = parser.add_argument
    add("--json", type=Path, default=None, metavar="FILE", help="write everything there, as JSON")
    add("--threads", type=positive(int), default=None, metavar="N",
        help="threads that read and decode (default: all cores; more may help on a network)")  # fmt: skip


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    return int(load_part("fastpipe.tools.scan_report").run(args, console, progress))
