"""The settings of a loader that ``autotune`` changes, and measurements of a loader with given settings."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np

import fastpipe
from fastpipe.core.caches import AUTO_SHARE
from fastpipe.core.extras import require
from fastpipe.core.machine import free_memory
from fastpipe.core.processes import memory_of_processes
from fastpipe.core.text import counted, in_bytes
from fastpipe.options import Cache, Decode
from fastpipe.tools.costs import epochs
from fastpipe.tools.loaders import is_map_style, processes_of

_CHECK_S = 0.25
_LOOKED_AT = 64  # number of images whose sizes stand for all images


@dataclass(frozen=True)
class Settings:
    workers: int
    ahead: int | Literal["auto"] = "auto"
    threads: int | Literal["auto"] | None = None
    backend: str | None = None
    cache: Cache | None = None

    def with_workers(self, workers: int) -> Settings:
        return self if workers == self.workers else replace(self, workers=workers, ahead="auto")

    @property
    def of_loader(self) -> dict[str, Any]:
        name = "prefetch_factor" if self.workers else "prefetch_batches"
        more = {} if self.ahead == "auto" else {name: self.ahead}
        processes = {"workers": "processes"} if self.workers else {}
        return {"num_workers": self.workers, **processes, **more}

    def of_dataset(self, before: Settings) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.threads not in (None, before.threads):
            found["threads"] = self.threads
        if self.backend not in (None, before.backend):
            found["decode"] = Decode(backend=self.backend)  # type: ignore[arg-type]
        if self.cache not in (None, before.cache):
            found["cache"] = self.cache
        return found

    def as_text(self, before: Settings) -> str:
        """Return in words who makes the batches, the loader's other arguments, and the dataset's arguments
        that differ from ``before``."""
        values = {**self.of_loader, **self.of_dataset(before)}
        who = counted(self.workers, "worker") if self.workers else "no workers"
        others = (name for name in values if name not in ("num_workers", "workers"))
        return ", ".join([who, *(f"{name}={values[name]!r}" for name in others)])


class Base:
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.folders = folders_behind(loader.dataset)
        self.is_sequence = is_map_style(loader.dataset)
        fast = fastpipe.accelerate(loader, num_workers=0)
        self.is_threaded = hasattr(fast, "clock")
        # For torchvision's folders, the trials switch fastpipe's own cache off.
        self._cache: dict[str, Any] = {}
        if self.is_threaded and not self.folders and Cache.of(getattr(loader, "cache", "auto")) == Cache():
            self._cache = {"cache": "off"}

    @property
    def settings(self) -> Settings:
        loader, workers = self.loader, processes_of(self.loader)
        ahead: Any = loader.prefetch_factor if workers else getattr(loader, "prefetch_batches", "auto")
        first = self.folders[0] if self.folders else None
        return Settings(
            workers, "auto" if workers and ahead == 2 else ahead, getattr(first, "threads", None),
            getattr(getattr(first, "decode", None), "backend", None), getattr(first, "cache", None),
        )  # fmt: skip

    @contextlib.contextmanager
    def dataset_with(self, settings: Settings) -> Iterator[None]:
        """In this context, fastpipe's datasets have ``settings``, and ``cache="auto"`` is switched off."""
        names = ("threads", "decode", "cache")
        before = [(one, name, vars(one)[name]) for one in self.folders for name in names if name in vars(one)]
        try:
            self.set(settings)
            for one in self.folders:
                if getattr(one, "cache", None) == Cache():
                    one.cache = Cache("off")
            yield
        finally:
            for one, name, value in before:
                setattr(one, name, value)

    def set(self, settings: Settings) -> None:
        for one in self.folders:
            if settings.threads is not None:
                one.threads = settings.threads
            if settings.backend is not None and settings.backend != one.decode.backend:
                # ``gpu_share`` was for the previous back end.
                one.decode = replace(one.decode, backend=settings.backend, gpu_share=None)
            if settings.cache is not None and settings.cache != one.cache:
                one.cache = settings.cache

    def made(self, settings: Settings, *, for_trial: bool = False) -> Any:
        return fastpipe.accelerate(self.loader, **settings.of_loader, **(self._cache if for_trial else {}))


def folders_behind(dataset: Any) -> list[Any]:
    data = require("torch.utils.data", extra="torch")
    if type(dataset) is data.Subset:
        return folders_behind(dataset.dataset)
    if type(dataset) is data.ConcatDataset:
        found = [folder for part in dataset.datasets for folder in folders_behind(part)]
        return list({id(folder): folder for folder in found}.values())
    return [dataset] if type(dataset).__module__.partition(".")[0] == "fastpipe" else []


class OverBudgetError(Exception):
    pass


@dataclass(frozen=True)
class Measured:
    batch_s: float
    wait_s: float
    memory: int | None


