"""What the documents say is true: their code runs; tables, diffs, commands, messages, names and links are real."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fastpipe
from fastpipe import errors, sampling
from fastpipe.cli import COMMANDS, _parser

_ROOT = Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"
_README = _ROOT / "README.md"
_PAGES = sorted(_DOCS.rglob("*.md"))
_DOCUMENTS = [  # but for CHANGELOG.md, which says what was
    _README, *(_ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    _ROOT / "fastpipe/native/README.md", *_PAGES,
]  # fmt: skip


def _name(page: Path) -> str:
    return page.relative_to(_ROOT).as_posix()


def _blocks(page: Path, *kinds: str) -> list[str]:
    """What is in fences of some kinds; a fence without one has the kind ``""``."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [content for kind, content in found if kind in kinds]


# ---- Code and diffs ------------------------------------------------------------------------------


def _of_torch(page: Path) -> list[str]:
    return [code for code in _blocks(page, "python") if "fastpipe.tf" not in code]


@pytest.mark.parametrize("page", [page for page in (_README, *_PAGES) if _of_torch(page)], ids=_name)
def test_the_code_runs(page: Path, documents_code: Callable[[str], dict[str, Any]]) -> None:
    for code in _of_torch(page):
        assert "dataset" in documents_code(code)


_IN_SHORT = r"^In short:\n\n```diff\n(.*?)^```$"


