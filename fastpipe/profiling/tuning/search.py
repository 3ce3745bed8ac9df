"""The search for settings: one after the other, then around the best."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from fastpipe.core.processes import why_no_processes
from fastpipe.core.text import in_duration
from fastpipe.profiling.tuning.caching import cache_of_all, measure_kept
from fastpipe.profiling.tuning.settings import Base, Settings
from fastpipe.profiling.tuning.trials import OverBudgetError, Trial, measure, warm_up

__all__ = ["Search"]

_log = logging.getLogger("fastpipe")
_HOPELESS, _CLOSE = 1.25, 1.12  # times the best's time: measured once, and no more; measured more often
_ROUNDS, _MOST_ROUNDS = 3, 5
_SAME, _MOST_NOISE = 0.03, 0.05  # of a batch's time: no reason for more processes or memory
_NO_STALL = 0.02
_MOST_WORKERS, _MOST_AHEAD, _MOST_THREADS = 32, 16, 64
_SHARE = 1 / 60  # of all the time there is, for one measurement
_LEAST_S, _MOST_S = 0.2, 2.0


class Search:
    """Looks for the settings with which a batch takes least time.

    Args:
        base: the loader.
        step: called with each batch; None for nothing.
        cores: that this process may use.
        budget: bytes of memory that a loader may take; None for any.
        seconds: after which no more is tried.

    Attributes:
        trials: what was tried, in this order.
        notes: what was found, in words.
    """

    def __init__(
        self, base: Base, step: Callable[[Any], object] | None, cores: int, budget: int | None, seconds: float
    ) -> None:
        self._base, self._step, self._cores, self._budget = base, step, cores, budget
        self._began = perf_counter()
        self._until = self._began + seconds
        self._each_s = min(_MOST_S, max(_LEAST_S, seconds * _SHARE))
        self._by_settings: dict[Settings, Trial] = {}
        self._is_enough = self._is_warm = False
        self._warned: set[tuple[str, int]] = set()
        self.notes: list[str] = []

    @property
    def trials(self) -> list[Trial]:
        """What was tried."""
        return list(self._by_settings.values())

    def run(self) -> Trial:
        """Search; the best trial."""
        best = self._measured(self._base.settings)
        if best.why:
            return best
        for name, find in (
            ("worker processes", self._workers),
            ("batches ahead", self._ahead),
            ("threads", self._threads),
            ("decoder", self._decoders),
            ("around the best", self._around),
            ("cache", self._cache),
        ):
            if self._is_enough:
                self.notes.append(
                    f"ended before {name}: with a stall of {best.stall:.1%} a step has its data"
                )
                break
            if perf_counter() > self._until:
                self.notes.append(f"ended before {name}: the time was over")
                break
            best = find(best)
        return best

    # ---- one setting after the other -----------------------------------------------------------

    def _workers(self, best: Trial) -> Trial:
        base, now = self._base, best.settings
        if not base.is_sequence:
            self.notes.append(
                f"num_workers={now.workers} stays: what a {type(base.loader.dataset).__name__} gives may "
                "depend on it"
            )
            return best
        if why_none := why_no_processes():
            self.notes.append(f"no worker processes are tried: {why_none}")
            return self._best_of(best, [now.with_workers(0)] if now.workers else [])
        wanted = sorted({0, 1, self._cores // 2, self._cores, now.workers} - {now.workers})
        best = self._best_of(best, [now.with_workers(workers) for workers in wanted])
        while best.settings.workers >= max(1, self._cores) and not self._is_over:
            more = min(_MOST_WORKERS, 2 * best.settings.workers)
            found = self._best_of(best, [best.settings.with_workers(more)])
            if found is best:
                break
            best = found
        return best

    def _ahead(self, best: Trial) -> Trial:
        now = best.settings
        if not now.workers and not self._base.is_threaded:
            return best  # a batch is made when it is asked for
        return self._climb(best, lambda one, ahead: replace(one, ahead=ahead), [1, 4], _MOST_AHEAD)

    def _threads(self, best: Trial) -> Trial:
        if best.settings.threads != "auto":
            return best  # there are none, or the script says how many
        each = max(1, self._cores // max(1, best.settings.workers))
        values = sorted({1, each // 2, 2 * each} - {0, each})
        return self._climb(best, lambda one, threads: replace(one, threads=threads), values, _MOST_THREADS)

    def _decoders(self, best: Trial) -> Trial:
        if best.settings.backend != "auto":
            return best
        return self._best_of(best, [replace(best.settings, backend="pillow")])

    def _cache(self, best: Trial) -> Trial:
        """Last, as what is measured with a cache are later epochs."""
        base = self._base
        if len(base.folders) != 1 or base.loader.dataset is not base.folders[0] or not base.is_sequence:
            return best
        cache, note = cache_of_all(base.folders[0], self._budget)
        if note:
            self.notes.append(note)
        if cache is None:
            return best
        trial = self._trial(replace(best.settings, cache=cache))
        found = measure_kept(base, trial.settings, self._step, self._each_s, best.batch_s)
        if found is None:
            trial.why = "too few samples"
            return best
        trial.measured.append(replace(found, memory=(best.memory or 0) + int(cache.max_bytes)))
        if self._chosen(best, [best, trial]) is best:
            return best
        self.notes.append(f"with {cache!r} from the second epoch on")
        return trial

    def _around(self, best: Trial) -> Trial:
        """Once more, as settings depend on each other."""
        now, near = best.settings, []
        if self._base.is_sequence and not why_no_processes():
            near += [now.with_workers(workers) for workers in (now.workers - 1, now.workers + 1)
                     if 0 <= workers <= _MOST_WORKERS]  # fmt: skip
        if now.workers:
            near.append(replace(now, ahead=1 if now.ahead == "auto" else "auto"))
        return self._best_of(best, [one for one in near if one not in self._by_settings])

    def _climb(
        self, best: Trial, change: Callable[[Settings, int], Settings], values: Sequence[int], most: int
    ) -> Trial:
        """Some values, and twice the largest as long as that is better."""
        best = self._best_of(best, [change(best.settings, value) for value in values])
        largest = values[-1]
        while best.settings == change(best.settings, largest) and 2 * largest <= most and not self._is_over:
            largest *= 2
            best = self._best_of(best, [change(best.settings, largest)])
        return best

    # ---- measuring ------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._is_enough or perf_counter() > self._until

    def _best_of(self, best: Trial, others: Iterable[Settings]) -> Trial:
        """The better of what is best so far and of others, all of them measured in turns."""
        rivals = [best, *(self._trial(one) for one in others)]
        for number in range(_MOST_ROUNDS):
            leader = min(rivals, key=lambda one: one.batch_s)
            far = _HOPELESS if number < _ROUNDS else _CLOSE
            left = [
                one for one in rivals if not one.why and (not number or one.batch_s <= far * leader.batch_s)
            ]
            if number >= _ROUNDS and len(left) < 2:
                break
            for one in left:
                if self._is_over:
                    break
                if number or not one.measured:
                    self._measure(one)
        return self._chosen(best, rivals)

    def _chosen(self, best: Trial, rivals: Sequence[Trial]) -> Trial:
        """The fastest, or what is best so far where that is hardly slower."""
        fastest = min(rivals, key=lambda one: one.batch_s)
        margin = min(_MOST_NOISE, max(_SAME, 2 * best.spread, 2 * fastest.spread))
        if fastest is best or fastest.batch_s < best.batch_s / (1 + margin):
            return fastest
        # As good with fewer processes, and so with less memory.
        equal = [one for one in rivals if one.batch_s <= fastest.batch_s * (1 + margin)]
        return min(equal, key=lambda one: (one.settings.workers, one is not best))

    def _trial(self, settings: Settings) -> Trial:
        return self._by_settings.setdefault(settings, Trial(settings))

    def _measured(self, settings: Settings) -> Trial:
        trial = self._trial(settings)
        if not trial.measured and not trial.why:
            self._measure(trial)
        return trial

    def _measure(self, trial: Trial) -> None:
        settings = trial.settings
        likely = self._likely_memory(settings)
        if self._budget is not None and likely > self._budget:
            trial.why = f"would take about {likely / 1e6:,.0f} MB, and may take {self._budget / 1e6:,.0f}"
            return
        try:
            with self._base.dataset_with(settings), self._heard():
                loader = self._base.made(settings, for_trial=True)
                if not self._is_warm:  # what is imported and compiled once is no fault of the first settings
                    warm_up(loader)
                    self._is_warm = True
                skipped = max(2, settings.workers)
                found = measure(loader, self._step, self._each_s, skipped, self._budget)
        except OverBudgetError as error:
            trial.why = str(error)
            return
        except Exception as error:  # whatever it is: the script's own settings work
            if not any(one.measured for one in self.trials):
                raise
            trial.why = f"{type(error).__name__}: {error}"
            return
        if found is None:
            trial.why = "the loader has no batch"
            return
        trial.measured.append(found)
        said = settings.told(self._base.settings)
        _log.info("autotune: %s: a batch in %s", said, in_duration(found.batch_s))
        if self._step is not None and found.wait_s <= _NO_STALL * found.batch_s:
            self._is_enough = True

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Warnings, each of which many trials would give, are noted once."""
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            yield
        for one in given:
            if (one.filename, one.lineno) not in self._warned:
                self._warned.add((one.filename, one.lineno))
                self.notes.append(str(one.message))

    def _likely_memory(self, settings: Settings) -> int:
        """Bytes that a loader will take, by those of fewer workers and batches; 0 where none are known."""
        known = [
            (one.memory, max(1, one.settings.workers)) for one in self.trials
            if one.memory is not None and one.settings.workers
        ]  # fmt: skip
        if not settings.workers or not known:
            return 0
        memory, workers = max(known, key=lambda item: item[1])
        return memory * settings.workers // workers
