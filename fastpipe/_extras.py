"""Optional packages: imported when first needed, or an error that names the pip command."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from fastpipe.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, *, extra: str) -> Any:
    """Import ``module``, or say which extra of fastpipe brings it.

    Args:
        module: dotted name of the module, such as ``"nvidia.nvimgcodec"``.
        extra: the extra of fastpipe that installs it, such as ``"image"``.

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: the package that owns ``module`` is not installed.  An
            installed package that fails for another reason raises its own error.

    >>> require("json", extra="image").loads("[1]")
    [1]
    """
    try:
        loaded: ModuleType = importlib.import_module(module)
    except ModuleNotFoundError as error:
        wanted = {module[: i if i >= 0 else None] for i in _dots(module)}
        if error.name not in wanted:
            raise
        raise MissingDependencyError(
            f"fastpipe needs the package {module!r} here and it is not installed. "
            f"Install it with:  pip install 'fastpipe[{extra}]'"
        ) from error
    return loaded


def _dots(module: str) -> list[int]:
    """Positions at which a prefix of a dotted name ends; -1 stands for the whole name."""
    return [i for i, char in enumerate(module) if char == "."] + [-1]
