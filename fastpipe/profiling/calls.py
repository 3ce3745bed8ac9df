"""What a frame is calling just now, where that is a function in C, which has no frame of its own."""

from __future__ import annotations

import ast
import linecache
import sys
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["Calls"]

_NOTHING = object()


class Calls:
    """Names the functions that frames call, from their lines; nothing of the script runs for that.

    >>> import zlib
    >>> frame = sys._getframe()
    >>> Calls().named("zlib.compress(content)", frame)
    'zlib.compress'
    >>> file = open(getfixture("tmp_path") / "x", "w+")
    >>> Calls().named("file.read().strip()", sys._getframe())
    '_io.TextIOWrapper'
    >>> file.close()
    """

    def __init__(self) -> None:
        self._names: dict[tuple[CodeType, int], str] = {}

    def name(self, frame: FrameType) -> str:
        """The dotted name of what is called, or of the type of whose it is; empty where that is not known."""
        key = frame.f_code, frame.f_lasti
        found = self._names.get(key)
        if found is None:
            try:
                found = self.named(_source(frame), frame)
            except Exception:  # of an object of the script's, which may answer as it likes
                found = ""
            self._names[key] = found
        return found

    def named(self, source: str, frame: FrameType) -> str:
        """The same for an expression that a frame evaluates."""
        try:
            node: ast.AST = ast.parse(f"({source.strip()})", mode="eval").body
        except (SyntaxError, ValueError):
            return ""
        names: list[str] = []
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
            elif isinstance(node, (ast.Call, ast.Await, ast.Subscript)):
                node, names = node.func if isinstance(node, ast.Call) else node.value, [] if names else names
            else:
                return ""
        return _resolved(node.id, names, frame)


def _source(frame: FrameType) -> str:
    """The expression that a frame evaluates; its whole line before Python 3.11."""
    code, line = frame.f_code, frame.f_lineno
    if sys.version_info < (3, 11):
        return linecache.getline(code.co_filename, line)
    first, last, begin, end = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if first is None or last is None or begin is None or end is None or last - first > 20:
        return ""
    lines = [linecache.getline(code.co_filename, at).encode() for at in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # before the first is cut, which may be the same
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _resolved(name: str, attributes: list[str], frame: FrameType) -> str:
    """The dotted name of an attribute of a local or global variable, as far as it can be told safely."""
    found: Any = _NOTHING
    for namespace in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if name in namespace:
            found = namespace[name]
            break
    if found is _NOTHING:
        return ""
    for at, attribute in enumerate(attributes):
        if isinstance(found, ModuleType):
            inner = vars(found).get(attribute, _NOTHING)
            if isinstance(inner, (type, FunctionType, BuiltinFunctionType)):
                return ".".join([found.__name__, *attributes[at:]])
        else:  # not through properties, nor through what a class computes
            try:
                inner = object.__getattribute__(found, "__dict__").get(attribute, _NOTHING)
            except (AttributeError, TypeError):
                inner = _NOTHING
        if inner is _NOTHING:
            return _type_name(found)
        found = inner
    return _type_name(found)


def _type_name(found: Any) -> str:
    """The dotted name of a function or class, or of the type of anything else."""
    if isinstance(found, ModuleType):
        return found.__name__
    if isinstance(found, MethodType):  # which answers for what it is bound to, whatever that is
        return _type_name(found.__func__)
    named = found
    if isinstance(found, BuiltinFunctionType) and not isinstance(found.__self__, ModuleType | None):
        named = type(found.__self__)  # of a method in C, of whose it is
    elif not isinstance(found, (type, FunctionType, BuiltinFunctionType)):
        named = type(found)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"
