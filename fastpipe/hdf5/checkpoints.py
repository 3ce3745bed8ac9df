"""A file that is written in steps: whoever is killed finds it as it was after the last whole step.

An HDF5 file that is open for writing is not one that can be opened: its library changes records
in place, in an order of its own, and a kill between two of these writes leaves a file that is
damaged or, worse, wrong.  So here the library does not write to the file.  It writes through an
object that puts new bytes behind the end that the file had at the last checkpoint, where nobody
reads them, and keeps in memory what would change bytes before it.  A checkpoint, which is made
when the library has closed the file, is a redo log: the changed bytes and the note that goes
with them are written to a file of their own, which gets its name by a rename when it is whole
and on the disk; then they are put into place, which can be done again and again.  So a kill
leaves

* before the rename: the old checkpoint, with bytes behind its end that are cut off; or
* after it: the new one, put into place by whoever comes next.

An error of writing, such as a full disk, is kept from the library, which would not recover from
it: from then on its writes go nowhere, and the checkpoint raises the error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastpipe.core import files as _files
from fastpipe.core.files import UNFINISHED, open_regular, read_at, read_file, sync_folder

__all__ = [
    "DATA",
    "NOTE",
    "REDO",
    "CheckpointedFile",
    "unfinished_name",
    "write_all",
    "write_whole",
]

_PAGE = 1 << 14
DATA, NOTE, REDO = "data.h5", "note.json", "redo"


class CheckpointedFile(io.RawIOBase):
    """The file ``data.h5`` of a folder, for h5py's driver for file-like objects.

    Args:
        folder: its folder, which is this object's alone.

    Attributes:
        note: what the last checkpoint noted; None before the first.
        path: of the file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / DATA
        self._folder, self._descriptor = folder, -1
        self._size = self._kept = self._note_size = self._at = 0
        self._pages: dict[int, bytearray] = {}
        self._error: OSError | None = None
        self._descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            self._redo()
            self.note = self._read_note()
            self._roll_back()
        except BaseException:
            self.close()
            raise

    def begin_anew(self) -> None:
        """Forget all checkpoints."""
        self.note = None
        for name in (NOTE, REDO):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)
        sync_folder(self._folder)
        self._roll_back()

    def checkpoint(self, note: dict[str, Any]) -> None:
        """Make what was written permanent; the library must not have the file open.

        Args:
            note: for whoever goes on; it is kept with the file's content, the one never without the other.

        Raises:
            OSError: the disk is full, for instance; the checkpoint before stays.
        """
        if self._error is not None:
            error, self._error = self._error, None
            self._roll_back()
            raise error
        if self._size >= self._kept:  # else nothing is behind the old end
            os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        pages = sorted(self._pages.items())
        head = {"size": self._size, "note": note, "pages": [[page, len(data)] for page, data in pages]}
        parts = [json.dumps(head).encode(), b"\n", *(data for _, data in pages)]
        write_whole(self._folder / REDO, parts)
        self._redo()
        self.note = self._read_note()
        self._roll_back()

    def update_note(self, note: dict[str, Any]) -> None:
        """Change the note alone, when nothing was written since the last checkpoint."""
        self._write_note(note, self._kept)
        self.note = note

    @property
    def failed(self) -> OSError | None:
        """Why writes go nowhere, if they do."""
        return self._error

    def close(self) -> None:
        """Close the file, at its last checkpoint."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        super().close()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        at = base + offset
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = read_at(self._descriptor, view, self._at)
        view[done:] = bytes(len(view) - done)
        for page, start, first, count in self._in_pages(self._at, len(view)):
            data = self._pages.get(page)
            if data is not None:
                view[first : first + count] = data[start : start + count]
        self._at += len(view)
        return len(view)

    def write(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        at, self._at = self._at, self._at + len(view)
        if self._error is not None:
            return len(view)
        try:
            old = max(0, min(len(view), self._kept - at))
            for page, start, first, count in self._in_pages(at, old):
                self._page(page)[start : start + count] = view[first : first + count]
            write_all(self._descriptor, view[old:], at + old)
        except OSError as error:
            self._error = error
        self._size = max(self._size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        # What is in the file stays until the checkpoint, which gives it this size.
        size = self._at if size is None else size
        self._size = size
        return size

    def flush(self) -> None:
        """Nothing waits here."""

    def _in_pages(self, at: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Pages of what lies before the last checkpoint's end: number, first byte in it and here, bytes."""
        end, place = min(at + length, self._kept), at
        while place < end:
            page, start = divmod(place, _PAGE)
            count = min(_PAGE - start, end - place)
            yield page, start, place - at, count
            place += count

    def _page(self, page: int) -> bytearray:
        data = self._pages.get(page)
        if data is None:
            length = min(_PAGE, self._kept - page * _PAGE)
            data = self._pages[page] = bytearray(os.pread(self._descriptor, length, page * _PAGE))
            data += bytes(length - len(data))
        return data

    def _roll_back(self) -> None:
        self._kept = self._size = 0 if self.note is None else self._note_size
        self._pages = {}
        self._at, self._error = 0, None
        os.ftruncate(self._descriptor, self._kept)

    def _redo(self) -> None:
        """Put a checkpoint into place that was begun."""
        try:
            redo = open(self._folder / REDO, "rb", opener=open_regular)  # noqa: SIM115
        except FileNotFoundError:
            return
        with redo:
            head = json.loads(redo.readline())
            for page, length in head["pages"]:
                write_all(self._descriptor, memoryview(redo.read(length)), page * _PAGE)
        os.ftruncate(self._descriptor, head["size"])
        os.fsync(self._descriptor)
        self._write_note(head["note"], head["size"])
        os.unlink(self._folder / REDO)

    def _write_note(self, note: dict[str, Any], size: int) -> None:
        write_whole(self._folder / NOTE, [json.dumps({"size": size, "note": note}).encode()])

    def _read_note(self) -> dict[str, Any] | None:
        """The note of a file that is there as it says; None without."""
        try:
            content = json.loads(read_file(os.fspath(self._folder / NOTE)))
            self._note_size = int(content["size"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        if os.fstat(self._descriptor).st_size < self._note_size or not isinstance(content["note"], dict):
            return None
        return dict(content["note"])


def unfinished_name(name: str) -> str:
    """The name that a file has while ``write_whole`` writes it."""
    return f"{name}{UNFINISHED}"


def write_whole(path: Path, parts: list[Any]) -> None:
    """Make or replace a file, on the disk when this returns: all of it or nothing."""
    unfinished = path.with_name(unfinished_name(path.name))
    _files.write_whole(path, lambda file: file.writelines(parts), sync=True, unfinished=unfinished)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all bytes at a place of a file."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
