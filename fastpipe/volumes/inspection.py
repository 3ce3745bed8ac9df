"""``fastpipe inspect VOLUME``: measure the cost of patches on this machine, and find better chunks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from fastpipe.console import Progress, print_line, table
from fastpipe.core.clock import StageClock
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus
from fastpipe.core.text import counted, in_bytes
from fastpipe.errors import OptionError
from fastpipe.options import Cache
from fastpipe.volumes.cost import PatchModel, Stored
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.reader import Counts, PatchReader
from fastpipe.volumes.repack import (
    TOGETHER_NBYTES,
    Codec,
    ZarrLayout,
    chunk_of,
    create_array,
    finish_all,
    open_source,
    read_box,
    stored_nbytes,
    write_box,
)
from fastpipe.volumes.units import budget_of
from fastpipe.volumes.volume import Box, Int64Array, UnitGrid, Volume, aligned, grown_unit, sides_text
from fastpipe.volumes.zarr import arrays_in, is_zarr_group

SCHEMA = 1  # version of the JSON output


_SECONDS, _TRIED_SECONDS = 0.8, 0.25  # seconds for measuring the volume, and a part of it in other chunks
_LIMITS = (2.0, 1.2)  # decoded bytes for each used byte, for which the least memory is searched
_LESS = 0.8  # uniform order is good enough if it has this fraction of a tour's patches per second
_TRIED_NBYTES = 24 << 20  # the most bytes of the part of the volume that is written in other chunks
_LEAST_CHUNK, _LARGEST_CHUNK = 1 << 16, 16 << 20
_MOST_FILES = 1_000_000
_WORTH = 1.25  # ratio of patches per second from which on a copy is advised
_WORTH_UNIFORM = 2.0  # this ratio for uniform order; it is larger, because a tour helps without a copy


@dataclass(frozen=True)
class Speed:
    """How fast a number of threads decode units (parts of an array that are decoded as a whole)."""

    threads: int
    units: int
    nbytes: int
    seconds: float

    @property
    def nbytes_per_s(self) -> float:
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class VolumeFacts:
    """The facts about a volume; the JSON output of ``fastpipe inspect`` has the same fields."""

    name: str  # the path from the user
    how: str  # the storage format, in words
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]  # shape of a chunk
    unit: tuple[int, ...]  # shape of a unit, which is decoded as a whole
    unit_nbytes: int
    units: int  # number of units
    decoded: int  # bytes of the array
    stored: int | None  # bytes on disk; None if unknown
    one: Speed | None  # speed of one thread; None for an array without elements
    all: Speed | None  # speed of one thread for each core

    @property
    def ratio(self) -> float | None:
        return self.decoded / self.stored if self.stored else None


@dataclass(frozen=True)
class Cost:
    """The cost of reading patches in some order."""

    amplification: float  # decoded bytes for each used byte
    one: float  # patches per second with one thread
    all: float  # patches per second with one thread for each core


@dataclass(frozen=True)
class Fit:
    threads: int
    thread_nbytes: int  # bytes that each thread uses while it decodes
    remembered: int  # bytes for decoded units that are kept in memory


@dataclass(frozen=True)
class PatchFacts:
    patch: tuple[int, ...]
    nbytes: int  # bytes of a patch, in all arrays
    epoch: int  # number of patches that together have the volume's size
    budget: int  # bytes of memory
    fit: Fit
    all_nbytes: int  # bytes of all units
    keeps_all: bool  # True if all units fit into memory
    alone: Cost  # if no units are kept in memory
    uniform: Cost  # in uniformly random order
    tour: Cost  # on a tour, an order in which neighbouring patches follow each other (see tours.py)
    fronts: int  # number of parts of the tour, from which patches are taken in turn
    least: float  # decoded bytes for each used byte in the first epoch, if all units are kept in memory
    needed: dict[str, int | None]  # least bytes for a tour within each of ``_LIMITS``; None for all units
    copying: float  # seconds for a thread to copy a patch from decoded units


@dataclass(frozen=True)
class Rechunked:
    """What patches cost if the volume has other chunks.  For its present chunks, ``codec`` is empty."""

    chunk: tuple[int, ...]
    chunks: int  # number of chunks; a copy has a file for each chunk
    codec: str
    level: int
    ratio: float  # decoded bytes for each stored byte
    unit: tuple[int, ...]
    alone: Cost
    uniform: Cost
    tour: Cost  # on a tour with one front
    gain: float  # patches per second on a tour, relative to the present chunks
    uniform_gain: float  # patches per second in uniform order, relative to the present chunks


def inspect_volume(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Inspect the volume and print the results; ``args`` has the arguments of ``fastpipe.tools.inspect``."""
    for name, is_given in (("batch-size", args.batch_size != 256), ("sample-dims", args.sample_dims != 1)):
        if is_given:
            raise OptionError(f"--{name} is for HDF5 files, not for volumes")
    paths = [args.file] + ([args.labels] if args.labels else [])
    if args.patch is None and os.path.isdir(args.file) and is_zarr_group(args.file):
        paths[:1] = [f"{args.file.rstrip('/')}/{name}" for name in arrays_in(args.file)]
        if not paths:
            raise OptionError(f"{args.file} is a Zarr group without arrays")
    volumes = [open_source(path) for path in paths]
    if args.patch is None and (args.labels or args.budget):
        raise OptionError("--labels and --budget go with --patch, the size of patches")
    model = _model(volumes, args.patch) if args.patch else None
    layouts = _layouts(volumes[0], model.patch) if model is not None else []
    if layouts:
        require("tensorstore", extra="volume")
    facts = []
    for path, volume in zip(paths, volumes, strict=True):
        progress.now(f"decoding some of {path}")
        facts.append(volume_facts(path, volume, args.patch))
    patches, other = None, list[Rechunked]()
    if model is not None:
        progress.now("trying orders")
        patches = patch_facts(model, volumes, facts, args.budget or max(1, budget_of(Cache())))
        progress.now("trying other chunks")
        other = rechunked(volumes, facts, model, patches, layouts)
    progress.stop()
    if args.json:
        text = json.dumps(_content(facts, patches, other), indent=1)
        console.print(Text(text), soft_wrap=True)
        return 0
    _print_volumes(facts, console)
    if patches is not None:
        _print_patches(patches, facts, console)
        _print_other(other, console)
        _print_advice(patches, facts[0], other, console)
    return 0


