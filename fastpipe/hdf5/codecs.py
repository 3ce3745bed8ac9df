"""The names of codecs on the command line, and the filters that they stand for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fastpipe.core.extras import require
from fastpipe.errors import OptionError
from fastpipe.hdf5.filters import (
    BLOSC,
    BLOSC_CODECS,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    ZSTD,
    in_words,
    may_lose,
)
from fastpipe.hdf5.library import filters_of, load_plugins, missing
from fastpipe.hdf5.rows import is_plain

__all__ = ["CODECS", "Codec", "parse_codec", "set_filters"]

_LEVELS = {"gzip": (4, 0, 9), "zstd": (3, 1, 22), "blosc": (5, 0, 9)}  # default, least, most
CODECS = "keep, none, gzip[:LEVEL], lzf, lz4, zstd[:LEVEL], blosc[:CODEC[:LEVEL]]"
_BY_PLUGIN = {"lz4": LZ4, "zstd": ZSTD, "blosc": BLOSC}


@dataclass(frozen=True)
class Codec:
    """What a dataset is compressed with.

    Attributes:
        name: ``"keep"`` for the filters that it has, ``"none"`` for none, else the codec's.
        level: where the codec has levels.
        inner: blosc's own codec.
        text: as it was given.
    """

    name: str
    level: int = 0
    inner: str = ""
    text: str = ""


def parse_codec(text: str) -> Codec:
    """An argparse type: a codec, perhaps with its level.

    >>> parse_codec("gzip:9").level, parse_codec("blosc:zstd:7").inner
    (9, 'zstd')
    """
    name, *rest = text.split(":")
    inner = ""
    if name == "blosc":
        inner = rest.pop(0) if rest else "lz4"
        if inner not in BLOSC_CODECS:
            raise argparse.ArgumentTypeError(f"blosc has {', '.join(BLOSC_CODECS)}; got {inner!r}")
    if name not in _LEVELS:
        if name in ("keep", "none", "lzf", "lz4") and not rest:
            return Codec(name, text=text)
        raise argparse.ArgumentTypeError(f"must be one of {CODECS}; got {text!r}")
    default, least, most = _LEVELS[name]
    level = rest[0] if rest else str(default)
    if len(rest) > 1 or not level.isdecimal() or not least <= int(level) <= most:
        raise argparse.ArgumentTypeError(f"{name} has levels from {least} to {most}; got {text!r}")
    return Codec(name, int(level), inner, text)


def set_filters(properties: Any, codec: Codec, shuffle: bool | None, dataset: Any) -> None:
    """Give the creation properties of a chunked dataset other filters.

    Args:
        properties: h5py's, with the filters of the old dataset; ``"keep"`` leaves them.
        codec: to compress with.
        shuffle: whether to shuffle bytes first; None does so for elements of several bytes.
        dataset: the old one.

    Raises:
        OptionError: values would not stay what they are, or cannot be written like this.
        MissingDependencyError: what brings the codec is not installed.
    """
    steps, kind = filters_of(properties), dataset.id.get_type()
    if codec.name == "keep":
        lossy = may_lose(steps, kind.get_class())
        if lossy:
            raise OptionError(
                f"{dataset.name}: its filter {in_words(lossy)} may round values that were rounded already; "
                "choose another --codec, which keeps them as they are"
            )
        if missing(steps):
            load_plugins()
        check_can_write(steps, str(dataset.name))
        return
    has_sum = any(step.code == FLETCHER32 for step in steps)
    for step in steps:
        properties.remove_filter(step.code)
    # Of elements without a fixed size only their places in the file would be compressed, and
    # filters of plugins may end the process over them.
    if codec.name == "none" or not is_plain(kind):
        return
    _add(properties, codec, kind.get_size() > 1 if shuffle is None else shuffle)
    if has_sum:
        properties.set_fletcher32()


def check_can_write(steps: Any, name: str) -> None:
    """Raise OptionError where a filter can only be undone here, or is not there."""
    h5z = require("h5py.h5z", extra="hdf5")
    for step in steps:
        info = h5z.get_filter_info(step.code) if h5z.filter_avail(step.code) else 0
        if not info & h5z.FILTER_CONFIG_ENCODE_ENABLED:
            raise OptionError(
                f"{name}: the HDF5 library here cannot write its filter {in_words(step)}; choose another "
                "--codec"
            )


def _add(properties: Any, codec: Codec, shuffle: bool) -> None:
    h5z = require("h5py.h5z", extra="hdf5")
    if codec.name in _BY_PLUGIN:
        load_plugins()
    if shuffle and codec.name != "blosc":
        properties.set_filter(SHUFFLE, h5z.FLAG_OPTIONAL)
    # Optional: what does not become smaller is then stored as it is, and read as such.
    code, values = {
        "gzip": (DEFLATE, (codec.level,)),
        "lzf": (LZF, ()),
        "lz4": (LZ4, ()),
        "zstd": (ZSTD, (codec.level,)),
        "blosc": (BLOSC, (0, 0, 0, 0, codec.level, int(shuffle), BLOSC_CODECS.get(codec.inner, 0))),
    }[codec.name]
    properties.set_filter(code, h5z.FLAG_OPTIONAL, values)
