"""Run ``fastpipe scan`` with parsed arguments: check, move or rename files, and report the result."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from fastpipe.console import Progress, print_line
from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS
from fastpipe.core.files import is_url, write_output
from fastpipe.core.machine import default_threads
from fastpipe.core.text import counted, in_bytes, in_duration
from fastpipe.errors import FastpipeError, OptionError
from fastpipe.tools.folders import require_folder_of
from fastpipe.tools.quarantine import Done, Quarantine, check_apart, move_corrupt, rename
from fastpipe.tools.scan_hdf5 import scan_hdf5
from fastpipe.tools.scan_images import Findings, Judge, Verdict, group_of, scan_images

_FORMAT = 1  # version of the JSON file
_NAMED_AT_MOST = 20  # most files of a group to print; --json writes all files


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    if args.restore is not None:
        return _restore(args, console)
    if args.folder is None:
        raise OptionError("name a folder with one folder for each class, or an HDF5 file")
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
        except (FastpipeError, OSError) as error:  # the findings are still printed
            failed = error
    progress.stop()
    _show(found, done, decoders, console)
    if args.json is not None:
        write_output(args.json, json.dumps(_as_json(found, done, decoders), indent=1))
        progress.done(f"wrote {args.json}")
    if failed is not None:
        raise failed
    return 1 if found.bad_count > len(done.moved) else 0


def _restore(args: argparse.Namespace, console: Console) -> int:
    if args.folder is not None and not os.path.isdir(args.folder):
        raise OptionError(f"there is no folder {args.folder} to put the files into: make it first")
    require_folder_of(args.json)
    with Quarantine(args.restore, make=False) as quarantine:
        back, left = quarantine.restore(args.folder)
    if args.json is not None:
        content = {"back": back, "left": [{"path": path, "why": why} for path, why in left]}
        write_output(args.json, json.dumps(content, indent=1))
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
    if os.path.isfile(root) and root.lower().endswith(TORCHVISION_EXTENSIONS):
        raise OptionError(f"{root} is an image: name the folder that holds it, or an HDF5 file")
    if os.path.isfile(root) and (args.fix or args.quarantine is not None):
        raise OptionError("--fix and --quarantine are for folders of images, not for parts of a file")
    if args.quarantine is not None:
        if os.path.lexists(args.quarantine) and not os.path.isdir(args.quarantine):
            raise OptionError(f"--quarantine {args.quarantine}: this is no folder: name another one")
        check_apart(args.quarantine, root)
    require_folder_of(args.json)


def _show(found: Findings, done: Done, decoders: str, console: Console) -> None:
    rate = found.nbytes / found.seconds if found.seconds > 0 else 0.0
    size = in_bytes(found.nbytes) + ("" if found.what == "images" else " decoded")
    took = f"{size} in {in_duration(found.seconds)}, {in_bytes(rate)}/s"
    print_line(console, f"{found.root}: {found.count:,} {found.what}, {took}")
    if decoders:
        print_line(console, f"decoders: {decoders}", "dim")
    for title, some in (("corrupt", found.corrupt), ("cannot be read", found.unreadable)):
        if some:
            console.print()
            print_line(console, f"{title}: {len(some):,}", "bold red")
            _show_groups(console, found, ((group_of(one.reason), one) for one in some))
    if found.noted:
        console.print()
        print_line(console, f"read, and odd: {len(found.noted):,}", "bold yellow")
        _show_groups(console, found, ((group_of(note), one) for one in found.noted for note in one.notes))
    for note in found.notes:
        print_line(console, note, "yellow")
    if done.moved or done.renamed or done.left:
        console.print()
    if done.moved:
        print_line(console, f"moved: {len(done.moved):,}", "bold")
    for old, new in done.renamed:
        print_line(console, f"renamed: {old} → {os.path.basename(new)}")
    for path, why in done.left:
        print_line(console, f"left as it is: {path}: {why}", "yellow")
    for note in done.notes:
        print_line(console, note, "yellow")
    console.print()
    print_line(console, _verdict(found, done), "bold")


def _show_groups(console: Console, found: Findings, members: Iterable[tuple[str, Verdict]]) -> None:
    groups: defaultdict[str, list[Verdict]] = defaultdict(list)
    for name, one in members:
        groups[name].append(one)
    for name, some in sorted(groups.items(), key=lambda group: -len(group[1])):
        print_line(console, f"  {name} ({len(some):,})")
        for one in some[:_NAMED_AT_MOST]:
            size = "" if one.nbytes is None else f"  {counted(one.nbytes, 'byte')}"
            print_line(console, f"    {found.inside(one)}{size}")
        if len(some) > _NAMED_AT_MOST:
            print_line(console, f"    and {len(some) - _NAMED_AT_MOST:,} more, all of them in --json FILE")


def _verdict(found: Findings, done: Done) -> str:
    bad = found.bad_count
    if not found.count:
        return f"no {found.what} found"
    if not bad:
        return f"all {found.count:,} {found.what} can be read"
    rest = bad - len(done.moved)
    moved = f", of which {len(done.moved):,} were moved" if done.moved else ""
    remain = f"; {rest:,} remain, at which a training run would stop" if rest else ""
    return f"{bad:,} of {found.count:,} {found.what} cannot be read{moved}{remain}"


def _as_json(found: Findings, done: Done, decoders: str) -> dict[str, Any]:
    def plain(one: Verdict) -> dict[str, Any]:
        return {
            "path": found.inside(one), "nbytes": one.nbytes, "reason": one.reason, "message": one.message,
        }  # fmt: skip

    return {
        "format": _FORMAT, "root": found.root, "what": found.what, "decoders": decoders,
        "count": found.count, "nbytes": found.nbytes, "seconds": found.seconds,
        "verdict": _verdict(found, done),
        "corrupt": [plain(one) for one in found.corrupt],
        "unreadable": [plain(one) for one in found.unreadable],
        "notes": [{"path": found.inside(one), "notes": list(one.notes)} for one in found.noted],
        "about": [*found.notes, *done.notes],
        "moved": done.moved,
        "renamed": [{"from": old, "to": new} for old, new in done.renamed],
        "left": [{"path": path, "why": why} for path, why in done.left],
    }  # fmt: skip