def _model(volumes: Sequence[Volume], patch: Sequence[int]) -> PatchModel:
    name = volumes[0].name
    if not all(math.prod(volume.shape) for volume in volumes):
        raise OptionError(f"{name} is empty: there are no patches in it")
    try:
        return PatchModel(list(map(_stored, volumes)), patch, available_cpus())
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from None


def _stored(volume: Volume) -> Stored:
    return Stored(volume.shape, volume.grid.unit, volume.dtype.itemsize)


def decode_speed(
    volume: Volume, patch: Sequence[int] | None, threads: int, seconds: float, within: Box | None = None
) -> Speed:
    """Measure, for ``seconds`` seconds, how fast ``threads`` threads decode the units of random patches.

    Each thread decodes at least one group of units.  For each value of ``threads``, other random places are
    read, because the operating system has cached the places of previous measurements.
    """
    reader, groups, lock = volume.open(), _groups(volume, patch, within, threads), threading.Lock()
    begun = time.perf_counter()
    deadline = begun + seconds

    def work() -> int:
        count, parts = 0, aligned(volume.unit_nbytes, 1)
        while True:
            with lock:
                group = next(groups)
            if len(parts) < len(group):  # reuse the memory, like that of a batch
                parts = aligned(volume.unit_nbytes, len(group))
            reader.read(group, parts[: len(group)])
            count += len(group)
            if time.perf_counter() >= deadline:
                return count

    with ThreadPoolExecutor(threads, "fastpipe-inspect") as pool:
        count = sum(finish_all([pool.submit(work) for _ in range(threads)]))
    taken = max(time.perf_counter() - begun, 1e-9)
    return Speed(threads, count, count * volume.unit_nbytes, taken)


def _groups(
    volume: Volume, patch: Sequence[int] | None, within: Box | None, seed: int
) -> Iterator[Int64Array]:
    """Yield groups of units without end; one patch uses the units of a group, which are stored together."""
    rng = np.random.default_rng(seed)
    while True:
        if patch is None:
            yield rng.integers(0, volume.grid.count, 1)
            continue
        touched = volume.grid.touched(_random_patch(volume, patch, rng, within))
        groups = volume.together(touched, TOGETHER_NBYTES)
        for number in rng.permutation(len(groups)).tolist():
            yield groups[number]


