"""Memoized functions: results kept in a folder by arguments, files that arguments name, and code."""

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
_MOST_CHANGES = 4  # in a message


@overload
def memoize(fn: Callable[P, T], *, dir: str | os.PathLike[str], pickle: bool = False) -> Memoized[P, T]: ...
@overload
def memoize(
    fn: None = None, *, dir: str | os.PathLike[str], pickle: bool = False
) -> Callable[[Callable[P, T]], Memoized[P, T]]: ...
def memoize(
    fn: Callable[P, T] | None = None, *, dir: str | os.PathLike[str], pickle: bool = False
) -> Memoized[P, T] | Callable[[Callable[P, T]], Memoized[P, T]]:
    """Keep what a function returns in a folder, and load it from there when it is called again.

    Also a decorator: ``@memoize(dir="cache")``.  A result is loaded if it is of

    - equal arguments, whichever way they are given.  Arrays and tables count by their values, objects by
      what pickle would take of them, the user's functions and classes by their code;
    - unchanged files: of every argument, or part of one, that is a path, or a string that is the path of a
      file or folder: device, inode, size and times of each file;
    - the same code: the function's, and that of the user's functions, classes and constants that it names,
      without comments, docstrings and formatting; and the same versions of Python (3.12, say) and packages.

    Everything else that it depends on (random generators, the environment, files whose paths are not
    among the arguments) must be made an argument or be set inside the function; and a result that is loaded
    has no side effects, and draws no random numbers.

    None, numbers, strings, bytes, NumPy's arrays and scalars, torch's tensors, and lists, tuples, sets and
    dicts of them come back equal in types and bits, and no code is run for it.  An entry that is damaged,
    or cannot be loaded, is kept under another name, and the result is computed again.  A result that cannot
    be kept is returned all the same.  The logger ``"fastpipe.memoize"`` says at level INFO what was loaded,
    and why something was not; at level WARNING what went wrong.

    Threads and processes that need the same result at the same time wait for the first of them.

    Args:
        fn: the function.  It is not changed.
        dir: the folder; it is made at the first call, for the user alone.  Other functions may share it.
        pickle: keep results of other kinds too, by pickle, sealed with a key in the user's folder of
            settings; what has no such seal is never unpickled.

    Returns:
        A function with the same signature; its ``clear()`` removes what is kept.

    Raises:
        OptionError: ``fn`` is a generator or coroutine, or cannot be called; in a call: an argument cannot
            be told from others.
        CacheError: in a call: the folder belongs to somebody else, lets others in, or cannot be made.

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
    """A function whose results are kept, see ``memoize``."""

    def __init__(self, fn: Callable[P, T], *, dir: str | os.PathLike[str], pickle: bool = False) -> None:
        self._signature = _checked_signature(fn)
        functools.update_wrapper(self, fn)
        self._fn, self._name = fn, code_name(fn)
        self._dir, self._pickle = Path(dir).absolute(), pickle
        code_version(fn)  # reads the source of decorators while it is certainly that of this code

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return self._fn(*args, **kwargs)  # which says it in its own words
        bound.apply_defaults()
        with self._folder() as folder:
            wanted = self._wanted(folder, bound)
            entries = Entries(folder, self._name)
            name = entries.file_name(wanted.key)
            if is_computing(folder, name):  # it calls itself
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
                return name  # it stands in the function's place
        return functools.partial(Memoized, dir=self._dir, pickle=self._pickle), (self._fn,)

    def clear(self) -> int:
        """Remove this function's entries, of whatever arguments and code; return how many there were.

        What was kept aside as damaged stays.  Raises a CacheError as a call does.
        """
        if not os.path.lexists(self._dir):
            return 0
        with self._folder() as folder:
            return Entries(folder, self._name).clear()

    def _folder(self) -> PrivateFolder:
        if not hasattr(os, "geteuid"):
            raise CacheError("memoize keeps nothing on this system, whose folders cannot be closed to others")
        return PrivateFolder(self._dir)

    def _wanted(self, folder: PrivateFolder, bound: inspect.BoundArguments) -> Header:
        """The header of a call's entry."""
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
        """What is kept, or why it is not used; only who is alone with a key does something about that."""
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
        except Exception as error:  # it may have taken hours: whatever goes wrong, it is returned
            what = f"{type(error).__name__}: {error}. It is computed again at the next call"
            if isinstance(error, NotStorableError):
                also = "" if self._pickle else ", or pass pickle=True"
                what = f"{error}. Return arrays, numbers, strings, and dicts or lists of them{also}"
            text = "%s: its result, of %.1f s, is returned but not kept: %s"
            _log.warning(text, self._name, seconds, what)
        return result


def _checked_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """A function's signature, or an ``OptionError`` if what it returns can never be kept."""
    is_generator = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    if is_generator or inspect.iscoroutinefunction(fn):
        kind = "generator" if is_generator else "coroutine"
        raise OptionError(f"memoize keeps what a function returns, got a {kind}: return a list or an array")
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"memoize needs a function whose arguments have names, got {fn!r}: {error}"
        ) from error


def _held(fn: Any) -> dict[str, Any]:
    """What a call depends on that is bound to the function, as arguments."""
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
    """Why there is no entry, by the one that differs least."""
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
    """The names of what differs."""
    return [name for name in {**other, **one} if one.get(name) != other.get(name)]


# ---- arguments, and the files that they name --------------------------------------------------------


def _digests(
    name: str, arguments: Mapping[str, Any], own: tuple[int, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of the values of a function's arguments, and of the files and folders that they name.

    ``own``, device and inode of the folder of entries, does not count where it is below another folder.
    """
    digests, data = {}, {}
    for argument, value in arguments.items():
        try:
            digests[argument] = value_digest(value, _code)
        except DigestError as error:
            raise OptionError(
                f"memoize cannot tell argument {argument!r} of {name!r} from other values: {error}. It is a "
                f"{type(value).__module__}.{type(value).__qualname__}: pass what it is made from (numbers, "
                "arrays, a path), and make it inside the function"
            ) from error
        files = [joined(os.fsencode(path), _of_path(path, own)) for path in _paths(value, set())]
        if files:
            data[argument] = joined(*files).hex()
    return digests, data


def _code(thing: Any) -> str:
    """A function or class in an argument: the user's counts by its code."""
    module = thing.__module__ if isinstance(thing, type) else thing.__globals__.get("__name__")
    name = code_name(thing)
    return f"{name} {code_version(thing).digest}" if origin_of_module(str(module)) == "user" else name


def _paths(value: Any, seen: set[int]) -> Iterator[str]:
    """The files and folders that a value names; a string does if it is there, but not "/" or "."."""
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
    """Of all files below a folder, also of folders that links lead to, each once."""
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
            except OSError:  # a link to nothing, or it has gone just now
                yield joined(b"missing", name)
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield joined(name, state_of(status))
            elif (place := (status.st_dev, status.st_ino)) not in seen:
                seen.add(place)
                todo.append(entry.path)
