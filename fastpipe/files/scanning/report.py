"""What a scan found and did, for people and for programs."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from fastpipe.console import print_line
from fastpipe.core.text import counted, in_bytes, in_duration
from fastpipe.files.scanning.findings import Findings
from fastpipe.files.scanning.remedies import Done
from fastpipe.files.scanning.verdicts import Verdict, group_of

__all__ = ["as_json", "show"]

_FORMAT = 1
_NAMED_AT_MOST = 20  # of a group; --json has all


def show(found: Findings, done: Done, decoders: str, console: Console) -> None:
    """Print it.

    Args:
        found: what was found.
        done: what was done about it.
        decoders: in words; empty of what has none.
        console: where to.
    """
    rate = found.nbytes / found.seconds if found.seconds > 0 else 0.0
    size = in_bytes(found.nbytes) + ("" if found.what == "images" else " decoded")
    took = f"{size} in {in_duration(found.seconds)}, {in_bytes(rate)}/s"
    print_line(console, f"{found.root}: {found.count:,} {found.what}, {took}")
    if decoders:
        print_line(console, f"decoders: {decoders}", "dim")
    unreadable = [one for one in found.bad if one.state == "unreadable"]
    for title, some, style in (("corrupt", found.corrupt, "red"), ("cannot be read", unreadable, "red")):
        if some:
            console.print()
            print_line(console, f"{title}: {len(some):,}", f"bold {style}")
            _groups(console, found, ((group_of(one.reason), one) for one in some))
    if found.noted:
        console.print()
        print_line(console, f"read, and odd: {len(found.noted):,}", "bold yellow")
        _groups(console, found, ((group_of(note), one) for one in found.noted for note in one.notes))
    for note in found.notes:
        print_line(console, note, "yellow")
    _show_done(done, console)
    for note in done.notes:
        print_line(console, note, "yellow")
    console.print()
    print_line(console, verdict(found, done), "bold")


def verdict(found: Findings, done: Done) -> str:
    """One sentence."""
    bad = len(found.bad)
    if not found.count:
        return f"no {found.what} found"
    if not bad:
        return f"all {found.count:,} {found.what} can be read"
    rest = bad - len(done.moved)
    moved = f", of which {len(done.moved):,} were moved" if done.moved else ""
    remain = f"; {rest:,} remain, on which a training would stop" if rest else ""
    return f"{bad:,} of {found.count:,} {found.what} cannot be read{moved}{remain}"


def as_json(found: Findings, done: Done, decoders: str) -> str:
    """Everything, as a JSON object.  Names that are no UTF-8 have their bytes as Python's lone surrogates."""
    return json.dumps(
        {
            "format": _FORMAT, "root": found.root, "what": found.what, "decoders": decoders,
            "count": found.count, "nbytes": found.nbytes, "seconds": found.seconds,
            "verdict": verdict(found, done),
            "corrupt": [_plain(found, one) for one in found.corrupt],
            "unreadable": [_plain(found, one) for one in found.bad if one.state == "unreadable"],
            "notes": [{"path": _inside(found, one), "notes": list(one.notes)} for one in found.noted],
            "about": [*found.notes, *done.notes],
            "moved": done.moved,
            "renamed": [{"from": old, "to": new} for old, new in done.renamed],
            "left": [{"path": path, "why": why} for path, why in done.left],
        },
        indent=1,
    )  # fmt: skip


def _plain(found: Findings, one: Verdict) -> dict[str, Any]:
    return {
        "path": _inside(found, one), "nbytes": one.nbytes, "reason": one.reason, "message": one.message,
    }  # fmt: skip


def _inside(found: Findings, one: Verdict) -> str:
    """A path below the folder; a place in a file as it is."""
    return os.path.relpath(one.path, found.root) if found.what == "images" else one.path


def _groups(console: Console, found: Findings, members: Iterable[tuple[str, Verdict]]) -> None:
    groups: defaultdict[str, list[Verdict]] = defaultdict(list)
    for name, one in members:
        groups[name].append(one)
    for name, some in sorted(groups.items(), key=lambda group: -len(group[1])):
        print_line(console, f"  {name} ({len(some):,})")
        for one in some[:_NAMED_AT_MOST]:
            size = "" if one.nbytes is None else f"  {counted(one.nbytes, 'byte')}"
            print_line(console, f"    {_inside(found, one)}{size}")
        if len(some) > _NAMED_AT_MOST:
            print_line(console, f"    and {len(some) - _NAMED_AT_MOST:,} more, all of them in --json FILE")


def _show_done(done: Done, console: Console) -> None:
    if done.moved or done.renamed or done.left:
        console.print()
    if done.moved:
        print_line(console, f"moved: {len(done.moved):,}", "bold")
    for old, new in done.renamed:
        print_line(console, f"renamed: {old} → {os.path.basename(new)}")
    for path, why in done.left:
        print_line(console, f"left as it is: {path}: {why}", "yellow")
