"""Measure how long the GIL is held while an image, a patch or a sequence is augmented.

::

    python benchmarks/gil_augment.py --rounds 5 --json gil-augment.json

A script calls ``augment.Compose`` again and again, on the processor: SimCLR's chain on 64 float32 images of
224×224, nnU-Net's default on 2 patches of 72×136×136 with labels, and the chain of motion on 64 sequences of
250×25×3 with lengths: the recipes of ``python -m fastpipe.bench augment``.

Measured by the probe of ``gil.py``, a thread that always wants the lock: wall time less the time in which the
probe runs or waits for a core.  This includes each hand-over of the lock.  The chain has one thread less than
there are cores then, so that the probe has a core; two cores are needed.  The CPU time of Python's threads
tells nothing here: the calling thread works on samples itself, without the lock.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paths  # noqa: F401
import torch
from gil import probed
from rounds import figures, save_facts

from benchmarks.cases.augment_recipes import (
    MOTION,
    RECIPES,
    SEQUENCES,
    SIZE,
    VOLUMES,
    made_motion,
    made_volumes,
)
from fastpipe.core.machine import available_cpus

_IMAGES = (64, 3, 224, 224)


class Case(NamedTuple):
    """A chain, and a batch that it is called with.

    Attributes:
        label: its name.
        asked_us: that the lock may be held for a sample; None asks for nothing.
        chain: the chain.
        batch: samples first, and what is given beside them.
    """

    label: str
    asked_us: float | None
    chain: Callable[..., Any]
    batch: Sequence[torch.Tensor]


class Calls:
    """A chain that is called as often as is wanted.

    Args:
        case: which.
    """

    def __init__(self, case: Case) -> None:
        self.batch, self._case = len(case.batch[0]), case
        self.epoch(2 * self.batch)

    def epoch(self, samples: int) -> float:
        """Augment so many samples, in whole batches; return the seconds it took."""
        start = time.perf_counter()
        for _ in range(samples // self.batch):
            self._case.chain(*self._case.batch)
        return time.perf_counter() - start

    def samples_for(self, seconds: float) -> int:
        """Return the number of samples, in whole batches, that take about this long."""
        calls = 1
        while (took := self.epoch(calls * self.batch)) < seconds / 4:
            calls *= 2
        return max(1, round(calls * seconds / took)) * self.batch


def cases() -> list[Case]:
    """Return the cases."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.random(_IMAGES, np.float32))
    patches = tuple(map(torch.from_numpy, made_volumes(rng, VOLUMES, SIZE)))
    sequences = tuple(map(torch.from_numpy, made_motion(rng, SEQUENCES, MOTION)))
    chains = {recipe.key: recipe.chain("float32") for recipe in RECIPES}
    return [
        Case("an image, SimCLR, float32", 20, chains["simclr"], [images]),
        Case("a patch and its labels, nnU-Net's default", 100, chains["volume"], patches),
        Case("a sequence of motion and its length", None, chains["motion"], sequences),
    ]


def held(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the lock for a case; return its row."""
    calls = Calls(case)
    count = calls.samples_for(seconds)
    lost, beside, alone = [], [], []
    for _ in range(rounds):
        gc.collect()
        alone.append(count / calls.epoch(count))
        us, rate = probed(calls, count)
        beside.append(rate)
        if us is not None:
            lost.append(us)
    return {
        "label": case.label, "batch": calls.batch, "asked_us": case.asked_us,
        "us_by_probe": figures(lost) if lost else None, "samples_per_s": figures(alone, 1),
        "samples_per_s_beside_probe": figures(beside, 1),
    }  # fmt: skip


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement (default: 2)")
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    threads = max(1, available_cpus() - 1)
    torch.set_num_threads(threads)
    rows = [held(case, args.rounds, args.seconds) for case in cases()]
    print(
        f"{'':44} {'batch':>5} {'samples/s':>10} {'beside':>8} {'µs by probe':>12} {'range':>18} {'asked':>6}"
    )
    for row in rows:
        probe, asked = row["us_by_probe"], row["asked_us"]
        span = f"{probe['low']:.1f} to {probe['high']:.1f}" if probe else ""
        print(
            f"{row['label']:44} {row['batch']:5} {row['samples_per_s']['median']:10,.0f} "
            f"{row['samples_per_s_beside_probe']['median']:8,.0f} "
            f"{probe['median'] if probe else float('nan'):12.1f} {span:>18} "
            f"{f'{asked:.0f}' if asked is not None else '–':>6}"
        )
    save_facts(args.json, None, {"rounds": args.rounds, "threads": threads, "held": rows})


if __name__ == "__main__":
    main()
