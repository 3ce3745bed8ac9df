"""Write the tables and the pictures of the documents anew, from the committed results.

In README.md, benchmarks/README.md and docs/ a table stands between ``<!-- table:begin RESULT.json -->``, or
``table:short`` for fastpipe's rows alone, or ``table:trains`` for a result of ``trains_as_well.py``, or
``table:compared`` for one of ``never_slower.py``, and ``<!-- table:end -->``.  A RESULT.png is drawn from the
RESULT.json beside it.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import paths  # noqa: F401

from benchmarks.lines import markdown
from fastpipe.bench.plot import draw
from fastpipe.bench.report import short_markdown
from fastpipe.bench.results import load

ASKED = 0.97  # of a cell of `never_slower.py`
ROOT = Path(__file__).resolve().parents[1]
_MARKED = re.compile(r"(<!-- table:(begin|short|trains|compared) (\S+) -->\n).*?(<!-- table:end -->\n)", re.S)


def trained_row(case: dict[str, Any]) -> str:
    """A line of the table of ``trains_as_well.py``: a swap, accuracies, and by how much they differ."""
    before, after = (f"{statistics.mean(case[side]):.1f} %" for side in ("before", "after"))
    apart = f"{case['difference']:+.2f} ({case['low']:+.2f} to {case['high']:+.2f})"
    columns = [
        f"{case['group']}: {case['name']}", case["before_is"], case["after_is"], str(len(case["before"])),
        before, after, apart,
    ]  # fmt: skip
    return f"| {' | '.join(columns)} |"


def trained(result: dict[str, Any]) -> str:
    """All lines of that table, and where it was measured."""
    machine = result["machine"]
    head = ["swap", "before", "after", "pairs", "right before", "right after", "points, 95 % interval"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|--:|--:|--:|--:|", *map(trained_row, result["cases"])]
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['os']}, {machine['python']}."
    return "\n".join([*lines, "", place, ""])


def compared(result: dict[str, Any]) -> str:
    """Return the lines of the table of ``never_slower.py``, and where it was measured."""
    head = ["dataset", "transform", "workers", "swap", "before, samples/s", "after", "× (range)", "where"]
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|---|--:|--:|--:|---|"]
    for cell in result["cells"]:
        ratio = f"{cell['ratio']:.2f} ({cell['low']:.2f}–{cell['high']:.2f})"
        columns = [
            cell["dataset"], cell["transform"], str(cell["workers"]), cell["way"], f"{cell['before']:,.0f}",
            f"{cell['after']:,.0f}", f"**{ratio}**" if cell["ratio"] < ASKED else ratio, cell["note"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    machine = result["machine"]
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['os']}, {machine['python']}."
    return "\n".join([*lines, "", f"{place} {result['rounds']} rounds.", ""])


def pages() -> list[Path]:
    """The documents that may have tables."""
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


_OTHERS = {"trains": trained, "compared": compared}


def written(text: str) -> str:
    """A page with the tables of its results."""

    def table(found: re.Match[str]) -> str:
        if found[2] in _OTHERS:
            return found[1] + _OTHERS[found[2]](json.loads((ROOT / found[3]).read_text())) + found[4]
        result = load(ROOT / found[3])
        return found[1] + (short_markdown if found[2] == "short" else markdown)(result) + found[4]

    return _MARKED.sub(table, text)


def pictures() -> list[Path]:
    """Return the pictures that have their result beside them."""
    found = sorted(ROOT.glob("benchmarks/results/*/*.png"))
    return [picture for picture in found if picture.with_suffix(".json").exists()]


def drawn(picture: Path) -> bytes:
    """Return a picture of the result beside it, as the content of a PNG file."""
    with tempfile.TemporaryDirectory() as folder:
        draw(load(picture.with_suffix(".json")), path := Path(folder) / picture.name)
        return path.read_bytes()


def main() -> None:
    """Write the pages and pictures that changed, and say which."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    for picture in pictures():
        if (image := drawn(picture)) != picture.read_bytes():
            picture.write_bytes(image)
            print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main()
