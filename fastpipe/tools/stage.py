"""``fastpipe stage URL DIR``: copy remote images to a local folder (a stage), or fill a cache with them."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import fastpipe
from fastpipe.console import Progress, in_time, positive, print_line, size
from fastpipe.core.caches import holds_cache, open_cache_store
from fastpipe.core.extras import require
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError, StageError
from fastpipe.options import Cache, Stage, Subset
from fastpipe.stores.stage import StageFolder

_NAMED_AT_MOST = 10

EPILOG = """\
Images in the stage DIR are not downloaded again: after a stop or a kill, the same command
continues, and a training with FastImageFolder(URL, stage=DIR) uses them. Credentials come
from the environment or a credentials file, not from options.

With --form, nothing is copied: images of URL, or of a local folder, are decoded and kept in
DIR in that form, for FastImageFolder(URL, cache=Cache("disk", dir=DIR)). Images that are
there already are passed over.

--verify reads every staged image again and compares it with the checksum that its store
listed (an MD5 as ETag) or, if there is none, with its length; images that differ are
downloaded again.

exit codes: 0 done, 1 some images could not be copied or kept, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usages = ("URL DIR [options]", "URL DIR --form FORM [options]", "--status DIR", "--clear DIR")
    parser.usage = "\n       ".join(f"fastpipe stage {one}" for one in usages)
    add = parser.add_argument
    add("places", nargs="+", metavar="URL DIR",
        help="class folders, such as s3://bucket/train; a local folder")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    add = what.add_argument
    add("--status", action="store_true", help="report the content of the stage DIR")
    add("--clear", action="store_true", help="remove the content of the stage DIR")
    add("--verify", action="store_true", help="also compare staged images with the listing")
    add("--form", choices=("auto", "pixels", "coefficients", "index"), default=None,
        help="keep images in this form in a cache in DIR: see fastpipe.Cache")  # fmt: skip
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--classes",
        type=lambda text: list(filter(None, text.split(","))),
        default=None,
        metavar="NAME,…",
        help="these classes only",
    )
    add("--subset", type=positive(int), default=None, metavar="N",
        help="this many classes, drawn with --seed as Subset(num, seed) draws them")  # fmt: skip
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of --subset (default: 0)")
    add("--max-bytes", type=size, default=None, metavar="SIZE",
        help="what the stage or cache may hold, such as 200GiB (default: what is there, and nine tenths of "
        "the free disk)")  # fmt: skip
    add("--connections", type=positive(int), default=None, metavar="N",
        help="requests at a time (default: as many as latency and bandwidth need)")  # fmt: skip
    add("--refresh", action="store_true", help="list the bucket again instead of using the cached listing")
    add("--endpoint-url", default=None, metavar="URL", help="endpoint of a store that is not Amazon's")
    add("--anon", action="store_true", help="ask without credentials")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    if args.status or args.clear:
        if len(args.places) != 1:
            raise OptionError("--status and --clear take the stage's folder alone")
        return _show(args.places[0], console, clears=args.clear)
    if len(args.places) != 2:
        raise OptionError("name a URL, such as s3://bucket/train, and a folder on a local disk")
    url, folder = args.places
    access = {name: value for name in ("endpoint_url", "anon") if (value := getattr(args, name))}
    options: dict[str, Any] = {"storage_options": access or None}
    classes = Subset(args.subset, args.seed) if args.subset else args.classes
    progress.now(f"listing {url}")
    if args.form and args.connections:
        raise OptionError(
            "--connections is for a stage: with --form, images are fetched as a training fetches them"
        )
    if args.form:
        options |= {"cache": _cache(folder, args), "bad_samples": "skip"}
    else:
        options["stage"] = Stage(
            folder, max_bytes=args.max_bytes or "auto", connections=args.connections or "auto"
        )
    dataset = fastpipe.FastImageFolder(url, classes=classes, refresh=args.refresh, **options)
    try:
        if args.form:
            return _fill_cache(dataset, console, progress)
        return _fill(dataset, args.verify, console, progress)
    finally:
        dataset.close()


