"""``autotune``: find the fastest settings of a loader on this machine by measurements."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from fastpipe.console import PlainTable, TextReport, print_line
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus, free_memory
from fastpipe.core.processes import why_no_processes
from fastpipe.core.progress import SlowWork
from fastpipe.core.text import in_duration
from fastpipe.errors import OptionError
from fastpipe.tools.epochs import WatchedLoader
from fastpipe.tools.loaders import check_no_path
from fastpipe.tools.trials import (
    Base,
    OverBudgetError,
    Settings,
    Trial,
    cache_of_all,
    measure,
    measure_kept,
    warm_up,
)

_PART = 0.5  # default ``memory_budget``, as a fraction of the free memory
_log = logging.getLogger("fastpipe")
_HOPELESS, _CLOSE = 1.25, 1.12  # multiples of the best time for a second and a fourth measurement
_ROUNDS, _MOST_ROUNDS = 3, 5
_SAME, _MOST_NOISE = 0.03, 0.05  # fractions of a batch's time: a smaller gain does not justify more processes
_NO_STALL = 0.02
_MOST_WORKERS, _MOST_AHEAD, _MOST_THREADS = 32, 16, 64
_SHARE = 1 / 60  # fraction of the total time for one measurement
_LEAST_S, _MOST_S = 0.2, 2.0


class Search:
    def __init__(
        self, base: Base, step: Callable[[Any], object] | None, cores: int, budget: int | None,
        seconds: float, say: Callable[[str], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._say = say
        self._base, self._step, self._cores, self._budget = base, step, cores, budget
        self._began = perf_counter()
        self._until = self._began + seconds
        self._each_s = min(_MOST_S, max(_LEAST_S, seconds * _SHARE))
        self._by_settings: dict[Settings, Trial] = {}
        self._is_enough = self._is_warm = False
        self.notes: list[str] = []

    @property
    def trials(self) -> list[Trial]:
        return list(self._by_settings.values())

    def run(self) -> Trial:
        best = self._trial(self._base.settings)
        self._measure(best)
        if best.why:
            return best
        for name, find in (
            ("worker processes", self._workers), ("batches ahead", self._ahead), ("threads", self._threads),
            ("decoder", self._decoders), ("around the best", self._around), ("cache", self._cache),
        ):  # fmt: skip
            if self._is_over:
                enough = (
                    f"with a stall of {best.stall:.1%}, steps hardly wait for data" if self._is_enough else ""
                )
                self.notes.append(f"ended before {name}: {enough or 'the time limit was reached'}")
                break
            best = find(best)
        return best

    def tell_best(self) -> None:
        """Print the fastest settings so far, after an interruption."""
        best = min(self.trials, key=lambda one: one.batch_s, default=None)
        if best is not None and best.measured:
            said = best.settings.as_text(self._base.settings)
            print(
                f"autotune was interrupted; the fastest settings so far: {said}: a batch in "
                f"{in_duration(best.batch_s)}", file=sys.stderr
            )  # fmt: skip

    def _workers(self, best: Trial) -> Trial:
        base, now = self._base, best.settings
        if not base.is_sequence:
            self.notes.append(
                f"num_workers={now.workers} is kept: the samples of a {type(base.loader.dataset).__name__} "
                "may depend on it"
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
            return best  # no batch is made ahead
        return self._climb(best, lambda one, ahead: replace(one, ahead=ahead), [1, 4], _MOST_AHEAD)

    def _threads(self, best: Trial) -> Trial:
        if best.settings.threads != "auto":
            return best  # there are no threads, or the script sets their number
        each = max(1, self._cores // max(1, best.settings.workers))
        values = sorted({1, each // 2, 2 * each} - {0, each})
        return self._climb(best, lambda one, threads: replace(one, threads=threads), values, _MOST_THREADS)

    def _decoders(self, best: Trial) -> Trial:
        if best.settings.backend != "auto":
            return best
        return self._best_of(best, [replace(best.settings, backend="pillow")])

    def _cache(self, best: Trial) -> Trial:
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
        best = self._best_of(best, [change(best.settings, value) for value in values])
        largest = values[-1]
        while best.settings == change(best.settings, largest) and 2 * largest <= most and not self._is_over:
            largest *= 2
            best = self._best_of(best, [change(best.settings, largest)])
        return best

    @property
    def _is_over(self) -> bool:
        return self._is_enough or perf_counter() > self._until

    def _best_of(self, best: Trial, others: Iterable[Settings]) -> Trial:
        rivals = [best, *(self._trial(one) for one in others)]
        for number in range(_MOST_ROUNDS):
            leader = min(rivals, key=lambda one: one.batch_s)
            far = _HOPELESS if number < _ROUNDS else _CLOSE
            left = [one for one in rivals if not (one.why or (number and one.batch_s > far * leader.batch_s))]
            if number >= _ROUNDS and len(left) < 2:
                break
            for one in left:
                if self._is_over:
                    break
                if number or not one.measured:
                    self._measure(one)
        return self._chosen(best, rivals)

    def _chosen(self, best: Trial, rivals: Sequence[Trial]) -> Trial:
        fastest = min(rivals, key=lambda one: one.batch_s)
        margin = min(_MOST_NOISE, max(_SAME, 2 * best.spread, 2 * fastest.spread))
        if fastest is best or fastest.batch_s < best.batch_s / (1 + margin):
            return fastest
        # Among equally fast settings, take the fewest processes, which need the least memory.
        equal = [one for one in rivals if one.batch_s <= fastest.batch_s * (1 + margin)]
        return min(equal, key=lambda one: (one.settings.workers, one is not best))

    def _trial(self, settings: Settings) -> Trial:
        return self._by_settings.setdefault(settings, Trial(settings))

    def _measure(self, trial: Trial) -> None:
        settings, found = trial.settings, None
        likely = self._likely_memory(settings)
        if self._budget is not None and likely > self._budget:
            trial.why = f"would take about {likely / 1e6:,.0f} MB, and may take {self._budget / 1e6:,.0f}"
            return
        self._tell(settings)
        try:
            with self._base.dataset_with(settings), self._noted_warnings():
                loader = self._base.made(settings, for_trial=True)
                if not self._is_warm:  # otherwise the first measurement would include imports and compilation
                    warm_up(loader)
                    self._is_warm = True
                skipped = max(2, settings.workers)
                found = measure(loader, self._step, self._each_s, skipped, self._budget)
        except OverBudgetError as error:
            trial.why = str(error)
        except Exception as error:  # any error of other settings is ignored: the script's own settings work
            if not any(one.measured for one in self.trials):
                raise
            trial.why = f"{type(error).__name__}: {error}"
        else:
            trial.why = "" if found is not None else "the loader has no batch"
        if trial.why or found is None:
            return
        trial.measured.append(found)
        said = settings.as_text(self._base.settings)
        _log.info("autotune: %s: a batch in %s", said, in_duration(found.batch_s))
        if self._step is not None and found.wait_s <= _NO_STALL * found.batch_s:
            self._is_enough = True

    def _tell(self, settings: Settings) -> None:
        best = min((one.batch_s for one in self.trials), default=float("inf"))
        found = "" if best == float("inf") else f"; the fastest so far makes a batch in {in_duration(best)}"
        left = max(0.0, self._until - perf_counter())
        self._say(f"{settings.as_text(self._base.settings)}{found}; at most {left:.0f} s left")

    @contextmanager
    def _noted_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            yield
        texts = dict.fromkeys(str(one.message) for one in given)
        self.notes += [text for text in texts if text not in self.notes]

    def _likely_memory(self, settings: Settings) -> int:
        known = [
            (one.memory, max(1, one.settings.workers)) for one in self.trials
            if one.memory is not None and one.settings.workers
        ]  # fmt: skip
        if not settings.workers or not known:
            return 0
        memory, workers = max(known, key=lambda item: item[1])
        return memory * settings.workers // workers


@dataclass(frozen=True, repr=False)
class Tuning(TextReport):
    """The result of :func:`fastpipe.autotune`.  ``print(tuning)`` shows it.

    Attributes:
        loader: a ``FastLoader`` with the best settings, ready to use.
        best: the best settings and their measurements.
        before: the original settings and their measurements.
        trials: all tried settings and their measurements.
        notes: remarks, such as the reasons why some settings were not tried.
        config: code with the best settings, to paste into a script.
        seconds: duration of the search.
    """

    loader: Any
    best: Trial
    before: Trial
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    config: str
    seconds: float

    @property
    def gain(self) -> float:
        """The time of a batch before tuning, divided by the time after (with ``step``, steps included)."""
        return self.before.batch_s / self.best.batch_s

    def show(self, console: Console) -> None:
        """Print the result on a console, in the width and colours of the console."""
        print_line(console, self._verdict, style="bold")
        if self.best is not self.before:
            print_line(console, f"    {self.config}")
        for note in self.notes:
            print_line(console, note)
        table = PlainTable()
        table.add_column("settings")
        for name in ("a batch in", "spread", "waits for data", "memory", "measured"):
            table.add_column(name, justify="right")
        for trial in sorted(self.trials, key=lambda one: one.batch_s):
            table.add_row(*self._cells(trial), style="bold" if trial is self.best else "")
        console.print(table)

    @property
    def _verdict(self) -> str:
        now, then = in_duration(self.best.batch_s), in_duration(self.before.batch_s)
        if self.best is self.before:
            return f"{now} a batch with the current settings: no better ones were found"
        return f"{then} → {now} a batch, {self.gain:.2f}×, in {self.seconds:.0f} s of measuring"

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        said = trial.settings.as_text(self.before.settings)
        if trial.batch_s == float("inf"):
            return said, trial.why or "not measured", "", "", "", ""
        memory = "" if trial.memory is None else f"{trial.memory / 1e6:,.0f} MB"
        rest = f"{trial.spread:.1%}", f"{trial.stall:.0%}", memory, f"{len(trial.measured)}×"
        return said, in_duration(trial.batch_s), *rest

    def as_json(self) -> dict[str, Any]:
        """Return the result without the loader as dicts, lists, strings and numbers for JSON."""
        return {
            "config": self.config, "gain": self.gain, "seconds": self.seconds, "notes": list(self.notes),
            "trials": [
                {"settings": one.settings.as_text(self.before.settings), "why": one.why,
                 "is_best": one is self.best, "is_before": one is self.before,
                 "measured": [asdict(value) for value in one.measured]}
                for one in self.trials
            ],
        }  # fmt: skip


def autotune(
    loader: Any, *, batch_size: int | None = None, step: Callable[[Any], object] | None = None,
    memory_budget: int | None = None, seconds: float = 30.0,
) -> Tuning:  # fmt: skip
    """Find the fastest settings of a loader on this machine: workers, prefetch, threads, decoder, cache.

    ``autotune`` changes one setting after another, and then tries settings close to the best settings.  The
    settings are measured on the loader's own data.  Settings that are nearly as fast as the best settings are
    measured several times, in turns.  Among equally fast settings, ``autotune`` chooses the settings with the
    fewest processes.  The content and the order of batches stay the same.  A cache is tried if it can hold
    all decoded samples of the dataset.  For this, the cache is filled with a part of the data, and reading
    this part again is measured.

    The global random generators and the loader's random generators are restored afterwards.

    Args:
        loader: a ``DataLoader``, a ``FastLoader``, or a dataset.  A dataset needs ``batch_size`` and is
            shuffled.
        batch_size: batch size for a dataset.
        step: function that trains on a batch.  The loader is then measured together with the training, and
            the search ends as soon as at most 2 % of the time are spent waiting for data.  Do not keep the
            model that ``step`` trains.  If ``step`` is None, only the loader is measured.
        memory_budget: number of bytes that a loader may use in addition to the present memory of this
            process, for worker processes, prefetched batches and a cache.  Settings that need more memory are
            not used.  The default is half of the memory that is free to this process.
        seconds: number of seconds after which no further settings are tried.

    Returns:
        A :class:`Tuning` with a ``loader`` to use and a ``config`` to paste.  If the best settings change
        ``threads``, the decoder or the cache of a fastpipe dataset, this dataset is changed in place.

    Raises:
        OptionError: an argument is invalid, or the loader has no batch.
        Exception: the loader raised an error with its own settings.

    >>> from torch.utils.data import DataLoader
    >>> tuning = autotune(DataLoader(range(640), batch_size=64), seconds=1)
    >>> len(list(tuning.loader)), tuning.config.startswith("fastpipe.accelerate(loader")
    (10, True)
    """
    began = perf_counter()
    if isinstance(loader, WatchedLoader):
        loader = loader.loader
    base, is_dataset = _base_of(loader, batch_size)
    if not seconds > 0:
        raise OptionError(f"seconds must be above 0, got {seconds!r}")
    if memory_budget is not None and not (isinstance(memory_budget, int) and memory_budget > 0):
        raise OptionError(f"memory_budget must be a number of bytes from 1, got {memory_budget!r}")
    budget = memory_budget
    if budget is None:
        free = free_memory()
        budget = None if free is None else int(_PART * free)
    with SlowWork("autotune") as progress, _generators_kept(base.loader):
        search = Search(base, step, available_cpus(), budget, seconds, progress)
        try:
            best = search.run()
        except KeyboardInterrupt:
            search.tell_best()
            raise
    if not best.measured:
        remedy = "; give it a larger memory_budget" if "may take" in best.why else ""
        raise OptionError(f"the loader cannot be measured with the settings that it has: {best.why}{remedy}")
    config = _config(base, best.settings, is_dataset)
    base.set(best.settings)
    return Tuning(
        base.made(best.settings), best, search.trials[0], tuple(search.trials), tuple(search.notes), config,
        perf_counter() - began,
    )  # fmt: skip


def _base_of(loader: Any, batch_size: int | None) -> tuple[Base, bool]:
    check_no_path(loader, "autotune")
    data = require("torch.utils.data", extra="torch")
    if isinstance(loader, data.DataLoader):
        if batch_size is not None:
            raise OptionError(
                f"batch_size={batch_size} is for a dataset; a {type(loader).__name__} has its own"
            )
        return Base(loader), False
    if not hasattr(type(loader), "__getitem__") or not hasattr(type(loader), "__len__"):
        raise OptionError(
            f"autotune takes a DataLoader, a FastLoader or a dataset with samples by index, got a "
            f"{type(loader).__name__}"
        )
    if batch_size is None:
        raise OptionError(f"autotune of a dataset ({type(loader).__name__}) needs its batch_size=")
    return Base(data.DataLoader(loader, batch_size, shuffle=True)), True


def _config(base: Base, settings: Settings, is_dataset: bool) -> str:
    of_loader = "".join(f", {name}={value!r}" for name, value in settings.of_loader.items())
    if is_dataset:
        text = f"FastLoader(dataset, batch_size={base.loader.batch_size}, shuffle=True{of_loader})"
    elif type(base.loader).__module__.partition(".")[0] == "fastpipe":
        text = f"FastLoader(…{of_loader})"
    else:
        text = f"fastpipe.accelerate(loader{of_loader})"
    changed = settings.of_dataset(base.settings)
    if changed and base.folders:
        more = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        text += f"  # over {type(base.folders[0]).__name__}(…, {more})"
    return text


@contextmanager
def _generators_kept(loader: Any) -> Iterator[None]:
    torch = require("torch", extra="torch")
    holders = [loader, loader.sampler, loader.batch_sampler]
    for holder in holders:  # a sampler may keep another sampler, under any name
        for inner in getattr(holder, "__dict__", {}).values():
            if isinstance(inner, torch.utils.data.Sampler) and all(inner is not one for one in holders):
                holders.append(inner)
    restore: list[Callable[[], object]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
    ]
    for one in itertools.chain(*(getattr(holder, "__dict__", {}).values() for holder in holders)):
        if isinstance(one, np.random.Generator):
            bits = one.bit_generator
            restore.append(functools.partial(setattr, bits, "state", bits.state))
        elif isinstance(one, random.Random):
            restore.append(functools.partial(one.setstate, one.getstate()))
        elif isinstance(one, (np.random.RandomState, torch.Generator)):
            restore.append(functools.partial(one.set_state, one.get_state()))
    # A step may use the random generators of a GPU, for instance for dropout.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for put_back in restore:
                put_back()
