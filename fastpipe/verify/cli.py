"""``fastpipe verify FOLDER``: its options, and its run from start to end."""

from __future__ import annotations

import argparse
import textwrap
import warnings
from pathlib import Path

from rich.console import Console

from fastpipe.bench.data import existing_folder, listed
from fastpipe.bench.results import write_json
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.verify.chains import NAMED, chain_of
from fastpipe.verify.compare import Outcome, compare_folder
from fastpipe.verify.report import content, print_outcome

__all__ = ["add_arguments", "run"]


DEFAULT_IMAGES = 1000

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
    """The options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
    add("--json", metavar="FILE", type=Path, help="write the outcome to FILE")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Compare, report, and write what was asked for.

    Returns:
        0, or 1 when anything differs.

    Raises:
        OptionError: there is nothing to compare.
    """
    folder = existing_folder(args.folder)
    progress.now("loading torch and torchvision")
    torch = require("torch", extra="torch")
    require("torchvision", extra="torch")
    chain = chain_of(args.transform)
    progress.now("listing the images")
    stock = listed(folder)

    def on_image(outcome: Outcome) -> None:
        progress.now(f"comparing: {outcome.seen:,} of {outcome.chosen:,} images")

    with warnings.catch_warnings(), torch.no_grad():
        # Pillow warns of odd files, as it does in training; here they would tear the progress line.
        warnings.filterwarnings("ignore", module="PIL")
        warnings.filterwarnings("ignore", message="Palette images with Transparency")
        outcome = compare_folder(stock, chain, args.images, args.seed, on_image)
    progress.stop()
    print_outcome(outcome, chain, folder, console)
    if args.json:
        write_json(content(outcome, chain, folder, args.seed), args.json)
        progress.done(f"wrote {args.json}")
    return 0 if outcome.equal else 1


def _images(text: str) -> int | None:
    """An argparse type: how many images; ``None`` for all."""
    if text in ("0", "all"):
        return None
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a number, or 0 or 'all' for all images; got {text!r}")


def _seed(text: str) -> int:
    """An argparse type: a seed."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text!r}")
