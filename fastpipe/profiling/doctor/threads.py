"""How many threads libraries take, beside those that load data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from fastpipe.core.machine import default_threads
from fastpipe.core.text import counted
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, warning

__all__ = ["check", "settings"]

_TOPIC = "threads"
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_PLACES = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_NO_PLACE = ("", "0", "false", "disabled", "none")


def check(examined: Examined) -> Iterator[Finding]:
    """Look at the variables that set them, and at what torch makes of these."""
    cores = default_threads()
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield from settings(os.environ, cores, seen)
    torch = examined.torch or {}
    if "threads" in torch:
        count = counted(torch["threads"], "thread")
        text = f"torch's operations take {count} in a training, 1 in a DataLoader's worker"
        if torch["threads"] > cores:
            yield warning(
                _TOPIC, f"{text}; it has {counted(cores, 'core')}", f"export OMP_NUM_THREADS={cores}"
            )
        else:
            yield ok(_TOPIC, text)


def settings(environment: Mapping[str, str], cores: int, seen: int) -> Iterator[Finding]:
    """The variables that say how many threads there are, and where.

    Args:
        environment: of the process.
        cores: that this process, as one of its machine's ranks, has.
        seen: cores that libraries take it to have, which know nothing of quotas and ranks.
    """
    given = {name: environment[name] for name in _COUNTS if name in environment}
    if not given:
        count = counted(seen, "thread")
        text = f"{_COUNTS[0]}, {_COUNTS[1]} are not set: libraries take {count}, one for each core"
        if seen > cores:
            yield warning(_TOPIC, f"{text}; this process has {cores}", f"export {_COUNTS[0]}={cores}")
        else:
            yield ok(_TOPIC, text)
    for name, text in given.items():
        first = text.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            yield warning(_TOPIC, f"{name}={text!r} is no number of threads", f"unset {name}")
        elif int(first) > cores:
            yield warning(
                _TOPIC, f"{name}={text}, and it has {counted(cores, 'core')}", f"export {name}={cores}"
            )
        else:
            yield ok(_TOPIC, f"{name}={text}, of {counted(cores, 'core')}")
    for name in _PLACES:
        value = environment.get(name, "")
        if value.lower() not in _NO_PLACE:
            yield warning(
                _TOPIC,
                f"{name}={value} binds threads to cores, and forked workers inherit the core of their parent",
                f"unset {name}, or start workers by forkserver or spawn",
            )
