"""``fastpipe inspect FILE``: show how HDF5 datasets or a volume are stored, and what reading them costs."""

from __future__ import annotations

import argparse
import os

from rich.console import Console

from fastpipe.console import Progress, positive, sides, size
from fastpipe.core.extras import load_part
from fastpipe.core.files import is_hdf5, is_url
from fastpipe.errors import OptionError

EPILOG = """\
In uniform order, a chunk is decoded once for each batch that has one of its samples. With
Shuffle(window=W, unit="group"), chunks are in random order and samples are shuffled within
W chunks: each chunk is decoded once. Without filters nothing is decoded, and samples are
read one by one.

For a volume (Zarr, N5, TIFF, NIfTI, DICOM, .npy; after a slash, the name of an array within
a file or folder), a part is decoded to measure the speed. With --patch, the report has the cost of
patches of that size: alone, in uniform order, and on a tour, the order of
Shuffle(unit="group"); and whether other chunks would be better. If the file was read just
before, speeds are those of the page cache.

exit codes: 0 done, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="HDF5 file, or volume")
    add("--sample-dims", type=positive(int), default=1, metavar="N",
        help="how many first dimensions of a dataset count samples (default: 1)")  # fmt: skip
    add("--batch-size", type=positive(int), default=256, metavar="N",
        help="samples of a batch (default: 256)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of tables")
    volumes = parser.add_argument_group("for volumes")
    add = volumes.add_argument
    add("--patch", type=sides, default=None, metavar="Z,Y,X",
        help="a patch's size, along the last dimensions; FILE is then a volume")  # fmt: skip
    add("--labels", default=None, metavar="FILE", help="a volume that is read at the same positions")
    add("--budget", type=size, default=None, metavar="SIZE",
        help="memory for decoded chunks, such as 8GiB (default: a quarter of the free "
        "memory)")  # fmt: skip


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    if args.patch is not None or is_volume(args.file):
        return int(load_part("fastpipe.volumes.inspection").inspect_volume(args, console, progress))
    for name in ("labels", "budget"):
        if getattr(args, name) is not None:
            raise OptionError(f"--{name} goes with --patch, the size of a volume's patches")
    return int(load_part("fastpipe.hdf5.inspect").inspect(args, console, progress))


def is_volume(path: str) -> bool:
    if is_url(path) or os.path.isdir(path):
        return True
    if os.path.isfile(path):
        return not is_hdf5(path)
    # A name inside the file may follow the path of the file.
    parent = os.path.dirname(path.rstrip("/"))
    while parent and parent != os.path.dirname(parent) and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return os.path.isfile(parent)
