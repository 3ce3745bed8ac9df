"""Import optional packages at first use.  The error for a missing package names the pip command."""

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

# Names on PyPI that differ from the package's name.
_DISTRIBUTIONS = {
    "PIL": "pillow", "botocore": "s3fs", "google_crc32c": "google-crc32c",
    "nvidia.dali": "nvidia-dali-cuda130", "nvidia.nvimgcodec": "nvidia-nvimgcodec-cu13",
}  # fmt: skip


def load_part(module: str) -> ModuleType:
    """Import a module by its full name.  The ``__getattr__`` of a package may call this function.

    Raises:
        ImportError: an imported module lacks an attribute, or a user's file hides a package.  (An
            AttributeError would look like a missing name of the package.)
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
    """Import ``module``, or raise an error with the pip command that installs it.

    The command installs ``package`` if given.  Otherwise it installs the distribution of ``module``, and the
    error also names the command for fastpipe's extra ``extra``.

    Raises:
        MissingDependencyError: the package of ``module``, or a package that ``module`` imports, is not
            installed.
        Exception: an installed package cannot be imported.  The error is the package's own error, or an error
            of ``load_part``.

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
        command = f"pip install {package or distribution_of(module)}"
        if not package:
            command += f"  or, with all that this part needs, in fastpipe's checkout:  {install_extra(extra)}"
        raise MissingDependencyError(
            f"fastpipe needs the package {module!r} here and it is not installed. Install it with:  {command}"
        ) from error


def distribution_of(module: str) -> str:
    """Return the name on PyPI of the distribution that has a module.

    >>> distribution_of("PIL.Image"), distribution_of("nvidia.dali.fn"), distribution_of("h5py")
    ('pillow', 'nvidia-dali-cuda130', 'h5py')
    """
    top = module.partition(".")[0]
    parent = ".".join(module.split(".")[:2])
    return _DISTRIBUTIONS.get(parent, _DISTRIBUTIONS.get(top, top))


def install_extra(extra: str) -> str:
    """Return the command for a checkout of fastpipe that installs an extra's packages.

    >>> install_extra("hdf5")
    "pip install '.[hdf5]' (the fastpipe on PyPI is another project)"
    """
    return f"pip install '.[{extra}]' (the fastpipe on PyPI is another project)"


def missing_package(error: ModuleNotFoundError) -> MissingDependencyError:
    """Return the error for a missing package that no extra installs.  ``error`` is from its import."""
    name = str(error.name).partition(".")[0]
    return MissingDependencyError(
        f"the package {name!r} is needed here and it is not installed. "
        f"Install it with:  pip install {distribution_of(name)}"
    )


def load_rich() -> None:
    """Import the part of rich that uses Python's random generator on import, and restore the generator.
    Call this before any other import of rich in a process of the user's script."""
    state = random.getstate()
    load_part("rich.style")
    random.setstate(state)


@contextmanager
def briefly_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the ``with`` block, unless the variable is set already.

    This is for packages that read or set the variable on import.  After the block the variable is unset
    again, because other child processes must inherit the values of the user's script.
    """
    was_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not was_set:
            os.environ.pop(name, None)


@cache
def require_threadpoolctl(extra: str) -> Any:
    """Import threadpoolctl as ``require`` does, without its permanent change of the environment.

    The import of threadpoolctl sets the variable ``KMP_DUPLICATE_LIB_OK``.  Other packages that import
    threadpoolctl, such as scikit-learn, rely on the variable.  So a later import by such a package loads the
    module again, and sets the variable.
    """
    if "threadpoolctl" in sys.modules:
        return sys.modules["threadpoolctl"]
    with briefly_set("KMP_DUPLICATE_LIB_OK", "True"):
        module = require("threadpoolctl", extra=extra)
    if "KMP_DUPLICATE_LIB_OK" not in os.environ:
        del sys.modules["threadpoolctl"]
    return module
