"""What is done about files: those that are corrupt are moved away, names that are wrong are put right."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from fastpipe.console import Progress
from fastpipe.core.files import folder_below
from fastpipe.core.text import counted
from fastpipe.files.scanning.findings import Findings
from fastpipe.files.scanning.folder import without_images
from fastpipe.files.scanning.moving import move
from fastpipe.files.scanning.oddities import extensions_of, name_fits
from fastpipe.files.scanning.quarantine import Quarantine, check_apart
from fastpipe.files.scanning.verdicts import Verdict, check_is_the_same

__all__ = ["Done", "move_corrupt", "rename"]


@dataclass
class Done:
    """What was done.

    Attributes:
        moved: files, below the folder, that are in the quarantine now.
        renamed: files, and their new names.
        left: files that were to be moved or renamed, and why they were not.
        notes: about the whole.
    """

    moved: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _LeftError(Exception):
    """A file is to stay as it is."""


def move_corrupt(found: Findings, folder: str, progress: Progress) -> Done:
    """Move the files that are corrupt to a folder.

    What could not be read stays where it is: what is wrong may not be the file.

    Raises:
        OptionError: the folder cannot be used for this.
        OSError: it cannot be made.
    """
    check_apart(folder, found.root)
    root, done, seen = os.path.realpath(found.root), Done(), set()
    if not found.corrupt:
        return done
    with Quarantine(folder) as quarantine:
        for number, verdict in enumerate(found.corrupt):
            progress.now(f"moving {number + 1:,} of {len(found.corrupt):,} files to {folder}")
            name = os.path.relpath(verdict.path, found.root)
            try:
                path = _place(root, verdict)
                if path in seen:  # by way of a link to its folder
                    done.moved.append(name)
                    continue
                quarantine.take(root, os.path.relpath(path, root), verdict)
            except (_LeftError, OSError) as error:
                done.left.append((name, getattr(error, "strerror", None) or str(error)))
                continue
            seen.add(path)
            done.moved.append(name)
    gone = Counter(name.split(os.sep)[0] for name in done.moved)
    empty = [name for name, count in gone.items() if count == found.classes.get(name)]
    if empty:
        done.notes.append(without_images("an image any more", empty))
    return done


def rename(found: Findings, progress: Progress) -> Done:
    """Give files whose name says another kind than they are the usual ending of their kind.

    Only images that are read as they are; the bytes are not touched, and no other file's name is taken.
    """
    root, done = os.path.realpath(found.root), Done()
    wrong = [one for one in found.noted if not name_fits(one.path, one.kind)]
    targets = _linked_to(root) if wrong else set()
    seen: set[str] = set()
    for number, verdict in enumerate(wrong):
        progress.now(f"renaming {number + 1:,} of {len(wrong):,} files")
        name = os.path.relpath(verdict.path, found.root)
        try:
            endings = extensions_of(verdict.kind)
            if not endings:
                raise _LeftError(f"ImageFolder takes no name of a {verdict.kind}, and would lose it")
            path = _place(root, verdict)
            if path in seen:  # by way of a link to its folder
                continue
            seen.add(path)
            if not os.path.islink(path) and os.path.realpath(path) in targets:
                raise _LeftError("a link leads to it by its name")
            inside, old = os.path.split(os.path.relpath(path, root))
            new = os.path.splitext(old)[0] + endings[0]
            with folder_below(root, inside) as folder:
                check_is_the_same(os.path.join(folder, old), verdict)
                if os.path.lexists(os.path.join(folder, new)):
                    raise _LeftError(f"{new} is there already")
                move(os.path.join(folder, old), os.path.join(folder, new))
        except (_LeftError, OSError) as error:
            done.left.append((name, getattr(error, "strerror", None) or str(error)))
            continue
        done.renamed.append((name, os.path.splitext(name)[0] + endings[0]))
    if found.corrupt:
        done.notes.append(
            f"not repaired: {counted(len(found.corrupt), 'corrupt file')}. What is missing of an image, such "
            "as the end of a truncated JPEG, cannot be had back"
        )
    return done


def _place(root: str, verdict: Verdict) -> str:
    """Where a file really is: its folder may be a link.

    Raises:
        _LeftError: outside of the folder that was scanned.
    """
    folder, name = os.path.split(verdict.path)
    real = os.path.realpath(folder)
    if os.path.commonpath((real, root)) != root:
        raise _LeftError(f"it is outside, in {real}, to which a link leads: scan that folder itself")
    return os.path.join(real, name)


def _linked_to(root: str) -> set[str]:
    """The files to which links in a folder lead."""
    found = set()
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                found.add(os.path.realpath(path))
    return found
