"""``fastpipe verify FOLDER``: check that fastpipe and torchvision read the same samples from a folder."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from fastpipe.bench.check import INDEX, Check
from fastpipe.bench.data import existing_folder, listed
from fastpipe.bench.machine import versions
from fastpipe.bench.results import write_json
from fastpipe.console import Progress, plain, print_line
from fastpipe.core.caches import holds_cache
from fastpipe.core.extras import require
from fastpipe.core.text import counted
from fastpipe.errors import OptionError
from fastpipe.options import Cache
from fastpipe.tools.comparison import MOST_KEPT, NAMED, Chain, Failure, Outcome, chain_of, compare_folder

SCHEMA = 1
MOST_NAMED = 5  # most failing files to print; the JSON file has more
NAME_WIDTH = 24  # width of the longest name of a figure, plus a gap
DEFAULT_IMAGES = 1000


def share(part: int, whole: int) -> str:
    if part in (0, whole):
        return "0%" if part == 0 else "100%"
    return f"{min(max(100 * part / whole, 1e-6), 99.999999):.6f}%"


def sentence(outcome: Outcome) -> str:
    check = outcome.check
    compared = counted(check.photos, "image")
    if outcome.equal:
        count = len(outcome.unreadable)
        more = f" {counted(count, 'file')} can be read by neither." if count else ""
        return f"Equal: FastImageFolder and ImageFolder agree, to the last bit, for {compared}.{more}"
    if outcome.index_problems:
        return "Different: the two do not list the same samples, so no image was compared."
    parts = []
    if check.photos_differing:
        verb = "differs" if check.photos_differing == 1 else "differ"
        size = f" by up to {_size(check, check.largest)}" if check.differing else ""
        rounding = check.bytes_only and check.largest == 1 and check.worst[0].largest is not None
        note = ", as if rounded in another way" if rounding else ""
        parts.append(f"{check.photos_differing:,} of {compared} {verb}{size}{note}")
    if outcome.one_sided:
        count = len(outcome.one_sided)
        verb = "fails" if count == 1 else "fail"
        parts.append(f"{counted(count, 'image')} {verb} with one of the two only")
    return f"Different: {'; '.join(parts)}."


def print_outcome(outcome: Outcome, chain: Chain, folder: Path, console: Console) -> None:
    for name, value, is_well in _rows(outcome, chain, folder):
        figure = plain(f"{name:<{NAME_WIDTH}}", "dim") + plain(value, "" if is_well else "bold red")
        console.print(figure, soft_wrap=True)
    for title, lines in _lists(outcome, folder):
        console.print()
        print_line(console, title, "bold")
        for line in lines:
            print_line(console, f"  {line}")
    console.print()
    print_line(console, sentence(outcome), "bold green" if outcome.equal else "bold red")


def content(outcome: Outcome, chain: Chain, folder: Path, seed: int) -> dict[str, Any]:
    check = outcome.check
    return {
        "schema": SCHEMA, "equal": outcome.equal, "text": sentence(outcome),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "versions": versions(),
        "folder": str(folder), "transform": {"name": chain.name, "steps": chain.about},
        "plan": outcome.plan, "seed": seed, "classes": outcome.classes,
        "images": {
            "total": outcome.total, "chosen": outcome.chosen, "cached": outcome.cached,
            "compared": check.photos, "differing": check.photos_differing,
        },
        "index": {name: outcome.index_problems.get(name, "equal") for name in INDEX},
        "values": {
            "compared": check.values, "differing": check.differing,
            "over_one": check.over_one if check.bytes_only else None,
            "largest": _finite(check.largest), "unit": "of 255" if check.bytes_only else "absolute",
        },
        "worst": [
            {"index": one.index, "path": one.path, "largest": _finite(one.largest), "note": one.note}
            for one in check.worst
        ],
        "unreadable": _failures_json(outcome.unreadable),
        "one_sided": _failures_json(outcome.one_sided),
    }  # fmt: skip


def _rows(outcome: Outcome, chain: Chain, folder: Path) -> Iterator[tuple[str, str, bool]]:
    check = outcome.check
    yield "folder", str(folder), True
    part = f"{outcome.chosen:,} of " if outcome.chosen < outcome.total else ""
    classes = f"{outcome.classes:,} {'class' if outcome.classes == 1 else 'classes'}"
    yield "images", f"{part}{outcome.total:,} in {classes}", True
    if outcome.cached is not None:
        yield "from the cache", f"{outcome.cached:,} of {outcome.chosen:,}", True
    yield "transform", f"{chain.name}: {chain.about}", True
    equal = [name for name in INDEX if name not in outcome.index_problems]
    yield "index", f"{', '.join(equal) or 'nothing'} equal", not outcome.index_problems
    if outcome.index_problems:
        return
    yield "compared", f"{counted(check.photos, 'image')}, {check.values:,} values", True
    yield "values equal", share(check.values - check.differing, check.values), not check.differing
    if check.bytes_only:
        yield "off by more than 1", share(check.over_one, check.values), not check.over_one
    yield "largest difference", _size(check, check.largest), not check.differing
    yield "unreadable", f"{counted(len(outcome.unreadable), 'file')} that neither can read", True
    yield "failing with one only", counted(len(outcome.one_sided), "file"), not outcome.one_sided


def _lists(outcome: Outcome, folder: Path) -> Iterator[tuple[str, list[str]]]:
    if outcome.index_problems:
        yield "Not equal", list(outcome.index_problems.values())
    check = outcome.check
    if check.worst:
        more = _of_these(len(check.worst), check.photos_differing)
        yield (
            f"Images that differ{more}, the worst first",
            [f"{_where(one, folder)}: {one.note or _size(check, one.badness)}" for one in check.worst],
        )
    for title, failures in (
        ("Files that fail with one of the two only", outcome.one_sided),
        ("Files that neither can read", outcome.unreadable),
    ):
        named = failures[:MOST_NAMED]
        if named:
            yield (
                f"{title}{_of_these(len(named), len(failures))}",
                [f"{_where(one, folder)}: {_why(one, folder)}" for one in named],
            )


def _why(failure: Any, folder: Path) -> str:
    who = "" if failure.stock and failure.fast else "ImageFolder: " if failure.stock else "FastImageFolder: "
    text = " ".join((failure.fast or failure.stock).split())
    return f"{who}{text}".replace(f"{folder}{os.sep}", "")


def _where(one: Any, folder: Path) -> str:
    path = str(one.path).removeprefix(f"{folder}{os.sep}")
    return f"{path} (sample {one.index})"


def _of_these(named: int, count: int) -> str:
    return f" ({named} of {count:,})" if named < count else ""


def _size(check: Check, largest: float) -> str:
    return f"{largest} of 255" if check.bytes_only else f"{largest:.3g}"


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _failures_json(failures: list[Failure]) -> dict[str, Any]:
    files = [
        {"index": one.index, "path": one.path, "torchvision": one.stock, "fastpipe": one.fast}
        for one in failures[:MOST_KEPT]
    ]
    return {"count": len(failures), "files": files}


EPILOG = """\
transforms:
{chains}
  module:name  a transform of your own, or what makes one when it is called
               without arguments, imported from your code. Random steps that
               fastpipe recognises get the same draws in both; all others must
               be deterministic, which is tried out.

