"""Parts shared by the scripts of this folder: options, the result file, medians."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.results import first_fields, write_json

__all__ = ["add_photo_options", "figures", "photos_of", "rounds_asked", "save_facts"]


def rounds_asked(about: str | None, default: int, what: str) -> int:
    """Return the number of rounds given on the command line.

    Args:
        about: the script's docstring.
        default: without the option.
        what: is measured in a round.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=default, help=f"measurements of {what} (default: {default})"
    )
    rounds: int = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    return rounds


def add_photo_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options of a script that reads photographs.

    Args:
        parser: where they go.
        rounds: the default of ``--rounds``.
    """
    parser.add_argument("--data", help="an image folder (default: $FASTPIPE_PHOTOS, else made photographs)")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measurements of each (default: {rounds})"
    )
    parser.add_argument("--json", type=Path, help="where to write everything")


def photos_of(args: argparse.Namespace) -> Photos:
    """Return the photographs that the options name, read once so that the page cache has them."""
    folder, name, _ = folder_to_use(args.data, lambda text: print(text, flush=True))
    photos = scan(folder, name)
    photos.warm()
    return photos


def figures(values: Iterable[float], digits: int = 2) -> dict[str, Any]:
    """Return the median and range of some figures, and the figures themselves."""
    raw = [round(value, digits) for value in values]
    return {"median": round(statistics.median(raw), digits), "low": min(raw), "high": max(raw), "raw": raw}


def save_facts(path: Path | None, photos: Photos | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return a result, which begins with the fields of all results (see ``benchmarks/README.md``).

    Args:
        path: the file; None writes nothing.
        photos: the photographs that were read, or None.
        facts: what was measured.
    """
    script, *words = sys.argv
    names = [Path(word).name if os.sep in word else word for word in words]  # no paths of this machine
    command = " ".join(["python", f"benchmarks/{Path(script).name}", *names])
    result = first_fields(Path(script).stem, command)
    if photos is not None:
        count = len(photos.files)
        result["data"] = {"name": photos.name, "photos": count, "bytes_each": photos.bytes // count}
    result |= facts
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, path)
    return result
