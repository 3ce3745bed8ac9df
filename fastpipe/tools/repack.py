"""``fastpipe repack IN OUT``: copy an HDF5 file or a volume, with other chunks and another codec."""

from __future__ import annotations

import argparse

from rich.console import Console

from fastpipe.console import Progress, positive, sides, size
from fastpipe.core.extras import load_part
from fastpipe.errors import OptionError
from fastpipe.tools.inspect import is_volume

EPILOG = """\
Datasets above 1 MiB, or those that --dataset names, get new chunks and filters; everything
else is copied unchanged. Virtual and external datasets get their own data. With
--chunk-rows auto, a chunk has as many whole samples as fit 64 KiB; data without filters
become contiguous, unless the dataset can grow. With --sample-dims above 1, a chunk has
--chunk-rows samples along the last of these dimensions, and one along those before.

The copy is written to a file fastpipe-repack-….unfinished beside OUT. It is renamed to OUT
when every value has been read back and equals the source's. The next run with the same OUT
removes the unfinished file of a killed run.

Folders that are missing above OUT are made.

A volume (Zarr, N5, TIFF, NIfTI, DICOM, .npy; after a slash, the name of an array within a file
or folder) becomes a Zarr array in the folder OUT, in chunks of --chunks; so does one dataset
of an HDF5 file, if OUT ends in .zarr. OUT may be in a group: scan.zarr/image makes the Zarr
group scan.zarr if it is missing. Chunks that contain only the fill value are not
written. The data in memory take at most --memory, for any size of the volume. While the
copy grows, it is in a folder fastpipe-repack-… beside OUT; remove the folder of a killed
run.

exit codes: 0 done, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", metavar="IN", help="HDF5 file, or volume")
    add("output", metavar="OUT", help="file, or folder for a volume, to make")
    add("--chunk-rows", type=_rows, default=None, metavar="N",
        help="samples of a chunk, or 'auto' (default: auto)")  # fmt: skip
    add("--codec", default="keep", metavar="CODEC",
        help="keep, none, gzip[:LEVEL], lzf, lz4, zstd[:LEVEL] or blosc[:CODEC[:LEVEL]] (default: keep); "
        "lz4, zstd and blosc need the package hdf5plugin; for volumes blosc-zstd (the "
        "same as keep), zstd or none")  # fmt: skip
    add("--shuffle", action=argparse.BooleanOptionalAction, default=None,
        help="sort bytes by significance before a new codec (default: for elements of several "
        "bytes)")  # fmt: skip
    add("--dataset", action="append", default=[], metavar="PATH",
        help="repack this dataset, of any size, and no other; may be given several times")  # fmt: skip
    add("--sample-dims", type=positive(int), default=1, metavar="N",
        help="how many first dimensions of a dataset count samples (default: 1)")  # fmt: skip
    add("--force", action="store_true", help="replace OUT if it exists")
    add("--threads", type=positive(int), default=None, metavar="N", help="for reading (default: all cores)")
    volumes = parser.add_argument_group("for volumes")
    add = volumes.add_argument
    add("--chunks", type=sides, default=None, metavar="Z,Y,X",
        help="a chunk's shape, along the last dimensions")  # fmt: skip
    add("--level", type=int, default=None, metavar="N",
        help="of the codec: 0 to 9 of blosc-zstd, 1 to 22 of zstd (default: 5)")  # fmt: skip
    add("--memory", type=size, default=None, metavar="SIZE",
        help="for data, beside the program itself, such as 1GiB (default: 256MiB, or what a chunk "
        "needs)")  # fmt: skip


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    if is_volume(args.input) or any(part.endswith(".zarr") for part in args.output.split("/")):
        return int(load_part("fastpipe.volumes.repack").repack_volume(args, console, progress))
    for name in ("chunks", "level", "memory"):
        if getattr(args, name) is not None:
            raise OptionError(
                f"--{name} is for a copy in Zarr: name an OUT such as scan.zarr or scan.zarr/image"
            )
    return int(load_part("fastpipe.hdf5.repack").repack(args, console, progress))


def _rows(text: str) -> int | None:
    return None if text == "auto" else positive(int)(text)
