"""Judges all images of a folder, as ``ImageFolder`` finds them or lying in the folder itself, in threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from fastpipe.console import Progress, in_time
from fastpipe.core.class_folders import IMG_EXTENSIONS, find_classes, scan_folder
from fastpipe.core.pool import Job, ThreadPool
from fastpipe.core.sample_tables import SampleTable
from fastpipe.core.text import counted, in_bytes
from fastpipe.files.scanning.findings import Findings
from fastpipe.files.scanning.judging import Judge

__all__ = ["Ticker", "in_threads", "scan_images", "without_images"]

_TELL_EVERY_S = 0.2
_NAMED_AT_MOST = 5
_FLAT = [""]  # in the place of classes: images lie in the folder itself


def scan_images(root: str, threads: int, progress: Progress, judge: Judge | None = None) -> Findings:
    """Judge every image.

    Args:
        root: a folder that holds one folder for each class, or images and no folders.
        threads: how many decode.
        progress: shows how far it is.
        judge: decides.

    Raises:
        FileNotFoundError: there is no such folder, or neither a class folder nor an image in it.
        OSError: files cannot be read for a reason that is the machine's.
    """
    judge = judge or Judge()
    progress.now(f"listing {root}")
    classes, table, notes = _list(root)
    found = Findings(root, "images", total=len(table), notes=notes)
    if classes != _FLAT:
        counts = np.bincount(table.targets_array(), minlength=len(classes)).tolist()
        found.classes = dict(zip(classes, counts, strict=True))
    empty = [name for name, count in found.classes.items() if not count]
    if empty:
        found.notes.append(without_images("an image", empty))
    ticker = Ticker(progress, found)

    def judge_one(number: int) -> None:
        path = table.path(number)
        verdict = judge.judge(number, path, classes[table.target(number)])
        found.add(verdict, verdict.nbytes or 0)
        ticker.tell()

    with judge.hearing_warnings():
        in_threads(judge_one, len(table), threads)
    found.seconds = ticker.seconds()
    found.sort()
    return found


def _list(root: str) -> tuple[list[str], SampleTable, list[str]]:
    """A folder's classes and images, or the images of one without any class that has some; and notes."""
    with os.scandir(root) as entries:
        beside = sum(one.name.lower().endswith(IMG_EXTENSIONS) and not one.is_dir() for one in entries)
    try:
        classes, numbers = find_classes(root)
    except FileNotFoundError:
        if not beside:
            raise
        classes, numbers = _FLAT, {"": 0}
    table = scan_folder(root, numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
    if beside and not len(table):  # folders, and no class
        classes, table = _FLAT, scan_folder(root, {"": 0}, extensions=IMG_EXTENSIONS)
    notes = []
    if classes == _FLAT:
        notes.append("no class folders, so ImageFolder takes none; FastImageFolder.from_samples does")
    elif beside:
        some = f"{counted(beside, 'image')} beside the class folders"
        notes.append(f"{some}, where ImageFolder does not look: not judged")
    return classes, table, notes


def without_images(text: str, classes: Sequence[str]) -> str:
    """A note about classes that the replaced loader does not take.

    Args:
        text: what is said of them.
        classes: their names.
    """
    some = ", ".join(map(repr, classes[:_NAMED_AT_MOST])) + (", …" if len(classes) > _NAMED_AT_MOST else "")
    return f"{counted(len(classes), 'class folder')} without {text}, for which ImageFolder raises: {some}"


class Ticker:
    """The moving line of a scan.

    Args:
        progress: to show it.
        found: what is counted.
    """

    def __init__(self, progress: Progress, found: Findings) -> None:
        self._progress, self._found = progress, found
        self._begun = self._told = time.monotonic()
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun

    def tell(self) -> None:
        """Show how far it is, now and then; from any thread."""
        now = time.monotonic()
        if now - self._told < _TELL_EVERY_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._told = now
            found, passed = self._found, max(now - self._begun, 1e-9)
            left = in_time((found.total - found.count) * passed / max(found.count, 1))
            self._progress.now(
                f"{found.count:,} of {found.total:,} {found.what}, {in_bytes(found.nbytes / passed)}/s, "
                f"{found.bad_count:,} bad, {left} left"
            )
        finally:
            self._lock.release()


def in_threads(task: Callable[[int], None], count: int, threads: int) -> None:
    """Run numbered tasks in threads, of which none is left afterwards, whatever happens."""
    pool = ThreadPool(max(1, min(threads, count)), name="fastpipe-judge")
    job: Job | None = None
    try:
        job = pool.submit(task, count)
        job.wait()
    finally:
        if job is not None and not job.done():
            job.cancel()
        pool.close()