def _swaps(page: Path) -> list[str]:
    """The side of the short diffs that is new."""
    diffs = _blocks(page, "diff") if page == _README else re.findall(_IN_SHORT, page.read_text(), re.S | re.M)
    return ["\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("+", " ")) for diff in diffs]


# That of TensorFlow is tested where that is loaded.
_SWAPPED = [page for page in (_README, *_PAGES) if _swaps(page) and page.stem != "tensorflow"]


@pytest.mark.parametrize("page", _SWAPPED, ids=_name)
def test_swaps_run(page: Path, documents_code: Callable[[str], dict[str, Any]]) -> None:
    given = "transform, PATCH, table = None, (8, 16, 16), [{'file': 'photos/1.jpg', 'label': 0}] * 9"
    for swap in _swaps(page):
        assert "dataset" in documents_code(f"{given}\n{swap}")


def test_each_case_has_a_swap() -> None:
    cases = [page for page in _PAGES if page.parent.name == "cases" and page.stem != "index"]
    pages = [_README, *cases, _DOCS / "augmentation.md"]
    assert [len(_swaps(page)) for page in pages] == [1] * 9


@pytest.mark.parametrize("page", [page for page in _PAGES if _blocks(page, "diff")], ids=_name)
def test_diffs_are_of_the_examples(page: Path) -> None:
    text = re.sub(_IN_SHORT, "", page.read_text(), flags=re.S | re.M)
    if not (diffs := re.findall(r"^```diff\n(.*?)^```$", text, re.S | re.M)):
        return
    (name,) = set(re.findall(r"^(?:Of|of) `examples/(\w+)/`", text, re.M))
    sides = {
        sign: {line.strip() for line in (_ROOT / "examples" / name / file).read_text().splitlines()}
        for sign, file in (("-", "before.py"), ("+", "after.py"))
    }
    for line in "".join(diffs).splitlines():
        assert line[1:].strip() in sides[line[:1]], line


@functools.cache
def _hook() -> Any:
    """The module that fills pages in."""
    spec = importlib.util.spec_from_file_location("documentation_pages", _DOCS / "hooks" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_of_the_hook_run() -> None:
    failed, tried = doctest.testmod(_hook())
    assert tried > 0 and failed == 0


# ---- Tables --------------------------------------------------------------------------------------

# As scripts they find the modules beside them, and tell processes that they start of them.
with mock.patch.object(sys, "path", [str(_ROOT / "benchmarks"), *sys.path]), mock.patch.dict(os.environ):
    _TABLES = runpy.run_path(str(_ROOT / "benchmarks/tables.py"))
    _PREDICTED = runpy.run_path(str(_ROOT / "benchmarks/predictions.py"))["row"]


def test_the_tables_of_predictions_are_made_from_their_results() -> None:
    marked = r"<!-- predictions:begin (\S+) -->\n(.*?)<!-- predictions:end -->"
    ((path, text),) = re.findall(marked, (_DOCS / "benchmarks/studies.md").read_text(), re.S)
    cases = json.loads((_ROOT / path).read_text())["cases"]
    assert text.splitlines()[2:] == [_PREDICTED(case) for case in cases] and len(cases) == 4


@pytest.mark.parametrize("page", _TABLES["pages"](), ids=_name)
def test_tables_are_made_from_committed_results(page: Path) -> None:
    text = page.read_text()
    assert _TABLES["written"](text) == text, "run `python benchmarks/tables.py`"
    kinds = re.findall(r"^<!-- table:(\w+)", text, re.M)
    assert [kind == "end" for kind in kinds] == [False, True] * (len(kinds) // 2)


def test_every_case_has_a_table_and_every_result_is_named() -> None:
    pages = {path.stem: path.read_text() for path in (_DOCS / "benchmarks").glob("*.md")}
    tables = {name: text.count("<!-- table:end -->") for name, text in pages.items()}
    cases = ("hdf5", "volumes", "buckets", "augmentation", "tensorflow", "generation", "gpu", "training")
    assert all(tables[case] for case in cases)
    assert tables["index"] == 9 and tables["images"] == 2 and tables["never-slower"] == 1
    results = (_ROOT / "benchmarks" / "results" / "0.1.0").glob("*.json")
    assert [path.name for path in results if path.name not in "".join(pages.values())] == []


# ---- Commands, messages and names ----------------------------------------------------------------


@pytest.mark.parametrize("page", [_README, *_PAGES], ids=_name)
def test_commands_are_those_of_the_parser(page: Path) -> None:
    for name in re.findall(r"`(?:python -m )?fastpipe ([a-z]+)[ `]", page.read_text()):
        assert name in COMMANDS
    lines = "".join(_blocks(page, "", "bash")).splitlines()
    lines += [line[2:] for line in "".join(_blocks(page, "text")).splitlines() if line.startswith("$ ")]
    for line in lines:
        if line.startswith("fastpipe "):
            _, name, *words = shlex.split(line, comments=True)
            _parser().parse_args([name, *COMMANDS[name].prepare(words)])


def test_the_commands_page_has_all_commands_and_options() -> None:
    path = "reference/commands.md"
    page = _hook().shown((_DOCS / path).read_text(), path)
    assert [name for name in COMMANDS if f"## fastpipe {name}\n" not in page] == []
    assert "### fastpipe bench images\n" in page and "--dry-run" in page


def _texts(path: Path) -> Iterator[str]:
    """All texts of a module, with … where they have values."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_source() -> None:
    quoted = _blocks(_DOCS / "troubleshooting.md", "text")
    assert len(quoted) >= 20
    messages = "\n".join(text for path in (_ROOT / "fastpipe").rglob("*.py") for text in _texts(path))
    # What stands for a value may be a text of its own, so what is between two of them is looked for.
    parts = [part.strip("'. ") for message in quoted for part in message.strip().split("…")]
    assert [part for part in parts if part not in messages] == []


def _public(module: str) -> set[str]:
    """A package's public names, without importing it."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((_ROOT / "fastpipe" / module / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {f"fastpipe.{module}.{name}" for name in names}


def test_every_public_name_is_in_the_reference() -> None:
    wanted = {f"fastpipe.{name}" for name in fastpipe.__all__} - {"fastpipe.errors", "fastpipe.sampling"}
    wanted |= {f"fastpipe.errors.{name}" for name in errors.__all__}
    wanted |= {f"fastpipe.sampling.{name}" for name in sampling.__all__}
    wanted |= _public("augment") | _public("tf")
    named = [name for page in _PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    # A function in a module of its name.
    missing = wanted - {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in named}
    assert not missing, f"write `::: NAME` on a page of docs/reference for {sorted(missing)}"


_DESIGN = [page for page in _PAGES if page.parent.name == "design"]
_NAMED_FROM = ("", "fastpipe", "fastpipe/native", "tests", "docs")  # what folders' names begin from
_LETTERS = {"T/": "fastpipe/native/tests/", "P/": "tests/native/"}  # of docs/design/native-traps.md


@pytest.mark.parametrize("page", _DOCUMENTS, ids=_name)
def test_files_that_documents_name_are_there(page: Path) -> None:
    names = re.findall(r"(?<![\w./…-])[\w.]+/[\w./]*\.(?:py|h|cpp)\b", page.read_text())
    paths = {name: _LETTERS.get(name[:2], name[:2]) + name[2:] for name in names}
    places = {name: [_ROOT / one / path for one in _NAMED_FROM] for name, path in paths.items()}
    assert [name for name in names if not any(map(Path.is_file, places[name]))] == []


@pytest.mark.parametrize("page", _DESIGN, ids=_name)
def test_modules_that_the_pages_on_design_name_without_a_folder_are_there(page: Path) -> None:
    folders = ("fastpipe", "tests", "benchmarks", "examples")
    known = {path.name for folder in folders for path in (_ROOT / folder).rglob("*.*")}
    known |= {"torch.py", "torchvision.py"}  # files of a user's own
    named = re.findall(r"(?<![\w./…-])\w+\.(?:py|h|cpp)\b", page.read_text())
    assert [name for name in named if name not in known] == []


@functools.cache
def _tests() -> set[str]:
    paths = (_ROOT / "tests").rglob("test_*.py")
    return {name for path in paths for name in re.findall(r"def (test_\w+)\(", path.read_text())}


@pytest.mark.parametrize("page", _DESIGN, ids=_name)
def test_tests_that_the_pages_on_design_name_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`(tests/[\w/.]+)::(test_\w+)`", text)
    assert [name for path, name in named if f"def {name}(" not in (_ROOT / path).read_text()] == []
    assert [name for name in re.findall(r"::(test_\w+)`", text) if name not in _tests()] == []


# ---- Links and the site --------------------------------------------------------------------------


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def _anchors(page: Path) -> set[str]:
    """Where links within a page may lead, as Python-Markdown names titles."""
    titles = re.findall(r"^#+ (.+)$", _without_code(page), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [_ROOT / "CHANGELOG.md", *_DOCUMENTS], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """In the repository; the site has a strict build of its own."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page)):
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if "://" not in path:
            assert place.exists() and (not anchor or anchor in _anchors(place)), target


def test_pictures_are_small() -> None:
    assert [path for path in (_DOCS / "images").iterdir() if path.stat().st_size >= 200_000] == []


def test_pages_are_built_without_a_warning_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    # Of this environment, or of the one that ``make docs`` makes.
    places = (Path(sys.executable).parent / "mkdocs", _ROOT / ".venv-docs" / "bin" / "mkdocs")
    mkdocs = next((path for path in places if path.exists()), None)
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: `make docs` makes an environment that has it")
    command = [mkdocs, "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found = sorted((tmp_path / "site").rglob("*.html"))
    assert len(found) > len(_PAGES)
    tags, elsewhere = r"<(?:script|img|iframe|source|video)\b[^>]*\ssrc=", r"[\"']?(?:https?:)?//"
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert not re.search(rf"(?:{tags}|<link\b[^>]*href=){elsewhere}", text), path
        assert 'class="mermaid"' not in text, f"{path}: mermaid comes from a server"
    assert "FastImageFolder" in (tmp_path / "site" / "search" / "search_index.json").read_text()
