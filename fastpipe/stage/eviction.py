"""Which staged objects make room: those that are needed last, as the order of the epochs says.

That is Belady's rule (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
1966), which no other can better, and which can be followed here because the order is known before.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fastpipe.protocols import NextUses

__all__ = ["NeededLast"]

Int64Array = npt.NDArray[np.int64]


class NeededLast:
    """Finds the staged row that is needed last.  From any thread.

    Args:
        uses: when rows are needed.
        staged: gives the rows that are staged now.
        is_staged: whether a row is.
    """

    def __init__(
        self, uses: NextUses, staged: Callable[[], Int64Array], is_staged: Callable[[int], bool]
    ) -> None:
        self._uses, self._staged, self._is_staged = uses, staged, is_staged
        self._lock = threading.Lock()
        self._sorted: list[tuple[int, int]] | None = (
            None  # by use, the last at the end; made when it is needed
        )
        self._later: list[
            tuple[int, int]
        ] = []  # a heap of what was used, or came, since; minus the use first

    def use_of(self, row: int) -> int:
        """When a row is needed next."""
        return int(self._uses.next_uses(np.array([row], np.int64))[0])

    def note(self, rows: Int64Array) -> None:
        """Rows were used or staged just now: they are needed at another time."""
        if self._sorted is None or not len(rows):
            return
        uses = self._uses.next_uses(rows)
        with self._lock:
            for row, use in zip(rows.tolist(), uses.tolist(), strict=True):
                heapq.heappush(self._later, (-use, row))

    def take(self, after: int) -> int | None:
        """The row that is needed last, if it is needed after ``after``; it is to be removed."""
        with self._lock:
            if self._sorted is None:
                rows = self._staged()
                uses = self._uses.next_uses(rows)
                order = np.argsort(uses, kind="stable")
                self._sorted = list(zip(uses[order].tolist(), rows[order].tolist(), strict=True))
            while True:
                use, row = self._last()
                if row < 0 or use <= after:
                    return None
                self._remove_last(use, row)
                if not self._is_staged(row):
                    continue
                now = self.use_of(row)
                if now == use:
                    return row
                heapq.heappush(self._later, (-now, row))  # another process has used it

    def _last(self) -> tuple[int, int]:
        """When the last one is needed, as was noted, and which it is; -1 where there is none."""
        assert self._sorted is not None
        best = self._sorted[-1] if self._sorted else (-1, -1)
        if self._later and -self._later[0][0] > best[0]:
            return -self._later[0][0], self._later[0][1]
        return best

    def _remove_last(self, use: int, row: int) -> None:
        assert self._sorted is not None
        if self._sorted and self._sorted[-1] == (use, row):
            self._sorted.pop()
        else:
            heapq.heappop(self._later)
