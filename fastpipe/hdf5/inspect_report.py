"""What people and programs read of an HDF5 file's layout."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from fastpipe.console import Progress, print_line, table
from fastpipe.core.machine import free_memory
from fastpipe.core.text import in_bytes
from fastpipe.hdf5.advice import SMALL_NBYTES, Advice, advise
from fastpipe.hdf5.inspecting import DatasetFacts, inspect_file

__all__ = ["inspect"]

SCHEMA = 1


def inspect(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Look at the file and print what was found; ``args`` as of ``inspect_cli``.

    Returns:
        0.
    """
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
    title = f"{path}: {len(datasets)} dataset{'s' if len(datasets) != 1 else ''}"
    rows = table(
        title,
        ["dataset", "shape", "dtype", "layout", "chunk", "filters"],
        ["stored", "decoded", "ratio", "samples/chunk", "chunks", "read by"],
    )
    for facts in datasets:
        has_ratio = facts.decoded and facts.stored
        cells = [
            facts.path,
            "none" if facts.shape is None else _sides(facts.shape) or "scalar",
            facts.dtype,
            facts.storage,
            _sides(facts.chunk) if facts.chunk else "",
            ", ".join(facts.filters),
            in_bytes(facts.stored),
            "?" if facts.decoded is None else in_bytes(facts.decoded),
            f"{facts.decoded / facts.stored:.2f}" if facts.decoded and has_ratio else "",
            "" if facts.samples_per_chunk is None else f"{facts.samples_per_chunk:,}",
            f"{facts.chunks:,}" if facts.chunk else "",
            facts.reader,
        ]
        rows.add_row(*cells)
    console.print(rows)
    reasons = [facts for facts in datasets if facts.why]
    for facts in reasons:
        print_line(console, f"{facts.path} is read through h5py: {facts.why}")
    if reasons:
        console.print()


def _print_epoch(datasets: Sequence[DatasetFacts], batch_size: int, console: Console) -> None:
    with_samples = [facts for facts in datasets if facts.epoch]
    if not with_samples:
        return
    rows = table(
        f"what an epoch reads, in batches of {batch_size:,}, where decoded chunks are not kept",
        ["dataset"],
        ["samples", "of each", "uniform order", "a chunk decoded", 'unit="group"', "a chunk decoded"],
    )
    for facts in with_samples:
        epoch, nbytes = facts.epoch, facts.sample_nbytes
        if epoch is None:
            continue
        is_known = facts.decoded is not None
        decodes = [f"{epoch.decodes:.3g}×", "1×"] if facts.filters and facts.chunk else ["", ""]
        cells = [
            facts.path,
            f"{facts.samples:,}",
            "?" if nbytes is None else in_bytes(nbytes),
            in_bytes(epoch.nbytes) if is_known else "?",
            decodes[0],
            in_bytes(epoch.windowed_nbytes) if is_known else "?",
            decodes[1],
        ]
        rows.add_row(*cells)
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
        print_line(console, f"{one.dataset}: {one.text}.")
        for remedy in one.remedies:
            print_line(console, f"  - {remedy}")


def _sides(shape: Sequence[int]) -> str:
    return " × ".join(f"{side}" for side in shape)
