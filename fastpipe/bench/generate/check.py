"""Before anything is timed: does each store what the function returns, each row in its place?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastpipe.bench.generate.functions import rows_of
from fastpipe.bench.generate.rows import Columns, MadeRow
from fastpipe.bench.runner import ContenderError

__all__ = ["StoredCheck", "check_stored", "difference"]


@dataclass
class StoredCheck:
    """What was compared.

    Attributes:
        files: that were made and read.
        rows: in them.
        problems: what is wrong; empty when all is well.
        peers: by key, why a peer's row cannot be measured.
    """

    files: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            return f"rows differ from what the function returns: {'; '.join(self.problems)}"
        return (
            f"{self.rows:,} rows that were made in {self.files} ways, and read from their files, equal"
            " fn(i, np.random.default_rng([seed, i])) bit for bit, each in its place"
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        told = {"files": self.files, "rows": self.rows, "problems": self.problems}
        return {**told, "ok": self.ok, "text": self.sentence()}


def check_stored(rows: Sequence[MadeRow], say: Callable[[str], None] = lambda text: None) -> StoredCheck:
    """Make some rows in each way, read them, and compare them with what the function returns here.

    Args:
        rows: the ways.
        say: told what is compared.
    """
    check = StoredCheck()
    expected: dict[str, Columns] = {}
    for row in rows:
        section, what = row.spec.section, f"{row.spec.section.key}: {row.spec.label}"
        say(f"comparing: {what}")
        if section.key not in expected:
            expected[section.key] = rows_of(section.function, section.checked)
        try:
            problem = difference(expected[section.key], row.stored(section.checked))
        except ContenderError as error:
            check.peers[row.key] = str(error)
            continue
        if problem is None:
            check.files, check.rows = check.files + 1, check.rows + section.checked
        elif row.spec.group == "peer":
            check.peers[row.key] = f"rows differ from what the function returns: {problem}"
        else:
            check.problems.append(f"{what}: {problem}")
    return check


def difference(expected: Columns, found: Columns) -> str | None:
    """How columns differ, or None.

    Args:
        expected, found: names and arrays, (N, …).
    """
    if sorted(expected) != sorted(found):
        return f"columns are {sorted(found)}, expected {sorted(expected)}"
    for name, values in expected.items():
        others = found[name]
        if (others.dtype, others.shape) != (values.dtype, values.shape):
            return f"{name} is {others.dtype} {others.shape}, expected {values.dtype} {values.shape}"
        wrong = np.flatnonzero((others != values).reshape(len(values), -1).any(1))
        if len(wrong):
            return f"{name} differs in {len(wrong)} of {len(values)} rows, row {wrong[0]} is the first"
    return None
