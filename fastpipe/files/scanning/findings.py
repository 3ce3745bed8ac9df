"""What a scan found: counted, and every file about which there is something to say."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fastpipe.files.scanning.verdicts import Verdict

__all__ = ["Findings"]


@dataclass
class Findings:
    """What was found so far.  Threads may add to it.

    Attributes:
        root: the folder, or file, that was scanned.
        what: is counted: ``"images"``, or ``"chunks"``.
        total: that there are.
        count, nbytes: that were judged, and their bytes.
        bad_count: of those, how many the replaced loader raises on.
        classes: how many images each class has.
        seconds: that it took.
        told: what there is something to say of, in any order.
        notes: about the whole.
    """

    root: str
    what: str
    total: int = 0
    count: int = 0
    nbytes: int = 0
    bad_count: int = 0
    seconds: float = 0.0
    told: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, verdict: Verdict, nbytes: int) -> None:
        """Take a verdict.

        Args:
            verdict: of a file, or part of one.
            nbytes: how much was judged with it.
        """
        with self._lock:
            self.count += 1
            self.nbytes += nbytes
            self.bad_count += verdict.state != "good"
            if verdict.state != "good" or verdict.notes:
                self.told.append(verdict)

    def sort(self) -> None:
        """Bring what is told into an order that does not depend on threads."""
        self.told.sort(key=lambda one: one.path)

    @property
    def bad(self) -> list[Verdict]:
        """What the replaced loader raises on."""
        return [one for one in self.told if one.state != "good"]

    @property
    def corrupt(self) -> list[Verdict]:
        """Those of them whose content is wrong."""
        return [one for one in self.told if one.state == "corrupt"]

    @property
    def noted(self) -> list[Verdict]:
        """What is odd, and is read."""
        return [one for one in self.told if one.state == "good"]
