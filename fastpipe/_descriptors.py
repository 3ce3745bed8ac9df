"""The descriptors of this process: files stay open only while there are enough."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["closes_idle", "is_spent", "is_tight", "opened"]

P = ParamSpec("P")
T = TypeVar("T")

_SPENT = {errno.EMFILE, errno.ENFILE}
_MOST_LOOKED_AT = 1 << 16

# Of whoever keeps files open to read them again: functions that close those that nobody reads just now.
_closing: list[Callable[[], object]] = []


def closes_idle(function: Callable[[], T]) -> Callable[[], T]:
    """Have a function called when no descriptor is left: it closes files that are not in use."""
    _closing.append(function)
    return function


def opened(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Return what a function opens; without a descriptor left, after fastpipe has closed its idle files.

    Raises:
        OSError: as the function raises it; one about descriptors says which are open, and what to do.
    """
    try:
        return function(*args, **named)
    except OSError as error:
        if not is_spent(error):
            raise
    for close in _closing:
        close()
    try:
        return function(*args, **named)
    except OSError as error:
        if not is_spent(error):
            raise
        raise OSError(error.errno or errno.EMFILE, _what_is_open(), error.filename) from error


def is_spent(error: BaseException) -> bool:
    """Return whether an error says that there is no descriptor left, here or on the machine."""
    return isinstance(error, OSError) and error.errno in _SPENT


def is_tight(descriptor: int) -> bool:
    """Return whether a descriptor that was just opened shows that half of those of this process are in use.

    The system gives the lowest number that is free.  So this counts all descriptors, whoever has them, and
    goes by the limit as it is now.

    Args:
        descriptor: a file's.
    """
    limit = _limit()
    return limit is not None and descriptor >= limit // 2


def _limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _what_is_open() -> str:
    limit = _limit()
    if limit is None:
        return os.strerror(errno.ENFILE)
    kinds: Counter[str] = Counter()
    for number in range(min(limit, _MOST_LOOKED_AT)):  # listing them would take a descriptor
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        kinds[_kind(target)] += 1
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return (
        f"Too many open files: this process may have {limit} (ulimit -n)"
        + (f", and has {counts}" if counts else "")
        + ". Raise the limit before the program starts, as by 'ulimit -n 4096', or use fewer worker "
        "processes and threads"
    )


def _kind(target: str) -> str:
    if target.startswith(("pipe:", "socket:")):
        return f"{target.partition(':')[0]}s"
    return "files" if re.match(r"/(?!memfd:|dev/)", target) else "others"
