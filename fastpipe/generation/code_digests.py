"""What a function's code is, without comments, formatting, docstrings and line numbers; and what it names.

The source counts where it is certain to be that of the code that runs: compiled anew it must give the same
bytecode.  That of a file which was edited since it was imported does not; then, as without any source, the
bytecode counts.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["References", "code_digest", "module_imports", "names_written", "references", "source_digest"]

T = TypeVar("T")

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_HAS_DOCSTRING = 0x4000000
_COUNTING_FLAGS = 0x3FF  # *args, **kwargs, generators, coroutines …, but not from where they are compiled
# Nothing that runs: which of an assignment's sides it is, notes of type checkers, how a string was written.
_FIELDS_LEFT_OUT = {"ctx", "type_comment", "type_ignores", "kind"}


@dataclass(frozen=True)
class References:
    """What code names outside itself.

    Attributes:
        chains: names, each with the attributes that are looked up on it at once: ``np.random.normal``.
        imports: modules that it imports while it runs, with the names it takes from them, and their level.
        written: global names that it assigns.
    """

    chains: tuple[tuple[str, ...], ...]
    imports: tuple[tuple[str, tuple[str, ...], int], ...]
    written: frozenset[str]


def code_digest(code: types.CodeType, namespace: dict[str, Any], *, decorators: bool = False) -> str:
    """The digest of a function's code.

    Args:
        code: of the function.
        namespace: the function's globals, by which files inside archives are found.
        decorators: count the expressions of its decorators.
    """
    found = _of_code(_digests, code, lambda: _digests_of(code, namespace))
    return found[decorators]


def source_digest(source: str) -> str:
    """The digest of a module's source.

    >>> source_digest("x = 1  # one") == source_digest("x=1") != source_digest("x = 2")
    True
    """
    return _hex(_shape(ast.parse(source)))


def module_imports(source: str) -> list[tuple[str, tuple[str, ...], int]]:
    """Modules that a module imports, the names it takes from them, and their level.

    >>> module_imports("from .a import b")
    [('a', ('b',), 1)]
    """
    found: list[tuple[str, tuple[str, ...], int]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, (), 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", tuple(alias.name for alias in node.names), node.level))
    return found


def references(code: types.CodeType) -> References:
    """What a function's code names, and the functions inside it."""
    return _of_code(_references, code, lambda: _references_of(code))


def names_written(namespace: dict[str, Any]) -> frozenset[str]:
    """Global names that functions and methods of a module assign: they are state, no constants."""
    found: set[str] = set()
    for value in list(namespace.values()):
        inside = list(vars(value).values()) if isinstance(value, type) else [value]
        for one in inside:
            while one is not None:
                if isinstance(one, types.FunctionType) and one.__globals__ is namespace:
                    found |= references(one.__code__).written
                one = inspect.getattr_static(one, "__wrapped__", None)
    return frozenset(found)


# By identity, as code that is equal may have other sources.
_Kept = dict[int, tuple[weakref.ref[types.CodeType], T]]
_digests: _Kept[tuple[str, str]] = {}
_references: _Kept[References] = {}


def _of_code(kept: _Kept[T], code: types.CodeType, make: Callable[[], T]) -> T:
    """What is known of code, or is found out once."""
    known = kept.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    made, key = make(), id(code)
    kept[key] = weakref.ref(code, lambda _: kept.pop(key, None)), made
    return made


def _digests_of(code: types.CodeType, namespace: dict[str, Any]) -> tuple[str, str]:
    """Without and with decorators."""
    bytecode = _bytecode(code)
    node = _node_of(code, bytecode, namespace)
    if node is None:
        digest = _hex(("bytecode", bytecode))
        return digest, digest
    shape = _shape(node, "decorator_list")  # whoever calls a decorated function calls what it was made to
    return _hex(shape), _hex(_shape(node))


