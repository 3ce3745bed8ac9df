"""HDF5's filters in words, and what they do to values."""

from __future__ import annotations

from collections.abc import Iterable

from fastpipe.hdf5.filters import FilterStep

__all__ = ["in_words", "may_lose"]

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
