"""What a function's result depends on besides its arguments: its code, and all of the user's that it names.

From the function on, what each piece of code names is followed: helpers, classes, constants, modules.  A
piece counts by its own code and by the names of what it uses, so that of two versions can be told which
pieces changed.  Python's own code does not count, and that of packages by their versions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastpipe.generation.code_digests import (
    code_digest,
    module_imports,
    names_written,
    references,
    source_digest,
)
from fastpipe.generation.origins import (
    Origin,
    class_name,
    module_file,
    module_name,
    origin_of_module,
    package_version,
)
from fastpipe.generation.value_digests import DigestError, ValueDigests

__all__ = ["CodeVersion", "changed", "code_name", "code_version"]

_Descriptor = types.MemberDescriptorType | types.GetSetDescriptorType
# What Python and packages note in a class does not count, as it may have addresses in it; but fields do.
_LEFT_OUT = {"__annotate__", "__annotate_func__", "_abc_impl"}
_FIELDS = {"__attrs_attrs__", "__pydantic_fields__", "__slots__"}
_CODE = types.FunctionType, staticmethod, classmethod, property


@dataclass(frozen=True)
class CodeVersion:
    """A function's code, and all that it names, at one time.

    Attributes:
        digest: of everything, in hexadecimal digits.
        parts: by ``"module:name"``, the kind of each piece and its digest: ``"helper:3f0c…"``.
    """

    digest: str
    parts: dict[str, str]


def code_version(fn: Callable[..., Any]) -> CodeVersion:
    """The version of a function's code, the same in every process that would run the same.

    What counts: its own code without comments, docstrings and formatting; defaults, closures, what a
    ``functools.partial`` or a bound method holds; its attribute ``batch``, a second function; functions,
    classes and constants of the user's that it names, and what those name; the versions of packages.  What
    cannot be told from others counts by its type, and what the user's functions assign to (``global``) not
    at all.

    Args:
        fn: a function, or anything else that can be called.

    >>> mine = {"__name__": "mine"}
    >>> exec("rate = 2; fast = lambda x: x * rate", mine)
    >>> sorted(code_version(mine["fast"]).parts)
    ['mine:<lambda>', 'mine:rate']
    """
    walk = _Walk()
    root = walk.root(fn)
    made = hashlib.sha256(repr((root, sorted(walk.parts.items()))).encode("utf-8", "surrogatepass"))
    return CodeVersion(made.hexdigest(), walk.parts)


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs between two versions, in words.

    Args:
        old, new: the ``parts`` of each.

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
    """The name of a function, or of what else can be called: ``"module:name"``.

    >>> code_name(code_name)
    'fastpipe.generation.code_version:code_name'
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{module_name(str(getattr(named, '__module__', None) or 'builtins'))}:{named.__qualname__}"


@dataclass
class _Piece:
    """A function or class that is still to be looked at."""

    thing: Any
    name: str
    kind: str
    decorators: bool


