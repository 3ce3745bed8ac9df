"""Versions of functions' code, and digests of values, to decide whether a stored result is still valid.

A stored result is valid only for the code and the arguments of its call.  The version of a function covers
the function's own code, and the user's functions, classes, constants and modules that this code names.  Each
of these is a *part* with its own digest, so that messages can name the parts that changed.

If a function's source compiles to the code that runs, the function's digest is made from the syntax tree of
the source, without docstrings.  Otherwise the digest is made from the bytecode instructions.  For packages
and for Python, only the version numbers count.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import linecache
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Origin = Literal["user", "package", "python"]


class CodeVersion(NamedTuple):
    """The version of a function: a digest of its code and of everything that the code names."""

    digest: str
    parts: dict[str, str]  # name of a part, ``"module:name"`` -> its kind and digest, ``"helper:3f0c…"``


def code_version(fn: Callable[..., Any]) -> CodeVersion:
    """Return the version of a function's code; two processes that run the same code get equal versions.

    The version covers:

    - the function's own code, defaults, closure, and attribute ``batch``;
    - the values in a ``functools.partial``, and the object of a bound method;
    - the user's functions, classes and constants that the code names, and the code that they name in turn;
    - the versions of Python and of packages.

    If a value has no digest, only the value's type counts.  Global variables to which the user's functions
    assign values are ignored.

    >>> mine = {"__name__": "mine"}
    >>> exec("rate = 2; fast = lambda x: x * rate", mine)
    >>> sorted(code_version(mine["fast"]).parts)
    ['mine:<lambda>', 'mine:rate', 'python']
    """
    walk = _Walk()
    root = walk.run(fn)
    return CodeVersion(_hex((root, sorted(walk.parts.items()))), walk.parts)


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a message for each part of a function's code that differs between two versions.

    ``old`` and ``new`` are the attributes ``parts`` of the two `CodeVersion` objects.

    >>> changed({"a:f": "function:1", "a:g": "helper:2"}, {"a:f": "function:1", "a:g": "helper:3"})
    ["helper 'a:g' changed"]
    """
    found = []
    for name in [*new, *(name for name in old if name not in new)]:
        kind, _, is_now = new.get(name, old.get(name, "")).partition(":")
        was = old.get(name, "").partition(":")[2]
        if name not in old:
            found.append(f"{kind} {name!r} is used now")
        elif name not in new:
            found.append(f"{kind} {name!r} is not used any more")
        elif kind == "package" and is_now != was:
            found.append(f"package {name!r} is {is_now or 'without a version'}, was {was or 'without one'}")
        elif old[name] != new[name]:
            found.append(f"{kind} {name!r} changed")
    return found


