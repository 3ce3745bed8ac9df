"""What people and programs read of a volume and its patches."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from fastpipe.console import Progress, print_line, table
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError
from fastpipe.volumes.advice import (
    Rechunked,
    command,
    rechunked,
    worthwhile,
    worthwhile_uniform,
)
from fastpipe.volumes.inspecting import (
    Cost,
    PatchFacts,
    VolumeFacts,
    budget_for,
    checked_model,
    default_budget,
    patch_facts,
    volume_facts,
)
from fastpipe.volumes.opened import open_source

__all__ = ["inspect_volume"]

SCHEMA = 1

_LESS = 0.8  # of a tour's patches in a second: an order that gives so many is good enough


def inspect_volume(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Look at the volume and print what was found; ``args`` as of ``inspect_cli``.

    Returns:
        0.

    Raises:
        OptionError: the options cannot work.
        VolumeError: the volume is damaged.
        OSError: it cannot be read.
    """
    for name, is_given in (("batch-size", args.batch_size != 256), ("sample-dims", args.sample_dims != 1)):
        if is_given:
            raise OptionError(f"--{name} is for HDF5 files, not for volumes")
    paths = [args.file] + ([args.labels] if args.labels else [])
    volumes = [open_source(path) for path in paths]
    if args.patch is None and (args.labels or args.budget):
        raise OptionError("--labels and --budget go with --patch, the size of patches")
    model = checked_model(volumes, args.patch) if args.patch else None
    facts = []
    for path, volume in zip(paths, volumes, strict=True):
        progress.now(f"decoding some of {path}")
        facts.append(volume_facts(path, volume, args.patch))
    patches, other = None, list[Rechunked]()
    if model is not None:
        progress.now("trying orders")
        patches = patch_facts(model, volumes, facts, args.budget or default_budget())
        progress.now("trying other chunks")
        other = rechunked(volumes, facts, model, patches)
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
        lines = [
            ("array", f"{_sides(one.shape)} {one.dtype}, {in_bytes(one.decoded)} decoded"),
            ("stored", f"{stored}{ratio}: {one.how}"),
            (
                "decoded at once",
                f"{_sides(one.unit)}, {in_bytes(one.unit_nbytes)}, of which it has {one.units:,}",
            ),
        ]
        for speed in dict.fromkeys((one.one, one.all)):
            if speed is not None:
                threads = f"{speed.threads} thread{'s' if speed.threads > 1 else ''}"
                pace = f"{speed.units_per_s:,.0f} units/s, {in_bytes(speed.nbytes_per_s)}/s"
                lines.append((f"measured, {threads}", pace))
        for name, text in lines:
            print_line(console, f"  {name:<20} {text}")
        console.print()


def _print_patches(patches: PatchFacts, facts: Sequence[VolumeFacts], console: Console) -> None:
    title = (
        f"patches of {_sides(patches.patch)}: {in_bytes(patches.nbytes)} each, {patches.epoch:,} have the "
        "volume's size"
    )
    threads = facts[0].all.threads if facts[0].all else 1
    rows = table(
        title,
        ["order"],
        ["remembered", "decoded for one", "for each byte used", "patches/s, 1 thread", f"{threads} threads"],
    )
    remembered = in_bytes(patches.fit.remembered)
    places = f"{patches.fronts} place{'s' if patches.fronts > 1 else ''}"
    orders = [
        ("one alone", "nothing", patches.alone),
        ("uniform", remembered, patches.uniform),
        (f"a tour from {places} at a time", remembered, patches.tour),
    ]
    for name, memory, cost in orders:
        rows.add_row(name, memory, in_bytes(cost.amplification * patches.nbytes), *_cells(cost))
    console.print(rows)
    if patches.keeps_all:
        print_line(console, "Everything is remembered: from the second epoch on nothing is decoded.")
    for limit, nbytes in patches.needed.items():
        what = _enough(patches, float(limit), nbytes)
        line = f"For a tour to decode at most {limit} bytes for each that is used, {what}."
        print_line(console, line)
    fit = patches.fit
    print_line(
        console,
        f"In {in_bytes(patches.budget)}: {fit.threads} thread{'s' if fit.threads > 1 else ''} of "
        f"{in_bytes(fit.thread_nbytes)} each while they decode, and {remembered} for what is remembered.",
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
        paces = f"{one.ratio:.2f}", *costs, f"{one.tour.all:,.1f}"
        rows.add_row(_sides(one.chunk), codec, files, *paces, gain)
    console.print(rows)


def _print_advice(
    patches: PatchFacts, now: VolumeFacts, other: Sequence[Rechunked], console: Console
) -> None:
    best, best_uniform = worthwhile(other), worthwhile_uniform(other)
    if patches.keeps_all:
        print_line(console, "Other chunks would change the first epoch only.", "bold green")
    elif best is not None:
        print_line(console, "Advice", "bold")
        print_line(
            console,
            f"Chunks of {_sides(best.chunk)} would give {best.gain:.1f} times as many patches, "
            f"{best.tour.all:,.0f} in a second in place of {other[0].tour.all:,.0f}:",
        )
        print_line(console, f"  {command(now.name, best)}")
    elif best_uniform is not None:
        print_line(console, "For a tour no other chunks are worth a copy.", "bold green")
        print_line(
            console,
            f"In uniform order chunks of {_sides(best_uniform.chunk)} would give "
            f"{best_uniform.uniform_gain:.1f} times as many patches, {best_uniform.uniform.all:,.0f} in a "
            f"second in place of {other[0].uniform.all:,.0f}:",
        )
        print_line(console, f"  {command(now.name, best_uniform)}")
    else:
        print_line(console, "No other chunks are worth a copy.", "bold green")
    if patches.uniform.all < _LESS * patches.tour.all:
        print_line(
            console,
            f'Shuffle(unit="group") visits patches on a tour: {patches.tour.all:,.0f} in a second in '
            f"place of {patches.uniform.all:,.0f}.",
        )


def _enough(patches: PatchFacts, limit: float, nbytes: int | None) -> str:
    """Which memory is enough for a tour to decode no more than ``limit``."""
    if nbytes is not None:
        return f"{in_bytes(nbytes)} is enough"
    if patches.least > limit:
        return f"no budget is enough: with all of it remembered it is {patches.least:.2f} in the first epoch"
    least = budget_for(patches.all_nbytes, patches.fit.thread_nbytes)
    return f"only all of it is enough, {in_bytes(least)}"


def _cells(cost: Cost) -> tuple[str, str, str]:
    return f"{cost.amplification:.2f}×", f"{cost.one:,.1f}", f"{cost.all:,.1f}"


def _sides(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"
