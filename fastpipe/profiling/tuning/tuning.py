"""``autotune``: a loader with the settings that are best here, found by measuring."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from fastpipe.console import PlainTable, print_line
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus, free_memory
from fastpipe.core.text import in_duration
from fastpipe.errors import OptionError
from fastpipe.profiling.epochs import WatchedLoader
from fastpipe.profiling.shown import Shown
from fastpipe.profiling.tuning.search import Search
from fastpipe.profiling.tuning.settings import Base, Settings
from fastpipe.profiling.tuning.trials import Trial

__all__ = ["Tuning", "autotune"]

_PART = 0.5  # of the memory that is free


@dataclass(frozen=True, repr=False)
class Tuning(Shown):
    """What :func:`fastpipe.autotune` has found; ``print`` it.

    Attributes:
        loader: a ``FastLoader`` with the best settings, ready.
        best, before: settings, measured.
        trials: all that was tried.
        notes: why nothing else was tried.
        config: the best settings, as arguments to paste.
        seconds: that it took.
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
        """How many times as fast a batch, with its step if there is one, comes as before."""
        return self.before.batch_s / self.best.batch_s

    def show(self, console: Console) -> None:
        """Print it on a console."""
        print_line(console, self._verdict, style="bold")
        print_line(console, f"    {self.config}")
        for note in self.notes:
            print_line(console, note)
        table = PlainTable()
        table.add_column("settings")
        for name in ("a batch in", "spread", "waiting", "memory", "measured"):
            table.add_column(name, justify="right")
        for trial in sorted(self.trials, key=lambda one: one.batch_s):
            table.add_row(*self._cells(trial), style="bold" if trial is self.best else "")
        console.print(table)

    @property
    def _verdict(self) -> str:
        now, then = in_duration(self.best.batch_s), in_duration(self.before.batch_s)
        if self.best is self.before:
            return f"{now} a batch with the settings that it has: nothing better was found than"
        return f"{then} → {now} a batch, {self.gain:.2f}×, in {self.seconds:.0f} s of measuring"

    def _told(self, trial: Trial) -> str:
        return trial.settings.told(self.before.settings)

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        if trial.batch_s == float("inf"):
            return self._told(trial), trial.why or "not measured", "", "", "", ""
        memory = "" if trial.memory is None else f"{trial.memory / 1e6:,.0f} MB"
        return (
            self._told(trial), in_duration(trial.batch_s), f"{trial.spread:.1%}", f"{trial.stall:.0%}",
            memory, f"{len(trial.measured)}×",
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Everything but the loader, as plain numbers, texts, lists and dictionaries."""
        return {
            "config": self.config, "gain": self.gain, "seconds": self.seconds, "notes": list(self.notes),
            "trials": [
                {"settings": self._told(one), "why": one.why, "is_best": one is self.best,
                 "is_before": one is self.before, "measured": [asdict(value) for value in one.measured]}
                for one in self.trials
            ],
        }  # fmt: skip


def autotune(
    loader: Any,
    *,
    batch_size: int | None = None,
    step: Callable[[Any], object] | None = None,
    memory_budget: int | None = None,
    seconds: float = 30.0,
) -> Tuning:
    """Find the settings with which a loader is fastest here: workers, batches ahead, threads, decoder, cache.

    One setting after the other is changed, then those around the best; each is measured on the loader's own
    data, those that are close several times in turns.  Of settings that are equally good it takes those with
    the fewest processes.  What a batch holds, and the order of batches, stays the same.  A cache is measured
    as later epochs find it, on a part of the data, where it can hold all that a dataset decodes.

    It draws nothing from the global random generators, nor from the loader's.

    Args:
        loader: a ``DataLoader`` or ``FastLoader``; or a dataset, together with ``batch_size``, which is
            shuffled.
        batch_size: of the loader that a dataset gets.
        step: trains on a batch, so that the loader is measured beside what it is for.  What it trains is not
            worth keeping.  As soon as it hardly waits for data the search ends.  None for the loader alone.
        memory_budget: bytes that a loader may take beyond what this process has: its worker processes,
            the batches that are made ahead, and a cache.  Settings that took more, or would, are left out.
            Default: half of the memory that is free to this process.
        seconds: after which nothing more is tried.

    Returns:
        A :class:`Tuning`: its ``loader`` is ready, its ``config`` is to be pasted.  Where ``threads``,
        decoder or cache of a dataset of fastpipe's were changed, they are set on that dataset.

    Raises:
        OptionError: an option cannot work, or the loader has no batch.
        Exception: what the loader raises with the settings that it has.

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
    search = Search(base, step, available_cpus(), budget, seconds)
    with _generators_kept(base.loader):
        best = search.run()
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
    """What is tuned, and whether it was a dataset."""
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
    """The settings as code."""
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


def _generators_of(loader: Any, kind: type) -> list[Any]:
    """Those of a loader, and of its samplers, also where one draws from another.

    Args:
        loader: the loader.
        kind: torch's generators.
    """
    found: dict[int, Any] = {}
    holders, at = [loader, loader.sampler, loader.batch_sampler], 0
    while at < len(holders):
        for value in getattr(holders[at], "__dict__", {}).values():
            if isinstance(value, (kind, np.random.Generator, np.random.RandomState, random.Random)):
                found[id(value)] = value
        inner = getattr(holders[at], "sampler", None)
        if inner is not None and all(inner is not one for one in holders):
            holders.append(inner)
        at += 1
    return list(found.values())


def _state_of(generator: Any) -> Callable[[], object]:
    """What puts a generator back to where it is."""
    if isinstance(generator, np.random.Generator):
        bits, found = generator.bit_generator, copy.deepcopy(generator.bit_generator.state)
        return lambda: setattr(bits, "state", found)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())


@contextlib.contextmanager
def _generators_kept(loader: Any) -> Iterator[None]:
    """Random generators go on afterwards as if nothing had happened."""
    torch = require("torch", extra="torch")
    own = [_state_of(one) for one in _generators_of(loader, torch.Generator)]
    python, numpy = random.getstate(), np.random.get_state()
    torchs = torch.get_rng_state()
    # A step may draw there, as dropout does.
    cudas = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        if cudas is not None:
            torch.cuda.set_rng_state_all(cudas)
        np.random.set_state(numpy)
        random.setstate(python)
        for put_back in own:
            put_back()