def code_name(fn: Any) -> str:
    """Return the name of a function, a class or another callable in the form ``"module:name"``.

    >>> code_name(code_name)
    'fastpipe.generation.code:code_name'
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{_module_name(str(getattr(named, '__module__', None) or 'builtins'))}:{named.__qualname__}"


def _hex(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()


# ---- the code of one function -----------------------------------------------------------------------

_COUNTING_FLAGS = 0x3FF  # *args, **kwargs, generators, coroutines …; not flags of __future__ imports
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS",
          "LOAD_FROM_DICT_OR_DEREF"}  # fmt: skip
_SKIPPED = {"PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"}
_MOST_DIGESTS = 1 << 14


class _Code(NamedTuple):
    """The digest of a Python code object, and the names that the code uses."""

    digest: str
    chains: tuple[
        tuple[str, ...], ...
    ]  # names that the code uses, each with its attributes: ("np", "random", "normal")
    imports: tuple[tuple[str, tuple[str, ...], int], ...]  # modules, names imported from them, import level
    written: frozenset[str]  # global names that the code assigns


@functools.lru_cache(4096)
def _read_code(code: types.CodeType) -> _Code:
    chains: set[tuple[str, ...]] = set()
    imports: set[tuple[str, tuple[str, ...], int]] = set()
    written: set[str] = set()

    def words(code: types.CodeType) -> Any:
        steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
        for at, step in enumerate(steps):
            if step.opname in _LOADS:
                then = itertools.takewhile(
                    lambda one: one.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[at + 1 :]
                )
                chains.add((str(step.argval), *(str(one.argval) for one in then)))
            elif step.opname == "STORE_GLOBAL":
                written.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                level, names = steps[at - 2].argval, steps[at - 1].argval
                imports.add((str(step.argval), tuple(names or ()), int(level or 0)))
        found = [(step.opname, constant(step.argval)) for step in steps]
        handlers = getattr(code, "co_exceptiontable", b"")  # Python 3.10 has instructions for handlers
        return found, handlers, _scope(code)

    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return value.co_name, words(value)
        if isinstance(value, tuple):
            return "tuple", [constant(one) for one in value]
        if isinstance(value, frozenset):
            return "frozenset", sorted(repr(constant(one)) for one in value)
        return type(value).__name__, repr(value)

    digest = _hex(words(code))
    return _Code(digest, tuple(sorted(chains)), tuple(sorted(imports)), frozenset(written))


def _scope(code: types.CodeType) -> tuple[Any, ...]:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    return *counts, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags & _COUNTING_FLAGS


# The id of a code object -> the object, and its digests without and with decorators.  The object is kept so
# that its id is not used again.
_digests: dict[int, tuple[types.CodeType, str, str]] = {}


def _body_digest(fn: types.FunctionType, decorators: bool) -> str:
    """Return a digest of the body of a function, and of its decorators if ``decorators`` is true.

    The digest is made from the source, and does not depend on formatting.  If there is no source, or the file
    was edited after the code was loaded, the digest is made from the bytecode instructions.  Decorators do
    not count then.
    """
    code = fn.__code__  # not fn: tools that reload edited files put new code into the same function
    if id(code) not in _digests:
        own = with_decorators = _read_code(code).digest
        linecache.checkcache(code.co_filename)  # the cached lines may be older than the code
        source = "".join(linecache.getlines(code.co_filename, fn.__globals__))
        there = [
            (line != code.co_firstlineno, number, node)
            for number, (line, other, node) in enumerate(_functions_in(source, code.co_filename))
            if other.co_name == code.co_name and _read_code(other).digest == own
        ]
        if there:  # of several equal functions take the function at this line
            node = min(there)[2]
            scope = *_scope(code), code.co_names, sys.flags.optimize
            own = _hex((scope, [ast.dump(one) for one in node.body]))
            with_decorators = _hex((own, [ast.dump(one) for one in node.decorator_list]))
        if len(_digests) >= _MOST_DIGESTS:
            _digests.clear()
        _digests[id(code)] = code, own, with_decorators
    _, bare, whole = _digests[id(code)]
    return whole if decorators else bare


@functools.lru_cache(64)
def _functions_in(source: str, filename: str) -> list[tuple[int, types.CodeType, Any]]:
    """Return the first line, the code and the syntax tree of each function in a module's source."""
    try:
        tree = ast.parse(source, filename)
        todo = [compile(tree, filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError):  # the file has been changed since it was imported
        return []
    codes: dict[tuple[str, int], types.CodeType] = {}
    while todo:
        inner = [one for one in todo.pop().co_consts if isinstance(one, types.CodeType)]
        codes |= {(one.co_name, one.co_firstlineno): one for one in inner}
        todo += inner
    found = []
    for node in ast.walk(_without_docstrings(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min(one.lineno for one in (node, *node.decorator_list))
            if (node.name, line) in codes:
                found.append((line, codes[node.name, line], node))
    return found


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree


# ---- all parts of a function's version ----------------------------------------------------------------

# Attributes that Python and packages store in a class are ignored, because they may contain addresses.  The
# attributes in `_FIELDS` do count.
_LEFT_OUT = {"__annotate__", "__annotate_func__", "_abc_impl"}
_FIELDS = {"__attrs_attrs__", "__pydantic_fields__", "__slots__"}
_DESCRIPTORS = types.MemberDescriptorType | types.GetSetDescriptorType
_FUNCTIONS = types.FunctionType, staticmethod, classmethod, property


class _Walk:
    """Collects all parts of a function's version: its code, and the code and values that this code names.

    Many methods return *words*: a text that stands for a value in the digest of the code that uses the value.
    """

    def __init__(self) -> None:
        self.parts = {"python": f"package:{sys.version_info.major}.{sys.version_info.minor}"}
        self._names: dict[int, tuple[object, str]] = {}
        self._written: dict[int, frozenset[str]] = {}
        # Functions and classes to visit: each with name, kind, and True if decorators count.
        self._todo: list[tuple[Any, str, str, bool]] = []

    def run(self, fn: Any) -> str:
        """Collect all parts of the function ``fn`` in ``parts``; return the text that stands for ``fn``."""
        name = code_name(fn)
        is_code = isinstance(fn, types.FunctionType | types.MethodType | functools.partial | type)
        words = [name, self._mention(fn, name if is_code else f"{name}[self]", kind="function")]
        batch = getattr(fn, "batch", None)
        if callable(batch) and not isinstance(fn, types.FunctionType):
            words.append(self._mention(batch, f"{name}.batch"))
        while self._todo:
            thing, name, kind, decorators = self._todo.pop(0)
            is_class = isinstance(thing, type)
            lines = self._of_class(thing, name) if is_class else self._of_function(thing, name, decorators)
            self.parts[name] = f"{kind}:{_hex([line for line in lines if line])}"
        return "; ".join(words)

    def _mention(self, thing: Any, place: str, *, kind: str = "helper", decorators: bool = False) -> str:
        """Return the text that stands for a value in the digest of code; "" if the value does not count.

        ``place`` is the name of the value in messages.  If ``decorators`` is true, a function's decorators
        count, too.  This is so if a decorator of a package or of Python returned the value.
        """
        if isinstance(thing, types.FunctionType | type):
            return self._code(thing, kind=kind, decorators=decorators)
        if isinstance(thing, types.ModuleType):
            return self._module(thing.__name__)
        if isinstance(thing, staticmethod | classmethod):
            return f"{type(thing).__name__} {self._mention(thing.__func__, place)}"
        if isinstance(thing, property):
            parts = (thing.fget, thing.fset, thing.fdel)
            return "; ".join(self._mention(part, place) for part in parts if part is not None)
        if isinstance(thing, functools.cached_property):
            return self._mention(thing.func, place)
        if isinstance(thing, types.MethodType):
            bound = self._mention(thing.__self__, f"{place}[self]")
            return f"{self._mention(thing.__func__, place, kind=kind)} of {bound}"
        if isinstance(thing, functools.partial):
            given = self._value((thing.args, thing.keywords), f"{place}[partial]")
            return f"{self._mention(thing.func, place, kind=kind)} with {given}"
        if thing is None or isinstance(thing, _DESCRIPTORS):
            return ""
        if isinstance(thing, types.BuiltinFunctionType) and thing.__module__:
            self._package(thing.__module__)
            return code_name(thing)
        wrapped, module = _wrapped(thing), type(thing).__module__
        if wrapped is not None and callable(thing) and origin_of_module(module) != "user":
            is_ours = module.startswith("fastpipe.")  # False for functools.cache, numba.jit, tf.function …
            maker = "" if is_ours else self._code(type(thing))
            return f"{maker} {self._mention(wrapped, place, kind=kind, decorators=not is_ours)}"
        return self._value(thing, place)

    def _value(self, value: Any, place: str) -> str:
        """Add a constant, a default or another value that is no code to ``parts``; return the part's name."""
        try:
            words = value_digest(value, self._code)
        except DigestError:
            words = self._code(type(value))
        kind = "value" if place.endswith("]") else "constant"
        place = self._free(place, f"{kind}:{words}")
        self.parts[place] = f"{kind}:{words}"
        return place

    def _free(self, name: str, words: str | None = None) -> str:
        """Return ``name``; append a number if another part already has this name."""
        count, wanted = 1, name
        while name in self.parts and self.parts[name] != words:
            count += 1
            name = f"{wanted}#{count}"
        return name

    def _code(self, thing: Any, *, kind: str = "", decorators: bool = False) -> str:
        """Return the name of a function or class; if it is the user's, add it to the code to visit."""
        if id(thing) in self._names:
            return self._names[id(thing)][1]
        is_class = isinstance(thing, type)
        module = str(thing.__module__ if is_class else thing.__globals__.get("__name__"))
        name = code_name(thing)
        if origin_of_module(module) != "user":
            self._package(module)
            inner = _wrapped(thing)  # the function that a package's decorator has wrapped
            if inner is not None:
                name = f"{module} {self._mention(inner, name, kind=kind or 'helper', decorators=True)}"
            return name
        name = self._free(name)
        self._names[id(thing)] = thing, name
        self.parts[name] = ""
        self._todo.append((thing, name, "class" if is_class else kind or "helper", decorators))
        return name

    def _package(self, module: str) -> None:
        if origin_of_module(module) == "package":
            top = module.partition(".")[0]
            self.parts[top] = f"package:{_package_version(top)}"

    def _of_class(self, kind: type, name: str) -> Iterator[str]:
        for base in kind.__bases__:
            yield f"from {self._code(base)}"
        if type(kind) is not type:
            yield f"by {self._code(type(kind))}"
        for attribute, value in sorted(vars(kind).items()):
            is_note = attribute.startswith("__") and not isinstance(value, _FUNCTIONS)
            if attribute not in _LEFT_OUT and (not is_note or attribute in _FIELDS):
                yield f"{attribute} = {self._mention(value, f'{name}.{attribute}')}"

    def _of_function(self, fn: types.FunctionType, name: str, decorators: bool) -> Iterator[str]:
        code, read = fn.__code__, _read_code(fn.__code__)
        yield _body_digest(fn, decorators)
        defaults, first = fn.__defaults__ or (), code.co_argcount - len(fn.__defaults__ or ())
        given = dict(zip(code.co_varnames[first : code.co_argcount], defaults, strict=True))
        for parameter, value in (given | (fn.__kwdefaults__ or {})).items():
            yield f"{parameter} = {self._mention(value, f'{name}[{parameter}]')}"
        closure = {}
        for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the variable has not been assigned yet
                closure[variable] = cell.cell_contents
        for chain in read.chains:
            yield self._reference(chain, fn.__globals__, closure, name)
        for module, names, level in read.imports:
            yield from self._imported(module, names, level, str(fn.__globals__.get("__package__") or ""))
        for attribute in ("__wrapped__", "batch"):
            if callable(inner := fn.__dict__.get(attribute)):
                yield f"{attribute} {self._mention(inner, f'{name}.{attribute}')}"

    def _reference(self, chain: Sequence[str], namespace: Any, closure: dict[str, Any], name: str) -> str:
        """Return the text that stands for the value of a name with attributes, such as ``module.rate``."""
        first, *attributes = chain
        holder, at = _module_name(str(namespace.get("__name__", "?"))), first
        if first in closure:
            found, place = closure[first], f"{name}[{first}]"
        elif first in namespace and not first.startswith("__"):
            found, place = namespace[first], ""
        else:  # a built-in name, a local variable of an enclosing function, or a name not defined yet
            return ""
        while (
            isinstance(found, types.ModuleType) and attributes and origin_of_module(found.__name__) == "user"
        ):
            namespace, holder, at = vars(found), _module_name(found.__name__), attributes.pop(0)
            found, place = getattr(found, at, None), ""
        is_value = not isinstance(found, types.FunctionType | types.ModuleType | type)
        if not place and is_value and at in self._names_written(namespace):
            return ""
        return f"{'.'.join(chain)} is {self._mention(found, place or f'{holder}:{at}')}"

    def _names_written(self, namespace: dict[str, Any]) -> frozenset[str]:
        """Return the global variables that a module's functions assign; these are state, not constants."""
        if id(namespace) not in self._written:
            found: set[str] = set()
            for value in list(namespace.values()):
                for one in list(vars(value).values()) if isinstance(value, type) else [value]:
                    while one is not None:
                        if isinstance(one, types.FunctionType) and one.__globals__ is namespace:
                            found |= _read_code(one.__code__).written
                        one = inspect.getattr_static(one, "__wrapped__", None)
            self._written[id(namespace)] = frozenset(found)
        return self._written[id(namespace)]

    def _imported(self, module: str, names: tuple[str, ...], level: int, package: str) -> Iterator[str]:
        """Collect the module and the submodules that an import statement names, and yield their names."""
        if level:
            try:
                module = importlib.util.resolve_name("." * level + module, package)
            except ImportError:
                return
        yield self._module(module)
        if _module_file(module)[0] == "user":
            for name in names:  # names may be submodules of a package
                if _module_file(f"{module}.{name}")[1] is not None:
                    yield self._module(f"{module}.{name}")

    def _module(self, module: str) -> str:
        """Return the name of a module; if it is the user's, its whole code and its imports become parts."""
        module, (origin, file) = _module_name(module), _module_file(module)
        if origin == "package":
            self._package(module)
        if origin != "user" or file is None or module in self.parts:
            return module
        try:
            with open(file, "rb") as opened:
                tree = ast.parse(opened.read(), file)
            imports = _read_code(compile(tree, file, "exec", dont_inherit=True)).imports
        except (OSError, SyntaxError, ValueError):
            return module
        self.parts[module] = f"module:{_hex(ast.dump(_without_docstrings(tree)))}"
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for name, names, level in imports:
            for _ in self._imported(name, names, level, package):
                pass
        return module


def _wrapped(thing: Any) -> Any:
    """Return the function that ``thing``, such as a decorator's result, wraps; None if there is none."""
    try:
        inner = getattr(thing, "__wrapped__", None)
    except Exception:  # a proxy object may raise anything
        return None
    return inner if callable(inner) else None


# ---- the origin of code: the user, a package, or Python -----------------------------------------------

_PACKAGES = ("site-packages", "dist-packages")
_STDLIB = {PurePath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_MAIN = ("__main__", "__mp_main__")  # "__mp_main__" is the script in a process of multiprocessing


def origin_of_module(name: str) -> Origin:
    """Return ``"user"``, ``"package"`` or ``"python"``: whose a module is, according to its file's folder.

    >>> origin_of_module("json.decoder"), origin_of_module("numpy")
    ('python', 'package')
    """
    top = name.partition(".")[0]
    if top == "fastpipe":  # also if fastpipe is imported from a source checkout
        return "package"
    module = sys.modules.get(name, sys.modules.get(top))
    file = getattr(module, "__file__", None) or getattr(getattr(module, "__spec__", None), "origin", None)
    return _origin_of_file(top, file)


@functools.lru_cache(4096)
def _origin_of_file(top: str, file: str | None) -> Origin:
    path = None if file in (None, "built-in", "frozen") else PurePath(str(file))
    if path is None:
        return "python" if top in sys.stdlib_module_names and top not in _MAIN else "user"
    if any(name in path.parts for name in _PACKAGES):
        return "package"
    return "python" if _STDLIB & set(path.parents) else "user"


def _module_name(name: str) -> str:
    """Return the name by which other code imports a module; for ``__main__``, the name of the script."""
    if name not in _MAIN:
        return name
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name not in _MAIN:  # python -m
        return str(spec.name).removesuffix(".__main__")
    file = getattr(module, "__file__", None)
    return PurePath(file).stem if file else "__main__"


def _module_file(name: str) -> tuple[Origin, str | None]:
    """Return a module's origin (user, package or Python) and its source file, without importing it."""
    top, search, spec, at = name.partition(".")[0], None, None, ""
    if top == "fastpipe" or top in sys.builtin_module_names:
        return "package" if top == "fastpipe" else "python", None
    for part in name.split("."):
        at = f"{at}.{part}" if at else part
        spec = getattr(sys.modules.get(at), "__spec__", None)
        if not (isinstance(spec, importlib.machinery.ModuleSpec) and spec.has_location):
            try:
                spec = importlib.machinery.PathFinder.find_spec(at, search)
            except (ImportError, ValueError):
                spec = None
        if spec is None:
            return _origin_of_file(top, None), None
        search = spec.submodule_search_locations
    file = spec.origin if spec is not None and spec.has_location else None
    return _origin_of_file(top, file), file if file and file.endswith(".py") else None


@functools.cache
def _package_version(top: str) -> str:
    """Return the version of an installed package, from its distribution; "" if it is unknown."""
    if top == "fastpipe":
        return str(sys.modules["fastpipe"].__version__)
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        names = sorted(set(importlib.metadata.packages_distributions().get(top, ())))
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


# ---- digests of values --------------------------------------------------------------------------------
#
# joblib.hash does not fit.  It may give equal values different hashes if some parts are the same object.  The
# hash of a tensor depends on its address, and code counts only by its name.

_PLAIN = {bool, int, float, str, bytes, type(None)}  # C's pickler writes equal values of these types equally


class DigestError(TypeError):
    """A value has no digest, for example because pickle cannot save it, so it cannot be compared."""


def joined(*parts: bytes | memoryview) -> bytes:
    """Return one digest, of 32 bytes, for all ``parts`` in their order."""
    made = hashlib.blake2b(digest_size=32)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def value_digest(value: object, code: Callable[[Any], str]) -> str:
    """Return a digest of a value; equal values have equal digests in every process.

    The digest of an array, a table or a tensor is made from its values.  For a function or a class, the
    digest is made from the text that ``code(thing)`` returns.  For any other object, it is made from the
    state that pickle would save.  The order of a dict counts, because a function may iterate over the dict.
    Raises a DigestError if the value has no digest.

    >>> one, same, other = (value_digest([1, (number, "x")], repr) for number in (2.0, 4 / 2, 2))
    >>> one == same != other
    True
    """
    try:
        return _Digests(code).of(value).hex()
    except (DigestError, MemoryError):
        raise
    except RecursionError:
        raise DigestError("it is nested too deep") from None
    except Exception as error:  # raised by code of the user or of a package
        raise DigestError(f"{type(error).__name__}: {error}") from error


class _Digests:
    """Computes the digests of a value's parts, once for an object to which several parts refer."""

    def __init__(self, code: Callable[[Any], str]) -> None:
        self._code = code
        self._path: dict[int, int] = {}  # ids and depths of the objects that enclose the current object
        # Digests by the ids of objects.  The objects are kept so that their ids are not used again.
        self._known: dict[int, tuple[object, bytes]] = {}
        self._highest = 0  # the least depth of an enclosing object to which the current object refers

    def of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _PLAIN:
            return _plain(value)
        key, depth = id(value), len(self._path)
        if key in self._known:
            return self._known[key][1]
        if key in self._path:
            self._highest = min(self._highest, self._path[key])
            return joined(b"around", str(depth - self._path[key]).encode())
        self._path[key] = depth
        outer, self._highest = self._highest, depth
        made = self._of_parts(value)
        del self._path[key]
        if self._highest >= depth:  # otherwise the digest depends on the enclosing objects
            self._known[key] = value, made
        self._highest = min(outer, self._highest)
        return made

    def _of_parts(self, value: Any) -> bytes:
        kind = type(value)
        if isinstance(value, type | types.FunctionType):
            return joined(b"code", self._code(value).encode())
        if kind in (list, tuple):
            is_plain = set(map(type, value)) <= _PLAIN
            return _plain(value) if is_plain else joined(kind.__name__.encode(), *map(self.of, value))
        if kind is dict:
            is_plain = {*map(type, value), *map(type, value.values())} <= _PLAIN
            parts = () if is_plain else (self.of(part) for pair in value.items() for part in pair)
            return _plain(value) if is_plain else joined(b"dict", *parts)
        if kind in (set, frozenset):
            return joined(kind.__name__.encode(), *sorted(map(self.of, value)))
        if kind is bytearray:
            return joined(b"bytearray", value)
        if kind in (np.ndarray, np.memmap):
            return self._of_array(np.asarray(value))
        if isinstance(value, np.generic):
            return joined(b"scalar", kind.__name__.encode(), self._of_array(np.asarray(value)))
        if isinstance(value, os.PathLike):
            return joined(b"path", self.of(os.fspath(value)))
        if isinstance(value, types.ModuleType):
            return joined(b"module", value.__name__.encode())
        return self._of_table(value) or self._of_tensor(value) or self._of_object(value)

    def _of_array(self, array: npt.NDArray[Any]) -> bytes:
        dtype = array.dtype
        tag = joined(b"array", repr((dtype.name, dtype.str, array.shape)).encode())
        if dtype.names is not None:  # the padding between fields is undefined
            fields = (joined(name.encode(), self._of_array(array[name])) for name in dtype.names)
            return joined(tag, *fields)
        if dtype.hasobject or dtype.kind == "T":
            return joined(tag, *map(self.of, array.reshape(-1).tolist()))
        if not array.nbytes:
            return tag
        as_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if dtype.char in "gG" and np.finfo(dtype).nmant == 63:  # numbers of 80 bits, stored in 128 bits
            as_bytes = as_bytes.reshape(-1, 16)[:, :10].reshape(-1)
        return joined(tag, as_bytes.data)

    def _of_table(self, value: Any) -> bytes | None:
        """Return the digest of a pandas table's values, whatever their memory layout; None for no table."""
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, pandas.Index | pandas.Series | pandas.DataFrame):
            return None
        if isinstance(value, pandas.DataFrame):
            columns = (self.of(value.iloc[:, place]) for place in range(value.shape[1]))
            return joined(b"frame", self.of(value.columns), self.of(value.index), *columns)
        names = self.of(list(value.names) if isinstance(value, pandas.Index) else value.name)
        index = self.of(value.index) if isinstance(value, pandas.Series) else b""
        is_array = isinstance(value.dtype, np.dtype) and not value.dtype.hasobject
        values = self._of_array(value.to_numpy()) if is_array else self.of(value.tolist())
        categories = getattr(value.dtype, "categories", None)
        more = b"" if categories is None else self.of((categories.tolist(), value.dtype.ordered))
        return joined(b"column", str(value.dtype).encode(), names, index, values, more)

    def _of_tensor(self, value: Any) -> bytes | None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise DigestError("only dense tensors with values are supported")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        tag = type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad
        values = memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""
        return joined(b"tensor", repr((*tag, value.device.type)).encode(), values)

    def _of_object(self, value: Any) -> bytes:
        """Return the digest of the state that pickle would save for an object."""
        if any(one.__name__ == "KerasSaveable" for one in type(value).__mro__):
            raise DigestError(
                "a saved Keras model contains the time of saving: pass its get_weights() instead"
            )
        reduce = copyreg.dispatch_table.get(type(value))
        reduced: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return joined(b"global", str(getattr(value, "__module__", "")).encode(), reduced.encode())
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        parts = [self.of(function), self.of(arguments), self._of_state(state)]
        parts += [self.of(list(part)) if part is not None else b"" for part in (items, pairs)]
        return joined(b"object", *parts)

    def _of_state(self, state: Any) -> bytes:
        if isinstance(state, tuple) and len(state) == 2:  # the state of a class with slots
            return joined(b"slots", *map(self._of_state, state))
        if type(state) is not dict:
            return self.of(state)
        # The attributes are sorted, so that the order in which they were set does not count.
        return joined(b"state", *sorted(joined(self.of(name), self.of(one)) for name, one in state.items()))


def _plain(value: Any) -> bytes:
    """Return the digest of a value whose parts all have types in ``_PLAIN``."""
    made = hashlib.blake2b(digest_size=32)
    pickler = pickle.Pickler(types.SimpleNamespace(write=made.update), 4)
    pickler.fast = True  # write every part completely, also a part that was written before
    pickler.dump(value)
    return made.digest()
