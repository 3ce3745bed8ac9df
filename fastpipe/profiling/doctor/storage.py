"""How a folder's files are reached, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

from fastpipe.core.machine import available_cpus
from fastpipe.core.text import counted, in_bytes
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, warning
from fastpipe.profiling.doctor.reading import Rate, Sample, read_many, sample
from fastpipe.profiling.mounts import FileSystem, file_system

__all__ = ["check", "disk_against_decoders", "of_kind"]

_TOPIC = "storage"
_THREADS = 16
_PHOTOS = 512  # that decoders are measured with, at most
_SECONDS, _NBYTES = 0.4, 64 << 20  # of each measurement
_LARGE = 4 << 20  # bytes of a file that shows how fast bytes come in order
_NOT_FORGOTTEN = 0.5  # of the bytes: with fewer the disk was not measured


def check(examined: Examined) -> Iterator[Finding]:
    """Measure the folder."""
    if not examined.folder:
        return
    system = file_system(examined.folder)
    yield of_kind(examined.name, system)
    found = sample(examined.folder)
    if not found.files:
        yield warning(_TOPIC, "there is no file to measure", "name a folder with data")
        return
    examined.photos = found.photos[:: max(1, len(found.photos) // _PHOTOS)][:_PHOTOS]
    mean = sum(found.nbytes) / len(found.files)
    count = "1 file" if found.walked == 1 else f"{found.walked:,} files"
    if not found.is_all:
        count = f"some of the files, {found.walked:,} of them seen"
    yield ok(_TOPIC, f"looked at {count}: {in_bytes(mean)} on average")
    yield from _sequential(found)
    yield from _small(found, examined)


def of_kind(name: str, system: FileSystem) -> Finding:
    """What a file system's kind means for a training."""
    text = f"{name} is on {system.name}"
    if system.is_fuse:
        return warning(
            _TOPIC, f"{text}: a program answers for it, with several requests a file where it asks a bucket",
            "have fastpipe read the bucket itself: FastImageFolder('s3://…', stage=Stage('/local/disk')), or "
            "FastImageFolder(FOLDER, stage=…), which keeps local copies",
        )  # fmt: skip
    if system.is_remote:
        return warning(
            _TOPIC, f"{text}: each file is fetched over a network, or from outside of this machine",
            "FastImageFolder(FOLDER, stage=Stage('/local/disk')), or copy it to a local disk once",
        )  # fmt: skip
    return ok(_TOPIC, text)


def _sequential(found: Sample) -> Iterator[Finding]:
    nbytes, path = max(zip(found.nbytes, found.files, strict=True))
    if nbytes < _LARGE:
        return
    cold = read_many([path], 1, seconds=_SECONDS, nbytes=_NBYTES, past_cache=True)
    warm = read_many([path], 1, seconds=_SECONDS, nbytes=_NBYTES, past_cache=False)
    yield ok(
        _TOPIC, f"one file in order: {_past(cold)} {in_bytes(cold.nbytes_s)}/s, from memory "
        f"{in_bytes(warm.nbytes_s)}/s",
    )  # fmt: skip


def _small(found: Sample, examined: Examined) -> Iterator[Finding]:
    files = found.files
    if len(files) < 2:
        return
    half = len(files) // 2  # threads read other files than one did, whose neighbours may have come along
    rates: dict[tuple[bool, int], Rate] = {}
    for threads, some in ((1, files[:half]), (_THREADS, files[half:])):
        rates[True, threads] = read_many(some, threads, seconds=_SECONDS, nbytes=_NBYTES, past_cache=True)
    for threads, some in ((1, files[:half]), (_THREADS, files[half:])):
        some = some[: rates[True, threads].files]  # which are in memory now
        rates[False, threads] = read_many(some, threads, seconds=_SECONDS, nbytes=_NBYTES, past_cache=False)
    for is_cold in (True, False):
        one, many = rates[is_cold, 1], rates[is_cold, _THREADS]
        where = _past(one) if is_cold else "from memory"
        yield ok(
            _TOPIC, f"whole files, {where}: 1 thread {_rate(one)}, {_THREADS} threads {_rate(many)}"
        )  # fmt: skip
    cold = max((rates[True, threads] for threads in (1, _THREADS)), key=lambda rate: rate.files_s)
    if examined.photos and cold.missed is not None and cold.missed > _NOT_FORGOTTEN:
        examined.disk_files_s = cold.files_s


def disk_against_decoders(examined: Examined) -> Iterator[Finding]:
    """Whether the disk keeps up with the decoders, where both were measured."""
    if examined.disk_files_s is None or examined.images_s is None:
        return
    cores = available_cpus()
    decoded = examined.images_s * cores
    disk = f"{examined.disk_files_s:,.0f} files/s"
    text = f"the disk gives {disk}, and {counted(cores, 'core')} can decode {decoded:,.0f} images/s"
    if examined.disk_files_s < decoded:
        yield warning(
            _TOPIC, f"{text}: until files are in memory, a training waits for the disk",
            "FastImageFolder(…, cache='ram') or cache='disk', a stage on a faster disk, or more memory for "
            "the system to keep files in",
        )  # fmt: skip
    else:
        yield ok(_TOPIC, f"{text}: decoding is what takes the time")


def _past(rate: Rate) -> str:
    if rate.missed is None:
        return "with the system told to forget them"
    if rate.missed < _NOT_FORGOTTEN:
        return f"which the system would not forget ({1 - rate.missed:.0%} were in memory all the same)"
    return "from the disk"


def _rate(rate: Rate) -> str:
    return f"{rate.files_s:,.0f} files/s, {in_bytes(rate.nbytes_s)}/s"
