"""``fastpipe inspect`` and ``fastpipe repack``: how an HDF5 file is laid out, and another layout for it.

The names below are loaded when they are first used: reading HDF5 needs compiled kernels, and the
command's help does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastpipe.files.inspect_report import inspect
    from fastpipe.files.repacking import repack

__all__ = ["inspect", "repack"]

_LAZY = {"inspect": "fastpipe.files.inspect_report", "repack": "fastpipe.files.repacking"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe.files' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
