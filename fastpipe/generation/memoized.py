"""Memoized functions: results are stored, and used again if arguments, files and code are unchanged."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import operator
import os
import stat
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, overload

from fastpipe.core.file_identity import state_of
from fastpipe.core.private_folder import PrivateFolder
from fastpipe.errors import CacheError, OptionError
from fastpipe.generation.code import (
    DigestError,
    changed,
    code_name,
    code_version,
    joined,
    origin_of_module,
    value_digest,
)
from fastpipe.generation.store import (
    FORMAT,
    Entries,
    EntryError,
    Header,
    NeedsPickleError,
    NotStorableError,
    computing,
    is_computing,
)

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("fastpipe.memoize")
_MOST_CHANGES = 4  # a message lists at most this many changes


@overload
def memoize(fn: Callable[P, T], *, dir: str | os.PathLike[str], pickle: bool = False) -> Memoized[P, T]: ...
@overload
def memoize(
    fn: None = None, *, dir: str | os.PathLike[str], pickle: bool = False
) -> Callable[[Callable[P, T]], Memoized[P, T]]: ...
def memoize(
    fn: Callable[P, T] | None = None, *, dir: str | os.PathLike[str], pickle: bool = False
) -> Memoized[P, T] | Callable[[Callable[P, T]], Memoized[P, T]]:
    """Store the results of a function in a folder, and load a stored result instead of computing it again.

    ``memoize`` also works as a decorator: ``@memoize(dir="cache")``.  A stored result is loaded if the
    arguments, the files and the code of the call are equal to those of the stored call:

    - Arguments may be passed by position or by name.  Arrays and tables are compared by their values.  The
      user's functions and classes are compared by their code, and other objects by the state that pickle
      would save.
    - The files are those whose path is an argument or a part of an argument.  A string counts as a path only
      if the file or folder exists.  Files are compared by device, inode, size and times.
    - The code is that of the function, and of the user's functions, classes and constants that the code
      names.  Comments, docstrings and formatting do not count.  The versions of Python (such as 3.12) and of
      packages do count.

    If the result depends on anything else, pass this as an argument, or set it inside the function.  Examples
    are random generators, the environment, and files whose paths are not among the arguments.  A call that
    loads a result has no side effects and draws no random numbers.

    Results of these types are loaded with equal types and bits, and without running code: None, numbers,
    strings, bytes, NumPy arrays and scalars, torch tensors, and lists, tuples, sets and dicts of these types.
    If the file of a result is damaged or cannot be decoded, the file is renamed, and the result is computed
    again.  A result that cannot be stored is still returned.  The logger ``"fastpipe.memoize"`` logs at level
    INFO which results were loaded, and why other results were computed.  At level WARNING it logs problems.

    If several threads and processes need the same result at the same time, one of them computes the result,
    and the others wait.

    Args:
        fn: the function.  It is not changed.
        dir: the folder.  The first call creates it, private to the user.  Several functions may share it.
        pickle: True also stores results of other types, with pickle.  Their files are sealed (signed) with a
            key in the user's settings folder.  Data without this seal is never unpickled.

    Returns:
        A function with the same signature.  Its method ``clear()`` removes the stored results.

    Raises:
        OptionError: ``fn`` is a generator or coroutine, or is not callable.  A call of the returned function
            raises this error if an argument cannot be compared with the arguments of stored calls.
        CacheError: raised by a call if the folder belongs to another user, is accessible to other users, or
            cannot be created.

    >>> calls = []
    >>> def square(x):
    ...     calls.append(x)
    ...     return x * x
    >>> kept = memoize(square, dir=getfixture("tmp_path") / "cache")
    >>> kept(3), kept(x=3), calls
    (9, 9, [3])
    """
    if fn is None:
        return functools.partial(Memoized, dir=dir, pickle=pickle)
    return Memoized(fn, dir=dir, pickle=pickle)


class Memoized(Generic[P, T]):
    """A function whose results are stored; see ``memoize``."""

    def __init__(self, fn: Callable[P, T], *, dir: str | os.PathLike[str], pickle: bool = False) -> None:
        self._signature = _checked_signature(fn)
        functools.update_wrapper(self, fn)
        self._fn, self._name = fn, code_name(fn)
        self._dir, self._pickle = Path(dir).absolute(), pickle
        code_version(fn)  # reads the source of decorators now, while the source surely matches this code

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return self._fn(*args, **kwargs)  # raises Python's own error
        bound.apply_defaults()
        with self._folder() as folder:
            wanted = self._wanted(folder, bound)
            entries = Entries(folder, self._name)
            name = entries.file_name(wanted.key)
            if is_computing(folder, name):  # the function calls itself
                return self._fn(*args, **kwargs)
            found = self._load(entries, wanted.key, is_alone=False)
            if isinstance(found, str):
                with computing(folder, name):
                    found = self._load(entries, wanted.key, is_alone=True)
                    if isinstance(found, str):
                        return self._compute(entries, wanted, found, lambda: self._fn(*args, **kwargs))
        header, value = found
        _log.info("%s: loaded from %s, which saves %.1f s", self._name, name, header.seconds)
        return value  # type: ignore[no-any-return]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<memoized {self._name} in {str(self._dir)!r}{', pickle=True' if self._pickle else ''}>"

    def __reduce__(self) -> Any:
        name = str(getattr(self._fn, "__qualname__", ""))
        with contextlib.suppress(AttributeError):
            if operator.attrgetter(name)(sys.modules.get(str(self._fn.__module__))) is self:
                return name  # the module's attribute with this name is this wrapper
        return functools.partial(Memoized, dir=self._dir, pickle=self._pickle), (self._fn,)

    def clear(self) -> int:
        """Remove all stored results of this function, for any arguments and code; return their number.

        Damaged files, which have been renamed, stay.  Raises a CacheError if a call would raise it.
        """
        if not os.path.lexists(self._dir):
            return 0
        with self._folder() as folder:
            return Entries(folder, self._name).clear()

    def _folder(self) -> PrivateFolder:
        if not hasattr(os, "geteuid"):
            raise CacheError(
                "memoize stores nothing on this system, because folders cannot be closed to other users"
            )
        return PrivateFolder(self._dir)

    def _wanted(self, folder: PrivateFolder, bound: inspect.BoundArguments) -> Header:
        """Return the description of a call (the header) with which the call's result is stored."""
        arguments = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments[name] = dict(sorted(arguments[name].items()))
        status, version = os.stat(folder.here()), code_version(self._fn)
        own = status.st_dev, status.st_ino
        digests, data = _digests(self._name, _held(self._fn) | arguments, own)
        parts = FORMAT, self._name, version.digest, sorted(digests.items()), sorted(data.items())
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return Header(self._name, key, version.parts, digests, data)

    def _load(self, entries: Entries, key: str, *, is_alone: bool) -> tuple[Header, Any] | str:
        """Return the header and the value of a stored result, or a text that says why it is not used.

        ``is_alone`` is True if the caller holds the lock of ``key``.  Only then is a damaged file renamed.
        """
        try:
            return entries.load(key, pickled=self._pickle)
        except FileNotFoundError:
            return ""
        except NeedsPickleError:
            what, done = "it is pickled: pass pickle=True to load it", "it stays where it is"
        except EntryError as error:
            aside = entries.set_aside(key) if is_alone else None
            what, done = str(error), f"it is kept as {aside}"
        except (OSError, MemoryError) as error:
            what, done = f"{type(error).__name__}: {error}", "it is replaced"
        if is_alone:
            text = "%s: its entry %s cannot be loaded: %s; %s, and the result is computed again"
            _log.warning(text, self._name, entries.file_name(key), what, done)
        return "its entry cannot be loaded"

    def _compute(self, entries: Entries, wanted: Header, reason: str, compute: Callable[[], T]) -> T:
        _log.info("%s: computed: %s", self._name, reason or _reason(entries.headers(), wanted))
        begin = time.perf_counter()
        result = compute()
        seconds = time.perf_counter() - begin
        try:
            entries.store(replace(wanted, seconds=seconds), result, pickled=self._pickle)
        except Exception as error:  # return the result after any error: computing it may have taken hours
            what = f"{type(error).__name__}: {error}. It is computed again at the next call"
            if isinstance(error, NotStorableError):
                also = "" if self._pickle else ", or pass pickle=True"
                what = f"{error}. Return arrays, numbers, strings, and dicts or lists of them{also}"
            text = "%s: its result, of %.1f s, is returned but not kept: %s"
            _log.warning(text, self._name, seconds, what)
        return result


