"""How long a store takes to answer, and how many requests that asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median, quantiles
from typing import Any

from fastpipe.core.machine import available_cpus
from fastpipe.core.text import counted, in_bytes, in_duration
from fastpipe.profiling.doctor.asking import ask
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, problem, warning

__all__ = ["check", "connections", "latencies"]

_TOPIC = "store"
_PATIENCE_S = 60.0
_MOST = 128  # requests that Stage(connections="auto") has under way
_CODE = """
from fastpipe.profiling.doctor.requests import measure
answer(measure(*_asked))
"""
_REMEDY = "see that URL, endpoint and credentials (environment or credentials file) are those of the training"


def check(examined: Examined) -> Iterator[Finding]:
    """Ask the store, from another process."""
    if not examined.url:
        return
    answer = ask(_CODE, [examined.url, dict(examined.storage_options)], seconds=_PATIENCE_S)
    found: Mapping[str, Any] = answer.value or {"error": answer.why}
    if "error" in found:
        yield problem(_TOPIC, f"{examined.url} cannot be read: {found['error']}", _REMEDY)
    elif not found["bytes"]:
        yield warning(_TOPIC, f"{examined.url} has no object to measure", "name the folder that has the data")
    else:
        yield from latencies(examined.url, found)
        yield from connections(found, examined.images_s)


def latencies(url: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    """How long answers take.

    Args:
        url: of the store.
        found: as ``requests.measure`` has them.
    """
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


def connections(found: Mapping[str, Any], images_s: float | None) -> Iterator[Finding]:
    """How many requests are to be under way: Little's law.

    Args:
        found: as ``requests.measure`` has them.
        images_s: that a core decodes; None where that is not known.
    """
    seconds = sum(found["whole"]) / len(found["whole"])  # the law is about means
    alone = f"one request at a time brings {1 / seconds:,.0f} objects/s"
    if images_s is None:
        yield ok(_TOPIC, f"{alone}; n at a time n times as many, until the line is full (Little's law)")
        return
    rate = images_s * available_cpus()
    needed = math.ceil(rate * seconds)
    text = (
        f"{alone}; the {rate:,.0f} images/s that {counted(available_cpus(), 'core')} can decode need "
        f"{rate:,.0f}/s × {in_duration(seconds)} = {needed:,} at a time (Little's law)"
    )
    if needed > _MOST:
        yield warning(
            _TOPIC, f"{text}, and Stage(connections='auto') has {_MOST} at most",
            "fastpipe stage URL DIR before the training, or Stage(…), so that the second epoch is local",
        )  # fmt: skip
    else:
        yield ok(_TOPIC, f"{text}, which Stage(connections='auto') finds by itself")


def _p90(values: list[float]) -> float:
    return quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