def _random_patch(
    volume: Volume, patch: Sequence[int], rng: np.random.Generator, within: Box | None = None
) -> Box:
    whole = (*volume.shape[: len(volume.shape) - len(patch)], *patch)
    box = []
    for size, side, part in zip(volume.shape, whole, within or [None] * len(whole), strict=True):
        first, end = (0, size) if part is None else (min(part.start, size - side), min(part.stop, size))
        at = int(rng.integers(first, max(first, end - side) + 1))
        box.append(slice(at, at + side))
    return tuple(box)


def copy_seconds(volume: Volume, patch: Sequence[int]) -> float:
    clock = StageClock()
    box = _random_patch(volume, patch, np.random.default_rng(1))
    out = np.zeros([side.stop - side.start for side in box], volume.dtype)
    out.fill(0)  # write to all pages first, so that the copy causes no page faults, as in reused memory
    PatchReader(volume, clock, Counts()).read([side.start for side in box], out)
    return clock.totals().get("copy", 0.0)


def volume_facts(path: str, volume: Volume, patch: Sequence[int] | None) -> VolumeFacts:
    one, every = _one_and_all(volume, patch, _SECONDS) if volume.grid.count else (None, None)
    return VolumeFacts(
        name=path,
        how=volume.how,
        shape=volume.shape,
        dtype=str(volume.dtype),
        chunk=chunk_of(volume),
        unit=volume.grid.unit,
        unit_nbytes=volume.unit_nbytes,
        units=volume.grid.count,
        decoded=volume.nbytes,
        stored=stored_nbytes(path),
        one=one,
        all=every,
    )


def patch_facts(
    model: PatchModel, volumes: Sequence[Volume], facts: Sequence[VolumeFacts], budget: int
) -> PatchFacts:
    fit = fit_of(facts, budget)
    if fit.thread_nbytes > budget:
        raise OptionError(
            f"a budget of {in_bytes(budget)} is too little: a decoding thread needs "
            f"{in_bytes(fit.thread_nbytes)}; give at least --budget {fit.thread_nbytes}B"
        )
    copying = sum(copy_seconds(volume, model.patch) for volume in volumes)
    rates = Rates(model, [(one.one, one.all) for one in facts], copying)
    tour = model.tour(fit.remembered)
    needed = [least and budget_for(least, fit.thread_nbytes) for least in model.least_budget(_LIMITS)]
    return PatchFacts(
        patch=model.patch,
        nbytes=model.patch_nbytes,
        epoch=model.epoch,
        budget=budget,
        fit=fit,
        all_nbytes=model.total_nbytes,
        keeps_all=fit.remembered >= model.total_nbytes,
        alone=rates.cost(model.alone() / model.patch_nbytes),
        uniform=rates.cost(model.uniform(fit.remembered)),
        tour=rates.cost(tour.amplification),
        fronts=tour.fronts,
        least=model.uniform(model.total_nbytes),
        needed=dict(zip(map(str, _LIMITS), needed, strict=True)),
        copying=copying,
    )