exit codes: 0 equal, 1 different, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chains = "\n".join(
        textwrap.fill(f"  {name:<11}  {about}", 78, subsequent_indent=" " * 15)
        for name, (about, *_) in NAMED.items()
    )
    parser.epilog = EPILOG.format(chains=chains)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="image folder, one sub-folder per class")
    add("--images", type=_images, default=DEFAULT_IMAGES, metavar="N", help="compare N images, spread "
        f"evenly over the folder; 0 or 'all' for all (default: {DEFAULT_IMAGES})")  # fmt: skip
    add("--transform", default="eval", metavar="NAME", help="what to compare after: one of those below, or "
        "module:name for one of your own, which must be deterministic (default: eval)")  # fmt: skip
    add("--seed", type=_seed, default=0, metavar="S",
        help="which images, and what random transforms draw (default: 0)")  # fmt: skip
    add("--cache", metavar="DIR", default=None, help="read images from the cache in DIR, as a training with "
        'cache=Cache("disk", dir=DIR) does')  # fmt: skip
    add("--json", metavar="FILE", type=Path, help="write the outcome to FILE")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    folder = existing_folder(args.folder)
    cache = None if args.cache is None else _cache_in(args.cache)
    progress.now("loading torch and torchvision")
    torch = require("torch", extra="torch")
    require("torchvision", extra="torch")
    chain = chain_of(args.transform)
    progress.now("listing the images")
    stock = listed(folder)

    def on_image(outcome: Outcome) -> None:
        progress.now(f"comparing: {outcome.seen:,} of {outcome.chosen:,} images")

    with warnings.catch_warnings(), torch.no_grad():
        # Pillow's warnings about unusual files would break the progress line.
        warnings.filterwarnings("ignore", module="PIL")
        warnings.filterwarnings("ignore", message="Palette images with Transparency")
        outcome = compare_folder(stock, chain, args.images, args.seed, on_image, cache)
    progress.stop()
    print_outcome(outcome, chain, folder, console)
    if args.json:
        write_json(content(outcome, chain, folder, args.seed), args.json)
        progress.done(f"wrote {args.json}")
    return 0 if outcome.equal else 1


def _cache_in(folder: str) -> Cache:
    if not holds_cache(folder):
        raise OptionError(f"there is no cache in {folder!r}: name the folder that Cache(dir=…) names")
    return Cache("disk", dir=folder)


def _images(text: str) -> int | None:
    if text in ("0", "all"):
        return None
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a number, or 0 or 'all' for all images; got {text!r}")


def _seed(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text!r}")
