"""An examination's report, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fastpipe.console import plain, print_line
from fastpipe.profiling.doctor.findings import Finding, State
from fastpipe.profiling.shown import Shown

__all__ = ["DoctorReport"]

_FORMAT = 1
_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True, repr=False)
class DoctorReport(Shown):
    """What an examination has found; ``print`` it.

    Attributes:
        findings: in the order of their topics.
        target: the folder or URL that was looked at; empty without one.
        seconds: that it took.

    >>> from fastpipe.profiling.doctor import Finding
    >>> print(DoctorReport((Finding("memory", "warning", "1 GiB is free", "end other programs"),)))
    memory
      warning  1 GiB is free
               → end other programs
    <BLANKLINE>
    0 problems, 1 warning
    """

    findings: tuple[Finding, ...]
    target: str = ""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 if there is a problem, else 0."""
        return int(self.count("problem") > 0)

    def count(self, state: State) -> int:
        """How many findings are of this state."""
        return sum(finding.state == state for finding in self.findings)

    @property
    def verdict(self) -> str:
        """In a few words."""
        problems, warnings = self.count("problem"), self.count("warning")
        return f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"

    def show(self, console: Console) -> None:
        """Print it on a console, in its width and colours."""
        for topic, findings in self._by_topic():
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
        """Everything, as plain numbers, texts, lists and dictionaries."""
        return {
            "format": _FORMAT, "target": self.target, "seconds": self.seconds, "verdict": self.verdict,
            "problems": self.count("problem"), "warnings": self.count("warning"),
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip

    def _by_topic(self) -> Iterator[tuple[str, list[Finding]]]:
        topics: dict[str, list[Finding]] = {}
        for finding in self.findings:
            topics.setdefault(finding.topic, []).append(finding)
        yield from topics.items()
