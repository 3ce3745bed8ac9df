"""One of the five pipelines measured: its check, its rounds, and what steps wait for."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fastpipe.bench.driver import Driver
from fastpipe.bench.overview.cases import Case, Rows
from fastpipe.bench.results import entries, verdict
from fastpipe.bench.runner import ContenderError, Plan, Session
from fastpipe.errors import FastpipeError

__all__ = ["Pair"]

ROUNDS = 3
# A step is busy for this part of the time that the replaced loader takes for its batch, so that the loader is
# what bounds it; and there are so many steps that this loader needs so many seconds for them.
BUSY_PART, STEPPED_S = 0.5, 2.0
_LEAST_STEPS = 4


@dataclass
class Pair(Driver):
    """One run of one pipeline."""

    case: ClassVar[str] = "all"
    pipeline: Case = field(kw_only=True)

    def plan(self) -> Plan:
        """How long to measure."""
        plan = super().plan()
        return plan if self.args.quick else Plan(rounds=ROUNDS, seconds=self.pipeline.seconds, settle_s=0.1)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; where the check fails nothing is measured."""
        case = self.pipeline
        with ExitStack() as stack:
            rows = case.rows(stack)
            for info, row in rows:
                stack.callback(row.close)
                self.infos[info.key] = replace(info, section=case.key)
            outcome = case.check(rows)
            check = {**outcome.as_json(), "text": outcome.sentence()}
            self.progress.done(f"check: {outcome.sentence()}")
            if not outcome.ok:
                return {"check": check}
            session = self.measure([row for _, row in rows])
            timelines = self._timelines(rows, session)
        told = entries(list(self.infos.values()), session)
        self._require_both(told)
        result = self.facts([f"--only {case.key}"], None) | {
            "method": self.method(session.rounds),
            "data": {"text": case.data, "name": case.key, "samples": 0, "sample_bytes": 0},
            "job": {"text": case.label, "short": case.key, "batch_size": case.batch_size,
                    "replaces": "pipeline"},
            "sections": {case.key: {"label": case.label, "data": case.data, "batch_size": case.batch_size}},
            "check": check,
            "main": next(entry["key"] for entry in told if entry["group"] == "fastpipe"),
            "best": {case.key: next(entry["key"] for entry in told if entry["group"] == "replaced")},
            "rows": told,
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": "",
            "timelines": {case.key: timelines} if timelines else {},
        }  # fmt: skip
        result["verdict"] = verdict(result)
        return result

    def _require_both(self, rows: list[dict[str, Any]]) -> None:
        """Refuse a run without the two rows that matter.

        Raises:
            FastpipeError: one of them could not be measured.
        """
        if {"replaced", "fastpipe"} - {entry["group"] for entry in rows}:
            raise FastpipeError("; ".join(f"{miss['label']}: {miss['why']}" for miss in self.missing))

    def _timelines(self, rows: Rows, session: Session) -> dict[str, Any] | None:
        """Steps with the batches of what is replaced and of its replacement; None where none waits."""
        case = self.pipeline
        pair = [rows[0], next(one for one in rows if one[0].group == "fastpipe")]
        if not case.most_steps or any(info.key not in session.samples for info, _ in pair):
            return None
        # By the fastest round, lest a neighbour of that time leave the loader less to wait for.
        batch_s = case.batch_size / max(one.rate for one in session.samples[rows[0][0].key])
        steps = max(_LEAST_STEPS, min(case.most_steps, round(STEPPED_S / batch_s)))
        busy_s = float(f"{BUSY_PART * batch_s:.2g}")
        found: list[dict[str, Any]] = []
        for info, row in pair:
            self.progress.step(f"steps of {1000 * busy_s:g} ms: {info.label}")
            try:
                timeline = case.timeline(row, steps, busy_s)
            except ContenderError as error:
                self.warnings.append(f"{case.key}: no steps: {info.label}: {error}")
                return None
            found.append({"key": info.key, "label": info.label, **timeline.as_json()})
        return {"busy_s": busy_s, "rows": found}

    def label_of(self, key: str) -> str:
        """What a row is called; its section is told by whoever started this process."""
        return self.infos[key].label
