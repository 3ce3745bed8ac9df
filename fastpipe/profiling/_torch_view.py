"""The place in this folder that touches private parts of torch's ``DataLoader``.

A *view* is a shallow copy of a loader, with other attributes and workers of its own; the loader stays as it
is.

Used: ``DataLoader._iterator``, in which workers that persist are; the loader's ``__dict__``, as
``DataLoader.__setattr__`` lets nobody change a dataset or the number of workers; and an iterator's
``_timeout``.
"""

from __future__ import annotations

import atexit
import copy
import os
from collections.abc import Callable
from typing import Any

__all__ = ["has_workers", "limit_waiting", "view_of"]


def has_workers(loader: Any) -> bool:
    """Whether workers that persist have been started."""
    return getattr(loader, "_iterator", None) is not None


def view_of(loader: Any, **attributes: Any) -> Any:
    """A loader of torch's with other attributes, and without workers that run already; its own end at once.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(4), batch_size=2)
    >>> [batch.tolist() for batch in view_of(loader, dataset=range(10, 14))], len(loader.dataset)
    ([[10, 11], [12, 13]], 4)
    """
    view = copy.copy(loader)
    view.__dict__.update(attributes, _iterator=None)
    view.worker_init_fn = _EndsAtOnce(view.worker_init_fn)
    return view


def limit_waiting(iterator: Any, seconds: float) -> None:
    """Have an iterator of torch's raise where its workers make no batch for so long, and no limit was set.

    A dataset that has threads or locks of its own may never answer in a process that was forked.
    """
    if getattr(iterator, "_workers", None) and vars(iterator).get("_timeout") == 0:
        iterator._timeout = seconds


class _EndsAtOnce:
    """Runs first in each worker.

    A spawned one that is told to end while its queue's thread is in torch's code aborts when the interpreter
    is finalized, three in a hundred; forked ones end in this way anyhow.
    """

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        atexit.register(os._exit, 0)
        if self._function is not None:
            self._function(worker_id)
