"""What is said of a file: good, corrupt, or not to be judged."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["Identity", "Verdict", "check_is_the_same", "group_of", "identity"]

# Device, inode, length, and when it was written: another one means another content, perhaps.  Not when its
# status changed, as it does for all its names when one of them goes.
Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one file.

    Attributes:
        path: the file, below the folder that was scanned.
        nbytes: of it; None if nobody says.
        state: ``"good"``: the replaced loader reads it.  ``"corrupt"``: it raises on the file's content.
            ``"unreadable"``: it raises because the content is not to be had; the file may not be at fault.
        reason: what it raises, without the path; empty where it is good.
        message: as ``FastImageFolder`` would raise it; empty where it is good.
        notes: what is odd about it, and no error.
        kind: of image, by its content: ``"JPEG"`` and so on; empty where it is not known.
        identity: of the file that was judged; None where it is not known, or nothing is to be done about it.
    """

    path: str
    nbytes: int | None = None
    state: Literal["good", "corrupt", "unreadable"] = "good"
    reason: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()
    kind: str = ""
    identity: Identity | None = None


def identity(path: str) -> Identity:
    """Of a file, links followed.

    Raises:
        OSError: there is none.
    """
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def check_is_the_same(path: str, verdict: Verdict) -> None:
    """Raise an error where a file has changed since it was judged.

    Raises:
        OSError: it has, or is not there any more.
    """
    if verdict.identity is None or identity(path) != verdict.identity:
        raise OSError("it has changed since it was looked at: scan it again")


def group_of(reason: str) -> str:
    """What reasons of a kind have in common: all but numbers.

    >>> group_of("OSError: image file is truncated (12 bytes not processed)")
    'OSError: image file is truncated (… bytes not processed)'
    """
    return re.sub(r"\d+", "…", reason)
