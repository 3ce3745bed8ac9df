"""Whether a stream knows of its workers, by what its code calls."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["uses_worker_info"]

_NAME = "get_worker_info"
_MOST, _MOST_ITEMS = 2000, 100  # things that are looked at; of each list


def uses_worker_info(dataset: Any) -> bool:
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
    >>> uses_worker_info(Shared()), uses_worker_info(Same())
    (True, False)
    """
    left, seen = [dataset], {id(dataset)}
    while left and len(seen) < _MOST:
        one = left.pop()
        function = one.__func__ if _is(one, MethodType) else one
        if _is(function, FunctionType) and _NAME in _names(function.__code__):
            return True
        for inner in _made_of(one):
            if id(inner) not in seen and not _is_plain(inner):
                seen.add(id(inner))
                left.append(inner)
    return False


def _is(one: Any, *kinds: type) -> bool:
    """``isinstance`` that asks nobody: a proxy of the script's may load something for its answer."""
    return issubclass(type(one), kinds)


def _made_of(one: Any) -> Iterable[Any]:
    """What a thing refers to: functions of its class, what is in it, and what its code calls by name."""
    if _is(one, MethodType):
        return one.__func__, one.__self__
    if _is(one, functools.partial):
        return one.func, *one.args, *one.keywords.values()
    if _is(one, list, tuple):
        return (list if _is(one, list) else tuple).__getitem__(one, slice(_MOST_ITEMS))
    if _is(one, dict):
        return list(dict.values(one))[:_MOST_ITEMS]
    if _is(one, FunctionType):
        return _called(one)
    if _is(one, type):
        return [value for kind in _own(one) for value in vars(kind).values()]
    try:
        attributes = object.__getattribute__(one, "__dict__")
    except AttributeError:
        attributes = {}
    return *_own(type(one)), *list(attributes.values())[:_MOST_ITEMS]


def _called(function: FunctionType) -> Iterator[Any]:
    names = _names(function.__code__)
    for name in names:
        found: Any = function.__globals__.get(name)
        if _is(found, ModuleType) and not _is_foreign(found.__name__):
            yield from (vars(found)[inner] for inner in names if inner in vars(found))
        elif _is(found, FunctionType, type):
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
    if _is(one, FunctionType, type):
        return _is_foreign(str(one.__module__))
    if _is(one, MethodType, functools.partial, list, tuple, dict):
        return False
    return _is(one, property, classmethod, staticmethod, ModuleType) or _is_foreign(type(one).__module__)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in {"builtins", "torch", "numpy", "typing", "abc", "functools"}
