"""Asks a store for small parts of objects; in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastpipe.errors import FastpipeError
from fastpipe.stage.stores.opening import open_store

__all__ = ["measure"]

_OBJECTS = 32
_SECONDS = 3.0  # of small requests, and as much of whole objects
_MOST_NBYTES = 1 << 20  # of an object


def measure(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure requests, one after the other.

    Returns:
        Seconds of listing, of the first request, of those for one byte, of those for whole objects (or
        their first MiB); and how many objects were seen, and their bytes.  Or what went wrong, in words
        that have no credentials in them.
    """
    try:
        return _measured(url, storage_options)
    except FileNotFoundError as error:
        return {"error": str(error)}
    except (FastpipeError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _measured(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    store, location = open_store(url, storage_options or None)
    try:
        begun = time.perf_counter()
        page = next(iter(store.objects(location.prefix)), ())
        found: dict[str, Any] = {"listing": time.perf_counter() - begun, "seen": len(page)}
        objects = [one for one in page if one.size][:_OBJECTS]
        found["describe"] = store.describe()
        found["nbytes"] = sum(one.size for one in objects) / max(1, len(objects))
        if objects:
            begun = time.perf_counter()
            store.get_range(objects[0].key, 0, 1)
            found["first"] = time.perf_counter() - begun
        found["bytes"] = _timed(store, objects, 1)
        found["whole"] = _timed(store, objects, _MOST_NBYTES)
        return found
    finally:
        store.close()


def _timed(store: Any, objects: Any, most: int) -> list[float]:
    until, found = time.perf_counter() + _SECONDS, []
    for one in objects:
        begun = time.perf_counter()
        store.get_range(one.key, 0, min(one.size, most))
        now = time.perf_counter()
        found.append(now - begun)
        if now > until:
            break
    return found
