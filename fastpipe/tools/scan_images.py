"""Check all images in class folders, or directly in a folder, by decoding them."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fastpipe.console import Progress, in_time
from fastpipe.core.bad_samples import Item, bad_sample_error, means_damage
from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, find_classes, scan_folder
from fastpipe.core.files import read_file
from fastpipe.core.pool import Job, ThreadPool
from fastpipe.core.sample_tables import SampleTable
from fastpipe.core.text import counted, in_bytes, printable
from fastpipe.core.types import Box
from fastpipe.errors import MissingDependencyError
from fastpipe.images.reader import ImageReader
from fastpipe.options import Decode

_TELL_EVERY_S = 0.2
_NAMED_AT_MOST = 5
_FLAT = [""]  # the classes if the images are directly in the folder

_ORIENTATION = 0x0112
_HEAD = 1 << 16  # EXIF data are within the first bytes
_EXIF_WORDS = (b"Exif\0\0", b"eXIf", b"EXIF", b"rientation")
_ZEROS = bytes(4096)  # a page of zeros at the end: data that never reached the disk
_JPEG_SCAN = b"\xff\xda"
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_BEGINS: dict[str, bytes | tuple[bytes, ...]] = {
    "JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": (b"GIF87a", b"GIF89a"), "BMP": b"BM",
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
}  # fmt: skip
_NETPBM = tuple(b"P%d" % number for number in range(1, 7))
_EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg"), "PNG": (".png",), "BMP": (".bmp",), "TIFF": (".tif", ".tiff"),
    "WebP": (".webp",), "Netpbm": (".ppm", ".pgm"), "GIF": (".gif",),
}  # fmt: skip

# Device, inode, size and modification time.  The time of the last status change is not used: it also changes
# if another name of the file is added or removed.
Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a file.

    ``state`` is "good" if the file can be decoded, "corrupt" if its content is invalid, and "unreadable" if
    reading fails for another reason.
    """

    path: str
    nbytes: int | None = None
    state: Literal["good", "corrupt", "unreadable"] = "good"
    reason: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()
    kind: str = ""
    identity: Identity | None = None


def identity(path: str) -> Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def check_is_the_same(path: str, verdict: Verdict) -> None:
    if verdict.identity is None or identity(path) != verdict.identity:
        raise OSError("it has changed since it was examined: scan it again")


def group_of(reason: str) -> str:
    return re.sub(r"\d+", "…", reason)


@dataclass
class Findings:
    root: str
    what: str
    progress: Progress = field(repr=False)
    total: int = 0
    count: int = 0
    nbytes: int = 0
    bad_count: int = 0
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    _begun: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, verdict: Verdict, nbytes: int) -> None:
        with self._lock:
            self.count += 1
            self.nbytes += nbytes
            self.bad_count += verdict.state != "good"
            if verdict.state != "good" or verdict.notes:
                self.verdicts.append(verdict)
            passed = time.monotonic() - self._begun
            if passed < self.seconds + _TELL_EVERY_S:
                return
            self.seconds = passed
            left = in_time(max(0.0, (self.total - self.count) * passed / self.count))
            self.progress.now(
                f"{self.count:,} of {self.total:,} {self.what}, {in_bytes(self.nbytes / passed)}/s, "
                f"{self.bad_count:,} bad, {left} left"
            )

    def finish(self) -> None:
        self.seconds = time.monotonic() - self._begun
        self.verdicts.sort(key=lambda one: one.path)

    @property
    def corrupt(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.state == "corrupt"]

    @property
    def unreadable(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.state == "unreadable"]

    @property
    def noted(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.state == "good"]

    def inside(self, one: Verdict) -> str:
        return os.path.relpath(one.path, self.root) if self.what == "images" else one.path


def in_threads(task: Callable[[int], None], count: int, threads: int) -> None:
    pool = ThreadPool(max(1, min(threads, count)), name="fastpipe-judge")
    job: Job | None = None
    try:
        job = pool.submit(task, count)
        job.wait()
    finally:
        if job is not None and not job.done():
            job.cancel()
        pool.close()


def scan_images(root: str, threads: int, progress: Progress, judge: Judge | None = None) -> Findings:
    judge = judge or Judge()
    progress.now(f"listing {root}")
    classes, table, notes = _list(root)
    found = Findings(root, "images", progress, total=len(table), notes=notes)
    if classes != _FLAT:
        counts = np.bincount(table.targets_array(), minlength=len(classes)).tolist()
        found.classes = dict(zip(classes, counts, strict=True))
    empty = [name for name, count in found.classes.items() if not count]
    if empty:
        found.notes.append(without_images("an image", empty))

    def judge_one(number: int) -> None:
        verdict = judge.judge(number, table.path(number), classes[table.target(number)])
        found.add(verdict, verdict.nbytes or 0)

    with judge.warnings_as_notes():
        in_threads(judge_one, len(table), threads)
    found.finish()
    return found


def _list(root: str) -> tuple[list[str], SampleTable, list[str]]:
    with os.scandir(root) as entries:
        beside = sum(
            one.name.lower().endswith(TORCHVISION_EXTENSIONS) and not one.is_dir() for one in entries
        )
    try:
        classes, numbers = find_classes(root)
    except FileNotFoundError:
        if not beside:
            raise
        classes, numbers = _FLAT, {"": 0}
    ignored: Counter[str] = Counter()  # by extension

    def is_image(path: str) -> bool:
        name = os.path.basename(path).lower()
        found = name.endswith(TORCHVISION_EXTENSIONS)
        ignored[os.path.splitext(name)[1] or name] += not found
        return found

    table = scan_folder(root, numbers, is_valid_file=is_image, allow_empty=True)
    if beside and not len(table):  # the folders contain no images
        ignored.clear()
        classes, table = _FLAT, scan_folder(root, {"": 0}, is_valid_file=is_image)
    notes = _ignored_note(+ignored)
    if classes == _FLAT:
        notes.append("no class folders, so ImageFolder finds no images; use FastImageFolder.from_samples")
    elif beside:
        some = f"{counted(beside, 'image')} beside the class folders"
        notes.append(f"{some}, where ImageFolder does not look: not checked")
    return classes, table, notes


