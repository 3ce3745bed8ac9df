"""Whether a stream's samples are shared out among workers, by what its code asks for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["asks_for_its_worker"]

_ASKS = "get_worker_info"
_MOST, _MOST_ITEMS = 2000, 100  # things that are looked at; of each list


def asks_for_its_worker(dataset: Any) -> bool:
    """Whether code of an ``IterableDataset``, or of what it is made of, calls torch's ``get_worker_info``.

    That is how torch's documents tell such a dataset to give other samples in each worker.  Nothing of the
    script runs for that.

    >>> from torch.utils.data import IterableDataset, get_worker_info
    >>> class Shared(IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(get_worker_info().id, 8, get_worker_info().num_workers))
    >>> class Same(IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(8))
    >>> asks_for_its_worker(Shared()), asks_for_its_worker(Same())
    (True, False)
    """
    left, seen = [dataset], {id(dataset)}
    while left and len(seen) < _MOST:
        one = left.pop()
        function = one.__func__ if isinstance(one, MethodType) else one
        if isinstance(function, FunctionType) and _ASKS in _names(function.__code__):
            return True
        for inner in _made_of(one):
            if id(inner) not in seen and not _is_plain(inner):
                seen.add(id(inner))
                left.append(inner)
    return False


def _made_of(one: Any) -> Iterator[Any]:
    """What a thing refers to: functions of its class, what is in it, and what its code calls by name."""
    if isinstance(one, MethodType):
        yield from (one.__func__, one.__self__)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, (list, tuple)):
        yield from islice(one, _MOST_ITEMS)
    elif isinstance(one, dict):
        yield from islice(one.values(), _MOST_ITEMS)
    elif isinstance(one, FunctionType):
        yield from _called(one)
    elif isinstance(one, type):
        yield from (value for kind in _own(one) for value in vars(kind).values())
    else:
        yield from _own(type(one))
        try:
            attributes = object.__getattribute__(one, "__dict__")
        except AttributeError:
            return
        yield from islice(attributes.values(), _MOST_ITEMS)


def _called(function: FunctionType) -> Iterator[Any]:
    names = _names(function.__code__)
    for name in names:
        found = function.__globals__.get(name)
        if isinstance(found, ModuleType) and not _is_foreign(found.__name__):
            yield from (vars(found)[inner] for inner in names if inner in vars(found))
        elif isinstance(found, (FunctionType, type)):
            yield found
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _names(code: CodeType) -> set[str]:
    """Of globals and attributes, in a function and those within it."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _own(kind: type) -> Iterator[type]:
    """Classes of which a class is, but those of Python and torch."""
    return (one for one in kind.__mro__ if not _is_foreign(one.__module__))


def _is_plain(one: Any) -> bool:
    """Whether nothing in a thing can be code of the script's."""
    if isinstance(one, (FunctionType, type)):
        return _is_foreign(str(one.__module__))
    if isinstance(one, (MethodType, functools.partial, list, tuple, dict)):
        return False
    return isinstance(one, (property, classmethod, staticmethod, ModuleType)) or _is_foreign(
        type(one).__module__
    )


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in {"builtins", "torch", "numpy", "typing", "abc", "functools"}
