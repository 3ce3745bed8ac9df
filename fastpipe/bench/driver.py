"""What every case does in the same way: its options, its rounds, and what it writes."""

from __future__ import annotations

import argparse
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.check import Outcome
from fastpipe.bench.page import page
from fastpipe.bench.plot import draw
from fastpipe.bench.report import old_result, print_changes, print_result
from fastpipe.bench.results import (
    SCHEMA,
    UNIT,
    RowInfo,
    best_by_section,
    best_of,
    check_target,
    entries,
    save,
    verdict,
    whole,
)
from fastpipe.bench.runner import Contender, ContenderError, Plan, Sample, Session, calibrate, interleave
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require
from fastpipe.errors import MissingDependencyError

# Options that name what is written.
FILES = ("json", "html", "plot")

_ROUNDS = 7
_GROUPS = ("replaced", "stock")  # whose best rows a result without sections names
QUICK_WARNING = "--quick checks that the benchmark runs; its figures are not measurements"


def add_run_arguments(
    parser: argparse.ArgumentParser, rounds: int = _ROUNDS, *, has_peers: bool = True
) -> None:
    """Add the options of every case; so many rounds are measured where nothing else is given."""
    add = parser.add_argument
    add_file_arguments(parser)
    parser.set_defaults(peers=False)
    if has_peers:
        add("--peers", action="store_true",
            help="also measure other libraries where they are installed; in a clone of fastpipe's "
            "repository, by python benchmarks/run.py")  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--rounds", type=positive(int), metavar="R", help=f"rounds to measure (default: {rounds})"
    )
    length.add_argument("--seconds", type=positive(float), metavar="S",
                        help="measure for about S seconds instead, at least three rounds")  # fmt: skip
    add("--quick", action="store_true", help="two short rounds: does it run? No figures to rely on")


def add_file_arguments(
    parser: argparse.ArgumentParser,
    page: str | None = None,
    picture: str | None = None,
    figures: str | None = None,
) -> None:
    """The options that name files."""
    usual = {name: file for name, file in (("html", page), ("plot", picture), ("json", figures)) if file}
    parser.set_defaults(usual=usual)
    add = parser.add_argument
    add("--json", metavar="FILE", type=Path, default=figures and Path(figures),
        help=f"write every sample, the medians and the machine to FILE{_default(figures)}")  # fmt: skip
    add("--html", metavar="FILE", type=Path, default=page and Path(page),
        help=f"write a page with pictures to FILE{_default(page)}")  # fmt: skip
    add("--plot", metavar="FILE.png", type=Path, default=picture and Path(picture),
        help=f"draw the result into FILE.png{_default(picture)}")  # fmt: skip
    add("--compare", metavar="OLD.json", type=Path,
        help="say what is faster or slower than in a file that --json wrote; exit code 1 if anything "
        "is slower")  # fmt: skip


