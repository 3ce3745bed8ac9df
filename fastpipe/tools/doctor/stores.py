"""Check an object store: its response time, and the number of parallel requests that a training needs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from statistics import median, quantiles
from typing import Any

from fastpipe.core.machine import available_cpus
from fastpipe.core.text import counted, in_bytes, in_duration
from fastpipe.errors import FastpipeError
from fastpipe.stores.opening import open_store
from fastpipe.tools.doctor.child import ask
from fastpipe.tools.doctor.report import Examined, Finding, judged, ok, problem, warning

_TOPIC = "store"
_PATIENCE_S = 60.0
_MOST = 128  # most simultaneous requests of Stage(connections="auto")
_OBJECTS = 32
_SECONDS = 3.0  # for small requests, and again for whole objects
_MOST_NBYTES = 1 << 20  # most bytes of an object to read
_CODE = """
from fastpipe.tools.doctor.stores import measure
answer(measure(*_asked))
"""
_REMEDY = (
    "check that URL, endpoint and credentials (environment or credentials file) are those of the training"
)


def check(examined: Examined) -> Iterator[Finding]:
    if not examined.url:
        return
    answer = ask(_CODE, [examined.url, dict(examined.storage_options)], seconds=_PATIENCE_S)
    found: Mapping[str, Any] = answer.value or {"error": answer.why}
    if "error" in found:
        yield problem(_TOPIC, f"{examined.url} cannot be read: {found['error']}", _REMEDY)
    elif not found["bytes"]:
        yield warning(_TOPIC, f"{examined.url} has no object to measure", "name the folder that has the data")
    else:
        yield from _latencies(examined.url, found)
        yield _connections(found, examined.images_s)


def _latencies(url: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    yield ok(
        _TOPIC, f"{url}, by {found['describe']}: a page of {found['seen']:,} objects listed in "
        f"{in_duration(found['listing'])}; the first request, with its connection, took "
        f"{in_duration(found['first'])}",
    )  # fmt: skip
    one, whole = found["bytes"], found["whole"]
    first = f"first byte after {in_duration(median(one))}, p90 {in_duration(_p90(one))}"
    all_bytes = f"whole objects, {in_bytes(found['nbytes'])} on average, after {in_duration(median(whole))}"
    counts = f"{len(one)} requests of a byte, {len(whole)} of all bytes, one at a time"
    yield ok(_TOPIC, f"{first}; {all_bytes}, p90 {in_duration(_p90(whole))} ({counts})")


def _connections(found: Mapping[str, Any], images_s: float | None) -> Finding:
    seconds = sum(found["whole"]) / len(found["whole"])  # Little's law needs the mean
    alone = f"one request at a time brings {1 / seconds:,.0f} objects/s"
    if images_s is None:
        return ok(
            _TOPIC,
            f"{alone}; n requests at a time bring n times as many, until the bandwidth is used up "
            "(Little's law)",
        )
    rate = images_s * available_cpus()
    needed = math.ceil(rate * seconds)
    text = (
        f"{alone}; the {rate:,.0f} images/s that {counted(available_cpus(), 'core')} can decode need "
        f"{rate:,.0f}/s × {in_duration(seconds)} = {needed:,} at a time (Little's law)"
    )
    is_bad = needed > _MOST
    finds = f"and Stage(connections='auto') has {_MOST} at most"
    text += f", {finds if is_bad else 'which Stage(connections=' + repr('auto') + ') finds by itself'}"
    remedy = "fastpipe stage URL DIR before the training, or Stage(…), so that the second epoch is local"
    return judged(_TOPIC, is_bad, text, remedy)


def _p90(values: list[float]) -> float:
    return quantiles(values, n=10)[-1] if len(values) > 1 else values[0]


def measure(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        store, location = open_store(url, storage_options or None)
        try:
            return _measured(store, location.prefix)
        finally:
            store.close()
    except FileNotFoundError as error:
        return {"error": str(error)}
    except (FastpipeError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _measured(store: Any, prefix: str) -> dict[str, Any]:
    begun = time.perf_counter()
    page = next(iter(store.objects(prefix)), ())
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


def _timed(store: Any, objects: Any, most: int) -> list[float]:
    until, found = time.perf_counter() + _SECONDS, []
    for one in objects:
        begun = time.perf_counter()
        if begun > until:
            break
        store.get_range(one.key, 0, min(one.size, most))
        found.append(time.perf_counter() - begun)
    return found
