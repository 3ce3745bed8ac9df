"""The report of a profile, and its output as text, JSON, HTML, a trace or TensorBoard scalars."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from fastpipe.bench import machine, page
from fastpipe.bench.page import document, escape, rect
from fastpipe.console import PlainTable, TextReport, print_line
from fastpipe.core.processes import load_triton_apart
from fastpipe.core.text import counted, in_bytes, in_duration
from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.tools.costs import Alone, Copies, LoaderCosts
from fastpipe.tools.loops import Phase
from fastpipe.tools.stacks import COLLATE, DECODE, OTHER, READ, STAGES, TRANSFER, TRANSFORM, Line
from fastpipe.tools.thread_times import Spent

_FORMAT = 1
_MOST = 0.5  # fraction of a script's time
_TOLD = 0.1  # fraction of a script's time: a longer time outside of loops is reported
_LEAST_S = 0.5  # seconds of CPU time in other processes: less time is ignored
_SMALL = 0.05  # fraction of a step: a shorter wait for data does not matter
_PREFIX = "fastpipe/profile"
_LONGER = 20  # steps in the time that a report suggests
_LEAST_LONGER_S = 12.0  # twice the default


@dataclass(frozen=True)
class LoaderNote:
    kind: str
    workers: int = 0
    ahead: int = 0
    batch_size: int | None = None
    made_at: str = ""
    used_at: str = ""


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float


@dataclass(frozen=True)
class Advice:
    """A suggested change.

    Attributes:
        what: the change, in words, with the line of the script.
        why: the measurement on which the advice is based.
        predicted_s: predicted seconds of a step with the change; None if the change was not predicted.
        tried_s: measured seconds of the script's own step with the change; None if the change was not tried.
        diff: the change of the script, for ``patch -p0``; an empty string if it needs more than one call.
    """

    what: str
    why: str
    predicted_s: float | None = None
    tried_s: float | None = None
    diff: str = ""


@dataclass(frozen=True)
class Alternative:
    """Another loader, or other settings of the loader.

    Attributes:
        what: the alternative, in words.
        predicted_s: predicted seconds of a step with it; None if it could not be measured.
        tried_s: measured seconds of the script's own step with it; None if it was not tried.
    """

    what: str
    predicted_s: float | None
    tried_s: float | None = None


@dataclass(frozen=True, repr=False)
class Report(TextReport):
    """The result of a profile.  ``print(report)`` shows it.

    A step of the training loop consists of the wait for a batch and the work with this batch.  A step with
    instant data is a step whose batch is available at once.  A stage is a part of the work that makes a
    batch, such as decoding.

    Attributes:
        loader: a description of the loop's loader; None if no loader was iterated.
        steps: number of measured steps.
        step_s: seconds of a step.
        wait_s: seconds for which a step waits for its batch.
        busy_s: seconds for which a step works with its batch.
        instant_s: seconds of a step with instant data; None if not measured.
        step_cpu_s: seconds of CPU time of a step with instant data; None if not measured.
        step_delay_s: seconds for which all threads together wait for cores during a step, minus the same
            seconds for a step with instant data; None if not measured.
        epoch_start_s: seconds from the beginning of the last epoch to its first batch; None if not measured.
        alone: the time of a batch if the loader runs without a training; None if not measured.
        costs: the times that each stage of a batch takes.
        stall: the seconds that a step loses for lack of data, for each stage; the largest part comes first.
        cases: seconds of a step in up to four cases: with instant data, without reading and decoding, with
            all files in memory, and without any change.
        advice: suggested changes, the most useful change first.
        alternatives: other loaders and settings, faster or not.
        hint: what may replace a loader for which no alternative is known; else an empty string.
        asides: work within the loop other than its steps, such as a validation, with its seconds.
        first_step_s: seconds for which the first step waits for its batch, and seconds for which it works,
            even if it has not ended; None if no batch has arrived.
        cores: number of cores that this process may use.
        device_wait_s: seconds for which the GPU is idle before a step; None if not measured.
        device_busy_s: seconds for which the GPU works on a step; None if not measured.
        copies: the times of copying a batch to the GPU; None if not measured.
        is_tried: True if the profile was asked to try the best advice on the script's own step.
        is_opaque: True if it is unknown which part of a step is the wait for its batch.
        outside: the functions that took long outside of loops over loaders, with their seconds.
        elsewhere_s: seconds of CPU time of the processes that the script has started.
        seconds: duration of the script.
        script: file name of the profiled script; an empty string without a script.
        date: time at which the report was made, UTC, in the format of ISO 8601.
        is_cut_short: True if the profile ended the script early.
        ended_by: the error that ended the script; an empty string if the script ended without an error.
        spans: for each step, the phase of the profile, and three times in nanoseconds: when the step's batch
            was requested, when the batch arrived, and when the step ended.
        worker_spans: for each worker and batch, three times in nanoseconds: when the first sample was
            requested, when the last sample was ready, and when the batch was complete.
    """

    loader: LoaderNote | None
    steps: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    instant_s: float | None = None
    step_cpu_s: float | None = None
    step_delay_s: float | None = None
    epoch_start_s: float | None = None
    alone: Alone | None = None
    costs: LoaderCosts = field(default_factory=LoaderCosts)
    stall: tuple[Part, ...] = ()
    cases: tuple[Part, ...] = ()
    advice: tuple[Advice, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    hint: str = ""
    asides: tuple[Part, ...] = ()
    first_step_s: tuple[float, float] | None = None
    cores: int = 1
    device_wait_s: float | None = None
    device_busy_s: float | None = None
    copies: Copies | None = None
    is_tried: bool = False
    is_opaque: bool = False
    outside: tuple[tuple[str, float], ...] = ()
    elsewhere_s: float = 0.0
    seconds: float = 0.0
    script: str = ""
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    is_cut_short: bool = False
    ended_by: str = ""
    spans: tuple[tuple[str, int, int, int], ...] = field(default=(), repr=False)
    worker_spans: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...] = field(default=(), repr=False)

    @property
    def lost_s(self) -> float:
        """Seconds of a step that are lost for lack of data.

        The lost time is the wait for the batch, plus the time by which the step's work is slower than with a
        batch that is available at once.  The work is slower while other threads or processes make the next
        batches on the same cores.  This slowdown counts only up to a limit, because a larger slowdown has
        causes other than the loader.  The limit is the CPU time of a batch, divided by the number of cores.
        The limit is larger if threads wait longer for cores during a step: one thread without a core may
        delay all others.  It is then the time of this waiting, but at most the CPU time of a batch.
        """
        if self.is_opaque:
            return 0.0 if self.instant_s is None else max(0.0, self.step_s - self.instant_s)
        if self.instant_s is None or self.alone is None or not self.loader or not self.loader.ahead:
            return self.wait_s
        taken, cpu_s = self.busy_s, self.alone.cpu_s
        if cpu_s is not None:
            taken = max(cpu_s / self.cores, min(self.step_delay_s or 0.0, cpu_s))
        return self.wait_s + min(max(0.0, self.busy_s - self.instant_s), taken)

    @property
    def base_s(self) -> float:
        """Seconds of a step whose batch is available at once."""
        return max(0.0, self.step_s - self.lost_s)

    @property
    def stall_share(self) -> float:
        """Fraction of a step that is lost for lack of data, from 0 to 1."""
        return self.lost_s / self.step_s if self.step_s else 0.0

    @property
    def is_loader_bound(self) -> bool:
        """True if a faster loader would make the steps clearly faster."""
        return self.stall_share > _SMALL

    @property
    def is_outside_bound(self) -> bool:
        """True if a single function outside of loops over loaders takes most of the script's time."""
        return bool(self.outside) and self.outside[0][1] > _MOST * self.seconds

    @property
    def is_elsewhere(self) -> bool:
        """True if no loop was seen, and most of the work is done by processes that the script started."""
        return self.loader is None and self.elsewhere_s > max(_LEAST_S, _MOST * self.seconds)

    @property
    def verdict(self) -> str:
        """The result of the profile, in one sentence."""
        if self.is_elsewhere:
            return (
                f"no loop was seen: in {self.seconds:.1f} s, processes started by the script used "
                f"{self.elsewhere_s:.1f} s of CPU time, and these are not observed"
            )
        if self.is_outside_bound:
            name, seconds = self.outside[0]
            share = f"{seconds / self.seconds:.0%} of {self.seconds:.1f} s"
            return f"{share} go into {name}, outside of any loop over a loader"
        if self.loader is None:
            return "no loader was iterated"
        if not self.steps:
            return self._without_steps(self.loader)
        if self.is_opaque and self.instant_s is None:
            return (
                f"not known: {self.steps} steps of {in_duration(self.step_s)} were seen, but none with "
                "data ready; fastpipe profile SCRIPT measures them, if there are more steps or with a "
                "longer --limit"
            )
        if not self.is_loader_bound:
            return (
                f"stall {self.stall_share:.0%}: your loader is not the problem. With data ready a step "
                f"takes {in_duration(self.base_s)} of {in_duration(self.step_s)}"
            )
        parts = ", ".join(f"{part.seconds / self.step_s:.0%} {part.name}" for part in self.stall[:4])
        return f"stall {self.stall_share:.0%}{': ' if parts else ''}{parts}"

    def _without_steps(self, loader: LoaderNote) -> str:
        ran = f" in {self.seconds:.1f} s" if self.seconds else ""
        if self.first_step_s is None:
            wait = "; if it is only slow, use a longer --limit" if self.is_cut_short else ""
            return f"no step was measured{ran}: {loader.kind} gave no batch{wait}"
        waits, works = self.first_step_s
        if self.is_cut_short:
            more = self._longer(waits + works)
        else:
            more = "its loop needs more batches"
        return (
            f"not known: only the first step was seen{ran}, which includes the start. It waited "
            f"{in_duration(waits)} for its batch and worked for {in_duration(works)}: {more}"
        )

    def _longer(self, step_s: float) -> str:
        return f"use a longer --limit, such as --limit {max(_LONGER * step_s, 2 * self.seconds):.0f}"

    @property
    def without_advice(self) -> str:
        """A sentence to show if the loop loses time but there is no advice; else an empty string."""
        if self.advice or not self.is_loader_bound:
            return ""
        if self.ended_by:
            return "no advice: the script ended before alternatives were measured"
        measured = list(map(_measured, self.alternatives_in_vain))
        slow = ["the loader alone"] if self.alone is None else []
        slow += [one.what for one in self.alternatives if one.predicted_s is None]
        said = []
        if measured:
            said.append(f"no alternative that was measured is clearly faster: {'; '.join(measured)}")
        if slow:
            seconds = max(_LEAST_LONGER_S, _LONGER * self.step_s)
            said.append(
                f"batches are too slow to measure {'; '.join(slow)} in this time: use a longer time, such as "
                f"--seconds {seconds:.0f} --limit {10 * seconds:.0f}"
            )
        if not said:
            kind = "this loader" if self.loader is None else self.loader.kind
            said.append(f"no replacement of {kind} is known, so nothing was tried")
        return f"no advice: {'. '.join(said)}"

    @property
    def alternatives_in_vain(self) -> list[Alternative]:
        """The alternatives that were measured, and are not clearly faster."""
        advised = {one.what for one in self.advice}
        return [one for one in self.alternatives if one.predicted_s is not None and one.what not in advised]

    def effect(self, advice: Advice) -> str:
        """Return text that compares the times of a step before and after a change; "" if these are unknown.

        The time after the change is predicted.  If the change was tried, the measured time is added.
        """
        if advice.predicted_s is None or not self.step_s:
            return ""
        now, then = self.step_s, advice.predicted_s
        text = f"{in_duration(now)} → {in_duration(then)} a step, {now / then:.2f}×"
        if advice.tried_s is not None:
            text += f" (tried: {in_duration(advice.tried_s)}, {now / advice.tried_s:.2f}×)"
        return text

    def lines(self) -> Iterator[str]:
        """Yield lines of text about the times of a step and about the time outside of loops over loaders."""
        if self.loader is not None:
            yield from self._loop_lines(self.loader)
        for name, seconds in self.outside:
            if seconds > _TOLD * self.seconds:
                yield f"{seconds:.1f} s outside of loops over loaders: {name}"
        if self.ended_by:
            yield f"the script ended with {self.ended_by}; these are the measurements until then"
        if self.is_cut_short:
            yield f"the script was ended after {self.seconds:.0f} s; do not keep the model that it trained"

    def _loop_lines(self, loader: LoaderNote) -> Iterator[str]:
        size = "" if loader.batch_size is None else f", batches of {loader.batch_size}"
        place = f", {loader.used_at}" if loader.used_at else ""
        yield f"{loader.kind}, num_workers={loader.workers}{size}{place}: {counted(self.steps, 'step')}"
        if not self.steps:
            return
        split = f": waits {in_duration(self.wait_s)}, is busy {in_duration(self.busy_s)}"
        slowed = self.lost_s - self.wait_s
        if slowed > _SMALL * self.step_s:
            split += f", {in_duration(slowed)} of it because the loader works on the same cores"
        yield f"a step takes {in_duration(self.step_s)}{'' if self.is_opaque else split}"
        if self.device_wait_s is not None and self.device_busy_s is not None:
            busy, wait = in_duration(self.device_busy_s), in_duration(self.device_wait_s)
            yield f"the GPU takes {busy} for a step and is idle for {wait} before it"
        if self.copies is not None:
            took, pinned = in_duration(self.copies.as_it_is_s), in_duration(self.copies.pinned_s)
            size = in_bytes(self.copies.nbytes)
            yield f"a batch of {size} is copied to the GPU in {took}, from pinned memory in {pinned}"
        for aside in self.asides:
            yield f"not counted as steps: {in_duration(aside.seconds)} in {aside.name}"
        if self.cases:
            yield "; ".join(f"{case.name} {in_duration(case.seconds)}" for case in self.cases)
        if self.alone is not None:
            alone, cpu_s = in_duration(self.alone.batch_s), self.alone.cpu_s
            cpu = "" if cpu_s is None else f", {in_duration(cpu_s)} of CPU time"
            yield f"the loader alone makes a batch in {alone}{cpu}; {self.cores} cores"
        if self.epoch_start_s is not None:
            yield f"an epoch's first batch comes after {in_duration(self.epoch_start_s)}"
        if self.instant_s is None and self.seconds and not (self.is_cut_short or self.is_opaque):
            yield (
                "the script ended before a step with data ready was measured: use more epochs, or a "
                "smaller --seconds"
            )
        if self.instant_s is None and self.is_cut_short and not self.is_opaque:
            yield (
                "the script was ended before a step with data ready was measured: "
                f"{self._longer(self.step_s)}"
            )
        if self.instant_s is not None and not (self.is_loader_bound or self.is_tried or self.is_opaque):
            yield (
                "--try (try_advice=True) measures what may make the step itself faster: larger batches, "
                "channels-last, bfloat16, torch.compile"
            )

    def show(self, console: Console) -> None:
        """Print the report on a console, in the width and colours of the console."""
        print_line(console, self.verdict, style="bold")
        for text in self.lines():
            print_line(console, text)
        if self.costs.batches:
            where = "the worker that makes it" if self.costs.makers else "the loader's threads"
            table = PlainTable(f"a batch, in {where}")
            table.add_column("stage")
            for name in ("time", "share", "running", "waits for a core", "other waits"):
                table.add_column(name, justify="right")
            for stage, of_all, times in _stage_rows(self.costs):
                table.add_row(stage, times[0], of_all, *times[1:])
            console.print(table)
            for line, stage, share in self.costs.top_lines():
                print_line(console, f"  {share:4.0%} {stage:9} {line}")
        for number, advice in enumerate(self.advice, start=1):
            print_line(console, f"{number}. {advice.what}", style="bold")
            effect = self.effect(advice)
            print_line(console, f"   {effect}{': ' if effect else ''}{advice.why}")
        for text in self._closing_lines():
            print_line(console, text)

    def _closing_lines(self) -> Iterator[str]:
        if self.without_advice:
            yield self.without_advice
        elif self.is_loader_bound and (vain := self.alternatives_in_vain):
            yield f"not clearly faster: {'; '.join(map(_measured, vain))}"
        if self.hint and self.is_loader_bound:
            yield self.hint

    def as_json(self) -> dict[str, Any]:
        """Return the whole report as dicts, lists, strings and numbers that JSON can represent."""
        plain: Any = _plain(self)
        return {"format": _FORMAT, "verdict": self.verdict, "stall_share": self.stall_share, **plain}

    def trace(self) -> str:
        """Return a timeline of the steps and the workers, as JSON for https://ui.perfetto.dev."""
        return json.dumps({"traceEvents": list(_trace_events(self)), "displayTimeUnit": "ms"})

    def html(self) -> str:
        """Return the report as an HTML page that needs no other files."""
        about = machine.describe()
        made = f"{about['cpu']}, {about['cores']} cores, {about['os']}, {about['python']}"
        parts = [
            f"<h1>{escape(self.verdict)}</h1>",
            f'<div class="quiet">{escape(self.script)}{", " if self.script else ""}{self.date[:16]}</div>',
            f'<div class="quiet">{escape(made)}</div>',
            *(f'<div class="quiet">{escape(line)}</div>' for line in self.lines()),
            *_cases(self), *_timeline(self), *_stages(self), *_advice(self),
        ]  # fmt: skip
        return document(f"fastpipe profile {self.script}".rstrip(), parts, _STYLE)

    def to_tensorboard(self, log_dir: str | os.PathLike[str], *, step: int = 0) -> None:
        """Write the report's numbers and its text as TensorBoard events.

        The names of scalars begin with ``fastpipe/profile/``.  ``step_seconds``, ``wait_seconds``,
        ``busy_seconds`` and ``stall_share`` are the attributes of the report.  There is one scalar
        ``stall_seconds/…`` and one scalar ``batch_seconds/…`` for each stage, and one ``case_seconds/…`` for
        each case.  ``predicted_seconds/1`` and ``tried_seconds/1`` are the times of advice 1 in the text.

        Args:
            log_dir: the log folder of TensorBoard, or a folder below it.
            step: the step number of the events.  Use a different number for each profile.

        Raises:
            MissingDependencyError: neither torch with the package tensorboard nor TensorFlow is installed.
            OptionError: the profile has measured no step.

        Example: ``profile(loader, train).to_tensorboard("runs")``.
        """
        scalars = _scalars_of(self)
        if not scalars:
            raise OptionError(f"there is nothing to write to {os.fspath(log_dir)!r}: {self.verdict}")
        write = _writer()
        text = str(self).replace("\n", "\n    ")  # indented text is shown as code, which keeps the columns
        write(os.fspath(log_dir), scalars, f"    {text}", step)
        load_triton_apart()  # TensorBoard's writer may have imported TensorFlow, too


