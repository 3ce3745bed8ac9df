"""The pages of docs/: their code runs, their figures, diffs, commands and messages are real, links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from fastpipe import errors, sampling
from fastpipe.cli import COMMANDS, _parser

_ROOT = Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"
_PAGES = sorted(str(path.relative_to(_DOCS)) for path in _DOCS.rglob("*.md"))


def _text(page: str) -> str:
    return (_DOCS / page).read_text(encoding="utf-8")


def _blocks(text: str, *kinds: str) -> list[str]:
    """What is in fences of some kinds; a fence without one has the kind ``""``."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.S | re.M)
    return [content for kind, content in found if kind in kinds]


@functools.cache
def _hook() -> Any:
    """The module that fills pages in."""
    path = _DOCS / "hooks" / "pages.py"
    spec = importlib.util.spec_from_file_location("documentation_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shown(page: str) -> str:
    """A page as the site has it."""
    text: str = _hook().shown(_text(page), page)
    return text


def _of_torch(page: str) -> list[str]:
    return [code for code in _blocks(_text(page), "python") if "fastpipe.tf" not in code]


@pytest.mark.parametrize("page", [page for page in _PAGES if _of_torch(page)])
def test_the_code_runs(page: str, documents_code: Callable[[str], dict[str, Any]]) -> None:
    for code in _of_torch(page):
        assert "dataset" in documents_code(code)


def test_the_examples_of_the_hook_run() -> None:
    failed, tried = doctest.testmod(_hook())
    assert tried > 0
    assert failed == 0


_IN_SHORT = r"^In short:\n\n```diff\n(.*?)^```$"


def _swaps(page: str) -> list[str]:
    """The side of the short diffs that is new."""
    return [
        "\n".join(line[1:] for line in diff.splitlines() if line.startswith(("+", " ")))
        for diff in re.findall(_IN_SHORT, _text(page), re.S | re.M)
    ]


@pytest.mark.parametrize("page", [page for page in _PAGES if _swaps(page) and "tensorflow" not in page])
def test_swaps_run(page: str, documents_code: Callable[[str], dict[str, Any]]) -> None:
    # That of TensorFlow is tested where that is loaded.
    given = "transform, PATCH, table = None, (8, 16, 16), [('photos/1.jpg', 0)] * 9"
    for swap in _swaps(page):
        assert "dataset" in documents_code(f"{given}\n{swap}")


def test_each_case_has_a_swap() -> None:
    cases = [page for page in _PAGES if page.startswith("cases/") and page != "cases/index.md"]
    assert [len(_swaps(page)) for page in [*cases, "augmentation.md"]] == [1] * 7


@pytest.mark.parametrize("page", [page for page in _PAGES if _blocks(_text(page), "diff")])
def test_diffs_are_of_the_examples(page: str) -> None:
    text = re.sub(_IN_SHORT, "", _text(page), flags=re.S | re.M)
    if not (diffs := _blocks(text, "diff")):
        return
    (name,) = set(re.findall(r"^(?:Of|of) `examples/(\w+)/`", text, re.M))
    before, after = (
        {line.strip() for line in (_ROOT / "examples" / name / f"{side}.py").read_text().splitlines()}
        for side in ("before", "after")
    )
    for diff in diffs:
        for line in diff.splitlines():
            assert line[:1] in ("-", "+"), line
            assert line[1:].strip() in (before if line[0] == "-" else after), line


@pytest.mark.parametrize("path", ["README.md", *(f"docs/{page}" for page in _PAGES)])
def test_commands_are_those_of_the_parser(path: str) -> None:
    text = (_ROOT / path).read_text(encoding="utf-8")
    for name in re.findall(r"`(?:python -m )?fastpipe ([a-z]+)[ `]", text):
        assert name in COMMANDS
    lines = "".join(_blocks(text, "", "bash")).splitlines()
    lines += [line[2:] for line in "".join(_blocks(text, "text")).splitlines() if line.startswith("$ ")]
    for line in lines:
        if line.startswith("fastpipe "):
            _, name, *words = shlex.split(line, comments=True)
            _parser().parse_args([name, *COMMANDS[name].prepare(words)])


@functools.cache
def _messages() -> str:
    """All texts of the source, with … where they have values."""
    return "\n".join(text for path in sorted((_ROOT / "fastpipe").rglob("*.py")) for text in _texts(path))


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_source() -> None:
    quoted = _blocks(_text("troubleshooting.md"), "text")
    assert len(quoted) >= 20
    # What stands for a value may be a text of its own, so what is between two of them is looked for.
    parts = [part.strip("'. ") for message in quoted for part in message.strip().split("…")]
    assert [part for part in parts if part not in _messages()] == []


def _documented() -> set[str]:
    names = [name for page in _PAGES for name in re.findall(r"^::: (\S+)$", _text(page), re.M)]
    # A function in a module of its name.
    return {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in names}


def _public(module: str) -> set[str]:
    """A package's public names, without importing it."""
    for node in ast.parse((_ROOT / "fastpipe" / module / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {f"fastpipe.{module}.{name}" for name in ast.literal_eval(node.value)}
    raise AssertionError(module)


def test_every_public_name_is_in_the_reference() -> None:
    wanted = {f"fastpipe.{name}" for name in fastpipe.__all__} - {"fastpipe.errors", "fastpipe.sampling"}
    wanted |= {f"fastpipe.errors.{name}" for name in errors.__all__}
    wanted |= {f"fastpipe.sampling.{name}" for name in sampling.__all__}
    wanted |= _public("augment") | _public("tf")
    missing = wanted - _documented()
    assert not missing, f"write `::: NAME` on a page of docs/reference for {sorted(missing)}"


def test_the_commands_page_has_all_commands_and_options() -> None:
    page = _shown("reference/commands.md")
    for name in COMMANDS:
        assert f"## fastpipe {name}\n" in page
    assert "### fastpipe bench images\n" in page
    assert "--dry-run" in page


def test_the_benchmarks_page_has_every_result() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (_DOCS / "benchmarks").glob("*.md"))
    for path in sorted((_ROOT / "benchmarks" / "results" / "0.1.0").glob("*.json")):
        assert path.name in text, path


def _anchors(text: str) -> set[str]:
    """Where links within a page may lead, as Python-Markdown names titles."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


@pytest.mark.parametrize("page", _PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """In the repository; the site has a strict build of its own."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(_text(page))):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        place = (_DOCS / page).parent / path if path else _DOCS / page
        assert place.exists(), target
        if anchor:
            assert anchor in _anchors(place.read_text(encoding="utf-8")), target


def test_links_of_readme_to_titles_lead_somewhere() -> None:
    for path, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", (_ROOT / "README.md").read_text()):
        assert anchor in _anchors((_ROOT / (path or "README.md")).read_text(encoding="utf-8"))


def test_pictures_are_small() -> None:
    for path in (_DOCS / "images").iterdir():
        assert path.stat().st_size < 200_000, path


def _mkdocs() -> Path | None:
    """mkdocs of this environment, or of the one that ``make docs`` makes."""
    places = (Path(sys.executable).parent, _ROOT / ".venv-docs" / "bin")
    return next((folder / "mkdocs" for folder in places if (folder / "mkdocs").exists()), None)


# What a page would load without being asked to.
_LOADED = r"<(?:script|img|iframe|source|video)\b[^>]*\ssrc=[\"']?(?:https?:)?//|<link\b[^>]*href=[\"']?(?:https?:)?//"


def test_pages_are_built_without_a_warning_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    mkdocs = _mkdocs()
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: `make docs` makes an environment that has it")
    command = [mkdocs, "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found = sorted((tmp_path / "site").rglob("*.html"))
    assert len(found) > len(_PAGES)
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert not re.search(_LOADED, text), path
        assert 'class="mermaid"' not in text, f"{path}: mermaid comes from a server"
    assert "FastImageFolder" in (tmp_path / "site" / "search" / "search_index.json").read_text()
