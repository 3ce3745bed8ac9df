"""Identify files, to find out whether cached data still belong to the file at a path."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.archive_paths import check_version, find_member

_NUMBERS = struct.Struct("<5Q")
_HALVES = struct.Struct("<2Q")
_MASK = (1 << 64) - 1
_NO_DEVICE = _MASK  # the device's number in the state of a store's object
_OF_OBJECT = _NO_DEVICE.to_bytes(8, "little")
# The first number is longer than a clock tick of Linux's file systems.  The second number is longer than the
# time steps of other file systems, which are recognised by the trailing zeros of their times.
_STEP_NS, _COARSE_STEP_NS = 20_000_000, 2_100_000_000


class FileIdentity(NamedTuple):
    """The state of a file at one time.

    ``digest`` is a 16-byte hash of ``state`` and of the ``tag`` that was passed to ``identify``.  If
    ``is_settled`` is True, any further change of the file gives another state.  If it is False, a further
    change may give an equal state, because file systems store times in steps.
    """

    digest: bytes
    state: bytes
    path: str
    is_settled: bool

    def note(self) -> bytes:
        """Return the state and the path as bytes, with which ``is_stale`` checks if the file has changed."""
        return self.state + os.fsencode(os.path.abspath(self.path))


def identify(path: str, tag: bytes) -> FileIdentity:
    """Return the current state of a file: device, inode, size, time of modification and time of change.

    If the result's ``is_settled`` is True, every later change or replacement of the file changes one of these
    values, because a program cannot set the time of change.  ``tag``, at most 64 bytes, describes everything
    else that the cached data depend on, for example how the file is decoded.
    """
    now = time.time_ns()
    state, changed = _state_at(path)
    step = _STEP_NS if changed % 1_000_000 else _COARSE_STEP_NS
    digest = hashlib.blake2b(state, digest_size=16, key=tag).digest()
    return FileIdentity(digest, state, path, now - changed > step)


def states_of_objects(versions: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the states of a store's objects, uint64 (N, 5), as ``identify_object`` computes them.  Each
    version in ``versions`` is 16 bytes."""
    states = np.zeros((len(versions), 5), np.uint64)
    states[:, 0] = _NO_DEVICE
    states[:, 3:] = np.frombuffer(b"".join(versions), "<u8").reshape(-1, 2)
    return states


def identify_object(version: bytes, path: str, tag: bytes) -> FileIdentity:
    """Return the state of a store's object.  ``version``, 16 bytes, is its version in the listing."""
    state = _NUMBERS.pack(_NO_DEVICE, 0, 0, *_HALVES.unpack(version))
    return FileIdentity(hashlib.blake2b(state, digest_size=16, key=tag).digest(), state, path, True)


def is_stale(note: bytes) -> bool:
    """Return whether the file that a ``note`` describes is gone or has changed.  The result for a store's
    object is always False, because a request to the store would be needed."""
    if note.startswith(_OF_OBJECT):
        return False
    try:
        return _state_at(os.fsdecode(note[_NUMBERS.size :]))[0] != note[: _NUMBERS.size]
    except (OSError, ValueError):
        return True


def _state_at(path: str) -> tuple[bytes, int]:
    """Return the state of the file at a path, and its time of change in nanoseconds.

    Each member of an archive has a state of its own, which changes with the archive."""
    member = find_member(path)
    status = os.stat(path if member is None else member.archive)
    if member is None:
        return state_of(status), status.st_ctime_ns
    check_version(member, status, path)
    numbers = list(_NUMBERS.unpack(state_of(status)))
    numbers[1] ^= _turned(member.nbytes, 32)
    numbers[2] ^= _turned(member.offset, 24)
    return _NUMBERS.pack(*numbers), status.st_ctime_ns


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def state_of(status: os.stat_result) -> bytes:
    times = (status.st_mtime_ns & _MASK, status.st_ctime_ns & _MASK)  # times before 1970 are negative
    return _NUMBERS.pack(status.st_dev, status.st_ino, status.st_size, *times)


# The local file systems, which store a reliable time of each change of a folder, and the resolution of times.

# Network file systems (nfs, cifs, 9p, virtiofs, lustre, …) may show old times, or times of the server's
# clock.  FUSE file systems may not store times at all.
_LOCAL = frozenset(
    (
        "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "tmpfs",
        "ramfs", "overlay", "squashfs", "iso9660", "erofs",
    )
)  # fmt: skip
_MOUNTS = "/proc/self/mountinfo"
# FAT has the coarsest resolution, two seconds.  The kernel's clock for files may be up to 10 ms late.
_RESOLUTION_NS = 2_100_000_000


class FileSystems:
    """Knows the types of the mounted file systems.  They are read once, from ``/proc/self/mountinfo``."""

    def __init__(self, mounts: str | None = None) -> None:
        self._of_device: dict[int, str] = {}
        self._of_folder: dict[str, str] = {}
        for line in (_read_mounts() if mounts is None else mounts).splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(" "), after.split(" ")[0]
            if len(fields) < 5 or not kind:
                continue
            major, _, minor = fields[2].partition(":")
            if major.isdecimal() and minor.isdecimal():
                self._of_device[os.makedev(int(major), int(minor))] = kind
            # A second mount on a folder hides the first mount, and follows it in the list.
            # The kernel writes blanks and other special characters as a backslash and three octal digits.
            folder = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            self._of_folder[folder] = kind

    def kind(self, device: int, folder: str) -> str | None:
        """Return the type of a folder's file system, such as ``"ext4"``; None if unknown.

        ``device`` is the folder's ``st_dev``, which identifies most file systems.  If the device is not in
        the list of mounts, the file system is found by the folder's path.  For example, the device numbers of
        btrfs subvolumes are not listed.
        """
        kind = self._of_device.get(device)
        if kind is None and self._of_folder:
            kind = self._kind_at(os.path.realpath(folder))
            if kind is not None:
                self._of_device[device] = kind
        return kind

    def is_local(self, device: int, folder: str) -> bool:
        return self.kind(device, folder) in _LOCAL

    def is_remote(self, device: int, folder: str) -> bool:
        """Return whether the file system is known to be remote.  Each access may then take long."""
        return self.kind(device, folder) not in (None, *_LOCAL)

    def _kind_at(self, folder: str) -> str | None:
        while folder not in self._of_folder:
            above = os.path.dirname(folder)
            if above == folder:
                return None
            folder = above
        return self._of_folder[folder]


def is_settled(changed: int, now: int) -> bool:
    """Return whether a change after ``now`` would get another time than ``changed``.  All in nanoseconds."""
    return now - changed > _RESOLUTION_NS


def _read_mounts() -> str:
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:  # not Linux, or a sandbox without /proc
        return ""
