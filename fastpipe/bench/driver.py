"""The common parts of all cases of the benchmark: options, rounds of measurements, and output."""

from __future__ import annotations

import argparse
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.check import Outcome
from fastpipe.bench.page import page
from fastpipe.bench.plot import draw
from fastpipe.bench.report import old_result, print_changes, print_result
from fastpipe.bench.results import (
    UNIT,
    RowInfo,
    best_by_section,
    best_of,
    check_target,
    entries,
    first_fields,
    name_of,
    save,
    verdict,
    write_file,
)
from fastpipe.bench.runner import Contender, ContenderError, Plan, Sample, Session, calibrate, interleave
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus
from fastpipe.errors import MissingDependencyError

_ROUNDS = 7
_GROUPS = ("replaced", "stock")  # a result without sections names the best row of each of these groups
DATA_HELP = " (default: $FASTPIPE_PHOTOS, else photograph-like JPEGs made once into the user's cache folder)"

Row = TypeVar("Row", bound=Contender)
# For each row of a result: its description, and the function that builds the row.
Rows = Iterable[tuple[RowInfo, Callable[[], Row]]]


def add_run_arguments(
    parser: argparse.ArgumentParser, rounds: int = _ROUNDS, *, has_peers: bool = True
) -> None:
    """Add the options of every case; ``rounds`` is the default number of rounds."""
    add = parser.add_argument
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
    add_file_arguments(parser)


def add_file_arguments(parser: argparse.ArgumentParser, **usual: str) -> None:
    """Add the options that name files; ``usual`` gives some of these options a default file."""
    for name, kind, what in (
        ("json", "FILE", "write every sample, the medians and the machine to FILE"),
        ("html", "FILE", "write a page with pictures to FILE"),
        ("plot", "FILE.png", "draw the result into FILE.png"),
    ):
        default = f" (default: {usual[name]})" if name in usual else ""
        file = Path(usual[name]) if name in usual else None
        parser.add_argument(f"--{name}", metavar=kind, type=Path, default=file, help=what + default)
    parser.add_argument("--compare", metavar="OLD.json", type=Path,
        help="say what is faster or slower than in a file that --json wrote; exit code 1 if anything "
        "is slower")  # fmt: skip


