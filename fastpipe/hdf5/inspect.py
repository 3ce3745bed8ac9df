"""Inspect an HDF5 file: report facts about its datasets, the reads of an epoch, and advice."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from fastpipe.console import Progress, print_line, table
from fastpipe.core.machine import free_memory
from fastpipe.core.text import counted, in_bytes
from fastpipe.hdf5.filters import BLOSC, DEFLATE, LZ4, LZF, ZSTD, in_words
from fastpipe.hdf5.layout import Geometry, grid_of, read_layout
from fastpipe.hdf5.library import filter_remedy, filters_of, h5py, missing_filters
from fastpipe.hdf5.opening import datasets_of, dtype_of, library_errors, name_of, opened, storage_of


def uniform_decodes(lead: Sequence[int], chunk: Sequence[int], batch_size: int) -> float:
    """Return how often, on average, a chunk is decoded in an epoch with uniformly random order.

    No cache is assumed.  A chunk is decoded once for each batch that contains at least one of the chunk's
    samples.  If ``n`` samples are in random order, a batch of ``b`` samples contains none of a chunk's ``k``
    samples with the probability

        p  =  C(n - b, k) / C(n, k)  =  product over i < b of  1 - k / (n - i)

    The expected number of decodes of a chunk is the sum of ``1 - p`` over the epoch's batches.  ``lead`` and
    ``chunk`` are the shapes of the dataset and of a chunk along the dimensions that count samples.

    >>> round(uniform_decodes([1000], [16], 64), 2), round(uniform_decodes([1000], [1], 64), 2)
    (10.26, 1.0)
    """
    count = math.prod(lead)
    if not count:
        return 0.0
    batches = _lengths(count, batch_size)
    # Chunks are grouped by their number of samples, because chunks at the ends have fewer samples.
    combinations = list(itertools.product(*map(_lengths, lead, chunk)))
    total = 0.0
    for sides in combinations:
        samples, times = (math.prod(numbers) for numbers in zip(*sides, strict=True))
        total += sum(times * many * (1 - _none_of(samples, count, size)) for size, many in batches)
    return total / math.prod(grid_of(lead, chunk))


def _lengths(size: int, side: int) -> list[tuple[int, int]]:
    """Divide ``size`` elements into parts; return each length of a part, and the number of such parts.

    All parts have the length ``side``, except the last part, which may be shorter.
    """
    whole, rest = divmod(size, side)
    return [(length, times) for length, times in ((side, whole), (rest, 1)) if length and times]


def _none_of(samples: int, count: int, batch: int) -> float:
    """Return the probability that a batch contains none of ``samples`` given samples out of ``count``."""
    if samples + batch > count:
        return 0.0
    # The formula is symmetric in ``samples`` and ``batch``, so compute the product with fewer factors.
    fewer, more = sorted((samples, batch))
    return float(np.exp(np.log1p(-more / (count - np.arange(fewer, dtype=np.float64))).sum()))


_DEEPEST = 20  # the deepest nesting of types that is written out


@dataclass(frozen=True)
class Epoch:
    decodes: float  # average decodes of each chunk in uniform order; 1 if nothing must be decoded
    nbytes: int  # bytes that are decoded in uniform order, or read if nothing must be decoded
    windowed_nbytes: int  # like ``nbytes``, for ``Shuffle(unit="group")``, which decodes each chunk once
    reads: int  # number of pieces of the file that a sample needs


@dataclass(frozen=True)
class DatasetFacts:
    """The facts about one dataset; the JSON output of ``fastpipe inspect`` has the same fields."""

    path: str
    shape: tuple[int, ...] | None  # None if the dataset has an empty dataspace
    dtype: str  # in words
    storage: str  # as returned by ``storage_of``
    chunk: tuple[int, ...] | None
    filters: tuple[str, ...]  # in words, in the order of writing
    codes: tuple[int, ...]  # the numbers of the filters
    missing: tuple[str, ...]  # filters that neither fastpipe nor this process's library supports
    remedies: tuple[str, ...]  # ways to install the missing filters
    stored: int  # bytes in the file
    decoded: int | None  # bytes in memory; None if elements have no fixed size
    samples: int | None  # None if the dataset has fewer dimensions than ``sample_dims``
    sample_nbytes: int | None
    samples_per_chunk: int | None  # the largest number of samples in a chunk
    chunk_nbytes: int | None  # bytes of a decoded chunk
    chunks: int
    parts: int  # number of chunks that contain a part of one sample
    reader: str  # "threads", "h5py", or "" if the dataset has no dimensions
    why: str  # the reason for the reader "h5py"
    epoch: Epoch | None  # None if the dataset has no samples


def inspect_file(path: str | os.PathLike[str], sample_dims: int, batch_size: int) -> list[DatasetFacts]:
    """Return the facts about every dataset in a file; soft and external links are not followed."""
    shown, found = os.fspath(path), []
    with opened(shown) as file:
        for dataset in datasets_of(file, shown):
            with library_errors(f"{shown}, dataset {name_of(dataset)}"):
                found.append(_facts(dataset, sample_dims, batch_size))
    return found


def _facts(dataset: Any, sample_dims: int, batch_size: int) -> DatasetFacts:
    steps = filters_of(dataset.id.get_create_plist())
    shape = None if dataset.shape is None else tuple(map(int, dataset.shape))
    dtype = dtype_of(dataset)
    storage = storage_of(dataset)
    chunk = tuple(map(int, dataset.chunks)) if storage == "chunked" else None
    has_samples = shape is not None and len(shape) >= sample_dims
    layout = read_layout(dataset) if shape and dtype is not None else None
    itemsize = 0 if dtype is None or dtype.hasobject else dtype.itemsize
    sized = dtype is not None and not dtype.hasobject
    geometry = Geometry(shape, chunk or shape, itemsize, sample_dims) if shape and has_samples else None
    is_direct = layout is not None and layout.kind != "h5py"
    lacking = [] if is_direct else missing_filters(dataset)
    return DatasetFacts(
        path=name_of(dataset),
        shape=shape,
        dtype=_dtype_in_words(dtype),
        storage=storage,
        chunk=chunk,
        filters=tuple(map(in_words, steps)),
        codes=tuple(step.code for step in steps),
        missing=tuple(map(in_words, lacking)),
        remedies=tuple(dict.fromkeys(map(filter_remedy, lacking))),
        stored=int(dataset.id.get_storage_size()),
        decoded=math.prod(shape) * itemsize if shape is not None and sized else None,
        samples=geometry.count if geometry else None,
        sample_nbytes=geometry.sample_nbytes if geometry and sized else None,
        samples_per_chunk=min(geometry.group_size, geometry.count) if geometry and chunk else None,
        chunk_nbytes=math.prod(chunk) * itemsize if chunk and sized else None,
        chunks=math.prod(grid_of(shape, chunk)) if shape and chunk else 0,
        parts=geometry.parts if geometry and chunk else 1,
        reader="" if not shape else "threads" if is_direct else "h5py",
        why=layout.why if layout else "its type has no equivalent in NumPy" if shape else "",
        epoch=_epoch(geometry, shape, chunk if steps else None, sample_dims, batch_size)
        if shape and geometry
        else None,
    )


def _epoch(
    geometry: Geometry, shape: tuple[int, ...], chunk: tuple[int, ...] | None, sample_dims: int,
    batch_size: int,
) -> Epoch | None:  # fmt: skip
    """Return the costs of reading an epoch (see ``Epoch``); None if the dataset has no samples.

    If nothing must be decoded, ``chunk`` is None.
    """
    if not geometry.count:
        return None
    if chunk is None:
        nbytes = geometry.count * geometry.sample_nbytes
        return Epoch(1.0, nbytes, nbytes, geometry.runs * geometry.parts)
    decodes = uniform_decodes(shape[:sample_dims], chunk[:sample_dims], batch_size)
    once = geometry.groups * geometry.parts * geometry.chunk_nbytes
    return Epoch(decodes, round(decodes * once), once, geometry.parts)


def _dtype_in_words(dtype: Any, depth: int = 0) -> str:
    if dtype is None or depth > _DEEPEST:
        return "?" if dtype is None else "…"
    text = h5py.check_string_dtype(dtype)
    if text is not None:
        return "string" if text.length is None else f"string of {text.length} bytes"
    if (element := h5py.check_vlen_dtype(dtype)) is not None:
        return f"lists of {_dtype_in_words(element, depth + 1)}"
    if (reference := h5py.check_ref_dtype(dtype)) is not None:
        return "region reference" if reference is h5py.RegionReference else "object reference"
    if h5py.check_enum_dtype(dtype) is not None:
        return f"enum of {dtype}"
    if dtype.names:
        fields = (f"{name}: {_dtype_in_words(dtype[name], depth + 1)}" for name in dtype.names)
        return f"({', '.join(fields)})"
    return str(dtype)


# Smaller datasets get no advice about speed, because reading them is fast in any layout.
SMALL_NBYTES = 1 << 20

_OFTEN = 1.5  # decodes of a chunk in an epoch, from which on advice is given
_HUGE_CHUNK = 8 << 20
_TINY_CHUNK = 16 << 10
_LARGE_ENOUGH = 16 << 10  # bytes from which on a sample should get its own chunk
_SMALL_PART = 64 << 10
_MANY_READS = 8
_PART = 0.02  # the least part of the file's decoded bytes that gets advice about speed
_SHOWN_AT_MOST = 20  # most datasets in a table
_NAMED_AT_MOST = 3  # most datasets that a command names
_WINDOW, _WINDOW_NBYTES = 64, 1 << 30
_FAST = {LZF, BLOSC, LZ4, ZSTD}
# Words in a reason for h5py, and the codec for a copy of the dataset that fastpipe reads without h5py.
_CODECS = (("filter", "lzf"), ("compressed twice", "lzf"), ("never written", "keep"))


@dataclass(frozen=True)
class Advice:
    dataset: str  # the path of the dataset
    kind: str  # a keyword for programs
    text: str  # the problem, with figures
    remedies: tuple[str, ...]  # the best remedy first
    others: tuple[str, ...] = ()  # the paths of datasets that are stored alike, with the same problem


# The kind, the text and the remedies of each piece of advice.
_Found = Iterator[tuple[str, str, tuple[str, ...]]]


@dataclass(frozen=True)
class _Place:
    path: str
    batch_size: int
    free_memory: int | None
    alike: Sequence[DatasetFacts]  # the dataset of the advice, and others that are stored like it

    def repack(self, options: str) -> str:
        names = [f"--dataset {shlex.quote(facts.path)}" for facts in self.alike]
        if len(names) > _NAMED_AT_MOST:  # the command then takes all datasets that are not small
            names = []
        return " ".join(["fastpipe repack", shlex.quote(self.path), "OUT", *names, options])


def advise(
    datasets: Sequence[DatasetFacts], path: str, batch_size: int, free_memory: int | None
) -> list[Advice]:
    """Return the advice about a file, once for all datasets that are stored alike.

    There is no advice about the speed of datasets that have less than 2 % of the file's decoded bytes.
    """
    groups: dict[Any, list[DatasetFacts]] = {}
    for facts in datasets:
        sides = facts.shape[1:] if facts.shape else facts.shape
        key = sides, facts.dtype, facts.storage, facts.chunk, facts.filters, facts.missing, facts.why
        groups.setdefault((key, _is_small(facts), not facts.samples), []).append(facts)
    least = _PART * sum(map(_nbytes, datasets))
    advice = []
    for alike in groups.values():
        largest = max(alike, key=_nbytes)
        rules = _VOLUME_RULES if _is_volume(largest) else _RULES
        if sum(map(_nbytes, alike)) < least:
            rules = _ALWAYS
        others = tuple(facts.path for facts in alike if facts is not largest)
        place = _Place(path, batch_size, free_memory, alike)
        advice += [Advice(largest.path, *found, others) for rule in rules for found in rule(largest, place)]
    return advice


def _nbytes(facts: DatasetFacts) -> int:
    # If elements have no fixed size, the decoded size is unknown, and the stored size decides.
    return max(facts.decoded or 0, facts.stored)


def _is_small(facts: DatasetFacts) -> bool:
    return _nbytes(facts) < SMALL_NBYTES


def _is_volume(facts: DatasetFacts) -> bool:
    """Return True if chunks are blocks of the last three dimensions, as those of a volume are."""
    shape, chunk = facts.shape or (), facts.chunk or ()
    return len(chunk) >= 3 and all(1 < side < size for side, size in zip(chunk[-3:], shape[-3:], strict=True))


def _no_samples(facts: DatasetFacts, place: _Place) -> _Found:
    if facts.shape and facts.samples == 0:
        text = f"it has no samples, its shape is {facts.shape}: a loader finds nothing in it"
        yield ("empty", text, ("write the data, or leave the dataset out",))


def _missing_plugin(facts: DatasetFacts, place: _Place) -> _Found:
    # A small dataset gets this advice too, because the dataset cannot be read.
    if facts.missing:
        text = f"its filter {', '.join(facts.missing)} is not in the HDF5 library here: it cannot be read"
        yield ("missing plugin", text, facts.remedies)


def _decoded_often(facts: DatasetFacts, place: _Place) -> _Found:
    epoch, per_chunk, nbytes = facts.epoch, facts.samples_per_chunk, facts.sample_nbytes
    if _is_small(facts) or epoch is None or per_chunk is None or not nbytes or epoch.decodes < _OFTEN:
        return
    chunk = facts.chunk_nbytes or 0
    text = (
        f"{per_chunk:,} samples are compressed together in a chunk of {in_bytes(chunk)}: an epoch in uniform "
        f"order, in batches of {place.batch_size:,}, decodes each chunk {epoch.decodes:.3g} times, "
        f"{in_bytes(epoch.nbytes)} instead of {in_bytes(epoch.windowed_nbytes)}"
    )
    group, remedies = chunk * facts.parts, []
    window = min(_WINDOW, _WINDOW_NBYTES // max(group, 1))
    groups = -(-facts.chunks // facts.parts)
    if window >= 1:
        remedies.append(
            f'Shuffle(window={window}, unit="group"), which decodes each chunk once and takes '
            f"{in_bytes(min(window, groups) * group)}"
        )
    decoded = sum(one.decoded or 0 for one in place.alike)
    if facts.decoded and place.free_memory is not None and decoded <= place.free_memory // 2:
        remedies.append(
            f'cache="ram": decoded the data are {in_bytes(decoded)}, and '
            f"{in_bytes(place.free_memory)} of memory are free"
        )
    alone = "--chunk-rows 1" if nbytes >= _LARGE_ENOUGH else "--codec none"
    remedies.append(place.repack(alone))
    yield ("decoded often", text, tuple(remedies))


def _huge_chunks(facts: DatasetFacts, place: _Place) -> _Found:
    chunk, nbytes = facts.chunk_nbytes or 0, facts.sample_nbytes
    if not facts.filters or not nbytes or chunk < _HUGE_CHUNK:
        return
    part = min(nbytes / facts.parts, chunk)
    if part < chunk / 2:
        text = (
            f"its chunks are {in_bytes(chunk)}, of which a sample needs {in_bytes(part)}: whoever reads one "
            f"sample decodes {in_bytes(chunk * facts.parts)}, and each thread needs memory for a chunk"
        )
        yield ("huge chunks", text, (place.repack("--chunk-rows auto"),))


def _cut_samples(facts: DatasetFacts, place: _Place) -> _Found:
    if _is_small(facts) or facts.epoch is None or facts.parts < 2 or not facts.sample_nbytes:
        return
    piece = facts.sample_nbytes / facts.epoch.reads
    if facts.filters:
        is_bad = facts.samples_per_chunk != 1 or (facts.chunk_nbytes or 0) < _SMALL_PART
        what = f"each sample of {in_bytes(facts.sample_nbytes)} is spread over {facts.parts:,} chunks"
    else:
        is_bad = facts.epoch.reads >= _MANY_READS and piece < _SMALL_PART
        what = (
            f"each sample of {in_bytes(facts.sample_nbytes)} is spread over {facts.parts:,} chunks and "
            f"read in {facts.epoch.reads:,} pieces of {in_bytes(piece)}"
        )
    if is_bad:
        text = f"its chunks {facts.chunk} cut the samples' own dimensions: {what}"
        yield ("cut samples", text, (place.repack("--chunk-rows auto"),))


def _blocks(facts: DatasetFacts, place: _Place) -> _Found:
    if _is_small(facts):
        return
    name = f"{place.path}{facts.path}"
    patch = ",".join(str(min(64, side)) for side in (facts.shape or ())[-3:])
    text = f"its chunks {facts.chunk} are blocks, as those of a volume are"
    remedies = (
        f"for patches: FastPatchDataset({name!r}, …), and "
        f"fastpipe inspect {shlex.quote(name)} --patch {patch}",
        f"for samples along the first dimension: {place.repack('--chunk-rows auto')}",
    )
    yield ("volume", text, remedies)


def _tiny_chunks(facts: DatasetFacts, place: _Place) -> _Found:
    chunk = facts.chunk_nbytes
    if _is_small(facts) or not facts.filters or facts.chunks < 2 or not chunk or chunk >= _TINY_CHUNK:
        return
    text = (
        f"its {facts.chunks:,} chunks are of {in_bytes(chunk)}: finding, reading and starting to decode one "
        "costs more than its bytes"
    )
    remedies = place.repack("--codec none"), place.repack("--chunk-rows auto")
    yield ("tiny chunks", text, remedies)


def _through_library(facts: DatasetFacts, place: _Place) -> _Found:
    if _is_small(facts) or facts.reader != "h5py" or facts.missing:
        return
    text = (
        f"{in_bytes(max(facts.decoded or 0, facts.stored))} are read through h5py, by one thread at a time: "
        f"{facts.why}"
    )
    codec = next((codec for words, codec in _CODECS if words in facts.why), "")
    if facts.storage in ("virtual", "external"):
        codec = codec or "none"
    remedy = "worker processes, each with an HDF5 library; or elements of a fixed size in NumPy's form"
    if codec:
        remedy = place.repack(f"--codec {codec}")
    elif "which chunk" in facts.why:
        remedy = "a file written without libver=, whose list of chunks h5py gets right; or worker processes"
    yield ("through h5py", text, (remedy,))


def _slow_codec(facts: DatasetFacts, place: _Place) -> _Found:
    if _is_small(facts) or DEFLATE not in facts.codes or facts.epoch is None or facts.reader != "threads":
        return
    if _FAST & set(facts.codes):
        return
    text = (
        f"its filter is {facts.filters[facts.codes.index(DEFLATE)]}: an epoch in uniform order inflates "
        f"{in_bytes(facts.epoch.nbytes)}, which lzf, lz4, zstd and blosc decode faster"
    )
    remedies = place.repack("--codec lzf"), place.repack("--codec lz4") + " (with hdf5plugin)"
    yield ("slow codec", text, remedies)


_Rules = tuple[Callable[[DatasetFacts, _Place], _Found], ...]
_ALWAYS: _Rules = (_no_samples, _missing_plugin)
_VOLUME_RULES: _Rules = (
    *_ALWAYS,
    _through_library,
    _blocks,
)  # an order of samples says nothing about patches
_RULES: _Rules = (
    *_ALWAYS,
    _through_library,
    _decoded_often,
    _huge_chunks,
    _cut_samples,
    _tiny_chunks,
    _slow_codec,
)


SCHEMA = 1


def inspect(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Print the facts about a file as tables or JSON; ``args`` has the arguments of ``tools.inspect``."""
    progress.now("asking for the chunks")
    datasets = inspect_file(args.file, args.sample_dims, args.batch_size)
    free = free_memory()
    advice = advise(datasets, args.file, args.batch_size, free)
    progress.stop()
    if args.json:
        text = json.dumps(_content(args, datasets, advice, free), indent=1)
        console.print(Text(text), soft_wrap=True)
        return 0
    _print_datasets(datasets, args.file, console)
    _print_epoch(datasets, args.batch_size, console)
    _print_advice(datasets, advice, console)
    return 0


