"""Show a suggested change of a script as a diff, which ``patch -p0`` applies."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastpipe.tools.stacks import Line


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
        name = _shown(line.file)
        return "".join(difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), name, name, n=1,
        ))  # fmt: skip

    def _applied(self, source: str, number: int) -> str:
        tree = ast.parse(source)
        call = _call_at(tree, number)
        begin, end = _offset(source, call.lineno, call.col_offset), _end(source, call)
        if self.function:
            words = [source[begin:end], *(f"{name}={value!r}" for name, value in self.arguments.items())]
            source = f"{source[:begin]}{self.function}({', '.join(words)}){source[end:]}"
            return _with_import(source, tree, self.function)
        for name, value in self.arguments.items():
            source = _with_argument(source, name, value, number)
        return source


def _shown(path: str) -> str:
    inside = os.path.relpath(path)
    return path if inside.startswith("..") else inside


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
    end = _end(source, call) - 1  # the closing parenthesis
    inside = source[:end].rstrip()
    comma = "" if inside.endswith(("(", ",")) else ","
    space = "" if inside.endswith("(") else " "
    return f"{inside}{comma}{space}{name}={value!r}{source[len(inside) :]}"


def _with_import(source: str, tree: ast.Module, name: str) -> str:
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = source.splitlines(keepends=True)
    at = imports[-1].end_lineno or 0 if imports else 0
    return "".join([*lines[:at], f"from fastpipe import {name}\n", *lines[at:]])


def _offset(source: str, number: int, column: int) -> int:
    """Return the index of a character, whose ``column`` counts the bytes of UTF-8."""
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: number - 1])) + len(lines[number - 1].encode()[:column].decode())


def _end(source: str, node: ast.expr) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None  # as parsed from source
    return _offset(source, node.end_lineno, node.end_col_offset)
