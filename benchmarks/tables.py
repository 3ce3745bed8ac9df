"""Write the tables of the documents anew, from the committed results.

In README.md, benchmarks/README.md and docs/ a table stands between ``<!-- table:begin RESULT.json -->``, or
``table:short`` for fastpipe's rows alone, and ``<!-- table:end -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastpipe.bench.report import markdown, short_markdown
from fastpipe.bench.results import load

ROOT = Path(__file__).resolve().parents[1]
_MARKED = re.compile(r"(<!-- table:(begin|short) (\S+) -->\n).*?(<!-- table:end -->\n)", re.S)


def pages() -> list[Path]:
    """The documents that may have tables."""
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(text: str) -> str:
    """A page with the tables of its results."""

    def table(found: re.Match[str]) -> str:
        result = load(ROOT / found[3])
        return found[1] + (short_markdown if found[2] == "short" else markdown)(result) + found[4]

    return _MARKED.sub(table, text)


def main() -> None:
    """Write those that changed, and say which."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
