"""Members of archives: files that lie, one after the other, in a tar or zip file, and are read from there.

The path of a member says where its bytes are: ``ARCHIVE/@OFFSET+NBYTES.VERSION/NAME``.  It stands wherever
the path of an image may stand.  No other file has such a path, because nothing can lie in a file.  If
``ARCHIVE`` is a folder, the path is an ordinary one.  The native engine has the same rules
(``native/files.h``).
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from typing import NamedTuple

# The numbers are written without a sign, and are smaller than 10**18, so each fits into an int64.
_PLACE = re.compile(r"/@(\d{1,18})\+(\d{1,18})(?::(\d{1,18}))?\.([0-9a-f]{8})/", re.ASCII)
_MASK = (1 << 64) - 1


class ChangedArchiveError(OSError):
    """An archive has changed since it was listed, so its members may be elsewhere."""


class Member(NamedTuple):
    """The place of a file in an archive.

    Attributes:
        archive: the path of the archive.
        offset: the first byte in the archive.
        nbytes: the number of bytes in the archive.
        size: the number of bytes after raw deflate is undone; None if the bytes are stored as they are.
        version: the archive's ``version_of`` when the archive was listed.
    """

    archive: str
    offset: int
    nbytes: int
    size: int | None
    version: int


def place_of(offset: int, nbytes: int, size: int | None, version: int) -> str:
    """Return the part of a member's path that says where its bytes are.

    >>> place_of(512, 4096, None, 1)
    '512+4096.00000001'
    """
    packed = "" if size is None else f":{size}"
    return f"{offset}+{nbytes}{packed}.{version:08x}"


def find_member(path: str) -> Member | None:
    """Return the place that a path names; None if it is the path of an ordinary file.

    >>> find_member("train.tar/@512+4096.0123abcd/cat/1.jpg")
    Member(archive='train.tar', offset=512, nbytes=4096, size=None, version=19114957)
    >>> find_member("train/cat/1.jpg") is None
    True
    """
    member = split_member(path)
    return None if member is None or os.path.isdir(member.archive) else member


def split_member(path: str) -> Member | None:
    """Return the place that a path or key names, as ``find_member``, without a look at the file system."""
    found = _PLACE.search(path) if "/@" in path else None
    if found is None or not found.start():
        return None
    offset, nbytes, size, version = found.groups()
    place = int(offset), int(nbytes), None if size is None else int(size)
    return Member(path[: found.start()], *place, int(version, 16))


def version_of(status: os.stat_result) -> int:
    """Return a number, 32 bits, that nearly always changes when a file is written again."""
    mixed = (status.st_size * 0x9E3779B97F4A7C15 + status.st_mtime_ns) & _MASK
    return (mixed * 0xBF58476D1CE4E5B9 & _MASK) >> 32


def check_version(member: Member, status: os.stat_result, path: str) -> None:
    """Raise a ChangedArchiveError (``errno.ESTALE``) if the archive has changed since it was listed."""
    if version_of(status) != member.version:
        raise changed_archive(path)


def changed_archive(path: str) -> ChangedArchiveError:
    text = "the archive has changed since it was listed: make the dataset anew"
    return ChangedArchiveError(errno.ESTALE, text, path)


def read_member(descriptor: int, member: Member, path: str) -> bytes:
    """Return the bytes of a member of the archive that is open as ``descriptor``.

    Raises:
        ChangedArchiveError: the archive has changed since it was listed.
        OSError: the archive does not have these bytes.
    """
    status = os.fstat(descriptor)
    check_version(member, status, path)
    blocks, at, end = [], member.offset, min(member.offset + member.nbytes, status.st_size)
    while at < end and (block := os.pread(descriptor, end - at, at)):
        blocks.append(block)
        at += len(block)
    stored = b"".join(blocks)
    if len(stored) != member.nbytes:
        raise OSError(errno.EIO, f"the archive ends after {len(stored)} of {member.nbytes} bytes", path)
    return stored if member.size is None else _inflated(stored, member.size, path)


def _inflated(stored: bytes, size: int, path: str) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflater.decompress(stored, size + 1)
    except zlib.error as error:
        raise OSError(errno.EIO, f"damaged in the archive: {error}", path) from error
    if len(data) != size or not inflater.eof:
        raise OSError(errno.EIO, f"damaged in the archive: it is not inflated to {size} bytes", path)
    return data