def _content(
    args: argparse.Namespace, datasets: Sequence[DatasetFacts], advice: Sequence[Advice], free: int | None
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "file": args.file,
        "sample_dims": args.sample_dims,
        "batch_size": args.batch_size,
        "free_memory": free,
        "datasets": [dataclasses.asdict(facts) for facts in datasets],
        "advice": [dataclasses.asdict(one) for one in advice],
    }


def _print_datasets(datasets: Sequence[DatasetFacts], path: str, console: Console) -> None:
    rows = table(
        f"{path}: {counted(len(datasets), 'dataset')}",
        ["dataset", "shape", "dtype", "layout", "chunk", "filters"],
        ["stored", "decoded", "ratio", "samples/chunk", "chunks", "read by"],
    )
    for facts in _shown(datasets):
        rows.add_row(
            facts.path,
            "none" if facts.shape is None else _sides(facts.shape) or "scalar",
            facts.dtype,
            facts.storage,
            _sides(facts.chunk) if facts.chunk else "",
            ", ".join(facts.filters),
            in_bytes(facts.stored),
            "?" if facts.decoded is None else in_bytes(facts.decoded),
            f"{facts.decoded / facts.stored:.2f}" if facts.decoded and facts.stored else "",
            "" if facts.samples_per_chunk is None else f"{facts.samples_per_chunk:,}",
            f"{facts.chunks:,}" if facts.chunk else "",
            facts.reader,
        )
    console.print(rows)
    if len(datasets) > _SHOWN_AT_MOST:
        more = counted(len(datasets) - _SHOWN_AT_MOST, "dataset")
        print_line(console, f"and {more} more, none of them larger: --json lists all")
        console.print()
    reasons: dict[str, list[str]] = {}
    for facts in datasets:
        reasons.setdefault(facts.why, []).append(facts.path)
    reasons.pop("", None)
    for why, paths in reasons.items():
        are = "is" if len(paths) == 1 else "are"
        print_line(console, f"{_and_others(paths[0], len(paths) - 1)} {are} read through h5py: {why}")
    if reasons:
        console.print()


