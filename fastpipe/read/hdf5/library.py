"""The HDF5 library's filters: which of them a dataset has, and where the library gets those it lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from fastpipe._extras import require
from fastpipe.errors import MissingDependencyError
from fastpipe.read.hdf5.filters import FilterStep

__all__ = ["filters_of", "load_filters", "load_plugins", "missing", "require_filters"]


def filters_of(properties: Any) -> tuple[FilterStep, ...]:
    """The filters in a dataset's creation properties, in the order of writing."""
    found = (properties.get_filter(number) for number in range(properties.get_nfilters()))
    return tuple(
        FilterStep(int(code), tuple(map(int, values)), name.decode("utf-8", "replace"))
        for code, _, values, name in found
    )


def missing(steps: Sequence[FilterStep]) -> list[FilterStep]:
    """Those that the HDF5 library of this process does not have."""
    h5z = require("h5py.h5z", extra="hdf5")
    return [step for step in steps if not h5z.filter_avail(step.code)]


def load_filters(steps: Sequence[FilterStep]) -> list[FilterStep]:
    """Give the library what it needs for filters, as far as it is installed; returns those still missing."""
    if missing(steps):
        with contextlib.suppress(MissingDependencyError):
            load_plugins()
    return missing(steps)


def load_plugins() -> None:
    """Import the package hdf5plugin, which gives the library its filters.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        require("hdf5plugin", extra="hdf5")
    except MissingDependencyError as error:
        raise MissingDependencyError(
            "the package 'hdf5plugin' brings this filter to the HDF5 library and is not installed. "
            "Install it with:  pip install hdf5plugin"
        ) from error


def require_filters(dataset: Any, shown: str = "") -> None:
    """Give the library what it needs for a dataset's filters.

    Args:
        dataset: an open ``h5py.Dataset``.
        shown: what messages call its file, where it is not its path.

    Raises:
        MissingDependencyError: nobody knows one of them.
    """
    for step in load_filters(filters_of(dataset.id.get_create_plist())):
        raise MissingDependencyError(
            f"{shown or dataset.file.filename}: the dataset {dataset.name!r} has the filter "
            f"{step.name or step.code} (number {step.code}), which the HDF5 library does "
            "not know: pip install hdf5plugin, or import the package that brings it"
        )
