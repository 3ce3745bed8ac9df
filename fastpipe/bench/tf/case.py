"""The case ``tf``: its options, its rows, its result."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.console import positive
from fastpipe.bench.data import folder_to_use
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.results import entries, rate_of, verdict
from fastpipe.bench.runner import Contender, Session
from fastpipe.bench.tf.apart import Apart, ApartRow
from fastpipe.bench.tf.check import check_rows
from fastpipe.bench.tf.data import FULL, QUICK, Lengths, Photos, Setting
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.bench.tf.rows import SECTIONS, EpochRow, specs
from fastpipe.bench.tf.targets import targets
from fastpipe.console import Progress
from fastpipe.errors import FastpipeError

__all__ = ["add_arguments", "run"]

BATCH, QUICK_BATCH = 32, 8
_MAIN = "crop-threads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder whose JPEGs are read (default: "
        "$FASTPIPE_PHOTOS, else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), metavar="N",
        help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
    add_run_arguments(parser, "antialiased boxes and Dataset.cache, TensorFlow's own,")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when samples are not those of the datasets that are replaced.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        OptionError: the photos cannot be used.
    """
    tensorflow()
    lengths = QUICK if args.quick else FULL
    folder, name, _ = folder_to_use(args.data, progress.done)
    photos = Photos.of(folder, name, lengths.crops)
    return _Bench(args, machine.cores_allowed(), progress, photos=photos, lengths=lengths).run(console)


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "tf"
    quick_s: ClassVar[float] = 0.05
    photos: Photos = field(kw_only=True)
    lengths: Lengths = field(kw_only=True)

    @property
    def batch_size(self) -> int:
        """Samples in a batch."""
        return self.args.batch_size or (QUICK_BATCH if self.args.quick else BATCH)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
            setting = Setting(self.photos, self.lengths, self.batch_size, scratch)
            own = self._own(setting, stack)
            check = check_rows(setting, list(own.values()), self.progress.now)
            self.progress.done(f"check: {check.sentence()}")
            if not check.ok:
                return None
            contenders, main = self._all(setting, own, stack), own[_MAIN]
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            _check_measured(session)
            images = sum(sample.count for sample in session.samples[_MAIN])
            self._tell_stages(before, main.stage_seconds(), images)
            plan = main.dataset.plan
        rows = entries(list(self.infos.values()), session)
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": _MAIN,
            "rows": rows,
            "best": _best(rows),
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": plan,
            "targets": targets(session.samples),
        }
        result["verdict"] = verdict(result)
        return result

    def _own(self, setting: Setting, stack: ExitStack) -> dict[str, EpochRow]:
        """Build the rows of fastpipe's."""
        found = {}
        stack.callback(gc.collect)  # once, when all are closed: it takes long beside TensorFlow
        for spec in specs():
            if spec.group != "fastpipe":
                continue
            row = self.open(stack, spec.info, partial(EpochRow, spec, setting))
            if isinstance(row, EpochRow):
                found[row.key] = row
        return found

    def _all(self, setting: Setting, own: Mapping[str, EpochRow], stack: ExitStack) -> list[Contender]:
        """All rows in the order of the tables, with those that have a process of their own."""
        _ = setting.folder  # made before another process looks for it
        found = list[Contender]()
        # Those of generators have one for themselves: see `apart`.
        apart = {is_generator: Apart(setting) for is_generator in (False, True)}
        for one in apart.values():
            stack.callback(one.close)
        infos = dict(self.infos)
        for spec in specs():
            if spec.group == "fastpipe" and spec.key in own:
                found.append(own[spec.key])
            elif spec.group != "fastpipe" and (spec.group != "peer" or spec.is_always or self.args.peers):
                found.append(ApartRow(spec, setting, apart[spec.is_generator]))
                infos[spec.key] = spec.info
        self.infos = {one.key: infos[one.key] for one in found}
        return found

    def _tell_stages(self, before: Mapping[str, float], after: Mapping[str, float], images: int) -> None:
        """Note where the main row's threads spent their time."""
        spent = ", ".join(
            f"{stage} {1000 * (seconds - before.get(stage, 0.0)) / images:.2f}"
            for stage, seconds in after.items()
        )
        self.infos[_MAIN] = replace(self.infos[_MAIN], note=f"ms an image in its threads: {spent}")

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, size, photos, lengths = self.args, self.batch_size, self.photos, self.lengths
        words = [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--batch-size {size}"] if args.batch_size else []
        epochs = (
            f"epochs of {lengths.crops:,} boxes, {lengths.folder:,} photos of a folder and"
            f" {lengths.modalities:,} times four boxes, of these photos again and again"
        )
        return self.facts(words, busy) | {
            "data": {
                "text": f"{photos.text}; {epochs}",
                "name": photos.name,
                "classes": len(photos.classes),
                "total": photos.total,
                "photos": len(photos.files),
                "bytes": photos.nbytes,
                "samples": lengths.crops,
            },
            "sections": {key: {"label": label} for key, label in SECTIONS.items()},
            "job": {
                "text": f"tf.data: shuffled float32 batches of {size}, consumed in Python",
                "short": f"tf.data pipelines, batches of {size}",
                "batch_size": size,
                "replaces": "dataset",
            },
        }


def _check_measured(session: Session) -> None:
    """Refuse a run in which there is nothing to compare with.

    Raises:
        FastpipeError: a section has no row that is replaced.
    """
    for section, label in SECTIONS.items():
        of_it = [spec for spec in specs() if spec.section == section]
        replaced = [spec.key for spec in of_it if spec.group == "replaced"]
        is_measured = any(session.samples.get(spec.key) for spec in of_it)
        if is_measured and not any(session.samples.get(key) for key in replaced):
            why = "; ".join(session.failures.get(key, "not measured") for key in replaced)
            raise FastpipeError(f"{label}: what is replaced could not be measured ({why}): run it again")


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Section → the faster of the rows that are replaced."""
    replaced = [entry for entry in rows if entry["group"] == "replaced"]
    return {
        entry["section"]: entry["key"]
        for entry in sorted(replaced, key=lambda entry: rate_of(entry)["median"])
    }
