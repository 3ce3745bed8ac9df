"""The photos that the benchmark reads."""

from __future__ import annotations

import math
import os
import shutil
import stat
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.extras import require
from fastpipe.core.private_folder import made_folder, user_cache_folder
from fastpipe.errors import OptionError

VARIABLE = "FASTPIPE_PHOTOS"
Say = Callable[[str], None]
CLASSES, PER_CLASS = 8, 50
LARGE_CLASSES, LARGE_PER_CLASS, LARGE_SIZE = 2, 16, (3024, 4032)

# The limits keep all data in the page cache; otherwise the benchmark would measure the disk.
MOST_PHOTOS = 2000
MOST_BYTES = 512 * 2**20


def unheard(text: str) -> None:
    """Discard a message; this is the default of ``say`` in functions that report their progress."""


@dataclass(frozen=True)
class Photos:
    """The photos that a run reads, chosen evenly from an image folder."""

    folder: Path
    name: str  # the folder's name in the report
    classes: int  # number of classes
    total: int  # number of photos in the folder
    indices: tuple[int, ...]  # indices in the folder of the photos that are used
    files: tuple[str, ...]  # paths of these photos
    labels: tuple[int, ...]  # class numbers of these photos
    bytes: int  # total size of these photos
    pixels: int = 0  # median number of pixels of a few photos

    def warm(self) -> None:
        """Read every file once, so that all files are in the page cache."""
        for file in self.files:
            Path(file).read_bytes()


def folder_to_use(given: Path | None, say: Say = unheard, *, large: bool = False) -> tuple[Path, str, bool]:
    """Return the folder that the user or ``$FASTPIPE_PHOTOS`` names; if none, a folder of generated photos.

    Returns:
        The folder, its name for the report, and True if the photos are generated.

    Raises:
        OptionError: the named folder does not exist.
    """
    named = given or (None if large else os.environ.get(VARIABLE))
    if not named:
        name = "generated photographs of 12 megapixels" if large else "generated photographs"
        return generated_folder(say=say, large=large), name, True
    folder = existing_folder(named, "--data: " if given else f"${VARIABLE}: ")
    return folder, folder.resolve().name, False


def existing_folder(named: str | Path, source: str = "") -> Path:
    """Return the path of a folder; raise an OptionError if the folder does not exist."""
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise OptionError(f"{source}{str(folder)!r} is not a folder; give one with a sub-folder per class")
    return folder


def generated_folder(
    cache: Path | None = None, say: Say = unheard, *, large: bool = False, per_class: int | None = None
) -> Path:
    """Return a folder of photograph-like JPEGs, created once in the user's cache folder."""
    classes, usual = (LARGE_CLASSES, LARGE_PER_CLASS) if large else (CLASSES, PER_CLASS)
    per_class = per_class or usual
    sizes = LARGE_SIZE if large else None
    name = f"photos-1-{'12mp-' if large else ''}{classes}x{per_class}"

    fill = partial(photo_tree, classes=classes, per_class=per_class, sizes=sizes)
    return made_once(name, fill, f"{classes * per_class} photograph-like JPEGs", cache, say)


def made_once(
    name: str, fill: Callable[[Path], object], what: str, cache: Path | None = None, say: Say = unheard
) -> Path:
    """Return a folder of generated data, created once in the user's cache folder.

    ``fill`` makes the data in a temporary folder next to the final folder.  The temporary folder is renamed
    when the data is complete.  So an interrupted run leaves no incomplete data, and two runs may make the
    same data at the same time.
    """
    parent = cache or user_cache_folder() / "bench"
    final = parent / name
    if _is_own(final):
        return final
    say(f"making {what}, once, in {final}")
    made_folder(parent, 0o755)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
    try:
        fill(unfinished / "made")
        try:
            os.rename(unfinished / "made", final)
        except OSError:
            if not _is_own(final):  # if it exists now, another run has made the same data
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final


def _is_own(folder: Path) -> bool:
    """Return True if a folder of this user exists; raise an OptionError if another user owns the folder."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return False
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise OptionError(
            f"{str(folder)!r} belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this: "
            "set XDG_CACHE_HOME to a folder of your own"
        )
    return stat.S_ISDIR(status.st_mode)


def class_folders(folder: Path) -> list[Path]:
    """Return the sub-folders of an image folder; raise an OptionError if there are none."""
    if found := sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        return found
    raise OptionError(f"{str(folder)!r} has no class folders; an image folder has one sub-folder per class")


def listed(folder: Path, transform: Any = None) -> Any:
    """Return torchvision's ``ImageFolder`` of a folder.

    Raises:
        OptionError: the folder has no class folders, or a class has no images.
    """
    class_folders(folder)
    try:
        return require("torchvision", extra="torch").datasets.ImageFolder(str(folder), transform)
    except FileNotFoundError as error:
        raise OptionError(f"{str(folder)!r} cannot be used: {str(error).splitlines()[0]}") from None


def scan(folder: Path, name: str, most_photos: int = MOST_PHOTOS, most_bytes: int = MOST_BYTES) -> Photos:
    """List the photos of an image folder as ``torchvision`` does, and choose the photos to read.

    Raises:
        OptionError: the folder has no class folders, or a class has no images.
    """
    dataset = listed(folder)
    samples: list[tuple[str, int]] = dataset.samples
    sizes = [os.path.getsize(path) for path, _ in samples]
    mean = max(1.0, sum(sizes) / len(sizes))
    count = max(1, min(len(samples), most_photos, int(most_bytes / mean)))
    indices = tuple(i * len(samples) // count for i in range(count))
    files, labels = zip(*(samples[i] for i in indices), strict=True)
    pixels = [of_it for path in files[:: max(1, count // 20)] if (of_it := math.prod(size_of(path)))]
    return Photos(
        folder, name, len(dataset.classes), len(samples), indices, files, labels,
        bytes=sum(sizes[i] for i in indices), pixels=int(statistics.median(pixels or [0])),
    )  # fmt: skip


def size_of(path: str | Path, kind: str = "") -> tuple[int, int]:
    """Return the width and height of an image; (0, 0) if it is no image, or not of the format ``kind``."""
    image = require("PIL.Image", extra="image")
    try:
        with image.open(path) as opened:
            return (opened.width, opened.height) if kind in ("", opened.format) else (0, 0)
    except OSError:
        return 0, 0
