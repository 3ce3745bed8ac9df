"""Optional packages: imported when first needed, or an error that names the pip command."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from fastpipe.errors import MissingDependencyError

_DISTRIBUTIONS = {"google_crc32c": "google-crc32c"}  # packages that are installed by another name


def load_part(module: str) -> ModuleType:
    """Import a module by its whole name, also for the ``__getattr__`` of a package.

    Raises:
        ImportError: an attribute is missing in what it imports, or a file hides a package.  Python would
            take an AttributeError for a name that the package does not have, and hide the reason.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = sys.modules.get((error.name or "").partition(".")[0])
        if top is None or hasattr(top, "__path__"):
            raise
        raise ImportError(f"{module} cannot be imported: {error}{_advice(top)}", name=module) from error
    except AttributeError as error:
        raise ImportError(f"{module} cannot be imported: {error}{_advice(error.obj)}", name=module) from error


def _advice(found: object) -> str:
    file = getattr(found, "__file__", None)
    if not isinstance(found, ModuleType) or file is None:
        return ""
    remedy = "if that is a file of your own, rename it; if it is too old, upgrade it"
    return f" ({found.__name__} is {file}: {remedy})"


def require(module: str, *, extra: str = "", package: str = "") -> Any:
    """Import ``module``, or say what brings it: an extra of fastpipe, or a package that is in none.

    Raises:
        MissingDependencyError: the package that owns ``module``, or one that this imports, is not installed.
        Others: an installed package fails for another reason: its own error, or that of `load_part`.

    >>> require("json", extra="image").loads("[1]")
    [1]
    """
    try:
        return load_part(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            if str(error.name).partition(".")[0] != module.partition(".")[0]:
                raise missing_package(error) from error
            raise
        command = f"pip install {package}" if package else f"pip install 'fastpipe[{extra}]'"
        raise MissingDependencyError(
            f"fastpipe needs the package {module!r} here and it is not installed. Install it with:  {command}"
        ) from error


def missing_package(error: ModuleNotFoundError) -> MissingDependencyError:
    """Return the error for a package that no extra brings, from the one that another package raised."""
    name = str(error.name).partition(".")[0]
    return MissingDependencyError(
        f"the package {name!r} is needed here and it is not installed. "
        f"Install it with:  pip install {_DISTRIBUTIONS.get(name, name)}"
    )


def load_rich() -> None:
    """Import what of rich draws from Python's generator when it is imported, and put that back: to be called
    before anything else of rich is loaded in a script's process."""
    state = random.getstate()
    load_part("rich.style")
    random.setstate(state)


@contextmanager
def briefly_set(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment within the block, unless it is set: for what a package reads, or
    sets, when it is imported.  The script's other child processes are to inherit what the script set."""
    was_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not was_set:
            os.environ.pop(name, None)


@cache
def require_threadpoolctl(extra: str) -> Any:
    """Import threadpoolctl as ``require`` does, without the variable that its import sets for good.

    Another package that imports it later, such as scikit-learn, relies on that variable: it gets a module of
    its own, which sets it.
    """
    if "threadpoolctl" in sys.modules:
        return sys.modules["threadpoolctl"]
    with briefly_set("KMP_DUPLICATE_LIB_OK", "True"):
        module = require("threadpoolctl", extra=extra)
    if "KMP_DUPLICATE_LIB_OK" not in os.environ:
        del sys.modules["threadpoolctl"]
    return module
