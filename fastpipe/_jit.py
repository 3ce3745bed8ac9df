"""Compiling kernels: when they are imported, for fixed types, kept on disk where possible."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastpipe._extras import require

__all__ = ["KERNEL_MODULES", "compiled"]

# Every module whose code may be part of a kernel.
KERNEL_MODULES = (
    "_jit.py",
)

_log = logging.getLogger("fastpipe")
_has_said = _is_compiling = False


def compiled(*signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's ``njit`` without the GIL, cached beside the module or in the user's cache folder.

    Where neither can be written, kernels are compiled anew in each process.

    Args:
        signatures: the types to compile for at once; none compiles for callers' types.
        options: further options of ``njit``.
    """
    njit = require("numba", extra="image").njit

    def wrap(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**{"nogil": True, **options})(function)
        try:
            dispatcher._cache = _cache_class()(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            _say_once(error)
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()
        return dispatcher

    return wrap


@cache
def _cache_class() -> Any:
    base = require("numba.core.caching", extra="image").FunctionCache

    class KernelCache(base):  # type: ignore[valid-type, misc]  # numba ships no types
        """numba's cache, which takes a function for unchanged when the file it is in is.

        But the machine code of a kernel holds that of functions in other files as well.
        """

        def _index_key(self, signature: Any, codegen: Any) -> Any:
            return *super()._index_key(signature, codegen), _sources_digest()

        def load_overload(self, signature: Any, target_context: Any) -> Any:
            found = super().load_overload(signature, target_context)
            if found is None:
                _say_that_it_takes_a_while()
            return found

    return KernelCache


@cache
def _sources_digest() -> str:
    """A digest of the source of all kernels."""
    digest = hashlib.sha256()
    for name in KERNEL_MODULES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _say_that_it_takes_a_while() -> None:
    """To whom waits before a terminal; a program's output stays its own."""
    global _is_compiling
    if not _is_compiling:
        _is_compiling = True
        text = "fastpipe compiles its kernels for this processor, once, which takes up to half a minute"
        _log.info(text)
        if sys.stderr is not None and sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)


def _say_once(error: RuntimeError) -> None:
    global _has_said
    if not _has_said:
        _has_said = True
        _log.warning(
            "kernels are compiled in every process, which takes seconds, as no folder for them can "
            "be written: set NUMBA_CACHE_DIR to one (%s)",
            error,
        )
