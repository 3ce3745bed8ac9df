"""Compiling kernels: when they are imported, for fixed types, kept on disk where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastpipe._extras import require

__all__ = ["compiled"]

_log = logging.getLogger("fastpipe")
_said: set[str] = set()


def compiled(*signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's ``njit`` without the GIL, cached beside the module or in the user's cache folder.

    Where neither can be written, kernels are compiled anew in each process.

    Args:
        signatures: the types to compile for at once; none compiles for callers' types.
        options: further options of ``njit``.
    """
    njit = require("numba", extra="image").njit
    given = [list(signatures)] if signatures else []
    options = {"nogil": True, **options}

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            return njit(*given, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            if not _said:
                _said.add("cache")
                _log.warning(
                    "kernels are compiled in every process, which takes seconds, as no folder for them can "
                    "be written: set NUMBA_CACHE_DIR to one (%s)",
                    error,
                )
            return njit(*given, **options)(function)

    return wrap
