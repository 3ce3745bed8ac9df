"""A report: what a profile has found, for people and for programs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fastpipe.console import PlainTable, print_line
from fastpipe.core.text import in_duration
from fastpipe.errors import OptionError
from fastpipe.profiling.board import scalars_of, write_board
from fastpipe.profiling.findings import Findings
from fastpipe.profiling.page import page
from fastpipe.profiling.shown import Shown
from fastpipe.profiling.stacks import Line
from fastpipe.profiling.stages import STAGES
from fastpipe.profiling.times import Spent
from fastpipe.profiling.trace import trace_events

__all__ = ["Report"]

_FORMAT = 1


@dataclass(frozen=True, repr=False)
class Report(Shown, Findings):
    """What a profile has found; ``print`` it.

    Its attributes are those of :class:`Findings`.
    """

    def show(self, console: Console) -> None:
        """Print it on a console, in its width and colours."""
        print_line(console, self.verdict, style="bold")
        for text in self.lines():
            print_line(console, text)
        if self.costs.batches:
            console.print(self._stage_table())
            for line, stage, share in self.costs.top_lines():
                print_line(console, f"  {share:4.0%} {stage:9} {line}")
        for number, advice in enumerate(self.advice, start=1):
            print_line(console, f"{number}. {advice.what}", style="bold")
            effect = self.effect(advice)
            print_line(console, f"   {effect}{': ' if effect else ''}{advice.why}")
        if self.without_advice:
            print_line(console, self.without_advice)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain numbers, texts, lists and dictionaries."""
        plain: Any = _plain(self)
        return {"format": _FORMAT, "verdict": self.verdict, "stall_share": self.stall_share, **plain}

    def trace(self) -> str:
        """A timeline as JSON, to be opened in https://ui.perfetto.dev."""
        events = trace_events(self.spans, self.worker_spans)
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def to_tensorboard(self, log_dir: str | os.PathLike[str], *, step: int = 0) -> None:
        """Write its numbers, and the text of it, where TensorBoard shows them.

        Scalars are ``fastpipe/profile/…``: ``step_seconds``, ``wait_seconds``, ``busy_seconds``,
        ``stall_share``; by stage ``stall_seconds/…`` and ``batch_seconds/…``; ``case_seconds/…``; and of each
        advice, by its number in the text, ``predicted_seconds/1`` and ``tried_seconds/1``.

        Args:
            log_dir: the folder that TensorBoard is started with, or one below it.
            step: at which they stand; of several profiles each has its own.

        Raises:
            MissingDependencyError: neither torch with the package tensorboard nor TensorFlow is installed.
            OptionError: the profile has measured no step.

        ``profile(loader, train).to_tensorboard("runs")`` profiles and writes.
        """
        scalars = scalars_of(self)
        if not scalars:
            raise OptionError(f"there is nothing to write to {os.fspath(log_dir)!r}: {self.verdict}")
        write_board(log_dir, scalars, str(self), step)

    def _stage_table(self) -> PlainTable:
        where = "the worker that makes it" if self.costs.makers else "the loader's threads"
        table = PlainTable(f"a batch, in {where}")
        table.add_column("stage")
        for name in ("time", "share", "running", "waits for a core", "waits for else"):
            table.add_column(name, justify="right")
        shares = self.costs.shares()
        for stage in sorted(self.costs.stages, key=STAGES.index):
            spent = self.costs.stages[stage]
            values = (spent.wall, spent.cpu, spent.delay, spent.idle)
            total, cpu, delay, idle = (in_duration(value / 1e9) for value in values)
            table.add_row(stage, total, f"{shares[stage]:.0%}", cpu, delay, idle)
        return table

    def html(self) -> str:
        """A page that needs nothing but itself."""
        return page(self)


def _plain(value: Any) -> Any:
    if isinstance(value, Line):
        return str(value) if value.file else ""
    if isinstance(value, Spent):
        return {"wall_s": value.wall / 1e9, "cpu_s": value.cpu / 1e9, "delay_s": value.delay / 1e9,
                "idle_s": value.idle / 1e9}  # fmt: skip
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
