"""Goes through all topics; a check that fails is a finding too."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastpipe.core.files import is_url
from fastpipe.errors import OptionError
from fastpipe.profiling.doctor.findings import Examined, Finding, problem, warning
from fastpipe.profiling.doctor.report import DoctorReport
from fastpipe.stage.stores.locations import Location

__all__ = ["examine"]

# Loaded one by one: where a package is missing, or broken, that one check says so and the others go on.
_PACKAGE = __name__.rpartition(".")[0]
# The cores first: later their load is our own.
_TOPICS = ("cores", "storage", "decoders", "stores", "packages", "memory", "limits", "threads", "caching")
_SHOWN = ("decoders", "packages", "threads", "cores", "memory", "limits", "storage", "store", "cache folder")


def examine(
    target: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> DoctorReport:
    """Look whether this machine and environment are fit for training input pipelines.

    Nothing is written.  What may crash or hang runs in processes of its own; TensorFlow and torch are never
    loaded into this one.

    Args:
        target: a folder with data, whose disk is measured; or the URL of a store, which is asked for a few
            small parts of objects.  None for neither.
        storage_options: for the store, as ``FastImageFolder`` takes them.
        on_progress: told what is looked at.

    Returns:
        The report; ``print`` it.

    Raises:
        OptionError: the URL cannot be used, or has credentials in it.
        FileNotFoundError: there is no such folder.

    >>> examine("/nowhere/at/all")
    Traceback (most recent call last):
        ...
    FileNotFoundError: [Errno 2] No such file or folder: '/nowhere/at/all'
    """
    examined = _examined(target, storage_options)
    begun = time.monotonic()
    found: list[Finding] = []
    for topic in _TOPICS:
        if on_progress is not None:
            on_progress(f"looking at {topic}")
        found += _checked(topic, examined)
    found.sort(key=lambda one: _SHOWN.index(one.topic) if one.topic in _SHOWN else len(_SHOWN))
    return DoctorReport(tuple(found), examined.name, time.monotonic() - begun)


def _examined(target: str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None) -> Examined:
    """What is to be examined."""
    options = dict(storage_options or {})
    if target is not None and is_url(target):
        place = Location.of(target).root  # refuses what has credentials in it
        return Examined(url=place, name=place, storage_options=options)
    if options:
        raise OptionError("storage_options are for the URL of a store, such as s3://bucket/train")
    if target is None:
        return Examined()
    folder = os.fspath(target)
    if not os.path.exists(folder):
        raise FileNotFoundError(2, "No such file or folder", folder)
    return Examined(folder=folder, name=os.fsencode(folder).decode("utf-8", "backslashreplace"))


def _checked(topic: str, examined: Examined) -> list[Finding]:
    """The findings of a topic; the last one says it if the check failed."""
    found: list[Finding] = []
    try:
        check: Callable[[Examined], Iterator[Finding]] = importlib.import_module(f"{_PACKAGE}.{topic}").check
        found.extend(check(examined))  # as they come: those before a failure are kept
    except ImportError as error:
        found.append(problem(topic, f"{type(error).__name__}: {error}", "install what is missing"))
    except Exception as error:
        remedy = "look at this by hand; if nothing is wrong there, fastpipe's check is: please report it"
        found.append(warning(topic, f"not looked at: {type(error).__name__}: {error}", remedy))
    return found
