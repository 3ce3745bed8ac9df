"""Pages of HTML that need nothing but themselves: what the reports of fastpipe have in common."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from fastpipe.core.text import printable

__all__ = ["document", "escape", "rect", "table"]

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
    """Return text as HTML, printable, for a page or for an attribute within quotes."""
    return html.escape(printable(text))


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole page, for light and dark screens, wide and narrow.

    Args:
        title: what a browser calls it.
        parts: of the body, as HTML.
        style: more rules of CSS.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing is loaded, not even an icon.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{style}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is wider than the page.

    >>> table(["a<b"], [["1"]])
    '<div class="wide"><table><tr><th>a&lt;b</th></tr><tr><td>1</td></tr></table></div>'
    """
    cells = "".join(f"<th>{escape(one)}</th>" for one in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def rect(x: float, y: float, width: float, height: float, colour: str, unit: str = "") -> str:
    """A rectangle of an SVG.

    Args:
        x, width: along the time, or whatever the picture shows; in the picture's units or in `unit`.
        y, height: in the picture's units.
        colour: of CSS.
        unit: ``"%"`` for parts of the picture's width.
    """
    size = f'width="{max(0.0, width):.2f}{unit}" height="{height:g}"'
    return f'<rect x="{x:.2f}{unit}" y="{y:g}" {size} fill="{escape(colour)}"/>'
