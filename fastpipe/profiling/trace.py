"""A profile as a timeline, for https://ui.perfetto.dev or ``chrome://tracing``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["trace_events"]

_Spans = Iterable[tuple[str, int, int, int]]
_WorkerSpans = Iterable[tuple[int, tuple[tuple[int, int, int], ...]]]


def trace_events(spans: _Spans, worker_spans: _WorkerSpans) -> list[dict[str, Any]]:
    """Events in the Trace Event Format (complete events, of microseconds).

    Args:
        spans: of steps: phase; nanoseconds at which the batch was asked for, came, and was done with.
        worker_spans: by worker: nanoseconds at which a batch's first sample was asked for, its last one came,
            and it was whole.  By the same clock.

    >>> [event["name"] for event in trace_events([("as it is", 0, 1000, 3000)], [])]
    ['thread_name', 'wait for the batch', 'step']
    """
    events = [_named(0, "training")]
    for phase, asked, got, done in spans:
        events += [_event("wait for the batch", 0, asked, got, phase), _event("step", 0, got, done, phase)]
    for worker, made in worker_spans:
        thread = worker + 1 if worker >= 0 else 0
        if thread:
            events.append(_named(thread, f"worker {worker}"))
        for begin, fetched, whole in made:
            events += [_event("fetch", thread, begin, fetched), _event("collate", thread, fetched, whole)]
    return events


def _event(name: str, thread: int, begin: int, end: int, phase: str = "") -> dict[str, Any]:
    arguments = {"args": {"phase": phase}} if phase else {}
    return {
        "name": name,
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        **arguments,
    }


def _named(thread: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