def _checked_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature; raise an ``OptionError`` if its result can never be stored."""
    is_generator = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    if is_generator or inspect.iscoroutinefunction(fn):
        kind = "generator" if is_generator else "coroutine"
        raise OptionError(
            f"memoize stores the value that a function returns, got a {kind}: return a list or an array"
        )
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"memoize needs a function whose arguments have names, got {fn!r}: {error}"
        ) from error


def _held(fn: Any) -> dict[str, Any]:
    """Return the values that ``fn`` holds, as a partial, a method or an object; they count as arguments."""
    if isinstance(fn, functools.partial):
        return {"functools.partial": (fn.args, fn.keywords)} | _held(fn.func)
    if isinstance(fn, types.MethodType):
        return {"self": fn.__self__}
    is_code = isinstance(fn, types.FunctionType | types.BuiltinFunctionType | type)
    if is_code or origin_of_module(type(fn).__module__) != "user":
        return {}
    return {"self": fn}


# ---- why there is no entry --------------------------------------------------------------------------


def _reason(headers: list[Header], wanted: Header) -> str:
    """Explain why no result of this call is stored: compare the call with the most similar stored call."""
    found = []
    for header in headers:
        arguments = _other(header.arguments, wanted.arguments)
        files = [name for name in _other(header.data, wanted.data) if name not in arguments]
        code = changed(header.parts, wanted.parts)[:_MOST_CHANGES]
        found.append((len(arguments) + len(files) + bool(code), arguments, files, code))
    if not found:
        return "no entry yet"
    _, arguments, files, code = min(found, key=lambda one: one[0])
    words = []
    if arguments:
        words.append(f"another value of {', '.join(map(repr, arguments))} than in the nearest entry")
    if files:
        words.append(f"the files of {', '.join(map(repr, files))} changed")
    if code:
        words.append(f"the code changed: {'; '.join(code)}")
    return "; ".join(words) or "no entry yet"


def _other(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ between two mappings."""
    return [name for name in {**other, **one} if one.get(name) != other.get(name)]


