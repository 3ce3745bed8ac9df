"""Files that the site adds to the pages of docs/: pages of the repository, results, the help of all commands.

Links lead from page to page in the repository, and are changed to lead so in the site.

mkdocs calls the functions whose names begin with ``on_``; the tests call the others.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fastpipe.bench.cli import ELSEWHERE
from fastpipe.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results/0.1.0"

# Files of the repository that are pages as they are, and where.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.txt",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks/method.md",
}
# As wide as a page shows without scrolling.
_COLUMNS = "78"


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own pages, and the benchmarks' pictures and figures."""
    from mkdocs.structure.files import File  # here: the tests have no mkdocs

    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for result in sorted((ROOT / RESULTS).rglob("*.*")):
        target = result.relative_to(ROOT).as_posix()
        files.append(File.generated(config, target, abs_src_path=str(result)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what a page asks for."""
    return shown(text, page.file.src_uri)


def shown(text: str, place: str) -> str:
    """A page as the site has it.

    Args:
        text: the page; a line ``<!-- commands -->`` asks for the help of all commands.
        place: where the site has it.
    """
    sources = {target: source for source, target in PAGES.items()}
    text = relinked(text, sources.get(place, f"docs/{place}"), place)
    return re.sub(r"^<!-- commands -->$", lambda _: commands(), text, flags=re.M)


def relinked(text: str, source: str, place: str) -> str:
    """Text of the repository with its links as they lead from a page.

    >>> relinked("[how](benchmarks/README.md#method)", "README.md", "cases/hdf5.md")
    '[how](../benchmarks/method.md#method)'
    >>> relinked("[how](../../benchmarks/README.md#method)", "docs/cases/hdf5.md", "cases/hdf5.md")
    '[how](../benchmarks/method.md#method)'
    >>> relinked("[pages](../measuring.md)", "docs/cases/hdf5.md", "cases/hdf5.md")
    '[pages](../measuring.md)'
    """

    def target(found: re.Match[str]) -> str:
        path, _, anchor = found[1].partition("#")
        if "://" in path or not path:
            return found[0]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        to = PAGES.get(whole, whole.removeprefix("docs/"))
        return f"]({posixpath.relpath(to, posixpath.dirname(place) or '.')}{'#' if anchor else ''}{anchor})"

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
            for name, child in action.choices.items():
                if name in ELSEWHERE:
                    continue
                yield from _parsers(child, 2 if level == 2 and parser.prog == "fastpipe" else 3)