def _ignored_note(ignored: Counter[str]) -> list[str]:
    if not ignored:
        return []
    kinds = ", ".join(f"{printable(kind)} ({count:,})" for kind, count in ignored.most_common(_NAMED_AT_MOST))
    more = ", …" if len(ignored) > _NAMED_AT_MOST else ""
    are = "is" if ignored.total() == 1 else "are"
    files = f"{counted(ignored.total(), 'file')} {are} not checked"
    return [f"{files}, as ImageFolder ignores such files: {kinds}{more}"]


def without_images(text: str, classes: Sequence[str]) -> str:
    some = ", ".join(map(repr, classes[:_NAMED_AT_MOST])) + (", …" if len(classes) > _NAMED_AT_MOST else "")
    return f"{counted(len(classes), 'class folder')} without {text}, for which ImageFolder raises: {some}"


class Judge:
    """Checks image files by decoding them in the same way as ``FastImageFolder``.

    A file is corrupt if torchvision's ``ImageFolder`` would raise an error for it.
    """

    def __init__(self) -> None:
        self._reader = ImageReader(Decode())
        self._local = threading.local()

    def describe(self) -> str:
        return self._reader.describe()

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: self._local.__dict__.setdefault(
                "warnings", []
            ).append(" ".join(str(message).split()))
            yield

    def judge(self, index: int, path: str, target: Any = None) -> Verdict:
        item = Item(index, path, target)
        self._local.warnings = []
        known = None
        with suppress(OSError, ValueError):
            known = identity(path)  # before reading, so that a later change is noticed
        nbytes = None if known is None else known[2]
        try:
            blob = read_file(path)
        except Exception as error:
            return _bad(item, error, Verdict(path, nbytes, "unreadable", identity=known))
        kind = content_kind(blob)
        verdict = Verdict(path, len(blob), "corrupt", kind=kind, identity=known)
        try:
            image = self._reader.open(blob, path)
            image.region(Box(0, 0, *image.size))
        except Exception as error:
            return _bad(item, error, verdict)
        turned = _orientation(blob, kind, lambda: self._reader.open_pillow(blob, path))
        notes = [*_oddities(path, blob, kind, turned), *self._local.warnings]
        notes = list(map(sys.intern, dict.fromkeys(notes)))  # photographs share most notes
        return replace(
            verdict, state="good", notes=tuple(notes), identity=None if name_fits(path, kind) else known
        )


def _bad(item: Item, error: Exception, verdict: Verdict) -> Verdict:
    is_unknown = isinstance(error, (MemoryError, PermissionError, MissingDependencyError))
    if not is_unknown and not means_damage(error):
        raise error
    text = str(error).replace(repr(item.path), "").replace(item.path, "").strip()
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif not verdict.nbytes and verdict.state == "corrupt":
        text = "the file is empty"
    return replace(
        verdict, state="unreadable" if is_unknown else verdict.state,
        reason=f"{type(error).__name__}: {text}",
        message=str(bad_sample_error(item, error)),
    )  # fmt: skip


def content_kind(blob: bytes) -> str:
    if blob.startswith(_NETPBM) and blob[2:3].isspace():
        return "Netpbm"
    if blob.startswith(b"RIFF") and blob[8:12] == b"WEBP":
        return "WebP"
    return next((kind for kind, begins in _BEGINS.items() if blob.startswith(begins)), "")


def extensions_of(kind: str) -> tuple[str, ...]:
    return tuple(ending for ending in _EXTENSIONS.get(kind, ()) if ending in TORCHVISION_EXTENSIONS)


def name_fits(path: str, kind: str) -> bool:
    return not kind or os.path.splitext(path)[1].lower() in _EXTENSIONS[kind]


def _oddities(path: str, blob: bytes, kind: str, turned: int) -> Iterator[str]:
    if not name_fits(path, kind):
        yield f"the name says {os.path.splitext(path)[1]}, the content is {kind}"
    if turned != 1:
        yield f"EXIF orientation {turned}, which ImageFolder ignores"
    end = _ENDS.get(kind)
    if end is not None:
        at = blob.rfind(end)
        behind = len(blob) - at - len(end)
        if at < 0:
            yield "it has no end marker: its last bytes may be missing"
        elif behind:
            yield f"{behind:,} bytes follow its end"
    if blob.endswith(_ZEROS):
        yield "it ends in zeros: an unfinished copy, or a lost block"


def _orientation(blob: bytes, kind: str, opened: Callable[[], Any]) -> int:
    first_scan = blob.find(_JPEG_SCAN, 0, _HEAD) if kind == "JPEG" else -1  # metadata come before it
    head = blob[: _HEAD if first_scan < 0 else first_scan]
    if kind == "TIFF" or not any(word in head for word in _EXIF_WORDS):  # Pillow applies it to a TIFF
        return 1
    try:
        value = opened().getexif().get(_ORIENTATION, 1)
    except Exception:  # the metadata are damaged: loaders ignore them
        return 1
    return value if value in range(1, 9) else 1