@dataclass
class _Walk:
    """From one function to all that counts."""

    parts: dict[str, str] = field(default_factory=dict)
    _names: dict[int, tuple[object, str]] = field(default_factory=dict)
    _written: dict[int, frozenset[str]] = field(default_factory=dict)
    _todo: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values = ValueDigests(self._code)

    def root(self, fn: Any) -> str:
        """Words for the function itself; all pieces have their digests afterwards."""
        name = code_name(fn)
        is_code = isinstance(fn, types.FunctionType | types.MethodType | functools.partial | type)
        words = [name, self._mention(fn, name if is_code else f"{name}[self]", kind="function")]
        batch = getattr(fn, "batch", None)
        if callable(batch) and not isinstance(fn, types.FunctionType):
            words.append(self._mention(batch, f"{name}.batch"))
        while self._todo:
            piece = self._todo.pop(0)
            lines = self._lines_of(piece)
            self.parts[piece.name] = f"{piece.kind}:{_hex([line for line in lines if line])}"
        return "; ".join(words)

    def _mention(self, thing: Any, place: str, *, kind: str = "helper", decorators: bool = False) -> str:
        """Words for something that code names; "" if it does not count.

        Args:
            thing: what it is.
            place: what a value is called that is found there.
            kind: what a function is called in messages.
            decorators: whether a function's decorators count: a package's made something else of it.
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
        if thing is None or isinstance(thing, _Descriptor):
            return ""
        if isinstance(thing, types.BuiltinFunctionType) and thing.__module__:
            self._package(origin_of_module(thing.__module__), thing.__module__)
            return code_name(thing)
        wrapped, module = _wrapped(thing), type(thing).__module__
        if wrapped is not None and callable(thing) and origin_of_module(module) is not Origin.USER:
            is_ours = module.startswith("fastpipe.")  # else functools.cache, numba.jit, tf.function …
            maker = "" if is_ours else self._code(type(thing))
            return f"{maker} {self._mention(wrapped, place, kind=kind, decorators=not is_ours)}"
        return self._value(thing, place)

    def _value(self, value: Any, place: str) -> str:
        """Of a constant, a default, or what else is no code."""
        try:
            words = self._values.hex(value)
        except DigestError:
            words = self._code(type(value))
        kind = "value" if place.endswith("]") else "constant"
        place = self._free(place, f"{kind}:{words}")
        self.parts[place] = f"{kind}:{words}"
        return place

    def _free(self, name: str, words: str | None = None) -> str:
        """A name that no other piece has."""
        count, wanted = 1, name
        while name in self.parts and self.parts[name] != words:
            count += 1
            name = f"{wanted}#{count}"
        return name

    def _code(self, thing: Any, *, kind: str = "", decorators: bool = False) -> str:
        """A function's or class's name; it is looked at later, if it is the user's."""
        if id(thing) in self._names:
            return self._names[id(thing)][1]
        module = (
            thing.__globals__.get("__name__") if isinstance(thing, types.FunctionType) else thing.__module__
        )
        origin = origin_of_module(str(module))
        name = class_name(thing) if isinstance(thing, type) else code_name(thing)
        if origin is not Origin.USER:
            self._package(origin, str(module))
            inner = _wrapped(thing)  # what a package's decorator made of a function of the user's
            if inner is not None:
                name = f"{module} {self._mention(inner, name, kind=kind or 'helper', decorators=True)}"
            return name
        name = self._free(name)
        self._names[id(thing)] = thing, name
        self.parts[name] = ""
        kind = "class" if isinstance(thing, type) else kind or "helper"
        self._todo.append(_Piece(thing, name, kind, decorators))
        return name

    def _package(self, origin: Origin, module: str) -> None:
        if origin is Origin.PACKAGE:
            top = module.partition(".")[0]
            self.parts[top] = f"package:{package_version(top)}"

    def _lines_of(self, piece: _Piece) -> Iterator[str]:
        """What a piece is, and what it names, in words that are the same in every process."""
        if isinstance(piece.thing, type):
            yield from self._lines_of_class(piece.thing, piece.name)
        else:
            yield from self._lines_of_function(piece.thing, piece.name, piece.decorators)

    def _lines_of_class(self, kind: type, name: str) -> Iterator[str]:
        for base in kind.__bases__:
            yield f"from {self._code(base)}"
        if type(kind) is not type:
            yield f"by {self._code(type(kind))}"
        for attribute, value in sorted(vars(kind).items()):
            is_note = attribute.startswith("__") and not isinstance(value, _CODE)
            if attribute not in _LEFT_OUT and (not is_note or attribute in _FIELDS):
                yield f"{attribute} = {self._mention(value, f'{name}.{attribute}')}"

    def _lines_of_function(self, fn: types.FunctionType, name: str, decorators: bool) -> Iterator[str]:
        code = fn.__code__
        yield code_digest(code, fn.__globals__, decorators=decorators)
        defaults = fn.__defaults__ or ()
        last = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        given = [*zip(last, defaults, strict=True), *(fn.__kwdefaults__ or {}).items()]
        for parameter, value in given:
            yield f"{parameter} = {self._mention(value, f'{name}[{parameter}]')}"
        closure = {}
        for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                closure[variable] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for chain in references(code).chains:
            yield self._reference(chain, fn.__globals__, closure, name)
        for module, names, level in references(code).imports:
            yield from self._imported(module, names, level, str(fn.__globals__.get("__package__") or ""))
        for attribute in ("__wrapped__", "batch"):
            if callable(inner := fn.__dict__.get(attribute)):
                yield f"{attribute} {self._mention(inner, f'{name}.{attribute}')}"

    def _reference(
        self, chain: tuple[str, ...], namespace: dict[str, Any], closure: dict[str, Any], name: str
    ) -> str:
        """What a name, with attributes, stands for."""
        first, *attributes = chain
        holder, at = module_name(str(namespace.get("__name__", "?"))), first
        if first in closure:
            found, place = closure[first], f"{name}[{first}]"
        elif first in namespace and not first.startswith("__"):
            found, place = namespace[first], ""
        else:  # of Python, a local variable of a function around it, or not there yet
            return ""
        while isinstance(found, types.ModuleType) and attributes and _is_users(found):
            namespace, holder, at = vars(found), module_name(found.__name__), attributes.pop(0)
            found, place = getattr(found, at, None), ""
        if not place and _is_value(found) and at in self._names_written(namespace):
            return ""
        return f"{'.'.join(chain)} is {self._mention(found, place or f'{holder}:{at}')}"

    def _names_written(self, namespace: dict[str, Any]) -> frozenset[str]:
        if id(namespace) not in self._written:
            self._written[id(namespace)] = names_written(namespace)
        return self._written[id(namespace)]

    def _imported(self, module: str, names: tuple[str, ...], level: int, package: str) -> Iterator[str]:
        """A module that is imported when the code runs; that may not have been yet."""
        if level:
            try:
                module = importlib.util.resolve_name("." * level + module, package)
            except ImportError:
                return
        yield self._module(module)
        if module_file(module)[0] is not Origin.USER:
            return
        for name in names:  # which may be modules of a package
            if module_file(f"{module}.{name}")[1] is not None:
                yield self._module(f"{module}.{name}")

    def _module(self, module: str) -> str:
        """A module as a whole counts by its source, and by what that imports."""
        module, (origin, file) = module_name(module), module_file(module)
        self._package(origin, module)
        if origin is not Origin.USER or file is None or module in self.parts:
            return module
        try:
            source = importlib.util.decode_source(_read(file))
            self.parts[module] = f"module:{source_digest(source)}"
        except (OSError, SyntaxError, ValueError):
            return module
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for name, names, level in module_imports(source):
            for _ in self._imported(name, names, level, package):
                pass
        return module


def _wrapped(thing: Any) -> Any:
    """The function that was wrapped to make this; None if there is none."""
    try:
        inner = getattr(thing, "__wrapped__", None)
    except Exception:  # of an object that stands for another one
        return None
    return inner if callable(inner) else None


def _is_users(module: types.ModuleType) -> bool:
    return origin_of_module(module.__name__) is Origin.USER


def _is_value(thing: Any) -> bool:
    return not isinstance(thing, types.FunctionType | types.ModuleType | type)


def _read(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _hex(lines: list[str]) -> str:
    return hashlib.sha256(repr(lines).encode("utf-8", "surrogatepass")).hexdigest()