# ---- arguments, and the files that they name --------------------------------------------------------


def _digests(
    name: str, arguments: Mapping[str, Any], own: tuple[int, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digests of a function's arguments, and of the files and folders that the arguments name.

    ``own`` is the device and inode of the folder with the stored results.  If an argument names a folder that
    contains this folder, the stored results do not count.
    """
    digests, data = {}, {}
    for argument, value in arguments.items():
        try:
            digests[argument] = value_digest(value, _code)
        except DigestError as error:
            raise OptionError(
                f"memoize cannot distinguish argument {argument!r} of {name!r} from other values: {error}. "
                "It is a "
                f"{type(value).__module__}.{type(value).__qualname__}: pass what it is made from (numbers, "
                "arrays, a path), and make it inside the function"
            ) from error
        files = [joined(os.fsencode(path), _of_path(path, own)) for path in _paths(value, set())]
        if files:
            data[argument] = joined(*files).hex()
    return digests, data


def _code(thing: Any) -> str:
    """Return the name of a function or class in an argument; if it is the user's, add its code's digest."""
    module = thing.__module__ if isinstance(thing, type) else thing.__globals__.get("__name__")
    name = code_name(thing)
    return f"{name} {code_version(thing).digest}" if origin_of_module(str(module)) == "user" else name


def _paths(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the paths of files and folders in a value.

    A string counts if the file or folder exists, but strings of only "/" and "." do not count.
    """
    if isinstance(value, os.PathLike):
        yield os.fsdecode(value)
    elif isinstance(value, str):
        if value.strip("./") and os.path.lexists(value):
            yield value
    elif isinstance(value, list | tuple | set | frozenset | dict) and id(value) not in seen:
        seen.add(id(value))
        inside = value.values() if isinstance(value, dict) else value
        for one in sorted(inside, key=str) if isinstance(value, set | frozenset) else inside:
            yield from _paths(one, seen)


def _of_path(path: str, own: tuple[int, int]) -> bytes:
    try:
        status = os.stat(path)
    except OSError as error:
        return joined(b"missing", str(error.errno).encode())
    if stat.S_ISDIR(status.st_mode):
        return joined(*sorted(_of_folder(path, {own, (status.st_dev, status.st_ino)})))
    return state_of(status)


def _of_folder(top: str, seen: set[tuple[int, int]]) -> Iterator[bytes]:
    """Yield digests of all files below a folder; follow links to folders, and visit each folder once."""
    todo = [top]
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            yield joined(b"closed", os.fsencode(os.path.relpath(folder, top)), str(error.errno).encode())
            continue
        for entry in entries:
            name = os.fsencode(entry.path[len(top) :])
            try:
                status = entry.stat()
            except OSError:  # a dangling link, or a file that was just removed
                yield joined(b"missing", name)
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield joined(name, state_of(status))
            elif (place := (status.st_dev, status.st_ino)) not in seen:
                seen.add(place)
                todo.append(entry.path)
