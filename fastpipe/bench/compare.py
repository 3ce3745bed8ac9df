"""Two results of a case: what is faster or slower than it was, beyond what rounds differ by."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fastpipe.bench.results import UNIT, load
from fastpipe.console import PlainTable, print_line
from fastpipe.errors import OptionError

__all__ = ["Change", "changes", "differences", "old_result", "print_changes"]

# Less is noise, whatever the rounds say.
LEAST = 0.05

_STYLES = {"improved": "bold green", "same": "", "regressed": "bold red"}
_COMPARED = ("stock", "fastpipe")


@dataclass(frozen=True)
class Change:
    """How a row of fastpipe's has changed.

    Attributes:
        label: the row.
        old, new: its rate over that of the best replaced loader, of each round.
    """

    label: str
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The new median over the old one."""
        return statistics.median(self.new) / statistics.median(self.old)

    @property
    def noise(self) -> float:
        """The part by which medians may differ without a reason, and never less than a twentieth.

        Of each run it is twice the median distance of a round from the median, or half of what its rounds
        span, as of three rounds two may be near each other by chance.
        """
        return max(LEAST, *(_spread(figures) for figures in (self.old, self.new)))

    @property
    def outcome(self) -> Literal["improved", "same", "regressed"]:
        """The change in a word; one that is real is larger than the noise, and the rounds' ranges are apart.

        >>> Change("a", (2.0, 2.1, 1.9), (3.0, 3.1, 2.9)).outcome
        'improved'
        >>> Change("a", (2.0, 2.1, 1.9), (1.8, 2.0, 1.7)).outcome
        'same'
        """
        if self.ratio > 1 + self.noise and min(self.new) > max(self.old):
            return "improved"
        if self.ratio < 1 / (1 + self.noise) and max(self.new) < min(self.old):
            return "regressed"
        return "same"


def old_result(path: Path, case: str) -> dict[str, Any]:
    """Read what is compared with.

    Args:
        path: a result file.
        case: the case that is measured now.

    Raises:
        OptionError: it cannot be read, or is another case's.
    """
    old = load(path)
    if old["case"] != case:
        raise OptionError(f"--compare: {str(path)!r} is of the case {old['case']!r}, and this is {case!r}")
    return old


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What has become of fastpipe's rows that are in both results.

    Ratios are compared, not rates: that of a round has the replaced loader on the same machine in the same
    minute as its measure.
    """
    rows = {entry["key"]: entry for entry in old["rows"]}
    found = [
        Change(_name(entry), _ratios(old, rows[entry["key"]]), _ratios(new, entry))
        for entry in new["rows"]
        if entry["group"] in _COMPARED
        and entry["key"] in rows
        and entry.get("unit") == rows[entry["key"]].get("unit")  # else one is of images, the other of patches
    ]
    return [one for one in found if one.old and one.new]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What a reader must know about two results beside their figures, a line each."""
    lines = []
    for name in ("cpu", "cores", "memory_gib", "os", "python"):
        was, now = old["machine"].get(name), new["machine"].get(name)
        if was != now:
            lines.append(f"another machine: {name} {was}, now {now}")
    versions = sorted({*old["versions"], *new["versions"]})
    moved = [
        f"{name} {old['versions'].get(name, 'none')} to {new['versions'].get(name, 'none')}"
        for name in versions
        if old["versions"].get(name) != new["versions"].get(name)
    ]
    if moved:
        lines.append(f"other versions: {', '.join(moved)}")
    lines += [
        f"other {what}: {was}, now {now}"
        for what, was, now in (
            ("work", old["job"]["text"], new["job"]["text"]),
            ("data", old["data"]["name"], new["data"]["name"]),
        )
        if was != now
    ]
    lines += [f"the {when} figures are of --quick, which are no measurements"
              for when, result in (("old", old), ("new", new)) if result["method"]["quick"]]  # fmt: skip
    keys = {entry["key"] for entry in new["rows"]}
    gone = [_name(entry) for entry in old["rows"] if entry["group"] in _COMPARED and entry["key"] not in keys]
    return lines + [f"not measured now: {name}" for name in gone]


def print_changes(old: Mapping[str, Any], new: Mapping[str, Any], name: str, console: Console) -> bool:
    """Say what has changed.

    Args:
        old, new: results of a case.
        name: of the old one's file.
        console: where to.

    Returns:
        Whether something is slower than it was.
    """
    found = changes(old, new)
    table = PlainTable(f"compared with {name} of {old['date'][:10]}", title_style="bold")
    table.add_column("row", min_width=28)
    for head in ("old", "new", "change", "noise", ""):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for one in found:
        old_median, new_median = (statistics.median(figures) for figures in (one.old, one.new))
        table.add_row(
            one.label, f"{old_median:.2f}×", f"{new_median:.2f}×", f"{one.ratio - 1:+.1%}",
            f"±{one.noise:.1%}", one.outcome, style=_STYLES[one.outcome],
        )  # fmt: skip
    console.print(table)
    counts = {kind: sum(one.outcome == kind for one in found) for kind in _STYLES}
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print_line(console, f"{words if found else 'no row is in both'}", style="bold")
    for line in differences(old, new):
        print_line(console, line)
    return counts["regressed"] > 0


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["label"]) if entry.get("section") is None else f"{entry['section']}: {entry['label']}"


def _ratios(result: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[float, ...]:
    """A row's rate over the best replaced one's, of each round."""
    replaced: dict[int, float] = {}
    for other in result["rows"]:
        if other["group"] == "replaced" and other.get("section") == entry.get("section"):
            for number, rate in _rates(other).items():
                replaced[number] = max(rate, replaced.get(number, 0.0))
    return tuple(rate / replaced[number] for number, rate in _rates(entry).items() if number in replaced)


def _rates(entry: Mapping[str, Any]) -> dict[int, float]:
    unit = entry.get("unit", UNIT)
    return {one["round"]: one[unit] / one["seconds"] for one in entry["samples"]}


def _spread(figures: Sequence[float]) -> float:
    """By how much figures differ, as a part of their median."""
    median = statistics.median(figures)
    distance = statistics.median(abs(one - median) for one in figures)
    return max(2 * distance, (max(figures) - min(figures)) / 2) / median
