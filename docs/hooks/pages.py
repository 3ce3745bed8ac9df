"""What pages have besides their text: tables and figures of committed results, parts of README, commands.

mkdocs calls the functions whose names begin with ``on_``; the tests call the others.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fastpipe.bench.report import markdown, short_markdown
from fastpipe.bench.results import load, rate_of, times_digits
from fastpipe.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results/0.1.0"

# Files of the repository that are pages as they are, and where.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks/method.md",
}
# Sections of README that are elsewhere here.
SECTIONS = {
    "augmentation": "augmentation.md",
    "images-in-a-bucket": "cases/bucket.md",
    "hdf5-files": "cases/hdf5.md",
    "volumes": "cases/volumes.md",
    "tensorflow-and-keras": "cases/tensorflow.md",
    "making-samples": "cases/generation.md",
    "does-training-wait-for-its-data": "measuring.md",
    "when-something-is-wrong-with-a-file": "settings.md#when-something-is-wrong-with-a-file",
}
# As wide as a page shows without scrolling.
_COLUMNS = "78"


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own pages and the benchmarks' pictures."""
    from mkdocs.structure.files import File  # here: the tests have no mkdocs

    for source, target in PAGES.items():
        if source != "README.md":
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for picture in sorted((ROOT / RESULTS).glob("*.png")):
        target = f"benchmarks/results/{posixpath.basename(RESULTS)}/{picture.name}"
        files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what a page asks for."""
    place = page.file.src_uri
    for source, target in PAGES.items():
        if target == place and source != "README.md":
            return relinked(text, source, place)
    return filled(text, place)


def filled(text: str, place: str) -> str:
    """A page with everything it asks for.

    Args:
        text: the page, with lines such as ``<!-- table:short benchmarks/….json gzip -->``,
            ``<!-- section README.md: Install -->`` and ``<!-- commands -->``, and figures such as
            ``{{ times hdf5/gzip-window }}``.
        place: the page's path in ``docs``, from which links lead.
    """
    fillings: dict[str, Callable[[re.Match[str]], str]] = {
        r"^<!-- table:(begin|short) (\S+)((?: \S+)*) -->$": lambda found: table(found[2], found[1], found[3]),
        r"^<!-- section (\S+): (.+) -->$": lambda found: relinked(section(*found.groups()), found[1], place),
        r"^<!-- list (\S+): (.+) -->$": lambda found: relinked(listed(*found.groups()), found[1], place),
        r"^<!-- sample (\S+): (.+) -->$": lambda found: sample(*found.groups()),
        r"^<!-- commands -->$": lambda _: commands(),
        r"\{\{ (times|rate|replaced) (\S+)/(\S+) \}\}": lambda found: figure(found[2], found[3], found[1]),
    }
    for pattern, filling in fillings.items():
        text = re.sub(pattern, filling, text, flags=re.M)
    return text


def table(path: str, kind: str = "begin", sections: str = "") -> str:
    """The table of a result file, as README has it.

    Args:
        path: of the file, from the repository's root.
        kind: ``"begin"`` for all rows, ``"short"`` for fastpipe's.
        sections: names of those that are wanted; empty for all.
    """
    result = load(ROOT / path)
    if wanted := sections.split():
        labels = {name: result["sections"][name] for name in wanted}
        rows = [row for row in result["rows"] if row["section"] in labels]
        result = {**result, "sections": labels, "rows": rows}
    return (short_markdown if kind == "short" else markdown)(result)


def figure(case: str, key: str, kind: str) -> str:
    """A row's figure in words: how many times as fast, or how many in a second.

    Args:
        case: the first part of the result file's name.
        key: the row's.
        kind: ``"times"`` with the range; ``"rate"``; ``"replaced"``, the rate of what is replaced.
    """
    result = load(ROOT / RESULTS / f"{case}-epyc-2cores.json")
    rows = {row["key"]: row for row in result["rows"]}
    row, ratio = rows[key], rows[key]["ratio"]
    if kind == "times":
        low, median, high = (
            f"{ratio[name]:.{times_digits(ratio['median'])}f}" for name in ("low", "median", "high")
        )
        return f"{median} times ({low}–{high})"
    if kind == "replaced":
        row = rows[result["best"][row.get("section", "replaced")]]
    return f"{rate_of(row)['median']:,.0f}"


def section(source: str, title: str) -> str:
    """What a page of the repository has below a title of second level, without that title.

    Args:
        source: the page, from the repository's root.
        title: the section's; ``"the top"`` for what is between the page's title and the first section.
    """
    top, *parts = re.split(r"^## (.+)\n", (ROOT / source).read_text(encoding="utf-8"), flags=re.M)
    found = dict(zip(parts[::2], parts[1::2], strict=True)) | {"the top": top.partition("\n")[2]}
    return re.sub(r"^<!-- table:.*\n", "", found[title].strip(), flags=re.M) + "\n"


def listed(source: str, title: str) -> str:
    """The list of a section that has one, without what follows."""
    lines = section(source, title).splitlines()
    return "\n".join(line for line in lines if line.startswith(("- ", "  "))) + "\n"


def sample(source: str, title: str) -> str:
    """The first output of a command that a section shows, in its fence."""
    found = re.search(r"^```text\n.*?^```$", section(source, title), re.S | re.M)
    assert found is not None, title
    return found[0]


def relinked(text: str, source: str, place: str) -> str:
    """Text of the repository with its links as they lead from a page.

    >>> relinked("[how](benchmarks/README.md#method)", "README.md", "cases/hdf5.md")
    '[how](../benchmarks/method.md#method)'
    """

    def target(found: re.Match[str]) -> str:
        path, _, anchor = found[1].partition("#")
        if "://" in path or (not path and source != "README.md"):
            return found[0]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        to = PAGES.get(whole, whole)
        if whole == "README.md" and anchor in SECTIONS:
            to, _, anchor = SECTIONS[anchor].partition("#")
        return f"]({posixpath.relpath(to, posixpath.dirname(place))}{'#' if anchor else ''}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", target, text)


def commands() -> str:
    """The help of all commands."""
    with mock.patch.dict(os.environ, {"COLUMNS": _COLUMNS, "NO_COLOR": "1"}):
        return "\n".join(
            f"{'#' * level} {parser.prog}\n\n```text\n{parser.format_help()}```\n"
            for parser, level in _parsers(_parser(), 2)
        )


def _parsers(parser: argparse.ArgumentParser, level: int) -> Iterator[tuple[argparse.ArgumentParser, int]]:
    """A parser and those of its commands, with the level of each one's title."""
    yield parser, level
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child, 2 if level == 2 and parser.prog == "fastpipe" else 3)
