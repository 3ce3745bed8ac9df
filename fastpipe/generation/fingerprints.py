"""What a call is told from others by: its arguments' values, and the files that they name."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastpipe.core.file_identity import state_of
from fastpipe.errors import OptionError
from fastpipe.generation.code_version import code_name, code_version
from fastpipe.generation.origins import Origin, origin_of_module
from fastpipe.generation.value_digests import DigestError, ValueDigests, joined

__all__ = ["Fingerprint", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """Of a call.

    Attributes:
        arguments: digests of the arguments' values, by name.
        data: digests of the files and folders that arguments name, by the arguments' names.
    """

    arguments: dict[str, str]
    data: dict[str, str]


def fingerprint(
    name: str, arguments: Mapping[str, Any], without: tuple[int, int] | None = None
) -> Fingerprint:
    """The fingerprint of a call.

    An ``os.PathLike`` names a file or folder, and so does a string that is the path of one, also inside
    lists, tuples, sets and dicts; ``"/"``, ``"."`` and the like are no paths as strings.  A file counts by
    its device, inode, size and times, a folder by all files below it.

    Args:
        name: of the function, for messages.
        arguments: by name.
        without: device and inode of a folder that does not count where it is below another.

    Raises:
        OptionError: an argument cannot be told from others.

    >>> fingerprint("f", {"x": 1}) == fingerprint("f", {"x": 1}) != fingerprint("f", {"x": 1.0})
    True
    """
    values, digests, data = ValueDigests(_code), {}, {}
    for argument, value in arguments.items():
        try:
            digests[argument] = values.hex(value)
        except DigestError as error:
            raise OptionError(
                f"memoize cannot tell argument {argument!r} of {name!r} from other values: {error}. It is a "
                f"{type(value).__module__}.{type(value).__qualname__}: pass what it is made from (numbers, "
                "arrays, a path), and make it inside the function"
            ) from error
        files = [joined(os.fsencode(path), _of_path(path, without)) for path in _paths(value, set())]
        if files:
            data[argument] = joined(*files).hex()
    return Fingerprint(digests, data)


def _code(thing: Any) -> str:
    """A function or class in an argument: the user's counts by its code."""
    module = thing.__module__ if isinstance(thing, type) else thing.__globals__.get("__name__")
    name = code_name(thing)
    if origin_of_module(str(module)) is Origin.USER:
        return f"{name} {code_version(thing).digest}"
    return name


def _paths(value: Any, seen: set[int]) -> Iterator[str]:
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


def _of_path(path: str, without: tuple[int, int] | None) -> bytes:
    try:
        status = os.stat(path)
    except OSError as error:
        return joined(b"missing", str(error.errno).encode())
    if stat.S_ISDIR(status.st_mode):
        return joined(*sorted(_of_folder(path, without, {(status.st_dev, status.st_ino)})))
    return state_of(status)


def _of_folder(top: str, without: tuple[int, int] | None, seen: set[tuple[int, int]]) -> Iterator[bytes]:
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
            place = (status.st_dev, status.st_ino)
            if not stat.S_ISDIR(status.st_mode):
                yield joined(name, state_of(status))
            elif place != without and place not in seen:
                seen.add(place)
                todo.append(entry.path)
