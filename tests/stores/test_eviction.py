"""Which staged row makes room: always the one that is needed last."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.stores.table import EvictionOrder

ROWS = 12


class Uses:
    tag = b"t" * 16

    def __init__(self, at: list[int]) -> None:
        self.at = np.array(at)

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self.at[rows]


def finder(uses: Uses, staged: set[int]) -> EvictionOrder:
    return EvictionOrder(uses, lambda: np.array(sorted(staged), np.int64), staged.__contains__)


def test_the_last_goes_first_and_what_is_needed_sooner_stays() -> None:
    needed = finder(Uses([5, 9, 7, 1]), {0, 1, 2, 3})
    assert [needed.take(4) for _ in range(4)] == [1, 2, 0, None]
    assert needed.use_of(3) == 1


def test_at_the_same_time_what_is_there_stays() -> None:
    assert finder(Uses([5, 5]), {0}).take(5) is None


def test_nothing_staged_is_nothing_to_remove() -> None:
    needed = finder(Uses([]), set())
    assert needed.take(-1) is None
    assert needed.take(-2) is None


def test_what_another_process_has_used_or_removed_is_seen() -> None:
    uses, staged = Uses([50, 40, 30]), {0, 1, 2}
    needed = finder(uses, staged)
    assert needed.take(45) == 0
    staged -= {0}
    uses.at[1] = 10
    assert needed.take(20) == 2
    staged -= {2}
    assert needed.take(5) == 1


@given(
    at=st.lists(st.integers(0, 30), min_size=ROWS, max_size=ROWS),
    staged=st.sets(st.integers(0, ROWS - 1)),
    steps=st.lists(st.tuples(st.sampled_from(["use", "stage", "take"]), st.integers(0, ROWS - 1),
                             st.integers(0, 60)), max_size=40),
)  # fmt: skip
def test_it_is_the_last_of_all_after_any_steps(
    at: list[int], staged: set[int], steps: list[tuple[str, int, int]]
) -> None:
    uses = Uses(at)
    needed = finder(uses, staged)
    for step, row, number in steps:
        if step == "use" and row in staged:
            uses.at[row] = number
            needed.note(np.array([row]))
        elif step == "stage":
            staged.add(row)
            needed.note(np.array([row]))
        elif step == "take":
            last = max((uses.at[other] for other in staged), default=-1)
            taken = needed.take(number)
            assert (taken is None) == (last <= number)
            if taken is not None:
                assert uses.at[taken] == last
                staged.discard(taken)
