"""Check how fast files are read from memory and from the disk, and check fastpipe's cache folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastpipe.core.private_folder import user_cache_folder
from fastpipe.core.text import in_bytes
from fastpipe.tools.doctor.report import Examined, Finding, ok, warning
from fastpipe.tools.folders import FileSystem, file_system

_TOPIC, _CACHE = "storage", "cache folder"
_THREADS = 16
_PHOTOS = 512  # most photographs to measure the decoders with
_SECONDS, _NBYTES = 0.4, 64 << 20  # limits of each measurement
_LARGE = 4 << 20  # bytes: smaller files do not show the sequential speed
_NOT_FORGOTTEN = 0.5  # fraction of the bytes: if less was evicted from memory, the disk was not measured
_LITTLE = 1 << 30
_REMEDY = "export XDG_CACHE_HOME=/a/folder/on/a/local/disk"

_LOOK_S = 0.4
_MOST_FILES = 2000
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BLOCK = 1 << 20
_JPEGS = (".jpg", ".jpeg")


def check(examined: Examined) -> Iterator[Finding]:
    if not examined.folder:
        return
    yield _kind(examined.name, file_system(examined.folder))
    found = _sample(examined.folder)
    if not found.files:
        yield warning(_TOPIC, "there is no file to measure", "name a folder with data")
        return
    examined.photos = found.photos[:: max(1, len(found.photos) // _PHOTOS)][:_PHOTOS]
    mean = sum(found.nbytes) / len(found.files)
    count = "1 file" if found.walked == 1 else f"{found.walked:,} files"
    if not found.is_all:
        count = f"some of the files, {found.walked:,} of them seen"
    yield ok(_TOPIC, f"examined {count}: {in_bytes(mean)} on average")
    yield from _sequential(found)
    yield from _small(found)


def _kind(name: str, system: FileSystem) -> Finding:
    text = f"{name} is on {system.name}"
    if system.is_fuse:
        return warning(
            _TOPIC,
            f"{text}: a user-space program serves it, with several requests for each file of a bucket",
            "have fastpipe read the bucket itself: FastImageFolder('s3://…', stage=Stage('/local/disk')), or "
            "FastImageFolder(FOLDER, stage=…), which keeps local copies",
        )  # fmt: skip
    if system.is_remote:
        return warning(
            _TOPIC, f"{text}: each file is fetched over a network, or from outside this machine",
            "FastImageFolder(FOLDER, stage=Stage('/local/disk')), or copy it to a local disk once",
        )  # fmt: skip
    return ok(_TOPIC, text)


def _sequential(found: Sample) -> Iterator[Finding]:
    nbytes, path = max(zip(found.nbytes, found.files, strict=True))
    if nbytes < _LARGE:
        return
    cold, warm = (_read_many([path], 1, past_cache=is_cold) for is_cold in (True, False))
    speeds = f"{in_bytes(cold.nbytes_s)}/s, from memory {in_bytes(warm.nbytes_s)}/s"
    yield ok(_TOPIC, f"one file in order: {_past(cold)} {speeds}")


def _small(found: Sample) -> Iterator[Finding]:
    files = found.files
    if len(files) < 2:
        return
    half = len(files) // 2  # different files, because reading a file may load its neighbours, too
    halves = ((1, files[:half]), (_THREADS, files[half:]))
    cold = [_read_many(some, threads, past_cache=True) for threads, some in halves]
    warm = [
        _read_many(some[: rate.files], threads, past_cache=False)  # these files are in memory now
        for (threads, some), rate in zip(halves, cold, strict=True)
    ]
    for where, (one, many) in ((_past(cold[0]), cold), ("from memory", warm)):
        yield ok(_TOPIC, f"whole files, {where}: 1 thread {one}, {_THREADS} threads {many}")


def _past(rate: Rate) -> str:
    if rate.missed is None:
        return "after dropping them from the page cache"
    if rate.missed < _NOT_FORGOTTEN:
        return f"which could not be dropped from the page cache ({1 - rate.missed:.0%} stayed in memory)"
    return "from the disk"


def check_cache(examined: Examined) -> Iterator[Finding]:
    folder = user_cache_folder()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    system = file_system(str(there))
    text = f"{folder} is on {system.name}, with {in_bytes(system.free)} free"
    if folder.exists() and not folder.is_dir():
        yield warning(_CACHE, f"{folder} is not a folder: nothing is cached", _REMEDY)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield warning(_CACHE, f"{text}, and cannot be written to: folders are listed at each start", _REMEDY)
    elif system.is_remote:
        yield warning(_CACHE, f"{text}: caches of decoded images would be read over a network", _REMEDY)
    elif system.free < _LITTLE:
        yield warning(_CACHE, f"{text}: Cache('disk') has no room", f"free some space, or {_REMEDY}")
    else:
        yield ok(_CACHE, text)


@dataclass(frozen=True)
class Sample:
    files: tuple[str, ...]
    nbytes: tuple[int, ...]
    walked: int
    is_all: bool

    @property
    def photos(self) -> tuple[str, ...]:
        return tuple(path for path in self.files if path.lower().endswith(_JPEGS))


@dataclass(frozen=True)
class Rate:
    files: int
    nbytes: int
    seconds: float
    missed: float | None

    @property
    def files_s(self) -> float:
        return self.files / self.seconds

    @property
    def nbytes_s(self) -> float:
        return self.nbytes / self.seconds

    def __str__(self) -> str:
        return f"{self.files_s:,.0f} files/s, {in_bytes(self.nbytes_s)}/s"


def _sample(folder: str) -> Sample:
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
                with contextlib.suppress(OSError):  # the file was removed, or a link is broken
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
                    elif entry.is_file() and os.access(entry.path, os.R_OK):
                        found.append((entry.path, entry.stat().st_size))
    return True


def _read_many(
    files: Sequence[str], threads: int, *, past_cache: bool, seconds: float = _SECONDS, nbytes: int = _NBYTES
) -> Rate:
    """Read each file at most once, for a limited time.

    With ``past_cache``, each file is first removed from the page cache in memory.
    """
    begun, left = time.perf_counter(), nbytes

    def read(path: str) -> tuple[int, float, bool | None] | None:
        nonlocal left
        if time.perf_counter() > begun + seconds or left <= 0:
            return None
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError:  # the file was removed
            return None
        try:
            before, length = time.perf_counter(), 0
            if past_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            is_cached = _is_cached(descriptor)
            aside = time.perf_counter() - before
            while length < nbytes and (block := os.read(descriptor, _BLOCK)):
                length += len(block)
                if time.perf_counter() > begun + seconds:
                    break
        finally:
            os.close(descriptor)
        left -= length
        return length, aside, is_cached

    with ThreadPoolExecutor(threads, thread_name_prefix="fastpipe-doctor") as pool:
        done = [one for one in pool.map(read, files) if one is not None]
    total = sum(length for length, _, _ in done)
    aside = sum(seconds for _, seconds, _ in done) / threads  # excludes the time of evicting and checking
    knows = all(is_cached is not None for _, _, is_cached in done)
    missed = sum(length for length, _, is_cached in done if is_cached is False)
    passed = max(time.perf_counter() - begun - aside, 1e-9)
    return Rate(len(done), total, passed, missed / total if knows and total else None)


def _is_cached(descriptor: int) -> bool | None:
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support this
        return None
    return True
