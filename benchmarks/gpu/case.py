"""The case ``gpu``: its options, its check, its rounds within a time, its result."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import training as devices
from benchmarks.gpu.check import Guarded, PixelCheck, check_pixels, guarded
from benchmarks.gpu.sections import (
    SECTIONS,
    Candidate,
    DecodingPeerRow,
    Run,
    Section,
    loader_specs,
    why_missing,
)
from benchmarks.gpu.training import Sizes, TrainRow, figures_of, sizes_for
from benchmarks.lines import Studied
from fastpipe.bench.driver import DATA_HELP, add_file_arguments
from fastpipe.bench.images import make_dataset, photos_to_use, train_transform
from fastpipe.bench.results import RowInfo, entries, verdict
from fastpipe.bench.runner import Contender, ContenderError, Plan, Session
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

# ----------------------------------------------------------------------------------------------------
# Windows and rounds that end in time: a run that has less of it measures fewer rounds, for shorter.

# Rounds that there is to be time for, and windows that a row's start and warm-up take.
_ROUNDS, _WARM = 5, 3
# The part of a section's time after which no further row is started: one round of the others is to follow.
_STARTING = 0.7
_SETTLE_S = 0.2


class Share:
    """Return the time that a section may take from now on.

    Args:
        seconds: so long.
        sizes: how long a measurement is at most, and how many rounds there are.
        now: the clock.

    Attributes:
        window: seconds of a measurement.
    """

    def __init__(self, seconds: float, sizes: Sizes, now: Callable[[], float]) -> None:
        self._seconds, self._sizes, self._now, self._began = seconds, sizes, now, now()
        self.divide(1)

    def divide(self, rows: int) -> None:
        """Choose the window for so many rows."""
        self.window = min(self._sizes.window_s, self._left() / (max(1, rows) * (_WARM + _ROUNDS)))

    def may_start(self) -> bool:
        """Return True if there is time for another row."""
        return self._now() - self._began <= _STARTING * self._seconds

    def plan(self) -> Plan:
        """Rounds for what is left: at least one, as rows that are warm are not to be for nothing."""
        settle = min(_SETTLE_S, self.window / 4)
        return Plan(self._sizes.rounds, self._left(), self.window, settle, least=1)

    def _left(self) -> float:
        return max(0.0, self._seconds - (self._now() - self._began))


class Budget:
    """Seconds of a run, from when it is told to begin.

    Args:
        seconds: so many.
        sizes: of the run.
        now: the clock, for tests.
    """

    def __init__(self, seconds: float, sizes: Sizes, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._sizes, self._now = sizes, now
        self.begin()

    def begin(self) -> None:
        """They begin now."""
        self._began = self._now()

    def left(self) -> float:
        """Seconds that are left; below zero when too many were taken."""
        return self.seconds - (self._now() - self._began)

    def share(self, part: float) -> Share:
        """Return a section's share of the remaining time.

        Args:
            part: of it, 0 to 1.
        """
        return Share(max(0.0, self.left()) * part, self._sizes, self._now)


# ---- The case ``gpu``: its options, its check, its rounds, its result -------------------------------

# Of a run that is to end within eight minutes, with its check, before which kernels may have to be compiled.
SECONDS = 400.0
_MAIN = ("train-cpu", "decode-cpu")
_SMALL = "--device cpu shows on little data that the command runs; no figures of a GPU"


class Bench(Studied):
    """One run of the case."""

    case = "gpu"
    about = "on a CUDA device: decoders, ResNet-50 steps by loader, augmentation and steps on 3D patches"
    what: Run
    budget: Budget
    share: Share

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        super().__init__(args, progress)
        self.timing: dict[str, dict[str, Any]] = {}
        self.is_wrong = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the case."""
        add = parser.add_argument
        add("--device", choices=("cuda", "cpu"), default="cuda",
            help="cpu: little data and no GPU, to see that the command runs (default: cuda)")  # fmt: skip
        add("--data", metavar="FOLDER", type=Path, help=f"image folder, one sub-folder per class{DATA_HELP}")
        add("--batch-size", type=positive(int), metavar="N",
            help="images in a batch, halved until a step has room (default: 256; on the cpu 8)")  # fmt: skip
        add(
            "--seconds", type=positive(float), default=SECONDS, metavar="S",
            help=f"for what is timed; with less, fewer and shorter rounds (default: {SECONDS:g})",
        )  # fmt: skip
        add_file_arguments(parser, plot="gpu.png", json="gpu.json")
        parser.set_defaults(peers=False, rounds=None, quick=False)

    def prepare(self) -> None:
        """Look at the device, and find the photos.

        Raises:
            OptionError: there is no such device, or nothing to measure.
        """
        args = self.args
        devices.check_device(args.device)
        sizes = sizes_for(args.device)
        self.budget = Budget(args.seconds, sizes)
        photos, batch = photos_to_use(self), args.batch_size or sizes.batch
        self.what = Run(args.device, sizes, photos, self.cores, batch, say=self.progress.done)
        self.share, self.gpu = self.budget.share(1), devices.described(args.device)

    def run(self, console: Console) -> int:
        """Measure, report, and write what was asked for; 1 also where a decoder was left out."""
        return max(super().run(console), int(self.is_wrong))

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the CPU's pixels are wrong."""
        self.begin()
        self.prepare()
        if self.what.device == "cpu":
            self.warnings.append(_SMALL)
        check = self._check()
        if "decode-cpu" in check.problems:
            return None
        self.budget.begin()
        sessions: dict[str, Session] = {}
        training: dict[str, Any] = {}
        labels: dict[str, dict[str, str]] = {}
        with ExitStack() as stack:
            self._settings(stack)
            for number, section in enumerate(SECTIONS):
                weights = [one.weight for one in SECTIONS[number:]]
                measured, rows = self._measured(section, section.weight / sum(weights))
                sessions[section.key] = measured
                self.timing[section.key] = {"rounds": measured.rounds, "seconds": round(self.share.window, 3)}
                labels[section.key] = {"label": section.label(self.what)}
                if figures := figures_of(rows, measured.samples, section.ceiling):
                    training[section.key] = figures
        return self._result(check, sessions, {"sections": labels, "training": training})

    def plan(self) -> Plan:
        """Return how long to measure, given the remaining time."""
        return self.share.plan()

    def warmed(self, contender: Contender) -> int:
        """Warm a row up, where there is time for that."""
        if not self.share.may_start():
            raise ContenderError(f"no time was left for it: give more than --seconds {self.budget.seconds:g}")
        return guarded(lambda: super(Bench, self).warmed(contender))()

    def _check(self) -> PixelCheck:
        """Compare pixels and say so."""
        what = self.what
        specs = [
            spec
            for spec in loader_specs("decode", what.device, what.cores, "uint8")
            if spec.group == "fastpipe" and not why_missing(spec)
        ]
        check = check_pixels(specs, what.photos, what.sizes.checked, what.batch, self.progress.now)
        self.progress.done(f"check: {check.sentence()}")
        self.is_wrong = not check.ok
        by_key = {spec.key: spec.decode.backend for spec in specs}
        what.problems = {by_key[key]: f"not checked: {why}" for key, why in check.problems.items()}
        return check

    def _settings(self, stack: ExitStack) -> None:
        """Enable cuDNN's benchmark mode, as training scripts do: all batches have one size."""
        cudnn = require("torch", extra="torch").backends.cudnn
        if self.what.device == "cuda":
            stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = True
            if not require("torch", extra="torch").cuda.is_bf16_supported(including_emulation=False):
                self.warnings.append("this GPU does not compute in bfloat16, which torch makes up for")

    def _measured(self, section: Section, part: float) -> tuple[Session, list[TrainRow]]:
        """A section's rounds, and its rows that train."""
        self.progress.step(f"{section.key}: starting")
        nothing = Session()
        if self.budget.left() <= 0:
            why = f"no time was left for it: give more than --seconds {self.budget.seconds:g}"
            self.miss(section.key, section.label(self.what), why)
            return nothing, []
        with ExitStack() as self.stack:
            self.stack.callback(_empty_cache)
            # The time of a section begins before its rows are built, which takes some of it.
            self.share = self.budget.share(part)
            try:
                candidates = guarded(lambda: section.candidates(self.what))()
            except ContenderError as error:
                self.miss(section.key, section.label(self.what), str(error))
                return nothing, []
            self.share.divide(sum(one.make is not None for one in candidates))
            rows = [row for one in candidates if (row := self._opened(one)) is not None]
            self.stack.callback(_close_workers, rows)
            # Workers are forked from here, and cannot free what is a device's and waits to be freed.
            gc.collect()
            # A stall is told by the ceiling: not to be what there is no time for.
            session = self.measure(sorted(rows, key=lambda row: row.key != section.ceiling))
            return session, [row.row for row in rows if isinstance(row.row, TrainRow)]

    def _opened(self, candidate: Candidate) -> Guarded | None:
        """A row; one that is not there is noted."""
        info, make = candidate.info, candidate.make
        if make is None:
            self.miss(info.key, f"{info.section}: {info.label}", candidate.why)
            return None
        self.progress.now(f"starting {info.label}")
        row = self.open(info, guarded(lambda: Guarded(make())))
        if row is not None and isinstance(row.row, DecodingPeerRow):
            self.infos[info.key] = row.row.info
        return row

    def _result(
        self,
        check: PixelCheck,
        sessions: Mapping[str, Session],
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The file's content.

        Raises:
            OptionError: nothing was measured.
        """
        session = merged(sessions.values())
        rows = entries(with_references(list(self.infos.values()), session), session)
        if not rows:
            told = {miss["key"]: miss["why"] for miss in self.missing}
            why = next((told[key] for key in _MAIN if key in told), self.missing[-1]["why"])
            raise OptionError(f"nothing could be measured: {why}")
        keys = [entry["key"] for entry in rows]
        result = self._facts() | {
            "method": {
                **self.method(session.rounds),
                "budget_s": self.budget.seconds,
                "seconds": max(one["seconds"] for one in self.timing.values()),
                "sections": self.timing,
            },
            "check": check.as_json(),
            "main": next((key for key in _MAIN if key in keys), keys[0]),
            "rows": rows,
            "best": {entry["section"]: entry["key"] for entry in rows if entry["group"] == "replaced"},
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": self._plan_text(),
            **more,
        }
        result["verdict"] = verdict(result)
        return result

    def _plan_text(self) -> str:
        """The settings with which fastpipe's loaders make samples."""
        what = self.what
        spec = next(
            one for one in loader_specs("train", what.device, what.cores, "float32") if one.key == _MAIN[0]
        )
        transform = train_transform(spec.output, what.sizes.side)
        plan = str(make_dataset(spec, what.photos.folder, transform).plan)
        return plan.replace(str(what.photos.folder), what.photos.name)

    def _facts(self) -> dict[str, Any]:
        """Return the command, the time and the machine."""
        what = self.what
        facts = self.facts()
        facts["machine"]["gpu"] = self.gpu
        photos = what.photos
        return facts | {
            "data": {
                "text": f"{len(photos.files):,} photos, {photos.bytes / len(photos.files) / 1000:.0f} kB each"
                f" ({photos.name}), and made-up volumes",
                "name": photos.name,
                "photos": len(photos.files),
                "bytes": photos.bytes,
            },
            "job": {
                "text": f"decoders, training steps and augmentation on {what.place}",
                "short": f"decoders, steps and augmentation on {what.place}",
                "batch_size": what.batch,
                "replaces": "pipeline",
            },
        }


def merged(sessions: Iterable[Session]) -> Session:
    """The samples of all sections; rounds are those of the one that has the fewest."""
    every = list(sessions)
    rounds = [session.rounds for session in every if session.rounds]
    return Session(
        {key: samples for session in every for key, samples in session.samples.items()},
        {key: why for session in every for key, why in session.failures.items()},
        min(rounds, default=0),
    )


def with_references(infos: Sequence[RowInfo], session: Session) -> list[RowInfo]:
    """The rows that were measured, one of each section being what the others are compared with.

    Where what is replaced could not be measured that is the first of the others, and its note says so.

    Args:
        infos: the rows, in order.
        session: of all sections.
    """
    found: list[RowInfo] = []
    for section in dict.fromkeys(info.section for info in infos):
        rows = [info for info in infos if info.section == section and session.samples.get(info.key)]
        if not any(info.group == "replaced" for info in rows):
            first = next((info for info in rows if info.group != "floor"), None)
            if first is None:
                continue
            note = "compared with, as what is replaced was not measured"
            note = f"{first.note}; {note}" if first.note else note
            rows[rows.index(first)] = replace(first, group="replaced", note=note)
        found += rows
    return found


def _close_workers(rows: Sequence[Guarded]) -> None:
    """End worker processes first: each holds the pipes of peers that were started before it, which so do not
    see that theirs is closed."""
    for row in rows:
        if row.workers:
            row.close()


def _empty_cache() -> None:
    """Give back what a section has taken of the device's memory."""
    gc.collect()
    with suppress(RuntimeError):  # after some errors CUDA refuses everything: what was measured is to stay
        require("torch", extra="torch").cuda.empty_cache()
