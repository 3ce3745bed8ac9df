"""``fastpipe scan``: look, say what was found, and do about it what was asked for."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console

from fastpipe.console import Progress, print_line
from fastpipe.core.files import is_url, write_output
from fastpipe.core.machine import default_threads
from fastpipe.errors import FastpipeError, OptionError
from fastpipe.files.scanning.folder import scan_images
from fastpipe.files.scanning.hdf5 import scan_hdf5
from fastpipe.files.scanning.judging import Judge
from fastpipe.files.scanning.quarantine import Quarantine, check_apart
from fastpipe.files.scanning.remedies import Done, move_corrupt, rename
from fastpipe.files.scanning.report import as_json, show

__all__ = ["restore", "scan"]


def scan(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Judge a folder's images, or an HDF5 file's chunks.

    Returns:
        0; 1 where something remains that cannot be read.

    Raises:
        OptionError: an option cannot work here.
        OSError: there is no such folder, or it has no class folders.
    """
    root, threads = os.fspath(args.folder), args.threads or default_threads()
    _check(args, root)
    done, decoders, failed = Done(), "", None
    if os.path.isfile(root):
        found = scan_hdf5(root, threads, progress)
    else:
        judge = Judge()
        decoders = judge.describe()
        found = scan_images(root, threads, progress, judge)
        try:
            if args.quarantine is not None:
                done = move_corrupt(found, args.quarantine, progress)
            elif args.fix:
                done = rename(found, progress)
        except (FastpipeError, OSError) as error:  # what was found is said all the same
            failed = error
    progress.stop()
    show(found, done, decoders, console)
    if args.json is not None:
        write_output(args.json, as_json(found, done, decoders))
        progress.done(f"wrote {args.json}")
    if failed is not None:
        raise failed
    return 1 if len(found.bad) > len(done.moved) else 0


def restore(folder: str, root: str | None, console: Console, json_file: Path | None = None) -> int:
    """Put everything back that is in a quarantine.

    Args:
        folder: the quarantine.
        root: the folder that has the place of the one where the files were; None for that one.
        console: where to say what was done.
        json_file: where to write that, too: ``"back"``, paths, and ``"left"``, paths and why.

    Returns:
        0; 1 where some files could not be put back.

    Raises:
        OptionError: there is no such folder.
    """
    if root is not None and not os.path.isdir(root):
        raise OptionError(f"there is no folder {root} to put the files into: make it first")
    _check_place(json_file)
    with Quarantine(folder, make=False) as quarantine:
        back, left = quarantine.restore(root)
    if json_file is not None:
        content = {"back": back, "left": [{"path": path, "why": why} for path, why in left]}
        write_output(json_file, json.dumps(content, indent=1))
    print_line(console, f"{len(back):,} file{' is' if len(back) == 1 else 's are'} back")
    for path, why in left:
        print_line(console, f"not put back: {path}: {why}", style="red")
    return 1 if left else 0


def _check(args: argparse.Namespace, root: str) -> None:
    if is_url(root):
        raise OptionError(
            f"{root} is a URL, and scan reads what is on this machine: bring it here with  fastpipe stage"
        )
    if not os.path.exists(root):
        raise FileNotFoundError(2, "No such file or folder", root)
    if os.path.isfile(root) and (args.fix or args.quarantine is not None):
        raise OptionError("--fix and --quarantine are for folders of images, not for parts of a file")
    if args.quarantine is not None:
        if os.path.lexists(args.quarantine) and not os.path.isdir(args.quarantine):
            raise OptionError(f"--quarantine {args.quarantine}: this is no folder: name another one")
        check_apart(args.quarantine, root)
    _check_place(args.json)


def _check_place(json_file: Path | None) -> None:
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise OptionError(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
