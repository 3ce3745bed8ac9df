"""``fastpipe stage``: fill a stage, check it, say what it holds, clear it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console

import fastpipe
from fastpipe.console import Progress, in_time, print_line
from fastpipe.core.text import in_bytes
from fastpipe.errors import StageError
from fastpipe.options import Stage, Subset
from fastpipe.stage.folder import StageFolder

__all__ = ["clear_stage", "fill_stage", "stage_status"]

_NAMED_AT_MOST = 10


def fill_stage(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Copy the images of a URL to a stage.

    Returns:
        0; 1 where some could not be copied.
    """
    url, folder = args.places
    options: dict[str, Any] = {}
    if args.endpoint_url:
        options["endpoint_url"] = args.endpoint_url
    if args.anon:
        options["anon"] = True
    classes = Subset(args.subset, args.seed) if args.subset else args.classes
    progress.now(f"listing {url}")
    dataset = fastpipe.FastImageFolder(
        url, classes=classes, refresh=args.refresh, storage_options=options or None,
        stage=Stage(folder, max_bytes=args.max_bytes or "auto", connections=args.connections or "auto"),
    )  # fmt: skip
    try:
        return _fill(dataset, args.verify, console, progress)
    finally:
        dataset.close()


def _fill(dataset: Any, verifies: bool, console: Console, progress: Progress) -> int:
    total = len(dataset)
    begun, first = time.monotonic(), 0

    def heard(count: int, nbytes: int) -> None:
        nonlocal first
        first = first or count
        rate = (count - first) / max(time.monotonic() - begun, 1e-9)
        left = f", {in_time((total - count) / rate)} left" if rate > 0 else ""
        progress.now(f"staged {count:,} of {total:,} images, {in_bytes(nbytes)}, {rate:,.0f}/s{left}")

    failed = dataset.stage_all(heard)
    damaged = (
        dataset.verify_stage(lambda count: progress.now(f"verified {count:,} of {total:,} images"))
        if verifies
        else []
    )
    progress.stop()
    count, nbytes = dataset.downloaded
    took = in_time(time.monotonic() - begun)
    staged = f"{total - len(failed):,} images are staged"
    print_line(console, f"{staged}; {count:,} of them ({in_bytes(nbytes)}) came in {took}")
    if verifies:
        print_line(console, f"verified: {len(damaged):,} of them were damaged, and are downloaded anew")
    for path, error in failed[:_NAMED_AT_MOST]:
        print_line(console, f"not staged: {path}: {error}", style="red")
    if len(failed) > _NAMED_AT_MOST:
        print_line(console, f"and {len(failed) - _NAMED_AT_MOST:,} more", style="red")
    return 1 if failed else 0


def stage_status(folder: str, console: Console) -> int:
    """Say what a stage holds.

    Returns:
        0.
    """
    opened = _opened(folder)
    try:
        usage = opened.usage()
    finally:
        opened.close()
    used = "in use" if usage.is_used else "used by nobody now"
    print_line(console, f"{opened.path}: {usage.objects:,} objects, {in_bytes(usage.nbytes)}, {used}")
    return 0


def clear_stage(folder: str, console: Console) -> int:
    """Remove what a stage holds.

    Returns:
        0.

    Raises:
        StageError: somebody uses it.
    """
    opened = _opened(folder)
    try:
        usage = opened.usage()
        opened.clear()
    finally:
        opened.close()
    print_line(console, f"{opened.path}: removed {usage.objects:,} objects, {in_bytes(usage.nbytes)}")
    return 0


def _opened(folder: str) -> StageFolder:
    """A stage that is there."""
    if not StageFolder.is_in(folder):
        raise StageError(f"there is no stage in {folder!r}: nothing was staged there, or it was moved")
    return StageFolder(Stage(folder))