def _cache(folder: str, args: argparse.Namespace) -> Cache:
    """Return the cache to fill: by default of what is there, and nine tenths of the free disk."""
    os.makedirs(folder, exist_ok=True)
    used = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*.data"))
    free = shutil.disk_usage(folder).free * 9 // 10
    return Cache("disk", args.max_bytes or used + free, folder, args.form)


def _fill_cache(dataset: Any, console: Console, progress: Progress) -> int:
    """Read all images once.  Those that are not in the cache yet are decoded and kept."""
    transforms = require("torchvision.transforms", extra="torch")
    dataset.transform = transforms.Compose([transforms.CenterCrop(1), transforms.PILToTensor()])
    store = open_cache_store(dataset.cache)
    assert store is not None  # a folder that cannot be used is an error
    total, before, read, begun = len(dataset), store.refreshed(), 0, time.monotonic()
    for samples in fastpipe.FastLoader(dataset, 64, collate_fn=len):
        read += samples
        rate = read / max(time.monotonic() - begun, 1e-9)
        left = in_time((total - read) / rate)
        progress.now(f"read {read:,} of {total:,} images, {rate:,.0f}/s, {left} left")
    progress.stop()
    kept = store.refreshed()
    took = in_time(time.monotonic() - begun)
    print_line(
        console,
        f"{kept - before:,} of {total:,} images were decoded and kept in {took}; {kept:,} are there "
        f"({in_bytes(store.allocated)})",
    )
    if read < total:
        print_line(console, f"{total - read:,} images cannot be read: fastpipe scan names them", style="red")
    why = store.why_refused if kept < read else ""
    if why:
        remedy = "make room, or pass --max-bytes"
        print_line(console, f"the cache accepts no more images ({why}): {remedy}", style="red")
    return 0 if read == total and not why else 1


def _fill(dataset: Any, verifies: bool, console: Console, progress: Progress) -> int:
    total = len(dataset)
    begun, first = time.monotonic(), 0

    def show_progress(count: int, nbytes: int) -> None:
        nonlocal first
        first = first or count
        rate = (count - first) / max(time.monotonic() - begun, 1e-9)
        left = f", {in_time((total - count) / rate)} left" if rate > 0 else ""
        progress.now(f"staged {count:,} of {total:,} images, {in_bytes(nbytes)}, {rate:,.0f}/s{left}")

    failed = dataset.stage_all(show_progress)
    damaged = []
    if verifies:
        damaged = dataset.verify_stage(lambda count: progress.now(f"verified {count:,} of {total:,} images"))
    progress.stop()
    count, nbytes = dataset.downloaded
    took = in_time(time.monotonic() - begun)
    staged = f"{total - len(failed):,} images are staged"
    print_line(console, f"{staged}; {count:,} of them ({in_bytes(nbytes)}) came in {took}")
    if verifies:
        print_line(console, f"verified: {len(damaged):,} of them were damaged and are downloaded again")
    for path, error in failed[:_NAMED_AT_MOST]:
        print_line(console, f"not staged: {path}: {error}", style="red")
    if len(failed) > _NAMED_AT_MOST:
        print_line(console, f"and {len(failed) - _NAMED_AT_MOST:,} more", style="red")
    return 1 if failed else 0


def _show(folder: str, console: Console, *, clears: bool) -> int:
    if not StageFolder.is_in(folder):
        if holds_cache(folder):
            raise StageError(f"{folder!r} holds a cache, as --form makes one, and not a stage")
        raise StageError(f"there is no stage in {folder!r}: nothing was staged there, or it was moved")
    opened = StageFolder(Stage(folder))
    try:
        usage = opened.usage()
        if clears:
            opened.clear()
    finally:
        opened.close()
    objects = f"{usage.objects:,} objects, {in_bytes(usage.nbytes)}"
    if clears:
        print_line(console, f"{opened.path}: removed {objects}")
    else:
        used = "in use" if usage.is_used else "not in use now"
        print_line(console, f"{opened.path}: {objects}, {used}")
    return 0
