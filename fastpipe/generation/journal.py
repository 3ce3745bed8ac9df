"""What is done of a job, on disk: a line for each block, after the block.

A line begins with the checksum of the rest, so that one that was cut off is not taken for a whole one.  When
blocks are added, their data is on the disk before their lines are: what the journal has is there after the
machine failed, too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastpipe.core.files import open_regular, sync_folder
from fastpipe.generation.storing import Stored
from fastpipe.hdf5.checkpoints import write_whole

__all__ = ["JOURNAL", "Journal"]

JOURNAL = "journal"


class Journal:
    """The journal of a folder, opened.

    Args:
        folder: in which it is.

    Attributes:
        job: what the journal is of; None of a new one.
        blocks: those that are stored.
        is_naming: whether all is done, and files are getting their names.
        damaged: lines that say nothing any more.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / JOURNAL
        self.job: dict[str, Any] | None = None
        self.blocks: list[Stored] = []
        self.is_naming, self.damaged = False, 0
        self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def begin(self, job: dict[str, Any]) -> None:
        """Begin anew.

        Args:
            job: what it is of.
        """
        os.ftruncate(self._descriptor, 0)
        self.job, self.blocks, self.is_naming, self.damaged = job, [], False, 0
        self._append([{"job": job}])
        sync_folder(self._folder)

    def add(self, blocks: Sequence[Stored]) -> None:
        """Note blocks whose data is on the disk.

        Raises:
            OSError: the disk is full, for instance; what was noted before stays.
        """
        self._append([one.as_json() for one in blocks])
        self.blocks += blocks

    def name(self) -> None:
        """Note that files are getting their names."""
        self._append([{"naming": True}])
        self.is_naming = True

    def drop(self, blocks: Sequence[Stored]) -> None:
        """Forget blocks that are not there as they were noted."""
        gone = {(one.first, one.last) for one in blocks}
        kept = [one for one in self.blocks if (one.first, one.last) not in gone]
        job = self.job
        assert job is not None
        lines = (_line(one) for one in ({"job": job}, *(one.as_json() for one in kept)))
        write_whole(self._path, ["".join(lines).encode()])
        os.close(self._descriptor)
        self._descriptor = open_regular(self._path, os.O_RDWR)
        self.blocks = kept

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, entries: Sequence[dict[str, Any]]) -> None:
        """Write lines behind the others, or none."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        data = memoryview("".join(map(_line, entries)).encode())
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except BaseException:  # an interrupt, too: lines behind half a line are lost
            os.ftruncate(self._descriptor, end)
            raise

    def _read(self) -> None:
        """What is there.  A last line that was cut off goes; of others that are damaged rows are missing."""
        whole = 0
        with open(self._path, "rb", opener=open_regular) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                entry = _entry(line)
                if entry is None:
                    self.damaged += 1
                elif "job" in entry:
                    self.job = entry["job"]
                elif "naming" in entry:
                    self.is_naming = True
                else:
                    self.blocks.append(Stored.from_json(entry))
        os.ftruncate(self._descriptor, whole)


def _line(entry: dict[str, Any]) -> str:
    text = json.dumps(entry, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says; None of one that is not whole."""
    if not line.endswith(b"\n") or len(line) < 10 or f"{zlib.crc32(line[9:-1]):08x}".encode() != line[:8]:
        return None
    found = json.loads(line[9:-1])
    return found if isinstance(found, dict) else None
