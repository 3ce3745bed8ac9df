"""Judges all images of a folder, as ``ImageFolder`` finds them, in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fastpipe._sizes import in_bytes
from fastpipe.bench.progress import Progress
from fastpipe.engine.pool import Job, ThreadPool
from fastpipe.files.pace import in_time
from fastpipe.files.scanning.findings import Findings
from fastpipe.files.scanning.judging import Judge
from fastpipe.index.folder import IMG_EXTENSIONS, find_classes, scan_folder

__all__ = ["Ticker", "in_threads", "scan_images"]

_TELL_EVERY_S = 0.2
_NAMED_AT_MOST = 5


def scan_images(root: str, threads: int, progress: Progress, judge: Judge | None = None) -> Findings:
    """Judge every image.

    Args:
        root: a folder that holds one folder for each class.
        threads: how many decode.
        progress: shows how far it is.
        judge: decides.

    Raises:
        FileNotFoundError: there is no such folder, or no class folder in it.
        OSError: files cannot be read for a reason that is the machine's.
    """
    judge = judge or Judge()
    progress.now(f"listing {root}")
    classes, numbers = find_classes(root)
    table = scan_folder(root, numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
    found = Findings(root, "images", total=len(table))
    filled = set(table.targets_array().tolist())
    empty = [name for name in classes if numbers[name] not in filled]
    if empty:
        some = ", ".join(map(repr, empty[:_NAMED_AT_MOST])) + (", …" if len(empty) > _NAMED_AT_MOST else "")
        found.notes.append(
            f"{len(empty):,} class folders without an image, for which ImageFolder raises: {some}"
        )
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
            bad = len(found.bad)
            self._progress.now(
                f"{found.count:,} of {found.total:,} {found.what}, {in_bytes(found.nbytes / passed)}/s, "
                f"{bad:,} bad, {left} left"
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
