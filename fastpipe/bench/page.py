"""HTML pages of results, and the common parts of all report pages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastpipe.bench.report import data_line, figures_of, machine_line, more_lines
from fastpipe.bench.results import (
    UNIT,
    name_of,
    rate_of,
    reference_of,
    replaced_thing,
    shown,
    times_and_range,
)
from fastpipe.core.text import printable

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --quiet: #5c6470; --line: #b9bec6; --page: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --quiet: #9aa3ae; --line: #4a515b; --page: #16181b }
}
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page) }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.wide { overflow-x: auto; overflow-wrap: normal }
table { border-collapse: collapse } td, th { padding: .15rem .9rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left }
th { font-weight: 600; border-bottom: 1px solid var(--line) }
svg { width: 100%; height: auto; display: block } svg text { fill: currentColor }
.quiet { color: var(--quiet) } li { margin-bottom: .7rem }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; vertical-align: -.05rem }
"""


def escape(text: str) -> str:
    """Return text as printable HTML, for the body of a page or for an attribute in quotes."""
    return html.escape(printable(text))


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return a whole HTML page, which suits light, dark, wide and narrow screens."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page loads nothing, not even an icon.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{style}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table, which scrolls if it is wider than the page.

    >>> table(["a<b"], [["1"]])
    '<div class="wide"><table><tr><th>a&lt;b</th></tr><tr><td>1</td></tr></table></div>'
    """
    cells = "".join(f"<th>{escape(one)}</th>" for one in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def rect(x: float, y: float, width: float, height: float, colour: str, unit: str = "") -> str:
    size = f'width="{max(0.0, width):.2f}{unit}" height="{height:g}"'
    return f'<rect x="{x:.2f}{unit}" y="{y:g}" {size} fill="{escape(colour)}"/>'


_RESULT_STYLE = """
:root { --replaced: #8b929b; --stock: #63b3a0; --fastpipe: #0b8a6f; --peer: #b9a8cc; --floor: #b9a8cc }
:root { --wait: #d2403a; --busy: #0b8a6f; --track: #eef0f2 }
@media (prefers-color-scheme: dark) {
  :root { --replaced: #7d858f; --stock: #4d9484; --fastpipe: #1fae8f; --peer: #83729b; --floor: #83729b }
  :root { --wait: #e0605a; --busy: #1fae8f; --track: #24282d }
}
h1 { line-height: 1.3 } section { margin-top: 2.2rem } section h2 { margin: 0 }
.name { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin-top: .5rem }
.name span:last-child { white-space: nowrap; font-variant-numeric: tabular-nums }
.own { font-weight: 600 } .alarm { color: var(--wait); font-weight: 600 }
svg.bar { height: 16px } svg.steps { height: 24px; background: var(--track); margin: .1rem 0 .4rem }
svg.bar line { stroke: var(--ink); stroke-width: 1.5 }
svg.steps rect { stroke: var(--page); stroke-width: .6 }
h3 { font-size: .95rem; margin: 1rem 0 0; font-weight: 600 }
td { vertical-align: top; font-variant-numeric: tabular-nums }
.facts td { text-align: left; padding-right: 1.2rem }
.figures td { white-space: nowrap } .figures td:first-child, .figures td:last-child { white-space: normal }
.figures td:first-child { min-width: 9rem } .figures td:last-child { min-width: 12rem }
.figures td:last-child, .figures th:last-child { text-align: left }
code { font-size: .93em }
"""
_SHARE = 100.0  # the width of a picture, in percent
_TALL, _LOW = 24, 10  # heights in pixels for waiting and working, which differ also without colours


def page(result: Mapping[str, Any], more: Sequence[str] = ()) -> str:
    """Return an HTML page about the result of any case; ``more`` has lines about other measurements."""
    method = result["method"]
    rounds = f"{method['rounds']} interleaved rounds, {result['date'][:10]}"
    about = (f"{result['job']['text']}: {data_line(result)}", machine_line(result), rounds)
    parts = [
        f"<h1>{escape(result['verdict'])}</h1>",
        *map(_quiet, about),
        *(f'<div class="alarm">{escape(text)}</div>' for text in method["warnings"]),
        *(part for key in result.get("sections") or [None] for part in _section(result, key)),
        *_figures(result, more), *_environment(result),
    ]  # fmt: skip
    return document(f"fastpipe bench {result['case']}", parts, _RESULT_STYLE)


def _section(result: Mapping[str, Any], key: str | None) -> Iterator[str]:
    about = {"label": result["job"]["short"]} if key is None else result["sections"][key]
    rows = [entry for entry in shown(result) if entry.get("section") == key]
    yield f"<section><h2>{escape(about['label'])}</h2>"
    if "data" in about:
        yield _quiet(about["data"])
    for miss in result["missing"]:
        if miss["key"] == key:
            yield f'<div class="alarm">not measured: {escape(miss["why"])}</div>'
    top = max((rate_of(entry)["high"] for entry in rows), default=1.0)
    for entry in rows:
        yield from _bar(result, entry, top)
    if told := result.get("timelines", {}).get(key):
        yield from _steps(told)
    yield "</section>"


def _bar(result: Mapping[str, Any], entry: Mapping[str, Any], top: float) -> Iterator[str]:
    """Yield a bar with the median of a row's rates, their range, and the ratio to the replaced loader."""
    rate, scale = rate_of(entry), _SHARE / top
    is_reference = entry["group"] == "replaced" and entry["key"] == reference_of(result, entry)
    ratio = "1×" if is_reference else times_and_range(entry["ratio"])
    figures = f"{rate['median']:,.0f} {entry.get('unit', UNIT)}/s · {ratio}"
    kind = ' class="own"' if entry["group"] == "fastpipe" else ""
    yield f'<div class="name"><span{kind}>{escape(entry["label"])}</span>'
    yield f"<span{kind}>{escape(figures)}</span></div>"
    low, high = rate["low"] * scale, rate["high"] * scale
    yield (
        f'<svg class="bar" role="img" aria-label="{escape(figures)}">'
        + rect(0, 0, rate["median"] * scale, 16, f"var(--{entry['group']})", "%")
        + f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="8" y2="8"/>'
        + "".join(f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="4" y2="12"/>' for x in (low, high))
        + "</svg>"
    )


def _steps(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield pictures of training steps with the replaced loader and with fastpipe's, on one time scale."""
    longest = max(one["total_s"] for one in told["rows"])
    steps = len(told["rows"][0]["wait_s"])
    yield f"<h3>{steps} steps that keep a device busy for {1000 * told['busy_s']:g} ms each</h3>"
    keys = (("wait", "waiting for data"), ("busy", "busy"))
    legend = (f'<span class="key" style="background:var(--{name})"></span>{text}' for name, text in keys)
    yield f'<div class="quiet">from left to right in time:{"".join(legend)}</div>'
    for name, one in zip(("before", "after"), told["rows"], strict=True):
        figures = f"{one['total_s']:.2f} s, {one['share']:.0%} of it waiting"
        yield f'<div class="name"><span>{name}: {escape(one["label"])}</span><span>{figures}</span></div>'
        yield f'<svg class="steps" role="img" aria-label="{name}: {figures}">'
        at, scale = 0.0, _SHARE / longest
        for wait, busy in zip(one["wait_s"], one["busy_s"], strict=True):
            yield rect(at * scale, 0, wait * scale, _TALL, "var(--wait)", "%")
            yield rect((at + wait) * scale, _TALL - _LOW, busy * scale, _LOW, "var(--busy)", "%")
            at += wait + busy
        yield "</svg>"


def _figures(result: Mapping[str, Any], more: Sequence[str]) -> Iterator[str]:
    rows = [
        [name_of(entry), *figures_of(entry, f" {entry.get('unit', UNIT)}"), entry["note"]]
        for entry in result["rows"]
    ]
    rows += [[miss["label"], "not measured", "", "", "", miss["why"]] for miss in result["missing"]]
    yield "<h2>All figures</h2>"
    head = [replaced_thing(result), "per second", "range", "ratio", "range", "note"]
    yield f'<div class="figures">{table(head, rows)}</div>'
    if lines := [*more, *more_lines(result)]:
        yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
    yield f"<h2>Are the results the same?</h2>\n<p>{escape(result['check']['text'])}</p>"


def _environment(result: Mapping[str, Any]) -> Iterator[str]:
    machine, revision = result["machine"], result["revision"] or {"commit": "", "modified": False}
    facts = [
        ["processor", f"{machine['cpu']}, {machine['cores']} cores"],
        ["memory", "unknown" if machine["memory_gib"] is None else f"{machine['memory_gib']:g} GiB"],
        ["system", f"{machine['os']}, {machine['python']}"],
        ["load at the start", f"{machine.get('load_at_start')}"],
        ["measured", result["date"]],
        ["revision", revision["commit"] + (", with changes" if revision["modified"] else "")],
        *([name, version] for name, version in result["versions"].items()),
    ]  # fmt: skip
    yield "<h2>Environment</h2>"
    yield f'<div class="facts">{table(["", ""], facts)}</div>'
    yield f"<p>Made by <code>{escape(result['command'])}</code>.</p>"


def _quiet(line: str) -> str:
    return f'<div class="quiet">{escape(line)}</div>'
