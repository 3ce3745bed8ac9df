"""HDF5's filters in words, whether they are there, and what they do to values."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from fastpipe._extras import require
from fastpipe.errors import MissingDependencyError
from fastpipe.read.hdf5.filters import FilterStep

__all__ = ["filters_of", "in_words", "load_plugins", "may_lose", "missing"]

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALE_OFFSET, LZF = 1, 2, 3, 4, 5, 6, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD = 32001, 32004, 32008, 32015

_NAMES = {
    DEFLATE: "gzip", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", SZIP: "szip", NBIT: "nbit",
    SCALE_OFFSET: "scale-offset", LZF: "lzf", BLOSC: "blosc", LZ4: "lz4", BITSHUFFLE: "bitshuffle",
    ZSTD: "zstd", 307: "bzip2", 32013: "zfp", 32017: "sz", 32018: "fcidecomp", 32024: "sz3",
    32026: "blosc2", 32028: "sperr", 32030: "htj2k",
}  # fmt: skip
_BLOSC_CODECS = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
_BLOSC_SHUFFLES = ("", ", its shuffle", ", its bitshuffle")
_BITSHUFFLE_CODECS = {2: " with lz4", 3: " with zstd"}
_LOSSY = {32013, 32017, 32018, 32024, 32028, 32030}
_FLOAT_CLASSES = (1,)  # of HDF5's classes of types


def filters_of(properties: Any) -> tuple[FilterStep, ...]:
    """The filters in a dataset's creation properties, in the order of writing."""
    found = (properties.get_filter(number) for number in range(properties.get_nfilters()))
    return tuple(
        FilterStep(int(code), tuple(map(int, values)), name.decode("utf-8", "replace"))
        for code, _, values, name in found
    )


def in_words(step: FilterStep) -> str:
    """A filter with what matters of its parameters.

    >>> in_words(FilterStep(1, (4,), "deflate")), in_words(FilterStep(32001, (2, 2, 4, 8, 5, 1, 1), ""))
    ('gzip 4', 'blosc lz4 5, its shuffle')
    """
    values = step.values
    name = _NAMES.get(step.code) or step.name or f"filter {step.code}"
    if step.code in (DEFLATE, ZSTD) and values:
        return f"{name} {values[0]}"
    if step.code == BLOSC and len(values) > 4:
        codec = values[6] if len(values) > 6 else 0
        codec_name = _BLOSC_CODECS[codec] if codec < len(_BLOSC_CODECS) else f"codec {codec}"
        shuffle = values[5] if len(values) > 5 else 0
        return f"{name} {codec_name} {values[4]}{_BLOSC_SHUFFLES[min(shuffle, 2)]}"
    if step.code == BITSHUFFLE:
        return name + _BITSHUFFLE_CODECS.get(values[4] if len(values) > 4 else 0, "")
    return name


def missing(steps: Iterable[FilterStep]) -> list[FilterStep]:
    """Those that the HDF5 library of this process does not have."""
    h5z = require("h5py.h5z", extra="hdf5")
    return [step for step in steps if not h5z.filter_avail(step.code)]


def plugins_are_installed() -> bool:
    """Whether the package that brings most filters is there, imported or not."""
    return importlib.util.find_spec("hdf5plugin") is not None


def load_plugins() -> Any:
    """The package hdf5plugin, whose import gives the HDF5 library its filters.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return require("hdf5plugin", extra="hdf5")
    except MissingDependencyError as error:
        raise MissingDependencyError(
            "the package 'hdf5plugin' brings this filter to the HDF5 library and is not installed. "
            "Install it with:  pip install hdf5plugin"
        ) from error


def may_lose(steps: Iterable[FilterStep], type_class: int) -> FilterStep | None:
    """The first filter that rounds values when it is applied, if there is one.

    Args:
        steps: a dataset's.
        type_class: HDF5's class of its elements' type.
    """
    for step in steps:
        if step.code in _LOSSY or (step.code == SCALE_OFFSET and type_class in _FLOAT_CLASSES):
            return step
    return None
