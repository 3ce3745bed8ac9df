"""The findings of ``fastpipe doctor``, and the report that shows each finding on a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from fastpipe.console import TextReport, plain, print_line
from fastpipe.core.text import counted

State = Literal["ok", "warning", "problem"]
_FORMAT = 1
_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    topic: str
    state: State
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(topic, "ok", text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, "warning", text, remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, "problem", text, remedy)


def judged(topic: str, is_bad: bool, text: str, remedy: str) -> Finding:
    return warning(topic, text, remedy) if is_bad else ok(topic, text)


@dataclass
class Examined:
    folder: str = ""
    name: str = ""
    url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    photos: tuple[str, ...] = ()
    images_s: float | None = None
    torch: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class DoctorReport(TextReport):
    findings: tuple[Finding, ...]
    target: str = ""
    seconds: float = 0.0

    def count(self, state: State) -> int:
        return sum(finding.state == state for finding in self.findings)

    @property
    def verdict(self) -> str:
        return f"{counted(self.count('problem'), 'problem')}, {counted(self.count('warning'), 'warning')}"

    def show(self, console: Console) -> None:
        for topic, findings in groupby(self.findings, lambda one: one.topic):
            print_line(console, topic, style="bold")
            table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
            table.add_column(width=9)
            table.add_column(overflow="fold")
            for finding in findings:
                table.add_row(plain(f"  {finding.state}", _STYLES[finding.state]), plain(finding.text))
                if finding.remedy:
                    table.add_row("", plain(f"→ {finding.remedy}"))
            console.print(table)
        style = _STYLES["problem" if self.count("problem") else "warning" if self.count("warning") else "ok"]
        console.print()
        print_line(console, self.verdict, style=style)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT, "target": self.target, "seconds": self.seconds, "verdict": self.verdict,
            "problems": self.count("problem"), "warnings": self.count("warning"),
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip
