"""The findings of an examination, one line each, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from fastpipe.console import TextReport, plain, print_line
from fastpipe.core.text import counted
from fastpipe.errors import OptionError

__all__ = ["DoctorReport", "Examined", "Finding", "State", "judged", "ok", "problem", "warning"]

State = Literal["ok", "warning", "problem"]
_FORMAT = 1
_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        topic: ``"decoders"``, ``"memory"`` and so on.
        state: ``"ok"``; ``"warning"``: it could be faster, or more; ``"problem"``: something will not work.
        text: what was found.
        remedy: what to do; empty where all is well.

    Raises:
        OptionError: something is not well, and there is no remedy.

    >>> Finding("memory", "ok", "20 GiB are free").state
    'ok'
    """

    topic: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.state == "ok") != (not self.remedy):
            raise OptionError(f"a finding has a remedy unless it is ok, got {self.state!r}, {self.remedy!r}")


def ok(topic: str, text: str) -> Finding:
    """Return a finding where all is well."""
    return Finding(topic, "ok", text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that could be better."""
    return Finding(topic, "warning", text, remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that will not work."""
    return Finding(topic, "problem", text, remedy)


def judged(topic: str, is_bad: bool, text: str, remedy: str) -> Finding:
    """Return a warning if something is bad, else that it is well."""
    return warning(topic, text, remedy) if is_bad else ok(topic, text)


@dataclass
class Examined:
    """What is examined, and what one check leaves for another.

    Attributes:
        folder: a folder, or file, of this machine; empty without one.
        name: what is examined, for people.
        url, storage_options: of a store; empty without one.
        photos: JPEG files of the folder.
        images_s: images that a core decodes in a second; None if not measured.
        disk_files_s: files of the folder that its disk gives in a second; None if not measured.
        torch: facts of torch, from a process that imported it; None without torch.
    """

    folder: str = ""
    name: str = ""
    url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    photos: tuple[str, ...] = ()
    images_s: float | None = None
    disk_files_s: float | None = None
    torch: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class DoctorReport(TextReport):
    """What an examination has found; ``print`` it.

    Attributes:
        findings: in the order of their topics.
        target: the folder or URL that was examined; empty without one.
        seconds: that it took.

    >>> from fastpipe.tools.doctor import Finding
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
        """Return how many findings are of this state."""
        return sum(finding.state == state for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The numbers of problems and warnings."""
        return f"{counted(self.count('problem'), 'problem')}, {counted(self.count('warning'), 'warning')}"

    def show(self, console: Console) -> None:
        """Print it on a console, in its width and colours."""
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
        """Everything, as plain numbers, texts, lists and dictionaries."""
        return {
            "format": _FORMAT, "target": self.target, "seconds": self.seconds, "verdict": self.verdict,
            "problems": self.count("problem"), "warnings": self.count("warning"),
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip
