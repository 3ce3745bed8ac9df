"""Measure how much a loader slows a training step in Python, and one worker process against threads.

::

    python benchmarks/beside_a_step.py --data FOLDER --rounds 5 --json beside-a-step.json

The step is a hundred small operations of torch, 5 ms on an idle machine.  Each batch is followed by as many
steps as fit into 70 % of the time that the loader takes for one, so that the loader works at full rate and
the loop does little else than steps.  A step's time begins when its batch is there, or the step before ended.

Two references have a batch that is always there: one does step after step, the other pauses as the loops
beside a loader do.  Rounds measure everything in turn, and ratios are within a round.  At last each
loader runs alone, in turn, float32 and uint8.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from rounds import add_photo_options, figures, photos_of, save_facts

from fastpipe.bench.data import Photos
from fastpipe.bench.images import LoaderRow, LoaderSpec
from fastpipe.bench.runner import calibrate, touch
from fastpipe.core.machine import available_cpus

_OPERATIONS, _STEP_S, _PART = 100, 5e-3, 0.7
_ALWAYS, _PACED = "a batch that is always there", "the same, at the loader's pace"
_ASKED_SLOWER, _ASKED_RATIOS = 0.03, {"float32": 0.95, "uint8": 0.98}


class Step:
    """A hundred small operations that take 5 ms.

    Attributes:
        numbers: that each operation computes.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.numbers = 4096
        for _ in range(8):  # the time is a constant and a part for each number
            self._values = torch.rand(self.numbers)
            seconds = statistics.median(self.timed() for _ in range(30))
            if abs(seconds / _STEP_S - 1) < 0.03:
                break
            self.numbers = max(64, int(self.numbers * min(4.0, max(0.25, _STEP_S / seconds))))

    def __call__(self) -> None:
        """Compute."""
        values = self._values
        for _ in range(_OPERATIONS // 4):
            values = torch.tanh(values)
            values = values * 1.25
            values = values + 0.5
            values = torch.sigmoid(values)

    def timed(self) -> float:
        """Compute; return the seconds."""
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


def loader_specs(cores: int, output: Any) -> list[LoaderSpec]:
    """Return the loaders: fastpipe's threads, its worker process, and the replaced one."""
    return [
        LoaderSpec("threads", "FastLoader", "fastpipe", 0, output),
        LoaderSpec("process", "FastLoader(num_workers=1)", "fastpipe", 1, output),
        LoaderSpec("stock", f"DataLoader(num_workers={cores})", "replaced", cores, output),
    ]


def loop(
    step: Step, batches: Iterable[Any], steps: int, skipped: int
) -> tuple[list[float], list[float], float]:
    """Do some steps on each batch.

    Args:
        step: does one.
        batches: that come.
        steps: for each batch.
        skipped: batches at the beginning that do not count, while a loader starts.

    Returns:
        Seconds of each step; of those that follow the arrival of a batch; and batches per second.
    """
    every, first, start, count = list[float](), list[float](), 0.0, 0
    for number, batch in enumerate(batches):
        if number == skipped:
            start = time.perf_counter()
        touch(batch)
        times = [step.timed() for _ in range(steps)]
        if number >= skipped:
            every += times
            first.append(times[0])
            count += 1
    return every, first, count / (time.perf_counter() - start)


def always(batch: Any, count: int, interval: float = 0.0) -> Iterator[Any]:
    """Yield a batch so many times, each not before its time, as a loader at full rate does."""
    due = time.perf_counter()
    for _ in range(count):
        due += interval
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        else:
            due = time.perf_counter()
        yield batch


def open_rows(stack: ExitStack, photos: Photos, batch: int, specs: list[LoaderSpec]) -> dict[str, LoaderRow]:
    """Open loaders; those with worker processes fork before others start threads."""
    rows = {}
    for spec in sorted(specs, key=lambda one: -one.num_workers):
        row = LoaderRow(spec, photos.folder, photos.indices, batch)
        stack.callback(row.close)
        row.measure(row.chunk)
        rows[spec.key] = row
    return {spec.key: rows[spec.key] for spec in specs}


def beside(
    photos: Photos, batch: int, rounds: int, seconds: float, cores: int, output: str
) -> tuple[dict[str, Any], Step]:
    """Measure steps beside each loader; return what came of it."""
    step = Step()
    with ExitStack() as stack:
        specs = loader_specs(cores, output)
        rows = open_rows(stack, photos, batch, specs)
        labels = {_ALWAYS: _ALWAYS, _PACED: _PACED} | {spec.key: spec.label for spec in specs}
        alone = {}
        for key, row in rows.items():
            count = calibrate(row, seconds)
            alone[key] = count / row.measure(count)
        same = next(iter(rows["threads"].batches(batch)))
        rates, found = dict(alone), {key: ([], [], []) for key in labels}  # type: ignore[var-annotated]
        steps_of, skipped = {}, 2 * cores
        each = statistics.median(step.timed() for _ in range(100))
        for number in range(rounds):
            order = list(labels)
            order = order[number % len(order) :] + order[: number % len(order)]
            for key in order:
                rate = alone[key if key in rows else "threads"]
                steps = max(1, int(_PART * batch / rate / each))
                count = max(8, int(rate * seconds / batch))
                steps_of[key] = steps
                batches: Iterable[Any]
                if key in rows:
                    chunk = rows[key].chunk // batch
                    batches = rows[key].batches(-(-(count + skipped) // chunk) * chunk * batch)
                else:
                    batches = always(same, count + skipped, 0.0 if key == _ALWAYS else batch / rate)
                gc.collect()
                every, first, per_s = loop(step, batches, steps, skipped)
                found[key][0].append(every)
                found[key][1].append(first)
                found[key][2].append(per_s * batch)
                del batches
    told = []
    for key, label in labels.items():
        steps_s, firsts_s, made_s = found[key]
        entry: dict[str, Any] = {"key": key, "label": label, "steps_a_batch": steps_of[key]}
        for name, middle in (("median", statistics.median), ("mean", statistics.fmean)):
            own = [middle(times) for times in steps_s]
            entry[f"{name}_ms"] = figures([1000 * value for value in own], 4)
            for reference, word in ((_ALWAYS, "slower"), (_PACED, "slower_than_paced")):
                others = [middle(times) for times in found[reference][0]]
                slower = [a / b - 1 for a, b in zip(own, others, strict=True)]
                entry[f"{word}_by_{name}"] = figures(slower, 4)
        entry["first_median_ms"] = figures([1000 * statistics.median(times) for times in firsts_s], 4)
        entry["images_per_s"] = figures(made_s, 1)
        if key in rates:
            entry["share_of_full_rate"] = round(entry["images_per_s"]["median"] / rates[key], 3)
        told.append(entry)
    return {"rows": told, "step_numbers": step.numbers, "output": output, "batch": batch}, step


def rates_alone(
    photos: Photos, batch: int, rounds: int, seconds: float, cores: int, output: str
) -> dict[str, Any]:
    """Measure loaders with nothing beside them, in turn; return their rates and the ratio of interest."""
    with ExitStack() as stack:
        specs = loader_specs(cores, output)
        rows = open_rows(stack, photos, batch, specs)
        counts = {key: calibrate(row, seconds) for key, row in rows.items()}
        rates: dict[str, list[float]] = {key: [] for key in rows}
        for number in range(rounds):
            for key in list(rows)[:: 1 if number % 2 else -1]:
                gc.collect()
                rates[key].append(counts[key] / rows[key].measure(counts[key]))
    ratio = [a / b for a, b in zip(rates["process"], rates["threads"], strict=True)]
    gain = [a / b for a, b in zip(rates["threads"], rates["stock"], strict=True)]
    return {
        "output": output,
        "rows": [{"label": spec.label, "images_per_s": figures(rates[spec.key], 1)} for spec in specs],
        "process_over_threads": figures(ratio, 4),
        "threads_over_stock": figures(gain, 4),
        "asked": _ASKED_RATIOS[output],
    }


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_photo_options(parser, 5)
    cores = available_cpus()
    size = 64 if cores < 8 else 256  # a batch must take longer than a step
    parser.add_argument("--batch", type=int, default=size, help=f"images in a batch (default here: {size})")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement (default: 3)")
    args = parser.parse_args()
    photos = photos_of(args)
    told, step = beside(photos, args.batch, args.rounds, args.seconds, cores, "float32")
    print(f"a step: {_OPERATIONS} operations on {step.numbers:,} numbers; batches of {args.batch}")
    print(f"{'':34} {'median':>9} {'mean':>9}  {'slower, median':>24}  {'mean':>6}  {'paced':>6}  images/s")
    for row in told["rows"]:
        slower, paced = row["slower_by_median"], row["slower_than_paced_by_median"]["median"]
        span = f"{slower['median']:+.1%} ({slower['low']:+.1%} to {slower['high']:+.1%})"
        share = row.get("share_of_full_rate")
        rate = "" if share is None else f"{row['images_per_s']['median']:,.0f}, {share:.0%} of its full rate"
        print(
            f"{row['label']:34} {row['median_ms']['median']:6.2f} ms {row['mean_ms']['median']:6.2f} ms"
            f"  {span:>24}  {row['slower_by_mean']['median']:+6.1%}  {paced:+6.1%}  {rate}"
        )
    print(f"asked beside FastLoader: at most {_ASKED_SLOWER:.0%} slower")
    alone = [
        rates_alone(photos, args.batch, args.rounds, args.seconds, cores, output)
        for output in ("float32", "uint8")
    ]
    for one in alone:
        print(f"\nalone, {one['output']}:")
        for row in one["rows"]:
            rate = row["images_per_s"]
            span = f"({rate['low']:,.0f} to {rate['high']:,.0f})"
            print(f"{row['label']:34} {rate['median']:8,.0f} images/s {span}")
        ratio = one["process_over_threads"]
        print(
            f"one worker process over threads: {ratio['median']:.3f} "
            f"({ratio['low']:.3f} to {ratio['high']:.3f}), asked at least {one['asked']}"
        )
    save_facts(args.json, photos, {"rounds": args.rounds, "beside": told, "alone": alone})


if __name__ == "__main__":
    main()