def _shown(datasets: Sequence[DatasetFacts]) -> list[DatasetFacts]:
    """Return the largest datasets, in the order of the file."""
    largest = sorted(datasets, key=_nbytes, reverse=True)[:_SHOWN_AT_MOST]
    names = {facts.path for facts in largest}
    return [facts for facts in datasets if facts.path in names]


def _and_others(path: str, others: int) -> str:
    return f"{path} and {others:,} more" if others else path


def _print_epoch(datasets: Sequence[DatasetFacts], batch_size: int, console: Console) -> None:
    with_samples = [(facts, facts.epoch) for facts in _shown(datasets) if facts.epoch]
    if not with_samples:
        return
    rows = table(
        f"what an epoch reads, in batches of {batch_size:,}, where decoded chunks are not kept",
        ["dataset"],
        ["samples", "of each", "uniform order", "a chunk decoded", 'unit="group"', "a chunk decoded"],
    )
    for facts, epoch in with_samples:
        is_known, is_decoded = facts.decoded is not None, facts.filters and facts.chunk
        rows.add_row(
            facts.path,
            f"{facts.samples:,}",
            "?" if facts.sample_nbytes is None else in_bytes(facts.sample_nbytes),
            in_bytes(epoch.nbytes) if is_known else "?",
            f"{epoch.decodes:.3g}×" if is_decoded else "",
            in_bytes(epoch.windowed_nbytes) if is_known else "?",
            "1×" if is_decoded else "",
        )
    console.print(rows)


def _print_advice(datasets: Sequence[DatasetFacts], advice: Sequence[Advice], console: Console) -> None:
    if not advice:
        print_line(console, "Nothing to advise.", "bold green")
        for facts in datasets:
            if facts.storage == "contiguous" and (facts.decoded or 0) >= SMALL_NBYTES and facts.samples:
                print_line(
                    console,
                    f"{facts.path} is contiguous, which is ideal: in any order a sample is read by itself.",
                )
        return
    print_line(console, "Advice", "bold")
    for one in advice:
        alike = f" and {counted(len(one.others), 'dataset')} like it" if one.others else ""
        print_line(console, f"{one.dataset}{alike}: {one.text}.")
        for remedy in one.remedies:
            print_line(console, f"  - {remedy}")


def _sides(shape: Sequence[int]) -> str:
    return " × ".join(f"{side}" for side in shape)
