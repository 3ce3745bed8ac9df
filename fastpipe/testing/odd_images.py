"""Every kind of image file that turns up in real folders, good and bad, one small file each.

Whether a file is good is what Pillow says when the file is written, so the labels hold for
the Pillow that is installed.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.testing._encode import jpeg
from fastpipe.testing._odd_damaged import damaged_files
from fastpipe.testing._odd_good import good_files
from fastpipe.testing.photos import photograph

__all__ = ["OddImage", "odd_images", "write_fifo"]


@dataclass(frozen=True)
class OddImage:
    """One file of :func:`odd_images`.

    Attributes:
        name: short, unique, such as ``"jpeg 4:2:2"``.
        path: the file.
        expect: ``"ok"`` where ``PIL.Image.open(f).convert("RGB")`` works, ``"bad"`` where
            it raises.
        note: what is odd about it.
    """

    name: str
    path: Path
    expect: Literal["ok", "bad"]
    note: str


def odd_images(root: Path, seed: int = 0) -> list[OddImage]:
    """Write one file for each odd case and say which of them Pillow can read.

    The bytes depend on ``seed`` and on the installed Pillow only.  Extensions are those that
    ``ImageFolder`` accepts, plus ``.gif`` and ``.ico``.

    Args:
        root: a folder; made when it does not exist.  All files lie directly in it.
        seed: any integer ≥ 0, for the pixels.

    Returns:
        The cases, good ones and bad ones mixed, in a fixed order.

    >>> import tempfile
    >>> cases = odd_images(Path(tempfile.mkdtemp()))
    >>> sorted({case.expect for case in cases})
    ['bad', 'ok']
    """
    root.mkdir(parents=True, exist_ok=True)
    photo = photograph(np.random.default_rng(seed), (70, 93))
    listed = []
    for case in (*good_files(photo), *damaged_files(photo)):
        path = root / case.file
        path.write_bytes(case.data)
        listed.append((case.name, path, case.note))
    listed += _special(root, photo)
    return [OddImage(name, path, _ask_pillow(path), note) for name, path, note in listed]


def write_fifo(root: Path) -> Path:
    """Make the named pipe ``root/pipe.jpg``: a reader that just opens it waits for ever.

    Not one of :func:`odd_images`, as a test that reads it needs a time limit.

    Raises:
        OSError: the file exists, or the file system has no pipes.
    """
    path = root / "pipe.jpg"
    os.mkfifo(path)
    return path


def _ask_pillow(path: Path) -> Literal["ok", "bad"]:
    pil = require("PIL.Image", extra="image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with path.open("rb") as file:
                pil.open(file).convert("RGB")
        except Exception:  # whatever it is, a loader built on Pillow fails with it
            return "bad"
    return "ok"


def _special(root: Path, photo: npt.NDArray[np.uint8]) -> list[tuple[str, Path, str]]:
    """What is more than a name and bytes: a folder, links, a file without permissions."""
    folder, dangling, loop, link, locked = (
        root / name for name in ("folder.jpg", "dangling.jpg", "loop.jpg", "link.jpg", "locked.jpg")
    )
    target = root / "link_target.bin"
    target.write_bytes(jpeg(photo))
    folder.mkdir(exist_ok=True)
    for path, to in ((dangling, "nowhere.jpg"), (loop, "loop.jpg"), (link, target.name)):
        path.unlink(missing_ok=True)
        path.symlink_to(to)
    if locked.exists():
        locked.chmod(0o600)
    locked.write_bytes(jpeg(photo))
    locked.chmod(0)
    return [
        ("folder", folder, "a folder with an image's name"),
        ("dangling link", dangling, "a symbolic link to nothing"),
        ("link loop", loop, "a symbolic link to itself"),
        ("link", link, "a symbolic link to a good file"),
        ("no permission", locked, "mode 000: good for the superuser, bad for everyone else"),
    ]
