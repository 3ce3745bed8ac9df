"""Functions of other packages that are looked at while somebody wants to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["observe"]

_log = logging.getLogger("fastpipe.profile")
_OBSERVERS = "_fastpipe_observers"


def observe(owner: Any, name: str, see: Callable[..., object]) -> Callable[[], None]:
    """Call somebody after each call of a function, with what it returned and its arguments.

    Several may look at one function, and end in any order: the last one puts it back.

    Args:
        owner: a module or a class.
        name: of its function.
        see: called with the value, and then the arguments.  An error of its own ends its looking.

    Returns:
        What ends that; called again it does nothing.

    >>> from types import SimpleNamespace
    >>> owner = SimpleNamespace(double=lambda number: 2 * number)
    >>> before, values = owner.double, []
    >>> end = observe(owner, "double", lambda value, number: values.append((number, value)))
    >>> owner.double(4), values, end(), owner.double is before
    (8, [(4, 8)], None, True)
    """
    function = getattr(owner, name)
    observers = getattr(function, _OBSERVERS, None)
    if observers is None:
        function, observers = _observed(function), []
        setattr(function, _OBSERVERS, observers)
        setattr(owner, name, function)
    observers.append(see)

    def end() -> None:
        if see in observers:
            observers.remove(see)
        # Where somebody else has put another function over it, it stays, and does nothing.
        if not observers and getattr(owner, name) is function:
            setattr(owner, name, function.__wrapped__)

    return end


def _observed(function: Any) -> Any:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        observers = getattr(watched, _OBSERVERS)
        for see in tuple(observers):
            try:
                see(value, *args, **kwargs)
            except Exception:  # whatever it is: the caller's own work goes on
                _log.warning("no more is seen of %s", function, exc_info=True)
                observers.remove(see)
        return value

    return watched
