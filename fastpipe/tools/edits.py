"""Show a suggested change of a script as a diff, which ``patch -p0`` applies in the script's folder."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastpipe.tools.folders import shown_path
from fastpipe.tools.stacks import Line

_PLAIN = 2  # positional arguments of a loader: the dataset and the batch size


@dataclass(frozen=True)
class Edit:
    """A change of the call that creates a loader.

    ``function`` is a function of fastpipe that receives the created loader, such as ``accelerate``.
    ``arguments`` are the function's keyword arguments, or the call's own if there is no function.
    """

    function: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def diff(self, line: Line | None) -> str:
        """Return a diff of the file whose ``line`` creates the loader; "" if the call is not found."""
        if line is None or not line.file:
            return ""
        try:
            before = Path(line.file).read_text(encoding="utf-8")
            after = self._applied(before, line.line)
        except (OSError, SyntaxError, ValueError, RecursionError, SystemError):
            return ""  # Python 3.11 raises a SystemError if it parses deep within a thread's calls
        name = shown_path(line.file)
        return "".join(difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), name, name, n=1,
        ))  # fmt: skip

    def _applied(self, source: str, number: int) -> str:
        tree = ast.parse(source)
        call, words = _call_at(tree, number), [f"{name}={value!r}" for name, value in self.arguments.items()]
        begin, end = _offset(source, call.lineno, call.col_offset), _end(source, call)
        if self.function:
            inner = ", ".join([source[begin:end], *words])
            source = f"{source[:begin]}{self.function}({inner}){source[end:]}"
            return _with_import(source, tree, call, self.function)
        for name, value in self.arguments.items():
            source = _with_argument(source, name, value, number)
        ast.parse(source)  # an argument in parentheses of its own ends before they do
        return source


def _call_at(tree: ast.Module, number: int) -> ast.Call:
    """Return the call that creates a loader in a line.

    Raises:
        ValueError: there is no such call, or there are several.
    """
    found = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= number <= (node.end_lineno or node.lineno)
        and ast.unparse(node.func).endswith("Loader")
    ]  # fmt: skip
    if len(found) != 1:
        raise ValueError(f"line {number} has {len(found)} calls that create loaders")
    return found[0]


def _with_argument(source: str, name: str, value: Any, number: int) -> str:
    call = _call_at(ast.parse(source), number)
    known = next((one.value for one in call.keywords if one.arg == name), None)
    if known is not None:
        begin, end = _offset(source, known.lineno, known.col_offset), _end(source, known)
        return f"{source[:begin]}{value!r}{source[end:]}"
    if len(call.args) > _PLAIN or any(one.arg is None for one in call.keywords):
        raise ValueError(f"the call in line {number} may have the argument {name} already")
    ends = [_end(source, one) for one in (call.func, *call.args, *(one.value for one in call.keywords))]
    if len(ends) == 1:
        raise ValueError(f"the call in line {number} has no argument")
    return f"{source[: max(ends)]}, {name}={value!r}{source[max(ends) :]}"


def _with_import(source: str, tree: ast.Module, call: ast.Call, name: str) -> str:
    """Add an import after the last import before the call, or at least after the module's docstring."""
    before = [node for node in tree.body if node.lineno < call.lineno]
    places: list[ast.stmt] = [node for node in before if isinstance(node, (ast.Import, ast.ImportFrom))]
    if not places and ast.get_docstring(tree) is not None:
        places = before[:1]
    lines = source.splitlines(keepends=True)
    at = places[-1].end_lineno or 0 if places else 0
    return "".join([*lines[:at], f"from fastpipe import {name}\n", *lines[at:]])


def _offset(source: str, number: int, column: int) -> int:
    """Return the index of a character, whose ``column`` counts the bytes of UTF-8."""
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: number - 1])) + len(lines[number - 1].encode()[:column].decode())


def _end(source: str, node: ast.expr) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None  # as parsed from source
    return _offset(source, node.end_lineno, node.end_col_offset)