class Driver(ABC):
    """One run of a case of the benchmark: compares outputs, measures, and reports."""

    case: ClassVar[str]  # name of the case
    about: ClassVar[str]  # one line of help
    program: ClassVar[str] = "python -m fastpipe.bench"  # start of the command
    quick_s: ClassVar[float] = 0.2  # duration of a measurement with --quick
    usual_rounds: ClassVar[int] = _ROUNDS
    main: str = ""  # key of the main row, which the verdict is about

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self.args, self.progress, self.cores = args, progress, available_cpus()
        self.stack = ExitStack()  # closes rows and their data after all measurements
        self.infos: dict[str, RowInfo] = {}  # descriptions of the rows, by key
        self.missing: list[dict[str, str]] = []  # rows that are not measured, with the reasons
        self.warnings: list[str] = []
        self.busy: float | None = None  # load of the machine at the start
        self.stages: dict[str, Any] = {"seconds": {}, "images": 0}  # time of the main row in each stage

    @classmethod
    @abstractmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the case."""

    @abstractmethod
    def result(self) -> dict[str, Any] | None:
        """Check outputs, measure, and return the content of the result file; None if the check fails."""

    def studies(self, session: Session) -> dict[str, Any]:
        """Return additional fields for the result; a subclass may measure them."""
        return {}

    def lines(self, result: Mapping[str, Any]) -> list[str]:
        return []

    def run(self, console: Console) -> int:
        """Measure, report, and write the requested files; return the exit code.

        The exit code is 1 if outputs differ from those of the replaced loader, or if fastpipe is slower
        in a row of the table than in the file of ``--compare``.

        Raises:
            OptionError: a file cannot be written or compared with, or there is nothing to measure.
            MissingDependencyError: a package is not installed that the case or the picture needs.
        """
        args = self.args
        self._check_files()
        old = old_result(args.compare, self.case) if args.compare else None
        result = self.result()
        if result is None:
            return 1
        self.progress.stop()
        print_result(result, console, self.lines(result))
        self._write(result)
        return int(old is not None and print_changes(old, result, args.compare.name, console))

    def begin(self) -> None:
        self.busy = busy = machine.load()
        if busy is not None and busy > 0.5 * self.cores:
            self.warnings.append(f"the machine was busy at the start (load {busy:g} on {self.cores} cores)")
        if self.args.quick:
            self.warnings.append("--quick checks that the benchmark runs; its figures are not measurements")

    def passed(self, check: Outcome) -> bool:
        """Report a comparison of outputs; return True if the outputs agree."""
        self.progress.done(f"check: {check.sentence()}")
        return check.ok

    def open(self, info: RowInfo, make: Callable[[], Row]) -> Row | None:
        """Build a row of the result (an object to measure), and add it to the run.

        If the row cannot be built, record it as missing, and return None.
        """
        try:
            row = make()
        except ContenderError as error:
            self.miss(info.key, name_of(vars(info)), str(error))
            return None
        return self.added(getattr(row, "info", info), row)

    def added(self, info: RowInfo, row: Row) -> Row:
        """Add a row (an object to measure) to the run, which closes the row at the end."""
        self.stack.callback(row.close)
        self.infos[info.key] = info
        return row

    def opened(self, rows: Rows[Row]) -> list[Row]:
        return [row for info, make in rows if (row := self.open(info, make)) is not None]

    def miss(self, key: str, label: str, why: str) -> None:
        self.missing.append({"key": key, "label": label, "why": why})
        self.progress.done(f"not measured: {label}: {why}")

    def measure(self, contenders: Sequence[Contender]) -> Session:
        """Warm up all contenders (the objects to measure), then measure all of them in rounds."""
        counts: dict[str, int] = {}
        # Loaders that fork processes come first, because forking after threads have started is unsafe.
        for contender in sorted(contenders, key=lambda one: -one.workers):
            label = self.label_of(contender.key)
            self.progress.step(f"warming up: {label}")
            try:
                counts[contender.key] = self.warmed(contender)
            except ContenderError as error:
                self.miss(contender.key, label, str(error))
        main = next((one for one in contenders if one.key == self.main), None)
        before = {} if main is None else main.stage_seconds()

        def on_sample(contender: Contender, sample: Sample) -> None:
            unit, label = self.infos[contender.key].unit or UNIT, self.label_of(contender.key)
            self.progress.step(f"round {sample.round + 1}: {label}: {sample.rate:,.0f} {unit}/s")

        # Garbage is collected before each measurement; the objects of imported modules are excluded.
        gc.collect()
        gc.freeze()
        try:
            alive = [contender for contender in contenders if contender.key in counts]
            session = interleave(alive, counts, self.plan(), on_sample=on_sample)
        finally:
            gc.unfreeze()
        for key, why in session.failures.items():
            self.miss(key, self.label_of(key), why)
        if main is not None and (after := main.stage_seconds()):
            seconds = {stage: round(after[stage] - before.get(stage, 0.0), 6) for stage in after}
            images = sum(sample.count for sample in session.samples.get(self.main, ()))
            self.stages = {"seconds": seconds, "images": images}
        return session

    def warmed(self, contender: Contender) -> int:
        """Warm up a contender (an object to measure); return how many samples a measurement needs."""
        return calibrate(contender, self.plan().seconds)

    def label_of(self, key: str) -> str:
        return name_of(vars(self.infos[key]))

    def plan(self) -> Plan:
        if self.args.quick:
            return Plan(rounds=self.args.rounds or 2, seconds=self.quick_s, settle_s=0.02)
        if self.args.seconds:
            return Plan(rounds=None, budget_s=self.args.seconds)
        return Plan(rounds=self.args.rounds or self.usual_rounds)

    def content(self, session: Session, check: Outcome, **fields: Any) -> dict[str, Any]:
        """Return the content of the result file; ``fields`` of the case replace default fields."""
        sections = fields.get("sections")
        infos = [one for one in self.infos.values() if sections is None or one.section in sections]
        rows = entries(infos, session)
        result = self.facts() | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            **({"main": self.main} if sections else {}),
            "rows": rows,
            "best": best_by_section(rows) if sections else {name: best_of(rows, name) for name in _GROUPS},
            "missing": self.missing,
            "stages": self.stages,
            "floor_share": None,
            "plan": "",
            **fields,
            **self.studies(session),
        }
        result["verdict"] = verdict(result)
        return result

    def method(self, rounds: int) -> dict[str, Any]:
        told = {name: getattr(self.plan(), name) for name in ("seconds", "settle_s")}
        return {"rounds": rounds, **told, "quick": self.args.quick, "warnings": self.warnings}

    def facts(self) -> dict[str, Any]:
        found = first_fields(self.case, self._command())
        found["machine"]["load_at_start"] = self.busy
        return found

    @cached_property
    def _usual(self) -> Mapping[str, Any]:
        """The default values of the options."""
        parser = argparse.ArgumentParser()
        self.add_arguments(parser)
        return vars(parser.parse_args([]))

    def _command(self) -> str:
        """Return the command line, in which paths are replaced by the names of files and folders."""
        words = [self.program, self.case]
        for name, value in vars(self.args).items():
            if name == "job":  # the only positional argument
                words += [value] if value != self._usual[name] else []
            elif name in self._usual and value != self._usual[name] and value is not None:
                for one in value if isinstance(value, list) else [value]:
                    words += [f"--{name.replace('_', '-')}", *([] if one is True else [_word(one)])]
        return " ".join(words)

    def _check_files(self) -> None:
        """Raise an error now if an output file could not be written at the end."""
        args = self.args
        for name in ("json", "html", "plot"):
            if (path := getattr(args, name)) is not None:
                check_target(path, f"--{name}")
        if args.plot:
            try:
                require("matplotlib", extra="bench")
            except MissingDependencyError as missing:
                if args.plot != self._usual["plot"]:
                    raise
                self.progress.done(f"no {args.plot}: {missing}")
                args.plot = None

    def _write(self, result: dict[str, Any]) -> None:
        args, say = self.args, self.progress.done
        if args.json:
            save(result, args.json)
            say(f"wrote {args.json.absolute()}")
        if args.html:
            content = page(result, self.lines(result)).encode()
            write_file(args.html, lambda file: file.write(content))
            say(f"wrote {args.html.absolute()}")
        if args.plot and result["rows"]:
            draw(result, args.plot)
            say(f"drew {args.plot.absolute()}")


class Case(Driver):
    """A case that builds all rows of its result, compares their outputs, and measures them together."""

    @abstractmethod
    def prepare(self) -> None:
        """Generate or find the data, and read all files once, so that they are in the page cache."""

    @abstractmethod
    def rows(self) -> Sequence[Contender]:
        """Build the rows (objects to measure) whose output is compared before."""

    def others(self) -> Sequence[Contender]:
        return []

    @abstractmethod
    def compared(self, rows: Sequence[Any]) -> Outcome:
        """Compare the output of fastpipe's rows with the expected output."""

    @abstractmethod
    def described(self, session: Session) -> dict[str, Any]:
        """Return the fields ``data`` and ``job`` of the result, and perhaps further fields."""

    def result(self) -> dict[str, Any] | None:
        self.begin()
        with self.stack:
            self.prepare()
            rows = self.rows()
            if not self.passed(check := self.compared(rows)):
                return None
            others = self.others()
            # The rows of a section are put together, as tables show them.
            sections = list(dict.fromkeys(info.section for info in self.infos.values()))
            self.infos = dict(sorted(self.infos.items(), key=lambda pair: sections.index(pair[1].section)))
            session = self.measure([*rows, *others])
            fields = self.described(session)
        return self.content(session, check, **fields)


def _word(value: Any) -> str:
    """Return the value of an option as text for the command line.

    >>> _word(Path("/data/photos")), _word((1, 2)), _word(30.0)
    ('photos', '1,2', '30')
    """
    if isinstance(value, Path):
        return value.resolve().name
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