def check_files(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Refuse at the beginning what would fail at the end.

    Raises:
        MissingDependencyError: a picture is asked for, and matplotlib is not installed.
        OptionError: a file cannot be written, or is not a result of the case to compare with.
    """
    for name in FILES:
        if (path := getattr(args, name)) is not None:
            check_target(path, f"--{name}")
    if args.plot:
        try:
            require("matplotlib", extra="bench")
        except MissingDependencyError as missing:
            if str(args.plot) != args.usual.get("plot"):
                raise
            say(f"no {args.plot}: {missing}")
            args.plot = None
    if args.compare:
        old_result(args.compare, args.what)


def _default(file: str | None) -> str:
    return "" if file is None else f" (default: {file})"


@dataclass
class Driver(ABC):
    """One run of a case.

    Attributes:
        args: its options.
        cores: processors that may be used.
        progress: told what is done.
        infos: the rows, by key.
        missing: rows that are not measured, and why.
        warnings: what a reader must know.
        busy: the load at the start.
        quick_s: seconds of a measurement with ``--quick``.
        usual_rounds: that are measured where nothing else is asked for.
        case: the case's name.
        program: what its command begins with.
    """

    case: ClassVar[str]
    program: ClassVar[str] = "python -m fastpipe.bench"
    quick_s: ClassVar[float] = 0.2
    usual_rounds: ClassVar[int] = _ROUNDS

    args: argparse.Namespace
    cores: int
    progress: Progress
    infos: dict[str, RowInfo] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    busy: float | None = None

    @abstractmethod
    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""

    def run(self, console: Console) -> int:
        """Measure, report, and write what was asked for; 0, or 1 if the check fails."""
        args = self.args
        old = old_result(args.compare, self.case) if args.compare else None
        result = self.result()
        if result is None:
            return 1
        self.progress.stop()
        print_result(result, console, self.lines(result))
        self._write(result)
        is_worse = old is not None and print_changes(old, result, args.compare.name, console)
        return int(is_worse)

    def _write(self, result: dict[str, Any]) -> None:
        """Write what was asked for."""
        args, say = self.args, self.progress.done
        if args.json:
            save(result, args.json)
            say(f"wrote {args.json.absolute()}")
        if args.html:
            with whole(args.html) as unfinished:
                unfinished.write_text(page(result, self.lines(result)), encoding="utf-8")
            say(f"wrote {args.html.absolute()}")
        if args.plot and result["rows"]:
            draw(result, args.plot)
            say(f"drew {args.plot.absolute()}")

    def others(self, stack: ExitStack) -> list[Contender]:
        """Build rows that a subclass adds to those of the case; the stack closes them."""
        return []

    def all_others(self, stack: ExitStack) -> list[Contender]:
        """Build these rows, and keep a section's rows together in tables."""
        found = self.others(stack)
        sections = list(dict.fromkeys(info.section for info in self.infos.values()))
        ordered = sorted(self.infos.items(), key=lambda pair: sections.index(pair[1].section))
        self.infos = dict(ordered)
        return found

    def studies(self, session: Session) -> dict[str, Any]:
        """Return fields of the result that a subclass adds, of what is measured beside rates."""
        return {}

    def lines(self, result: Mapping[str, Any]) -> list[str]:
        """Return lines that a subclass adds below tables, of what is measured beside rates."""
        return []

    def begin(self) -> None:
        """Note what makes figures doubtful."""
        self.busy = busy = machine.load()
        if busy is not None and busy > 0.5 * self.cores:
            self.warnings.append(f"the machine was busy at the start (load {busy:g} on {self.cores} cores)")
        if self.args.quick:
            self.warnings.append(QUICK_WARNING)

    def passed(self, check: Outcome) -> bool:
        """Report a comparison; return whether figures may be measured."""
        self.progress.done(f"check: {check.sentence()}")
        return check.ok

    def open(self, stack: ExitStack, info: RowInfo, make: Callable[[], Contender]) -> Contender | None:
        """Build a row; one that cannot be built is noted."""
        try:
            contender = make()
        except ContenderError as error:
            label = info.label if info.section is None else f"{info.section}: {info.label}"
            self.miss(info.key, label, str(error))
            return None
        stack.callback(contender.close)
        self.infos[info.key] = info
        return contender

    def measure(
        self, contenders: Sequence[Contender], when_warm: Callable[[], None] = lambda: None
    ) -> Session:
        """Warm up, and measure all rounds."""
        counts: dict[str, int] = {}
        alive = []
        # Forking first and starting threads later is what every loader copes with.
        for contender in sorted(contenders, key=lambda one: -one.workers):
            label = self.label_of(contender.key)
            self.progress.step(f"warming up: {label}")
            try:
                counts[contender.key] = self.warmed(contender)
                alive.append(contender)
            except ContenderError as error:
                self.miss(contender.key, label, str(error))
        when_warm()

        def on_sample(contender: Contender, sample: Sample) -> None:
            unit, label = self.infos[contender.key].unit or UNIT, self.label_of(contender.key)
            self.progress.step(f"round {sample.round + 1}: {label}: {sample.rate:,.0f} {unit}/s")

        ordered = [contender for contender in contenders if contender in alive]
        # Before each measurement garbage is collected: not from among what the imports made.
        gc.collect()
        gc.freeze()
        try:
            session = interleave(ordered, counts, self.plan(), on_sample=on_sample)
        finally:
            gc.unfreeze()
        for key, why in session.failures.items():
            self.miss(key, self.label_of(key), why)
        return session

    def warmed(self, contender: Contender) -> int:
        """Warm a row up; how many samples of it are a measurement.

        Raises:
            ContenderError: it cannot be measured.
        """
        return calibrate(contender, self.seconds_of(contender))

    def seconds_of(self, contender: Contender) -> float:
        """About how long a measurement of a row takes."""
        return self.plan().seconds

    def label_of(self, key: str) -> str:
        """What a row is called, also among those of other sections."""
        info = self.infos[key]
        return info.label if info.section is None else f"{info.section}: {info.label}"

    def plan(self) -> Plan:
        """How long to measure, from the options."""
        if self.args.quick:
            return Plan(rounds=self.args.rounds or 2, seconds=self.quick_s, settle_s=0.02)
        if self.args.seconds:
            return Plan(rounds=None, budget_s=self.args.seconds)
        return Plan(rounds=self.args.rounds or self.usual_rounds)

    def stages(
        self, before: Mapping[str, float], after: Mapping[str, float], samples: Sequence[Sample]
    ) -> dict[str, Any]:
        """Return where a loader's time went in a run, of which these are its samples."""
        seconds = {stage: round(after[stage] - before.get(stage, 0.0), 6) for stage in after}
        return {"seconds": seconds, "images": sum(sample.count for sample in samples)}

    def method(self, rounds: int) -> dict[str, Any]:
        """How it was measured."""
        plan = self.plan()
        return {
            "rounds": rounds,
            "seconds": plan.seconds,
            "settle_s": plan.settle_s,
            "quick": self.args.quick,
            "warnings": self.warnings,
        }

    def content(
        self, session: Session, check: Outcome, words: Sequence[str] = (), **fields: Any
    ) -> dict[str, Any]:
        """Put the file's content together.

        Args:
            session: what was measured.
            check: what was compared.
            words: the case's own options, with names in place of paths.
            fields: the case's own fields, and others than are usual.
        """
        sections = fields.get("sections")
        infos = [one for one in self.infos.values() if sections is None or one.section in sections]
        rows = entries(infos, session)
        result = self.facts(words) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "rows": rows,
            "best": best_by_section(rows) if sections else {name: best_of(rows, name) for name in _GROUPS},
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": "",
            **fields,
            **self.studies(session),
        }
        result["verdict"] = verdict(result)
        return result

    def facts(self, words: Sequence[str]) -> dict[str, Any]:
        """Return what was run, when, on what."""
        return {
            "schema": SCHEMA,
            "case": self.case,
            "command": self._command(words),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": {**machine.describe(), "load_at_start": self.busy},
            "versions": machine.versions(),
            "revision": machine.revision(),
        }

    def miss(self, key: str, label: str, why: str) -> None:
        """Note a row that is not measured."""
        self.missing.append({"key": key, "label": label, "why": why})
        self.progress.done(f"not measured: {label}: {why}")

    def _command(self, words: Sequence[str]) -> str:
        """The command line, with names in place of paths."""
        args = self.args
        line = [f"{self.program} {self.case}", *words]
        line += ["--peers"] if args.peers else []
        line += [f"--rounds {args.rounds}"] if args.rounds else []
        line += [f"--seconds {args.seconds:g}"] if args.seconds else []
        line += ["--quick"] if args.quick else []
        given = {name: path.name for name in (*FILES, "compare") if (path := getattr(args, name))}
        line += [f"--{name} {path}" for name, path in given.items() if path != args.usual.get(name)]
        return " ".join(line)