def fit_of(facts: Sequence[VolumeFacts], budget: int) -> Fit:
    """Return the best division of a memory budget between decoding threads and decoded units.

    Decoded units get at least half of the budget, unless one thread needs more than half.  A decoding thread
    holds the stored bytes and the decoded bytes of a chunk.  The stored bytes are estimated from the mean
    compression ratio.  The buffers of codecs and of batches are not included.
    """
    each = 0
    for one in facts:
        itemsize = one.unit_nbytes // max(1, math.prod(one.unit))
        chunk = max(math.prod(one.chunk) * itemsize, one.unit_nbytes)
        each = max(each, chunk + int(chunk / max(1.0, one.ratio or 1.0)))
    threads = max(1, min(available_cpus(), budget // 2 // max(1, each)))
    return Fit(threads, each, max(0, budget - threads * each))


def budget_for(remembered: int, thread_nbytes: int) -> int:
    """Return the memory budget of which ``fit_of`` gives ``remembered`` bytes to decoded units."""
    return remembered + thread_nbytes * max(1, min(available_cpus(), remembered // max(1, thread_nbytes)))


class Rates:
    """The number of patches per second, from the speeds of decoding and of copying."""

    def __init__(
        self, model: PatchModel, speeds: Sequence[tuple[Speed | None, Speed | None]], copying: float
    ) -> None:
        self._model, self._speeds, self._copying = model, speeds, copying

    def cost(self, amplification: float) -> Cost:
        rates = []
        for speeds in zip(*self._speeds, strict=True):  # first with one thread, then with all threads
            seconds, threads = 0.0, 1
            for number, speed in enumerate(speeds):
                if speed is not None:
                    seconds += amplification * self._model.nbytes_of(number) / speed.nbytes_per_s
                    threads = speed.threads
            rates.append(1 / max(seconds + self._copying / threads, 1e-12))
        return Cost(amplification, *rates)


def rechunked(
    volumes: Sequence[Volume], facts: Sequence[VolumeFacts], model: PatchModel, now: PatchFacts,
    layouts: Sequence[ZarrLayout],
) -> list[Rechunked]:  # fmt: skip
    """Return what patches cost with each of ``layouts`` for the first volume; its present layout comes first.

    For each layout, a part of the volume is written to a temporary folder and decoded.  The same part is also
    decoded in its present layout, so that the operating system has cached the data of all layouts equally.
    """
    if not layouts:
        return []
    volume, room = volumes[0], now.fit.remembered
    others = [(one.one, one.all) for one in facts[1:]]
    box = _middle(layouts[0])
    with ThreadPoolExecutor(available_cpus(), "fastpipe-inspect") as pool:
        part = read_box(volume, volume.open(), box, layouts[0].dtype, pool)
    rates = Rates(model, [_speeds(volume, model.patch, box), *others], now.copying)
    as_it_is = Rechunked(
        facts[0].chunk, UnitGrid(volume.shape, facts[0].chunk).count, "", 0, facts[0].ratio or 1.0,
        facts[0].unit, rates.cost(now.alone.amplification), rates.cost(now.uniform.amplification),
        rates.cost(model.near(room)), 1.0, 1.0,
    )  # fmt: skip
    found = []
    for layout in layouts:
        with tempfile.TemporaryDirectory(prefix="fastpipe-inspect-") as folder:
            array = Path(folder) / "array"
            target = create_array(array, layout._replace(shape=part.shape), available_cpus())
            write_box(target, tuple(map(slice, part.shape)), part)
            ratio = part.nbytes / max(1, stored_nbytes(f"{array}/c") or 0)
            copy = open_volume(array)
            unit, own = copy.grid.unit, _speeds(copy, model.patch, None)
        arrays = [Stored(layout.shape, unit, layout.dtype.itemsize), *map(_stored, volumes[1:])]
        other = PatchModel(arrays, model.patch, model.threads)
        rates = Rates(other, [own, *others], now.copying)
        alone, uniform = rates.cost(other.alone() / other.patch_nbytes), rates.cost(other.uniform(room))
        tour = rates.cost(other.near(room))
        gains = tour.all / as_it_is.tour.all, uniform.all / as_it_is.uniform.all
        chunks = UnitGrid(layout.shape, layout.chunk).count
        found.append(
            Rechunked(layout.chunk, chunks, *layout.codec, ratio, unit, alone, uniform, tour, *gains)
        )  # fmt: skip
    return [as_it_is, *sorted(found, key=lambda one: -one.gain)]


def _layouts(volume: Volume, patch: Sequence[int]) -> list[ZarrLayout]:
    codec = Codec.of("keep", None)
    try:
        return [
            ZarrLayout.of(volume.shape, volume.dtype, chunk, codec) for chunk in _candidates(volume, patch)
        ]
    except OptionError:
        return []


def _speeds(volume: Volume, patch: Sequence[int], box: Box | None) -> tuple[Speed, Speed]:
    """Return the decoding speeds of one thread and of all threads.

    The threads decode the units of random patches.  If patches do not fit into the volume, the threads decode
    random units.
    """
    spatial = volume.shape[len(volume.shape) - len(patch) :]
    fits = all(side <= size for side, size in zip(patch, spatial, strict=True))
    return _one_and_all(volume, patch if fits else None, _TRIED_SECONDS, box)


def _one_and_all(
    volume: Volume, patch: Sequence[int] | None, seconds: float, box: Box | None = None
) -> tuple[Speed, Speed]:
    cores = available_cpus()
    one = decode_speed(volume, patch, 1, seconds, box)
    return one, decode_speed(volume, patch, cores, seconds, box) if cores > 1 else one


def worthwhile(found: Sequence[Rechunked]) -> Rechunked | None:
    others = [one for one in found if one.codec]
    return others[0] if others and others[0].gain >= _WORTH else None


def worthwhile_uniform(found: Sequence[Rechunked]) -> Rechunked | None:
    best = max((one for one in found if one.codec), key=lambda one: one.uniform_gain, default=None)
    return best if best is not None and best.uniform_gain >= _WORTH_UNIFORM else None


def command(path: str, one: Rechunked) -> str:
    sides = ",".join(map(str, one.chunk))
    return f"fastpipe repack {shlex.quote(path)} OUT.zarr --chunks {sides} --codec {one.codec}"


def _candidates(volume: Volume, patch: Sequence[int]) -> list[tuple[int, ...]]:
    """Return chunk shapes to try: the patch's sides, rounded down to powers of two, and half and a quarter.

    Shapes with too many files for file systems are left out.
    """
    shape, itemsize = volume.shape, volume.dtype.itemsize
    lead, spatial = shape[: len(shape) - len(patch)], shape[len(shape) - len(patch) :]
    # A dimension of the volume that patches span completely is not divided.
    base = [
        side if side == size else 1 << (side.bit_length() - 1)
        for side, size in zip(patch, spatial, strict=True)
    ]
    # Every patch contains the leading dimensions completely.
    front = lead if math.prod((*lead, *base)) * itemsize <= _LARGEST_CHUNK else (1,) * len(lead)
    while math.prod((*front, *base)) * itemsize > _LARGEST_CHUNK:
        longest = int(np.argmax(base))
        base[longest] = -(-base[longest] // 2)
    found: list[tuple[int, ...]] = []
    for part in (1, 2, 4):
        sides = [
            side if side == size else max(1, side // part) for side, size in zip(base, spatial, strict=True)
        ]
        grown = grown_unit(sides, spatial, math.prod(front) * itemsize, _LEAST_CHUNK, is_cut=True)
        whole = (*front, *grown)
        if whole not in found and (not found or UnitGrid(shape, whole).count <= _MOST_FILES):
            found.append(whole)
    return found


def _middle(layout: ZarrLayout) -> Box:
    """Return a box in the middle of the volume; its sides are multiples of the layout's chunk."""
    sides = list(layout.chunk)
    while math.prod(sides) * layout.dtype.itemsize <= _TRIED_NBYTES // 2:
        dims = [dim for dim in range(len(sides)) if 2 * sides[dim] <= layout.shape[dim]]
        if not dims:
            break
        sides[min(dims, key=lambda dim: sides[dim] / layout.chunk[dim])] *= 2
    begins = [(size - side) // 2 for size, side in zip(layout.shape, sides, strict=True)]
    return tuple(slice(at, at + side) for at, side in zip(begins, sides, strict=True))


def _content(
    facts: Sequence[VolumeFacts], patches: PatchFacts | None, other: Sequence[Rechunked]
) -> dict[str, Any]:
    names = ("volume", "labels")
    best = None if patches is None or patches.keeps_all else worthwhile(other) or worthwhile_uniform(other)
    return {
        "schema": SCHEMA,
        "volumes": {
            name: {**dataclasses.asdict(one), "ratio": one.ratio}
            for name, one in zip(names, facts, strict=False)
        },
        "patches": None if patches is None else dataclasses.asdict(patches),
        "rechunked": [dataclasses.asdict(one) for one in other],
        "advice": None if best is None else command(facts[0].name, best),
    }


def _print_volumes(facts: Sequence[VolumeFacts], console: Console) -> None:
    for one in facts:
        print_line(console, one.name, "bold")
        stored = "not known" if one.stored is None else in_bytes(one.stored)
        ratio = f", ratio {one.ratio:.2f}" if one.ratio is not None else ""
        unit = f"{_sides(one.unit)}, {in_bytes(one.unit_nbytes)}, of which it has {one.units:,}"
        lines = [
            ("array", f"{_sides(one.shape)} {one.dtype}, {in_bytes(one.decoded)} decoded"),
            ("stored", f"{stored}{ratio}: {one.how}"),
            ("decoded at once", unit),
        ]
        for speed in dict.fromkeys(filter(None, (one.one, one.all))):
            pace = f"{speed.units / speed.seconds:,.0f} units/s, {in_bytes(speed.nbytes_per_s)}/s"
            lines.append((f"measured, {counted(speed.threads, 'thread')}", pace))
        for name, text in lines:
            print_line(console, f"  {name:<20} {text}")
        console.print()


def _print_patches(patches: PatchFacts, facts: Sequence[VolumeFacts], console: Console) -> None:
    size = f"patches of {_sides(patches.patch)}: {in_bytes(patches.nbytes)} each"
    threads = facts[0].all.threads if facts[0].all else 1
    rows = table(
        f"{size}, {patches.epoch:,} have the volume's size",
        ["order"],
        ["remembered", "decoded for one", "for each byte used", "patches/s, 1 thread", f"{threads} threads"],
    )
    remembered = in_bytes(min(patches.fit.remembered, patches.all_nbytes))
    for name, memory, cost in (
        ("one alone", "nothing", patches.alone),
        ("uniform", remembered, patches.uniform),
        (f"a tour from {counted(patches.fronts, 'place')} at a time", remembered, patches.tour),
    ):
        cells = f"{cost.amplification:.2f}×", f"{cost.one:,.1f}", f"{cost.all:,.1f}"
        rows.add_row(name, memory, in_bytes(cost.amplification * patches.nbytes), *cells)
    console.print(rows)
    if patches.keeps_all:
        print_line(console, "Everything is remembered: from the second epoch on nothing is decoded.")
    for limit, nbytes in patches.needed.items():
        if nbytes is not None:
            what = f"{in_bytes(nbytes)} is enough"
        elif patches.least > float(limit):
            least = f"{patches.least:.2f} in the first epoch"
            what = f"no budget is enough: with all of it remembered it is {least}"
        else:
            least = in_bytes(budget_for(patches.all_nbytes, patches.fit.thread_nbytes))
            what = f"only all of it is enough, {least}"
        print_line(console, f"For a tour to decode at most {limit} bytes for each that is used, {what}.")
    fit = patches.fit
    print_line(
        console,
        f"In {in_bytes(patches.budget)}: {counted(fit.threads, 'thread')} of {in_bytes(fit.thread_nbytes)} "
        f"each while they decode, and {remembered} for what is remembered.",
    )
    console.print()


def _print_other(other: Sequence[Rechunked], console: Console) -> None:
    if not other:
        return
    rows = table(
        "other chunks, tried on a part of the volume, in the same memory; tours from one place",
        ["chunks", "codec"],
        ["files", "ratio", "one alone", "uniform", "a tour", "patches/s of a tour", "gain"],
    )
    for one in other:
        codec, gain = (f"{one.codec} {one.level}", f"{one.gain:.2f}×") if one.codec else ("as it is", "")
        costs = [f"{cost.amplification:.2f}×" for cost in (one.alone, one.uniform, one.tour)]
        files = f"{one.chunks:,}" if one.codec else ""
        rows.add_row(
            _sides(one.chunk), codec, files, f"{one.ratio:.2f}", *costs, f"{one.tour.all:,.1f}", gain
        )
    console.print(rows)


def _print_advice(
    patches: PatchFacts, now: VolumeFacts, other: Sequence[Rechunked], console: Console
) -> None:
    best, best_uniform = worthwhile(other), worthwhile_uniform(other)
    lines = []
    if patches.keeps_all:
        print_line(console, "Other chunks would change the first epoch only.", "bold green")
    elif best is not None:
        print_line(console, "Advice", "bold")
        lines = [
            f"Chunks of {_sides(best.chunk)} would give {best.gain:.1f} times as many patches, "
            f"{best.tour.all:,.0f} in a second instead of {other[0].tour.all:,.0f}:",
            f"  {command(now.name, best)}",
        ]
    elif best_uniform is not None:
        print_line(console, "For a tour no other chunks are worth a copy.", "bold green")
        lines = [
            f"In uniform order chunks of {_sides(best_uniform.chunk)} would give "
            f"{best_uniform.uniform_gain:.1f} times as many patches, {best_uniform.uniform.all:,.0f} in a "
            f"second instead of {other[0].uniform.all:,.0f}:",
            f"  {command(now.name, best_uniform)}",
        ]
    else:
        print_line(console, "No other chunks are worth a copy.", "bold green")
    if patches.uniform.all < _LESS * patches.tour.all:
        lines.append(
            f'Shuffle(unit="group") visits patches on a tour: {patches.tour.all:,.0f} in a second instead '
            f"of {patches.uniform.all:,.0f}."
        )
    for line in lines:
        print_line(console, line)


def _sides(shape: Sequence[int]) -> str:
    return sides_text(shape) or "scalar"
