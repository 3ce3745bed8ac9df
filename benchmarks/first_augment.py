"""Measure the time to the first augmented batch on a new machine.

::

    python benchmarks/first_augment.py --rounds 3 --json first-augment.json

Each measurement is a new interpreter whose folders for caches are empty: ``HOME``, ``XDG_CACHE_HOME`` and
``NUMBA_CACHE_DIR`` are in a temporary folder.  It imports torch and makes a batch, which does not count; then
it times ``import fastpipe.augment``, and making the chain with its first batch, and the second batch.  Asked
for are at most 0.3 s for the import, and 1 s for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rounds import figures, save_facts

_IMPORT_S, _ALL_S = 0.3, 1.0
_NAMES = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
_CHILD = """
import json
from time import perf_counter as now
import torch
batch = {batch}
before = now()
from fastpipe import augment
imported = now()
chain = {chain}
made = chain(*batch)
first = now()
made = chain(*batch)
print(json.dumps([imported - before, first - imported, now() - first]))
"""


class Recipe(NamedTuple):
    """A chain.

    Attributes:
        label: its name.
        chain: the expression that makes it.
        batch: the expression that makes what it is called with.
    """

    label: str
    chain: str
    batch: str


_NORMALIZE = "augment.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
_CROP = "augment.RandomResizedCrop(224), augment.RandomHorizontalFlip()"
_SIMCLR = (
    f"augment.Compose([{_CROP}, augment.RandomApply(augment.ColorJitter(0.8, 0.8, 0.8, 0.2), 0.8), "
    f"augment.RandomGrayscale(0.2), augment.RandomApply(augment.GaussianBlur(23), 0.5), {_NORMALIZE}])"
)
_MOTION = (
    "augment.Compose([augment.MotionSpeed(), augment.MotionTranslation(0.1), augment.MotionScale(), "
    "augment.MotionMirror([(joint, joint + 1) for joint in range(1, 25, 2)])], lengths=1)"
)
_IMAGES = "(torch.rand(64, 3, 224, 224),)"
_PATCHES = "(torch.rand(2, 1, 72, 136, 136), torch.zeros(2, 72, 136, 136, dtype=torch.uint8))"
_SEQUENCES = "(torch.rand(64, 250, 25, 3), torch.full((64,), 200))"
RECIPES = (
    Recipe("SimCLR, 64 images", _SIMCLR, _IMAGES),
    Recipe(
        "RandAugment, 64 images",
        f"augment.Compose([{_CROP}, augment.RandAugment(2, 9), {_NORMALIZE}])",
        _IMAGES,
    ),
    Recipe("SpecAugment, 64 spectrograms", "augment.SpecAugment(2, 30, 2, 20)", "(torch.rand(64, 80, 400),)"),
    Recipe("nnU-Net's default, 2 patches", "augment.nnunet_default()", _PATCHES),
    Recipe("motion, 64 sequences", _MOTION, _SEQUENCES),
)


def measure(recipe: Recipe) -> list[float]:
    """Return seconds of the import, of the first batch and of the second, in a new interpreter."""
    code = _CHILD.format(chain=recipe.chain, batch=recipe.batch)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **{name: str(Path(folder) / name.lower()) for name in _NAMES}}
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def measured(rounds: int) -> list[dict[str, Any]]:
    """Measure all recipes, in turn; return a row for each."""
    found: list[list[list[float]]] = [[] for _ in RECIPES]
    measure(RECIPES[0])  # has the files of Python's packages in memory
    for _ in range(rounds):
        for row, recipe in zip(found, RECIPES, strict=True):
            row.append(measure(recipe))
    return [
        {
            "label": recipe.label, "import_s": figures((one[0] for one in row), 3),
            "first_s": figures((one[1] for one in row), 3), "second_s": figures((one[2] for one in row), 3),
            "all_s": figures((one[0] + one[1] for one in row), 3),
        }
        for recipe, row in zip(RECIPES, found, strict=True)
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    rows = measured(args.rounds)
    print(f"{'seconds':30} {'import':>7} {'first batch':>12} {'both':>7} {'range':>16} {'second batch':>13}")
    for row in rows:
        whole = row["all_s"]
        span = f"{whole['low']:.2f} to {whole['high']:.2f}"
        print(
            f"{row['label']:30} {row['import_s']['median']:7.2f} {row['first_s']['median']:12.2f} "
            f"{whole['median']:7.2f} {span:>16} {row['second_s']['median']:13.3f}"
        )
    print(f"asked: at most {_IMPORT_S} s for the import, {_ALL_S:.0f} s for both")
    save_facts(args.json, None, {"rounds": args.rounds, "asked_s": [_IMPORT_S, _ALL_S], "rows": rows})


if __name__ == "__main__":
    main()
