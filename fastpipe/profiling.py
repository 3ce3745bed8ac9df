"""The old name of :mod:`fastpipe.tools`.  This name is kept for one release."""

from __future__ import annotations

import warnings
from typing import Any

from fastpipe import tools

__all__ = [name for name in tools.__all__ if name not in ("BatchSizes", "Tuning")]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fastpipe.profiling' has no attribute {name!r}")
    message = f"fastpipe.profiling.{name} is now fastpipe.tools.{name}; its old name will be removed"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(tools, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
