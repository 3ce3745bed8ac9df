"""Memory for decoded units that processes share which have no parent in common that made it."""

from __future__ import annotations

import hashlib
import os

from fastpipe.cache.meeting import Announced, announce, announced, meeting_folder, meeting_name
from fastpipe.cache.unit_file import UnitFile, slot_nbytes

__all__ = ["joined_memory"]


def joined_memory(what: str, keys: int, slots: int, nbytes: int) -> UnitFile:
    """Memory for units that all processes of this user on this machine share which ask for the same.

    Args:
        what: says what the units are of.
        keys, slots, nbytes: as of ``UnitFile``; where there is memory already it has its own number of
            slots.

    Raises:
        OSError: there can be none, or processes cannot meet.
    """
    digest = hashlib.sha256(os.fsencode(f"units 2 {what} {keys} {slot_nbytes(nbytes)}")).hexdigest()[:32]
    with meeting_folder() as folder:
        name = meeting_name(digest)
        for found in announced(folder, name):
            memory = _announced_memory(found, keys, slot_nbytes(nbytes))
            if memory is not None:
                break
            folder.remove(found.note)
        else:
            memory = UnitFile(keys, slots, nbytes)
        announce(folder, name, [memory.descriptor], {"slots": memory.slots}, memory)
        return memory


def _announced_memory(found: Announced, keys: int, nbytes: int) -> UnitFile | None:
    """Memory that a process has, perhaps this one; None where it is not what it was said to be."""
    try:
        (number,), (inode,) = found.numbers, found.inodes
        return UnitFile.joined(found.pid, number, inode, (keys, int(found.about["slots"]), nbytes))
    except (ValueError, KeyError, TypeError):
        return None
