"""Where fastpipe keeps what it finds out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fastpipe.core.private_folder import user_cache_folder
from fastpipe.core.text import in_bytes
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, warning
from fastpipe.profiling.doctor.storage import disk_against_decoders
from fastpipe.profiling.mounts import file_system

__all__ = ["check"]

_TOPIC = "cache folder"
_LITTLE = 1 << 30
_REMEDY = "export XDG_CACHE_HOME=/a/folder/on/a/local/disk"


def check(examined: Examined) -> Iterator[Finding]:
    """Look at fastpipe's cache folder, which need not be there."""
    yield from disk_against_decoders(examined)  # here, when both are known
    folder = user_cache_folder()
    there = _nearest(folder)
    system = file_system(str(there))
    text = f"{folder} is on {system.name}, with {in_bytes(system.free)} free"
    if folder.exists() and not folder.is_dir():
        yield warning(_TOPIC, f"{folder} is no folder: nothing is kept", _REMEDY)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield warning(_TOPIC, f"{text}, and cannot be written to: folders are listed at each start", _REMEDY)
    elif system.is_remote:
        yield warning(_TOPIC, f"{text}: caches of decoded images would be read over a network", _REMEDY)
    elif system.free < _LITTLE:
        yield warning(_TOPIC, f"{text}: Cache('disk') has no room", f"free some, or {_REMEDY}")
    else:
        yield ok(_TOPIC, text)


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
