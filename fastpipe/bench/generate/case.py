"""The case ``generate``: its options, its rows, its result."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.generate.check import check_stored
from fastpipe.bench.generate.functions import SEED
from fastpipe.bench.generate.memory import peaks
from fastpipe.bench.generate.peers import PEERS, Peer, PeerRow
from fastpipe.bench.generate.predicted import Prediction, predictions
from fastpipe.bench.generate.rows import SECTIONS, MadeRow, Section, specs
from fastpipe.bench.generate.targets import PREDICTED, targets
from fastpipe.bench.results import entries, verdict
from fastpipe.bench.runner import ContenderError, Plan, Session, summarise
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["add_arguments", "run"]

# Long, so that the start of processes is a small part: with two cores 9 s of work.
MEASURED_S = 4.5
# What is tried of peers that may be told how many rows make a task, and what is predicted.
TUNED_S, PREDICTED_S, PREDICTED_TIMES = 1.5, 10.0, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--folder", metavar="FOLDER", type=Path,
        help="where files are written, and removed (default: the folder for temporary ones)")  # fmt: skip
    add("--section", action="append", choices=[one.key for one in SECTIONS], metavar="NAME",
        help="only this: " + ", ".join(one.key for one in SECTIONS)
        + "; may be given again (default: all)")  # fmt: skip
    add_run_arguments(parser, "joblib, multiprocessing.Pool and Hugging Face's datasets")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when rows are not those of the function.

    Raises:
        MissingDependencyError: h5py, which the script that is replaced needs, is not installed.
        OptionError: the folder is none.
    """
    require("h5py", extra="generation")
    if args.folder is not None and not args.folder.is_dir():
        raise OptionError(f"--folder: {str(args.folder)!r} is not a folder")
    with tempfile.TemporaryDirectory(prefix="fastpipe-bench-", dir=args.folder) as scratch:
        bench = _Bench(args, machine.cores_allowed(), progress, scratch=Path(scratch))
        return bench.run(console)


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "generate"
    scratch: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        asked = self.args.section
        self.sections = [one for one in SECTIONS if not asked or one.key in asked]

    def plan(self) -> Plan:
        """How long to measure, from the options."""
        plan = super().plan()
        return plan if self.args.quick else replace(plan, seconds=MEASURED_S)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        with ExitStack() as stack:
            made = [row for section in self.sections for row in self._rows(section, stack)]
            check = check_stored(made, self.progress.now)
            self.progress.done(f"check: {check.sentence()}")
            if not check.ok:
                return None
            for key, why in check.peers.items():
                self.miss(key, self.label_of(key), why)
            contenders = self._tuned([row for row in made if row.key not in check.peers])
            session = self.measure(contenders)
            told = self._predictions(session)
            memory = self._memory()
        rows = entries(list(self.infos.values()), session)
        predicted = [one.as_json() for one in told]
        keys = [one.key for one in self.sections]
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": f"{keys[0]}-workers",
            "rows": rows,
            "best": {key: f"{key}-replaced" for key in keys},
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": str(told[0].reports[0]) if told else "",
            "predicted": {"rows": predicted},
            "peak": memory or {},
            "targets": targets(session.samples, self.cores, predicted, memory, keys),
        }
        result["verdict"] = verdict(result)
        return result

    def _rows(self, section: Section, stack: ExitStack) -> list[MadeRow]:
        """All rows of a section; a peer that is not there is noted."""
        found: list[MadeRow] = []
        for spec, make in specs(section, self.cores):
            self.infos[spec.key] = spec.info
            found.append(make(spec, self.scratch))
        for peer in PEERS if self.args.peers and section.has_peers else ():
            if (row := self._peer(peer, section, stack)) is not None:
                found.append(row)
        return found

    def _peer(self, peer: Peer, section: Section, stack: ExitStack) -> MadeRow | None:
        """A peer's row, or ``None``."""
        spec = peer.spec(section, self.cores)
        if (why := peer.missing) is not None:
            self.miss(spec.key, f"{section.key}: {spec.label}", why)
            return None
        info = replace(spec.info, versions=peer.versions)
        row = self.open(stack, info, partial(peer.row, spec, self.scratch))
        assert row is None or isinstance(row, MadeRow)
        return row

    def _tuned(self, rows: Sequence[MadeRow]) -> list[MadeRow]:
        """The rows, with what peers may choose chosen; one that fails is noted."""
        found: list[MadeRow] = []
        for row in rows:
            if isinstance(row, PeerRow) and not self.args.quick:
                self.progress.now(f"trying: {self.label_of(row.key)}")
                try:
                    chosen = row.tune(round(TUNED_S * self.cores / row.spec.section.row_s))
                except ContenderError as error:
                    self.miss(row.key, self.label_of(row.key), str(error))
                    continue
                info = self.infos[row.key]
                notes = "; ".join(note for note in (chosen, info.note) if note)
                self.infos[row.key] = replace(info, note=notes)
            found.append(row)
        return found

    def _predictions(self, session: Session) -> list[Prediction]:
        """How well it is said how long rows will take."""
        seconds, times = (self.quick_s, 1) if self.args.quick else (PREDICTED_S, PREDICTED_TIMES)
        sections = []
        for one in self.sections:
            if one.key in PREDICTED:
                rate = summarise(sample.rate for sample in session.samples[f"{one.key}-workers"]).median
                sections.append((one, max(1, round(rate * seconds))))
        return predictions(sections, self.scratch, self.cores, times, self.progress.step)

    def _memory(self) -> dict[str, Any] | None:
        """Memory; None where it is not measured."""
        if self.args.quick:
            return None
        try:
            return peaks(self.scratch, self.cores, say=self.progress.step)
        except ContenderError as error:
            # The rates, which took far longer to measure, stay valid.
            self.warnings.append(f"no memory: {error}")
            return None

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args = self.args
        words = [f"--folder {args.folder.resolve().name}"] if args.folder else []
        words += [f"--section {one}" for one in args.section or ()]
        about = f"row i is fn(i, np.random.default_rng([{SEED}, i]))"
        return self.facts(words, busy) | {
            "data": {"text": about, "name": "functions of the benchmark", "samples": 0, "sample_bytes": 0},
            "sections": {one.key: {"label": one.label} for one in self.sections},
            "job": {
                "text": "Generation: rows of a function made and stored, from the call to the closed file",
                "short": f"rows of a function made and stored, {self.cores} workers",
                "batch_size": 1,
                "replaces": "script",
            },
        }
