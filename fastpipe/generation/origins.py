"""Where code is from: the user, a package or Python; and by which name it is known in every process."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import sys
import sysconfig
from collections.abc import Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

__all__ = ["Origin", "class_name", "module_file", "module_name", "origin_of_module", "package_version"]

_PACKAGES = ("site-packages", "dist-packages")
_STDLIB = {PurePath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_MAIN = ("__main__", "__mp_main__")  # the second is the script in a process that multiprocessing has started


class Origin(Enum):
    """Whose code it is: only what is the user's changes from run to run."""

    USER = 1
    PACKAGE = 2
    STDLIB = 3


def module_name(name: str) -> str:
    """A module's name as those who import it know it, also of the script that runs.

    >>> module_name("numpy.linalg")
    'numpy.linalg'
    """
    if name not in _MAIN:
        return name
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name not in _MAIN:  # python -m
        return str(spec.name).removesuffix(".__main__")
    file = getattr(module, "__file__", None)
    return PurePath(file).stem if file else "__main__"


def class_name(kind: type) -> str:
    """A class's module and name.

    >>> from pathlib import PurePath
    >>> class_name(PurePath)
    'pathlib:PurePath'
    """
    return f"{module_name(str(kind.__module__))}:{kind.__qualname__}"


def origin_of_module(name: str) -> Origin:
    """Whose code a module has, by where its file is.

    >>> origin_of_module("json.decoder"), origin_of_module("numpy")
    (<Origin.STDLIB: 3>, <Origin.PACKAGE: 2>)
    """
    top = name.partition(".")[0]
    if top == "fastpipe":  # also from a checkout
        return Origin.PACKAGE
    module = sys.modules.get(name, sys.modules.get(top))
    file = getattr(module, "__file__", None) or getattr(getattr(module, "__spec__", None), "origin", None)
    return _origin_of_file(top, file)


@functools.lru_cache(4096)
def _origin_of_file(top: str, file: str | None) -> Origin:
    path = None if file in (None, "built-in", "frozen") else PurePath(str(file))
    if path is None:
        is_known = top in sys.stdlib_module_names and top not in _MAIN
        return Origin.STDLIB if is_known else Origin.USER
    if any(name in path.parts for name in _PACKAGES):
        return Origin.PACKAGE
    return Origin.STDLIB if _STDLIB & set(path.parents) else Origin.USER


def module_file(name: str) -> tuple[Origin, str | None]:
    """Whose a module is, and the file with its source, whether or not it has been imported.

    Nothing is imported for it.
    """
    top, search, spec = name.partition(".")[0], None, None
    if top == "fastpipe":
        return Origin.PACKAGE, None
    if top in sys.builtin_module_names:
        return Origin.STDLIB, None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:count]), search)
        if spec is None:
            return _origin_of_file(top, None), None
        search = spec.submodule_search_locations
    file = spec.origin if spec is not None and spec.has_location else None
    return _origin_of_file(top, file), file if file and file.endswith(".py") else None


def _found(name: str, search: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if isinstance(loaded, importlib.machinery.ModuleSpec) and loaded.has_location:
        return loaded
    try:
        return importlib.machinery.PathFinder.find_spec(name, search)
    except (ImportError, ValueError):
        return None


def package_version(top: str) -> str:
    """The version of the distributions that have a package; "" if none says so.

    >>> import numpy
    >>> package_version("numpy") == numpy.__version__
    True
    """
    if top == "fastpipe":
        return str(sys.modules["fastpipe"].__version__)
    return _version(top)


@functools.cache
def _version(top: str) -> str:
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        names = sorted(set(_distributions().get(top, ())))
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@functools.cache
def _distributions() -> Any:
    return importlib.metadata.packages_distributions()
