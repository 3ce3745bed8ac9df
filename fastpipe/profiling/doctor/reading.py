"""How fast files of a folder are read: from memory, and past it; nothing is written."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

__all__ = ["Rate", "Sample", "read_many", "sample"]

_LOOK_S = 0.4
_MOST_FILES = 2000
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BLOCK = 1 << 20
_JPEGS = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Sample:
    """Some files of a folder.

    Attributes:
        files: paths, from all over what was walked.
        nbytes: of each.
        walked: how many were seen.
        is_all: whether these are all that there are.
    """

    files: tuple[str, ...]
    nbytes: tuple[int, ...]
    walked: int
    is_all: bool

    @property
    def photos(self) -> tuple[str, ...]:
        """Those whose names are JPEGs'."""
        return tuple(path for path in self.files if path.lower().endswith(_JPEGS))


@dataclass(frozen=True)
class Rate:
    """What was read.

    Attributes:
        files: how many.
        nbytes: of them.
        seconds: that it took.
        missed: of the bytes, the share that was not in memory before; None where the system does not say.
    """

    files: int
    nbytes: int
    seconds: float
    missed: float | None

    @property
    def files_s(self) -> float:
        """Files a second."""
        return self.files / self.seconds if self.seconds > 0 else 0.0

    @property
    def nbytes_s(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


def sample(folder: str) -> Sample:
    """Some files of a folder, or the one that it is, found in a fraction of a second."""
    if not os.path.isdir(folder):
        return Sample((folder,), (os.stat(folder).st_size,), 1, True)
    found: list[tuple[str, int]] = []
    is_all = _collect(folder, found, time.monotonic() + _LOOK_S)
    found.sort()
    step = max(1, len(found) // _MOST_FILES)
    some = found[::step][:_MOST_FILES]
    return Sample(
        tuple(path for path, _ in some), tuple(size for _, size in some), len(found), is_all and step == 1
    )


def _collect(folder: str, found: list[tuple[str, int]], until: float) -> bool:
    """Add the files of a folder and of all below to those that were found; whether that was all in time."""
    below = [folder]
    while below:
        try:
            entries = os.scandir(below.pop())
        except OSError:
            continue
        with entries:
            for entry in entries:
                if time.monotonic() > until:
                    return False
                with contextlib.suppress(OSError):  # it is gone, or a link to nothing
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
                    elif entry.is_file() and os.access(entry.path, os.R_OK):
                        found.append((entry.path, entry.stat().st_size))
    return True


def read_many(files: Sequence[str], threads: int, *, seconds: float, nbytes: int, past_cache: bool) -> Rate:
    """Read files, each whole, until time or bytes are spent.

    Args:
        files: each is read once at most.
        threads: at a time.
        seconds, nbytes: the most to spend.
        past_cache: have the system forget each file's pages first, as far as it lets go of them.
    """
    lock, left = threading.Lock(), iter(files)
    count = total = missed = 0
    knows = True
    begun = time.perf_counter()
    spent = 0.0  # in forgetting and asking, which is no reading; of all threads together

    def work() -> None:
        nonlocal count, total, missed, knows, spent
        while True:
            with lock:
                path = next(left, None)
                if path is None or time.perf_counter() - begun > seconds or total >= nbytes:
                    return
            try:
                descriptor = os.open(path, _FLAGS)
            except OSError:  # it went away
                continue
            try:
                before = time.perf_counter()
                if past_cache:
                    _forget(descriptor)
                is_cached = _is_cached(descriptor)
                aside = time.perf_counter() - before
                length = _read(descriptor, nbytes, begun + seconds)
            finally:
                os.close(descriptor)
            with lock:
                count += 1
                total += length
                spent += aside
                knows = knows and is_cached is not None
                missed += length if is_cached is False else 0

    with ThreadPoolExecutor(threads, thread_name_prefix="fastpipe-doctor") as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    passed = max(time.perf_counter() - begun - spent / threads, 1e-9)
    return Rate(count, total, passed, missed / total if knows and total else None)


def _read(descriptor: int, nbytes: int, until: float) -> int:
    length = 0
    while length < nbytes and (block := os.read(descriptor, _BLOCK)):
        length += len(block)
        if time.perf_counter() > until:
            break
    return length


def _forget(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_cached(descriptor: int) -> bool | None:
    """Whether a file's first byte is in memory; None where the system does not say."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system without this
        return None
    return True