def _measured(one: Alternative) -> str:
    assert one.predicted_s is not None
    tried = "" if one.tried_s is None else f" (tried: {in_duration(one.tried_s)})"
    return f"{one.what}: {in_duration(one.predicted_s)} a step{tried}"


def _plain(value: Any) -> Any:
    if isinstance(value, Line):
        return str(value) if value.file else ""
    if isinstance(value, Spent):
        return {"wall_s": value.wall / 1e9, "cpu_s": value.cpu / 1e9, "delay_s": value.delay / 1e9,
                "idle_s": value.idle / 1e9}  # fmt: skip
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def _stage_rows(costs: LoaderCosts) -> Iterator[tuple[str, str, list[str]]]:
    shares = costs.shares()
    for stage in sorted(costs.stages, key=STAGES.index):
        spent = costs.stages[stage]
        times = [in_duration(value / 1e9) for value in (spent.wall, spent.cpu, spent.delay, spent.idle)]
        yield stage, f"{shares[stage]:.0%}", times


def _trace_events(report: Report) -> Iterator[dict[str, Any]]:
    def named(thread: int, name: str) -> dict[str, Any]:
        return {"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}

    def event(name: str, thread: int, begin: int, end: int, phase: str = "") -> dict[str, Any]:
        arguments = {"args": {"phase": phase}} if phase else {}
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        return {"name": name, "ph": "X", "pid": 0, "tid": thread, **times, **arguments}

    yield named(0, "training")
    for phase, asked, got, done in report.spans:
        yield event("wait for the batch", 0, asked, got, phase)
        yield event("step", 0, got, done, phase)
    for worker, made in report.worker_spans:
        thread = worker + 1 if worker >= 0 else 0
        if thread:
            yield named(thread, f"worker {worker}")
        for begin, fetched, whole in made:
            yield event("fetch", thread, begin, fetched)
            yield event("collate", thread, fetched, whole)


_COLOURS = {
    READ: "#3b6fb6", DECODE: "#c2571a", TRANSFORM: "#7a4fa3", COLLATE: "#8a7a1f", TRANSFER: "#4d7d4d",
    OTHER: "#777777", "busy": "#0b8a6d", "wait": "#c9302c",
}  # fmt: skip
_PERCENT, _TALL = 100.0, 22
_STYLE = """
.name { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin-top: .4rem }
svg.bar, svg.steps { height: 22px }
pre { overflow-x: auto; font-size: .9em; margin: .3rem 0 0 }
td, .part { white-space: nowrap }
@media (max-width: 34rem) {
  table { font-size: .8em } td, th { padding-right: .5rem } ol { padding-left: 1.3rem }
}
"""
_OWN_BATCHES = {Phase.WARMING.value, Phase.AS_IT_IS.value}


def _cases(report: Report) -> Iterator[str]:
    if not report.step_s:
        return
    cases = [(case.name, case.seconds) for case in report.cases] or [("as it is", report.step_s)]
    longest = max(seconds for _, seconds in cases)
    yield "<h2>A step</h2>"
    for number, (name, seconds) in enumerate(cases):
        stall = report.stall if number == len(cases) - 1 else ()
        busy = max(0.0, seconds - sum(part.seconds for part in stall))
        x, rects = 0.0, []
        for stage, length in (("busy", busy), *((part.name, part.seconds) for part in stall)):
            width = _PERCENT * length / longest
            rects.append(rect(x, 0, width, _TALL, _COLOURS.get(stage, _COLOURS["wait"]), "%"))
            x += width
        yield f'<div class="name"><span>{escape(name)}</span><span>{in_duration(seconds)}</span></div>'
        yield f'<svg class="bar" role="img" aria-label="seconds of a step">{"".join(rects)}</svg>'
    named = [part.name for part in report.stall if part.seconds > 0.01 * report.step_s]
    keys = (
        f'<span class="part"><span class="key" style="background:{_COLOURS.get(name, _COLOURS["wait"])}">'
        f"</span>{escape(name)}</span>"
        for name in ("busy", *named)
    )
    yield f'<div class="quiet">parts of the last bar: {" ".join(keys)}</div>'


def _timeline(report: Report) -> Iterator[str]:
    spans = [span for span in report.spans if span[0] in _OWN_BATCHES][-40:]
    if not spans or report.is_opaque:  # the wait of a step is unknown
        return
    first, last = spans[0][1], max(span[3] for span in spans)
    scale = _PERCENT / max(1, last - first)
    yield f"<h2>{len(spans)} steps, {in_duration((last - first) / 1e9)}: waiting in red</h2>"
    yield '<svg class="steps" role="img" aria-label="steps, and what they waited">'
    for _, asked, got, done in spans:
        for begin, end, colour in ((asked, got, _COLOURS["wait"]), (got, done, _COLOURS["busy"])):
            yield rect((begin - first) * scale, 0, 0.98 * (end - begin) * scale, _TALL, colour, "%")
    yield "</svg>"


def _stages(report: Report) -> Iterator[str]:
    if not report.costs.stages:
        return
    yield "<h2>A batch</h2>"
    rows = [[stage, share, *times] for stage, share, times in _stage_rows(report.costs)]
    yield page.table(["stage", "share", "time", "running", "waits for a core", "other waits"], rows)
    lines = [[str(line), stage, f"{share:.0%}"] for line, stage, share in report.costs.top_lines()]
    if lines:
        yield "<h2>Lines of the script</h2>"
        yield page.table(["line", "stage", "share"], lines)


def _advice(report: Report) -> Iterator[str]:
    if report.advice:
        yield from _advice_list(report)
    yield from (f"<p>{escape(text)}</p>" for text in report._closing_lines())


def _advice_list(report: Report) -> Iterator[str]:
    yield "<h2>What would help</h2><ol>"
    for advice in report.advice:
        effect = "" if advice.predicted_s is None else f"<br>{escape(report.effect(advice))}"
        lines = "\n".join(map(escape, advice.diff.splitlines()))
        diff = f"<pre>{lines}</pre>" if lines else ""
        yield f"<li><b>{escape(advice.what)}</b>{effect}<br>{escape(advice.why)}{diff}</li>"
    yield "</ol>"


def _scalars_of(report: Report) -> dict[str, float]:
    if not report.steps:
        return {}
    found = {"step_seconds": report.step_s}
    if not report.is_opaque:
        found |= {"wait_seconds": report.wait_s, "busy_seconds": report.busy_s}
    if report.device_wait_s is not None and report.device_busy_s is not None:
        found["device_wait_seconds"] = report.device_wait_s
        found["device_busy_seconds"] = report.device_busy_s
    found["stall_share"] = report.stall_share
    if report.alone is not None:
        found["loader_alone/batch_seconds"] = report.alone.batch_s
    found |= {f"stall_seconds/{part.name}": part.seconds for part in report.stall}
    found |= {f"batch_seconds/{stage}": spent.wall / 1e9 for stage, spent in report.costs.stages.items()}
    found |= {f"case_seconds/{case.name}": case.seconds for case in report.cases}
    for number, advice in enumerate(report.advice, start=1):  # the same numbers as in the text
        for name, seconds in (("predicted", advice.predicted_s), ("tried", advice.tried_s)):
            if seconds is not None:
                found[f"{name}_seconds/{number}"] = seconds
    return {f"{_PREFIX}/{name.replace(' ', '_')}": value for name, value in found.items()}


def _writer() -> Callable[[str, Mapping[str, float], str, int], None]:
    if "tensorflow" not in sys.modules:
        with contextlib.suppress(ImportError):
            return partial(_write_with_torch, importlib.import_module("torch.utils.tensorboard"))
    try:
        return partial(_write_with_tensorflow, importlib.import_module("tensorflow"))
    except ImportError:
        raise MissingDependencyError(
            "a report goes to TensorBoard by torch and the package tensorboard, or by TensorFlow; neither is "
            "installed. Install it with:  pip install tensorboard torch"
        ) from None


def _write_with_torch(
    tensorboard: Any, log_dir: str, scalars: Mapping[str, float], text: str, step: int
) -> None:
    with tensorboard.SummaryWriter(log_dir) as writer:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.add_text(_PREFIX, text, step)


def _write_with_tensorflow(tf: Any, log_dir: str, scalars: Mapping[str, float], text: str, step: int) -> None:
    def metadata(plugin: str) -> Any:
        # tf.summary.scalar would require the package tensorboard.
        made = tf.compat.v1.SummaryMetadata()
        made.plugin_data.plugin_name = plugin
        return made

    writer = tf.summary.create_file_writer(log_dir)
    try:
        with writer.as_default():
            for name, value in scalars.items():
                tf.summary.write(name, np.float32(value), step, metadata("scalars"))
            tf.summary.write(f"{_PREFIX}/text_summary", text, step, metadata("text"))
    finally:
        writer.close()