@dataclass
class Trial:
    settings: Settings
    measured: list[Measured] = field(default_factory=list)
    why: str = ""

    @property
    def batch_s(self) -> float:
        if self.why or not self.measured:
            return float("inf")
        return statistics.median(one.batch_s for one in self.measured)

    @property
    def spread(self) -> float:
        middle = self.batch_s
        if middle == float("inf"):
            return 0.0
        return statistics.median(abs(one.batch_s - middle) for one in self.measured) / middle

    @property
    def stall(self) -> float:
        return statistics.median(one.wait_s / one.batch_s for one in self.measured)

    @property
    def memory(self) -> int | None:
        return max((one.memory for one in self.measured if one.memory is not None), default=None)


def measure(
    loader: Any, step: Callable[[Any], object] | None, seconds: float, skipped: int, budget: int | None
) -> Measured | None:
    memory = _Memory(budget)

    def stepped(batch: Any) -> None:
        if step is not None:
            step(batch)
        memory.guard()

    took = waited = 0.0
    count, is_over = 0, False
    look = functools.partial(memory.guard, now=True)
    for epoch in epochs(
        loader.__iter__, skipped, seconds, step=stepped, look=look, limit=6.0, counts_start=True
    ):
        if not epoch.taken:
            return None
        took, waited, count = took + epoch.seconds, waited + epoch.waited, count + epoch.batches
        is_over = epoch.is_over
        if not is_over:
            memory.look()  # the workers still exist
    if is_over:
        iterator = iter(loader)  # keep its workers while their memory is measured
        for _ in zip(range(skipped), iterator, strict=False):  # until each worker has made a batch
            pass
        memory.look()
    return Measured(took / count, waited / count, memory.most)


def warm_up(loader: Any) -> None:
    next(iter(loader), None)


class _Memory:
    def __init__(self, budget: int | None) -> None:
        self._budget, self._before, self._free = budget, memory_of_processes(), free_memory()
        self._next = 0.0
        self.most = None if self._before is None else 0

    def look(self) -> None:
        if self._before is None or self.most is None:
            return
        taken = max(0, (memory_of_processes() or 0) - self._before)
        self.most = max(self.most, taken)
        if self._budget is not None and taken > self._budget:
            raise OverBudgetError(f"took {taken / 1e6:,.0f} MB, and may take {self._budget / 1e6:,.0f}")

    def guard(self, *, now: bool = False) -> None:
        at = perf_counter()
        if self._budget is None or self._free is None or (at < self._next and not now):
            return
        self._next = at + _CHECK_S
        free = free_memory()
        if free is not None and self._free - free > self._budget:
            self.look()


def cache_of_all(dataset: Any, budget: int | None) -> tuple[Cache | None, str]:
    nbytes = decoded_bytes(dataset)
    if nbytes is None or getattr(dataset, "cache", None) != Cache():
        return None, ""
    if is_all_kept(Cache(), nbytes):
        return None, f"cache='auto' keeps all decoded samples, {in_bytes(nbytes)}, from the second epoch on"
    if budget is not None and nbytes > budget:
        return None, f"no cache holds all decoded samples: {in_bytes(nbytes)} of {in_bytes(budget)}"
    return Cache("ram", max_bytes=nbytes), ""


def is_all_kept(cache: Cache, nbytes: int) -> bool:
    if cache.where in ("off", "disk"):
        return cache.where == "disk"
    if cache.max_bytes != "auto":
        return nbytes <= cache.max_bytes
    free = free_memory()
    return free is not None and nbytes <= free // AUTO_SHARE


def kept(loader: Any, dataset: Any, batches: int, **settings: Any) -> Any:
    data = require("torch.utils.data", extra="torch")
    size = loader.batch_size or 1
    first = data.Subset(dataset, range(min(len(dataset), batches * size)))
    stock = data.DataLoader(first, size, shuffle=True, collate_fn=loader.collate_fn)
    found = fastpipe.accelerate(stock, **settings)
    for _ in found:
        pass
    return found


def decoded_bytes(dataset: Any) -> int | None:
    if isinstance(dataset, fastpipe.FastHDF5Dataset):
        return int(len(dataset) * sum(dtype.itemsize * np.prod(shape) for dtype, shape in dataset.kinds))
    samples = getattr(dataset, "samples", None)
    if not samples or not os.path.isfile(samples[0][0]):  # not for samples in a bucket
        return None
    image = require("PIL.Image", extra="image")
    step = max(1, len(samples) // _LOOKED_AT)
    areas = []
    for path, _ in samples[::step]:
        try:
            with image.open(path) as opened:
                areas.append(opened.width * opened.height)
        except OSError:  # decoding reports the error
            continue
    return int(3 * np.mean(areas) * len(samples) * 1.05) if areas else None


def measure_kept(
    base: Base, settings: Settings, step: Callable[[Any], object] | None, seconds: float, batch_s: float
) -> Measured | None:
    with base.dataset_with(settings):
        batches = max(4, int(seconds / batch_s))
        loader = kept(base.loader, base.loader.dataset, batches, **settings.of_loader)
        return measure(loader, step, seconds, max(2, settings.workers), None)