def _node_of(code: types.CodeType, bytecode: Any, namespace: dict[str, Any]) -> _FunctionNode | None:
    """The function in its source, if that is of this very code."""
    for _ in range(2):
        source = "".join(linecache.getlines(code.co_filename, namespace))
        if not source:
            return None
        nodes = _functions_in(code.co_filename, source).get((code.co_name, code.co_firstlineno), [])
        if len(nodes) == 1 and nodes[0][1] == bytecode:
            return nodes[0][0]
        linecache.checkcache(code.co_filename)  # it may be of an older file than the code
    return None


@functools.lru_cache(64)
def _functions_in(filename: str, source: str) -> dict[tuple[str, int], list[tuple[_FunctionNode, Any]]]:
    """By name and first line: nodes, with their bytecode; several where lambdas share a line."""
    try:
        tree = ast.parse(source, filename)
        module = compile(tree, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # a file of something else by now
        return {}
    codes: dict[tuple[str, int], list[types.CodeType]] = {}
    for code in _codes_in(module):
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    found: dict[tuple[str, int], list[tuple[_FunctionNode, Any]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, _FunctionNode):
            continue
        lines = [node.lineno]
        if not isinstance(node, ast.Lambda):
            lines += [one.lineno for one in node.decorator_list]
        key = getattr(node, "name", "<lambda>"), min(lines)
        if len(codes.get(key, ())) == 1:
            found.setdefault(key, []).append((node, _bytecode(codes[key][0])))
    return found


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


def _bytecode(code: types.CodeType) -> Any:
    """What Python runs, as plain values."""
    constants = list(code.co_consts)
    if sys.version_info >= (3, 14):
        may_have_docstring = bool(code.co_flags & _HAS_DOCSTRING)
    else:  # the first constant is the docstring, or None
        may_have_docstring = code.co_flags & 3 == 3 and not code.co_name.startswith("<")
    if may_have_docstring and constants and isinstance(constants[0], str):
        constants[0] = None
    return (
        code.co_code.hex(),
        [_constant(value) for value in constants],
        code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _COUNTING_FLAGS,
        getattr(code, "co_exceptiontable", b"").hex(),
    )  # fmt: skip


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return value.co_name, _bytecode(value)
    if isinstance(value, tuple):
        return "tuple", [_constant(one) for one in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(_constant(one)) for one in value)
    return type(value).__name__, repr(value)


def _shape(node: ast.AST, without: str = "") -> Any:
    """A part of a source as plain values; what is empty is left out, as later Pythons have more fields."""
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = _without_docstring(node, value)
        is_empty = value == [] or (value is None and not isinstance(node, ast.Constant))
        if not is_empty and name != without and name not in _FIELDS_LEFT_OUT:
            fields.append((name, _shape_of(value)))
    return type(node).__name__, fields


def _shape_of(value: Any) -> Any:
    if isinstance(value, ast.AST):
        return _shape(value)
    if isinstance(value, list):
        return [_shape_of(one) for one in value]
    return _constant(value)


def _without_docstring(node: ast.AST, body: list[Any]) -> list[Any]:
    is_documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
    first = body[0] if is_documented and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return body[1:] if isinstance(first.value.value, str) else body
    return body


def _references_of(code: types.CodeType) -> References:
    chains: set[tuple[str, ...]] = set()
    imports: set[tuple[str, tuple[str, ...], int]] = set()
    written: set[str] = set()
    for one in (code, *_codes_in(code)):
        instructions = [step for step in dis.get_instructions(one) if step.opname not in _SKIPPED]
        for at, step in enumerate(instructions):
            if step.opname in _LOADS:
                chains.add((str(step.argval), *_attributes(instructions, at + 1)))
            elif step.opname == "STORE_GLOBAL":
                written.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                level, names = instructions[at - 2].argval, instructions[at - 1].argval
                imports.add((str(step.argval), tuple(names or ()), int(level or 0)))
    return References(tuple(sorted(chains)), tuple(sorted(imports)), frozenset(written))


_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS",
          "LOAD_FROM_DICT_OR_DEREF"}  # fmt: skip
_SKIPPED = {"PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP"}


def _attributes(instructions: list[dis.Instruction], at: int) -> Iterator[str]:
    while at < len(instructions) and instructions[at].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        yield str(instructions[at].argval)
        at += 1


def _hex(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()
