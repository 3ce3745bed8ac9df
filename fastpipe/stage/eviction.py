"""Which staged objects make room: what nobody needs any more, then what is needed last.

The order of the epochs says what that is.  It is Belady's rule (L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", 1966), which can be followed here because the order is known
before.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastpipe.core.types import NextUses

if TYPE_CHECKING:
    from fastpipe.stage.folder import StageFolder

__all__ = ["Leftovers", "NeededLast"]

Int64Array = npt.NDArray[np.int64]

_NEVER = -1, -1
_GLANCES = 1 << 10  # questions that one look at the tables of others answers, at least


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
        self._is_begun = False
        # What was staged when it was first asked, by use; what is left of it is needed last at its end.
        self._at = self._rows = np.zeros(0, np.int64)
        self._left = 0
        self._later: list[
            tuple[int, int]
        ] = []  # a heap of what was used, or came, since: minus the use first

    def use_of(self, row: int) -> int:
        """When a row is needed next."""
        return int(self._uses.next_uses(np.array([row], np.int64))[0])

    def note(self, rows: Int64Array) -> None:
        """Rows were used or staged just now: they are needed at another time."""
        if not self._is_begun or not len(rows):
            return
        uses = self._uses.next_uses(rows)
        with self._lock:
            for row, use in zip(rows.tolist(), uses.tolist(), strict=True):
                heapq.heappush(self._later, (-use, row))

    def take(self, after: int) -> int | None:
        """The row that is needed last, if it is needed after ``after``; it is to be removed."""
        with self._lock:
            if not self._is_begun:
                self._begin()
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

    def _begin(self) -> None:
        self._is_begun = True  # what is noted from now on waits for the lock
        rows = self._staged()
        uses = self._uses.next_uses(rows)
        order = np.argsort(uses, kind="stable")
        self._at, self._rows, self._left = uses[order], rows[order], len(rows)

    def _last(self) -> tuple[int, int]:
        """When the last one is needed, as was noted, and which it is; -1 where there is none."""
        best = (int(self._at[self._left - 1]), int(self._rows[self._left - 1])) if self._left else _NEVER
        if self._later and -self._later[0][0] > best[0]:
            return -self._later[0][0], self._later[0][1]
        return best

    def _remove_last(self, use: int, row: int) -> None:
        if self._left and self._rows[self._left - 1] == row and self._at[self._left - 1] == use:
            self._left -= 1
        else:
            heapq.heappop(self._later)


class Leftovers:
    """What is in a stage beside one table: what nobody needs, and what others do.  From any thread.

    Args:
        folder: the stage.
        table: path of the table.
        adopt: notes those of the names, by their beginnings, that are the table's own; gives them.
    """

    def __init__(self, folder: StageFolder, table: str, adopt: Callable[[set[int]], set[int]]) -> None:
        self._folder, self._table, self._adopt = folder, table, adopt
        self._lock = threading.Lock()
        self._free: list[str] | None = None  # paths, the oldest at the end
        self._listed = np.zeros(0, np.uint64)
        self._tables, self._glances = -1, 0

    def remove_one(self) -> bool:
        """Remove the oldest object that no living process has listed; whether there was any."""
        with self._lock:
            if self._free is None:
                self._free = self._find()
            while self._free:
                path = self._free.pop()
                begin = int.from_bytes(bytes.fromhex("".join(path.rsplit("/", 2)[1:])[:16]), "little")
                if not self._is_listed(begin) and self._folder.remove(path):
                    return True
        return False

    def is_used_elsewhere(self, begin: int) -> bool:
        """Whether another table that processes use has a name that begins so."""
        with self._lock:
            return self._is_listed(begin)

    def _find(self) -> list[str]:
        found = self._folder.unlisted()
        if not found:
            return []
        own = self._adopt({begin for _, begin in found})
        return [path for path, begin in reversed(found) if begin not in own]

    def _is_listed(self, begin: int) -> bool:
        tables = self._folder.ledger.tables
        if tables != self._tables or self._glances <= 0:
            self._tables, self._listed = tables, self._folder.listed(self._table)
            # What others stage meanwhile is seen the next time; looking costs with what they have.
            self._glances = _GLANCES + len(self._listed) // 64
        self._glances -= 1
        at = int(np.searchsorted(self._listed, np.uint64(begin)))
        return at < len(self._listed) and int(self._listed[at]) == begin
