"""The search finds the best of settings whose costs are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from fastpipe.tools import tuning as searching
from fastpipe.tools.trials import Base, Measured, OverBudgetError, Settings, Trial
from fastpipe.tools.tuning import Search

Costs = Callable[[Settings], float]


class Folder:
    """Stands for a dataset of fastpipe's."""

    def __init__(self) -> None:
        self.threads: Any = "auto"

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 100


def searched(
    patch: pytest.MonkeyPatch,
    costs: Costs,
    *,
    loader: Any = None,
    folders: list[Any] | None = None,
    budget: int | None = None,
    seconds: float = 1e6,
    step: Any = None,
    cores: int = 4,
    memory: Callable[[Settings], int] = lambda settings: 1,
    wait: float = 1.0,
) -> tuple[Search, Trial]:
    """A search in which nothing is measured, but every cost is known."""
    base = Base(loader if loader is not None else DataLoader(range(100), batch_size=4))
    base.folders, base.is_threaded = folders or [], bool(folders)
    patch.setattr(base, "made", lambda settings, for_trial: settings)

    def measure(settings: Settings, *rest: Any) -> Measured:
        if budget is not None and memory(settings) > budget:
            raise OverBudgetError(f"took {memory(settings)} B, and may take {budget}")
        return Measured(costs(settings), wait * costs(settings), memory(settings))

    patch.setattr(searching, "measure", measure)
    patch.setattr(searching, "warm_up", lambda settings: None)
    search = Search(base, step, cores, budget, seconds)
    return search, search.run()


def of_workers(**by: float) -> Costs:
    return lambda settings: by.get(f"w{settings.workers}", 9.0)


def test_the_fastest_number_of_workers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, best = searched(monkeypatch, of_workers(w0=4.0, w1=5.0, w2=2.5, w3=1.0, w4=1.5))
    assert best.settings.workers == 3  # none of the first values, but around the best of them


def test_as_many_workers_as_help_where_they_wait_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _, best = searched(monkeypatch, lambda settings: 8.0 / min(max(settings.workers, 0.5), 16))
    assert best.settings.workers == 16


def test_of_equal_settings_those_with_fewest_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(range(100), batch_size=4, num_workers=4)
    _, best = searched(monkeypatch, lambda settings: 1.0 if settings.workers else 1.02, loader=loader)
    assert best.settings.workers == 4  # nothing is faster by more than noise


def test_settings_that_are_hopeless_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search, best = searched(monkeypatch, of_workers(w0=1.0, w1=1.1, w2=8.0, w4=9.0))
    times = {trial.settings.workers: len(trial.measured) for trial in search.trials}
    assert best.settings.workers == 0 and times[2] == times[4] == 1 < times[1]


def test_threads_of_a_dataset_are_tuned_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder()
    _, best = searched(
        monkeypatch, lambda settings: 1.0 if settings.threads == 32 else 2.0 - (settings.threads == 16) / 2
        - (settings.threads == 8) / 4, folders=[folder],
    )  # fmt: skip
    assert best.settings.threads == 32 and folder.threads == "auto"


def test_what_the_script_says_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder()
    folder.threads = 3
    search, best = searched(monkeypatch, lambda settings: 1.0, folders=[folder])
    assert {trial.settings.threads for trial in search.trials} == {3} and best.settings.threads == 3


def test_what_is_iterated_keeps_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    search, best = searched(monkeypatch, lambda settings: 1.0, loader=DataLoader(Numbers()))
    assert best.settings.workers == 0 and len(search.trials) == 1
    assert search.notes == ["num_workers=0 stays: what a Numbers gives may depend on it"]


def test_memory_beyond_the_budget_is_never_chosen_nor_tried_where_it_can_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, best = searched(
        monkeypatch, lambda settings: 10.0 / (1 + settings.workers), budget=250,
        memory=lambda settings: 100 * settings.workers,
    )  # fmt: skip
    assert best.settings.workers == 2
    refused = {trial.settings.workers: trial.why for trial in search.trials if trial.why}
    assert "may take" in refused[4] and "would take" in refused[4]
    assert all(not trial.measured for trial in search.trials if trial.settings.workers > 2)


def test_it_ends_as_soon_as_a_step_has_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    search, best = searched(monkeypatch, lambda settings: 1.0, step=print, wait=0.01)
    assert len(search.trials) == 1 and best.settings.workers == 0
    assert search.notes == ["ended before worker processes: with a stall of 1.0% a step has its data"]


def test_it_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    search, best = searched(monkeypatch, lambda settings: 1.0, seconds=1e-9)
    assert len(search.trials) >= 1 and best.measured
    assert search.notes == ["ended before worker processes: the time was over"]


def test_settings_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(settings: Settings) -> float:
        if settings.workers:
            raise ValueError("cannot be pickled")
        return 1.0

    search, best = searched(monkeypatch, costs)
    assert best.settings.workers == 0
    assert {trial.why for trial in search.trials if trial.settings.workers} == {
        "ValueError: cannot be pickled"
    }


def test_the_scripts_own_settings_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(settings: Settings) -> float:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        searched(monkeypatch, costs)


@st.composite
def valleys(draw: st.DrawFn, count: int) -> list[float]:
    """Costs that fall to the smallest one, and rise from there, by more than noise each time."""
    steps = draw(st.lists(st.floats(1.15, 2), min_size=count, max_size=count))
    lowest = draw(st.integers(0, count - 1))
    return [math.prod(steps[min(at, lowest) : max(at, lowest)]) for at in range(count)]


@given(of_workers=valleys(5), of_ahead=valleys(5), of_threads=valleys(5))
def test_the_best_of_all_is_found_where_settings_do_not_depend_on_each_other(
    of_workers: list[float], of_ahead: list[float], of_threads: list[float]
) -> None:
    workers = dict(zip((0, 1, 2, 4, 8), of_workers, strict=True))
    aheads = dict(zip((1, 2, 4, 8, 16), of_ahead, strict=True))
    threads = dict(zip((1, 2, 4, 8, 16), of_threads, strict=True))

    def costs(settings: Settings) -> float:
        ahead = 2 if settings.ahead == "auto" else settings.ahead
        each = max(1, 4 // max(1, settings.workers)) if settings.threads == "auto" else settings.threads
        return workers.get(settings.workers, 99.0) * aheads[ahead] * threads.get(each, 99.0)

    def without_threads(settings: Settings) -> float:
        return costs(replace(settings, threads=4))

    with pytest.MonkeyPatch.context() as patch:
        _, best = searched(patch, without_threads, folders=[Folder()])
    assert best.batch_s == min(of_workers) * min(of_ahead) * threads[4]
    with pytest.MonkeyPatch.context() as patch:
        loader = DataLoader(range(9), batch_size=4)
        _, best = searched(
            patch, lambda one: costs(replace(one, workers=0)), loader=loader, folders=[Folder()]
        )
    assert best.batch_s == pytest.approx(workers[0] * min(of_ahead) * min(of_threads))
