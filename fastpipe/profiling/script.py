"""A script of somebody's, run as it is until enough is known of its training loop."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import FrameType

from fastpipe.errors import OptionError
from fastpipe.profiling.diagnosis import Diagnosis
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.keras_fit import WATCHED
from fastpipe.profiling.loops import Enough, Loop
from fastpipe.profiling.report import Report
from fastpipe.profiling.watching import Watch

__all__ = ["profile_script"]

_LEAST_OUTSIDE_S = 0.5
_GRACE_S = 8.0
_CALLS = 0.9  # of a function's time, in one that it calls


def profile_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    seconds: float = 6.0,
    limit_s: float = 50.0,
    try_advice: bool = False,
) -> Report:
    """Run a script and find out whether it waits for data, for what, and what would help.

    It runs as ``python PATH ARGUMENTS`` would, until enough is known of the first loop over a loader that
    lasts long enough; that ends it.  What it trains is not worth keeping: the loop gets one batch again and
    again for a while.

    Args:
        path: of the script.
        arguments: its own.
        seconds: that the loop is measured as it is.
        limit_s: seconds after which the script is ended in any case; what is measured beside it just then
            may take eight more.
        try_advice: whether the best advice is tried in the script's loop.

    Raises:
        OptionError: there is no such script.
        Exception: whatever the script raises.
    """
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"there is no script {str(file)!r}")
    diagnosis = Diagnosis(seconds / 4, try_advice)
    watch = Watch(
        lambda one: Loop(seconds, True, next_phase=lambda: diagnosis.next_phase(watch, one)), also=WATCHED
    )
    begin = perf_counter()
    with closing(diagnosis), closing(watch), watch, _as_main(file, arguments), _limited(limit_s, diagnosis):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except Enough:
            pass
        except Exception as error:
            if not diagnosis.excuses(error):
                raise
        except SystemExit as error:
            if error.code not in (None, 0) and not watch.found:
                raise OptionError(f"{file.name} ended before it iterated a loader: {error.code}") from error
        ran = perf_counter() - begin
    if not diagnosis.is_known and watch.found:  # a loop that was over before enough was known of it
        diagnosis.see(max(watch.found, key=lambda one: one.loop.total_s))
    report = diagnosis.report() if diagnosis.is_known else Report(None)
    report = replace(report, seconds=ran, outside=_outside(watch))
    return replace(report, advice=(*_generation_advice(report), *report.advice))


def _generation_advice(report: Report) -> Iterator[Advice]:
    """For a script most of whose time goes before and between its loops."""
    if report.is_outside_bound:
        name, seconds = report.outside[0]
        yield Advice(
            f"make what {name} makes once, by all cores, with fastpipe.generate; or keep it with "
            "fastpipe.memoize",
            f"{seconds:.1f} of the script's {report.seconds:.1f} s go there, outside of loops over loaders",
        )


def _outside(watch: Watch) -> tuple[tuple[str, float], ...]:
    """Functions of the script that took long between its loops over loaders, with all that they call.

    Of those that call each other and nothing else, the innermost; first where most of the time goes.
    """
    assert watch.recorder is not None
    found = sorted(watch.recorder.outside.items(), key=lambda item: item[1])
    kept: list[tuple[str, float]] = []
    for at, ((file, function), spent) in enumerate(found):
        # A function that took hardly longer than another one has called that.
        inner = [other for _, other in found[:at] if other > _CALLS * spent]
        if spent > _LEAST_OUTSIDE_S * 1e9 and not inner:
            kept.append((f"{os.path.basename(file)} {function}", spent / 1e9))
    return tuple(sorted(kept, key=lambda item: -item[1]))


@contextmanager
def _as_main(file: Path, arguments: Sequence[str]) -> Iterator[None]:
    """What a script finds in ``sys`` when Python runs it."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _limited(seconds: float, diagnosis: Diagnosis) -> Iterator[None]:
    """End what runs in the main thread after so many seconds."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    is_late = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_late
        if is_late or not diagnosis.is_looking:
            raise Enough
        is_late = True  # a loop that has been measured is worth a few seconds more
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
