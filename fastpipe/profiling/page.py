"""A report as a page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator

from fastpipe.bench.page import document, escape, rect, table
from fastpipe.core.text import in_duration
from fastpipe.profiling.findings import Advice, Findings
from fastpipe.profiling.loops import Phase
from fastpipe.profiling.stages import COLLATE, DECODE, OTHER, READ, STAGES, TRANSFER, TRANSFORM

__all__ = ["page"]

_COLOURS = {
    READ: "#3b6fb6", DECODE: "#c2571a", TRANSFORM: "#7a4fa3", COLLATE: "#8a7a1f", TRANSFER: "#4d7d4d",
    OTHER: "#777777", "busy": "#0b8a6d", "wait": "#c9302c",
}  # fmt: skip
_WIDTH, _ROW = 860, 26
_OWN_BATCHES = {Phase.WARMING.value, Phase.AS_IT_IS.value}


def page(report: Findings) -> str:
    """The whole page.

    Args:
        report: what was found.
    """
    parts = [
        f"<h1>{escape(report.verdict)}</h1>",
        *(f'<div class="quiet">{escape(line)}</div>' for line in report.lines()),
        *_cases(report), *_timeline(report), *_stages(report), *_advice(report),
    ]  # fmt: skip
    return document("fastpipe profile", parts)


def _cases(report: Findings) -> Iterator[str]:
    """A bar for each case, and what is waited for in that as it is."""
    if not report.step_s:
        return
    cases = [(case.name, case.seconds) for case in report.cases] or [("as it is", report.step_s)]
    longest = max(seconds for _, seconds in cases)
    label, scale = 190, (_WIDTH - 190 - 70) / longest
    yield "<h2>A step</h2>"
    yield f'<svg viewBox="0 0 {_WIDTH} {len(cases) * _ROW}" role="img" aria-label="seconds of a step">'
    for number, (name, seconds) in enumerate(cases):
        y = number * _ROW
        yield f'<text x="0" y="{y + 17}" font-size="14">{escape(name)}</text>'
        if number == len(cases) - 1:
            busy = max(0.0, seconds - sum(part.seconds for part in report.stall))
            pieces = [("busy", busy), *((part.name, part.seconds) for part in report.stall)]
        else:
            pieces = [("busy", seconds)]
        x = float(label)
        for stage, length in pieces:
            yield rect(x, y + 3, length * scale, _ROW - 8, _colour(stage))
            x += length * scale
        yield f'<text x="{x + 6:.1f}" y="{y + 17}" font-size="14">{in_duration(seconds)}</text>'
    yield "</svg>"
    named = [part.name for part in report.stall if part.seconds > 0.01 * report.step_s]
    keys = (
        f'<span class="key" style="background:{_colour(name)}"></span>{escape(name)}'
        for name in ("busy", *named)
    )
    yield f'<div class="quiet">of the last bar:{"".join(keys)}</div>'


def _timeline(report: Findings) -> Iterator[str]:
    """Steps as they came: waiting in red."""
    spans = [span for span in report.spans if span[0] in _OWN_BATCHES][-40:]
    if not spans or report.is_opaque:  # what a step waited is not known apart
        return
    first, last = spans[0][1], max(span[3] for span in spans)
    scale = _WIDTH / max(1, last - first)
    yield f"<h2>{len(spans)} steps, {in_duration((last - first) / 1e9)}: waiting in red</h2>"
    yield f'<svg viewBox="0 0 {_WIDTH} 30" role="img" aria-label="steps, and what they waited">'
    for _, asked, got, done in spans:
        for begin, end, colour in ((asked, got, _COLOURS["wait"]), (got, done, _COLOURS["busy"])):
            x, width = (begin - first) * scale, (end - begin) * scale
            yield rect(x, 3, width - 0.4, 22, colour)
    yield "</svg>"


def _stages(report: Findings) -> Iterator[str]:
    """What a batch costs."""
    if not report.costs.stages:
        return
    yield "<h2>A batch</h2>"
    shares = report.costs.shares()
    rows = []
    for stage in sorted(report.costs.stages, key=STAGES.index):
        spent = report.costs.stages[stage]
        times = (in_duration(value / 1e9) for value in (spent.wall, spent.cpu, spent.delay, spent.idle))
        rows.append([stage, f"{shares[stage]:.0%}", *times])
    yield table(["stage", "share", "time", "running", "waits for a core", "waits for else"], rows)
    lines = [[str(line), stage, f"{share:.0%}"] for line, stage, share in report.costs.top_lines()]
    if lines:
        yield "<h2>Lines of the script</h2>"
        yield table(["line", "stage", "share"], lines)


def _advice(report: Findings) -> Iterator[str]:
    if report.without_advice:
        yield f"<p>{escape(report.without_advice)}</p>"
    if not report.advice:
        return
    yield "<h2>What would help</h2><ol>"
    for advice in report.advice:
        yield f"<li><b>{escape(advice.what)}</b>{_effect(report, advice)}<br>{escape(advice.why)}</li>"
    yield "</ol>"


def _effect(report: Findings, advice: Advice) -> str:
    if advice.predicted_s is None:
        return ""
    return f"<br>{escape(report.effect(advice))}"


def _colour(stage: str) -> str:
    return _COLOURS.get(stage, _COLOURS["wait"])
