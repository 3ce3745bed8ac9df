"""What the documents say is true: README's table and its code, links between pages."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]


def _readme() -> str:
    return (_ROOT / "README.md").read_text()


# As scripts they find the modules beside them, and tell processes that they start of them.
with mock.patch.object(sys, "path", [str(_ROOT / "benchmarks"), *sys.path]), mock.patch.dict(os.environ):
    _TABLES = runpy.run_path(str(_ROOT / "benchmarks/tables.py"))
    _PREDICTED = runpy.run_path(str(_ROOT / "benchmarks/predictions.py"))["row"]


def test_the_tables_of_predictions_are_made_from_their_results() -> None:
    marked = r"<!-- predictions:begin (\S+) -->\n(.*?)<!-- predictions:end -->"
    tables = re.findall(marked, (_ROOT / "docs/benchmarks/studies.md").read_text(), re.S)
    assert len(tables) == 2
    for path, text in tables:
        cases = json.loads((_ROOT / path).read_text())["cases"]
        assert text.splitlines()[2:] == [_PREDICTED(case) for case in cases] and len(cases) == 4


@pytest.mark.parametrize("page", _TABLES["pages"](), ids=lambda page: str(page.relative_to(_ROOT)))
def test_tables_are_made_from_committed_results(page: Path) -> None:
    text = page.read_text()
    assert _TABLES["written"](text) == text, "run `python benchmarks/tables.py`"
    kinds = re.findall(r"^<!-- table:(\w+)", text, re.M)
    assert [kind == "end" for kind in kinds] == [False, True] * (len(kinds) // 2)


def test_every_case_has_a_table() -> None:
    pages = {
        path.stem: path.read_text().count("<!-- table:end -->") for path in _ROOT.glob("docs/benchmarks/*.md")
    }
    cases = ("hdf5", "volumes", "buckets", "augmentation", "tensorflow", "generation", "gpu", "training")
    assert all(pages[case] for case in cases)
    assert pages["index"] == 9 and pages["images"] == 2 and pages["never-slower"] == 1


def test_the_swap_and_the_snippets_run(documents_code: Callable[[str], dict[str, Any]]) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", _readme(), re.S)
    swap = "\n".join(line[1:] for line in diff.splitlines() if line.startswith(("+", " ")))
    for code in [*re.findall(r"```python\n(.*?)```", _readme(), re.S), f"transform = None\n{swap}"]:
        assert "dataset" in documents_code(code)


_DESIGN = sorted((_ROOT / "docs/design").glob("*.md"))
_DOCUMENTS = [  # CHANGELOG.md says what was
    *(_ROOT / name for name in (*_PAGES, "fastpipe/native/README.md") if name != "CHANGELOG.md"),
    *sorted((_ROOT / "docs").rglob("*.md")),
]
_NAMED_FROM = ("", "fastpipe", "fastpipe/native", "tests", "docs")  # what folders' names begin from
_LETTERS = {"T/": "fastpipe/native/tests/", "P/": "tests/native/"}  # of docs/design/native-traps.md


@pytest.mark.parametrize("page", _DOCUMENTS, ids=lambda page: str(page.relative_to(_ROOT)))
def test_files_that_documents_name_are_there(page: Path) -> None:
    gone = []
    for name in re.findall(r"(?<![\w./…-])[\w.]+/[\w./]*\.(?:py|h|cpp)\b", page.read_text()):
        path = _LETTERS.get(name[:2], name[:2]) + name[2:]
        if not any((_ROOT / folder / path).is_file() for folder in _NAMED_FROM):
            gone.append(name)
    assert gone == []


@pytest.mark.parametrize("page", _DESIGN, ids=lambda page: page.name)
def test_modules_that_the_pages_on_design_name_without_a_folder_are_there(page: Path) -> None:
    folders = ("fastpipe", "tests", "benchmarks", "examples")
    known = {path.name for folder in folders for path in (_ROOT / folder).rglob("*.*")}
    known |= {"torch.py", "torchvision.py"}  # files of a user's own
    named = re.findall(r"(?<![\w./…-])\w+\.(?:py|h|cpp)\b", page.read_text())
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("page", _DESIGN, ids=lambda page: page.name)
def test_tests_that_the_pages_on_design_name_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`(tests/[\w/.]+)::(test_\w+)`", text)
    assert [name for path, name in named if f"def {name}(" not in (_ROOT / path).read_text()] == []
    assert [name for name in re.findall(r"::(test_\w+)`", text) if name not in _tests()] == []


@functools.cache
def _tests() -> set[str]:
    """Return the names of all tests."""
    paths = (_ROOT / "tests").rglob("test_*.py")
    return {name for path in paths for name in re.findall(r"def (test_\w+)\(", path.read_text())}


@pytest.mark.parametrize("page", _PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (_ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (_ROOT / page).parent.joinpath(target).exists(), target
