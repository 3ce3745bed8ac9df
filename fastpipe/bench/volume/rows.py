"""The rows of the case that are loaders in this process."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

import fastpipe
from fastpipe.bench.loaders import Draws, touch
from fastpipe.bench.places import ZarrPatches, box_at, start_of
from fastpipe.bench.results import RowInfo
from fastpipe.bench.volume.data import Scroll
from fastpipe.core.extras import require

__all__ = [
    "COLD",
    "QUARTER",
    "TENTH",
    "WARM",
    "PatchSpec",
    "SlicedRow",
    "WholeEpochs",
    "patch_dataset",
    "patch_loader",
    "sliced_loader",
    "specs",
]

# Parts of the volume that may be remembered.
QUARTER, TENTH = 4, 10
COLD, WARM = "cold", "warm"

Kind = Literal["zarr", "slices", "tour", "uniform"]
_FAST = "FastPatchDataset + FastLoader"


@dataclass(frozen=True)
class PatchSpec:
    """One loader to measure.

    Attributes:
        section: ``"cold"``, where nothing that was decoded is remembered at first and then a quarter, or
            ``"warm"``, where everything is.
        kind: ``"zarr"`` slices Zarr arrays, ``"slices"`` those in memory; the others are fastpipe's:
            ``"tour"`` visits patches so that little is decoded twice, ``"uniform"`` in any order.
        label: its name in tables.
        group: as of `RowInfo`.
        num_workers: as for ``DataLoader``.
        note: what a reader should know about the row.
        threads: of ``fastpipe.FastPatchDataset``.
        name: its name in the JSON file, if not that of its section and kind.
    """

    section: str
    kind: Kind
    label: str
    group: Literal["replaced", "fastpipe", "peer"]
    num_workers: int = 0
    note: str = ""
    threads: int | Literal["auto"] = "auto"
    name: str = ""

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return self.name or f"{self.section}-{'replaced' if self.group == 'replaced' else self.kind}"

    @property
    def info(self) -> RowInfo:
        """What the report calls it."""
        return RowInfo(
            self.key, self.label, self.group, self.num_workers, "uint16 and uint8", self.note,
            section=self.section, unit="patches",
        )  # fmt: skip


def specs() -> list[PatchSpec]:
    """The loaders that are measured; that of scripts without fastpipe comes first in each section."""
    stock = "zarr-python + DataLoader(num_workers=1)"
    spawned, each_time = "spawned", "decodes each chunk anew for each patch"
    return [
        PatchSpec(COLD, "zarr", stock, "replaced", 1, f"{spawned}; {each_time}"),
        PatchSpec(COLD, "tour", f'{_FAST}, Shuffle(unit="group")', "fastpipe", note="places drawn uniformly"),
        PatchSpec(COLD, "uniform", f"{_FAST}, shuffle=True", "fastpipe", note="all orders equally likely"),
        PatchSpec(WARM, "zarr", stock, "replaced", 1, f"{spawned}; {each_time}"),
        PatchSpec(WARM, "uniform", f"{_FAST}, shuffle=True", "fastpipe", note="from the second epoch on"),
        PatchSpec(WARM, "slices", "slices of NumPy arrays + DataLoader(num_workers=0)", "peer"),
    ]  # fmt: skip


def patch_dataset(
    scroll: Scroll, budget: int, seed: int = 0, threads: int | Literal["auto"] = "auto"
) -> fastpipe.FastPatchDataset:
    """An epoch of patches of a volume and its labels.

    Args:
        scroll: the volume.
        budget: bytes that may be remembered.
        seed: decides the places.
        threads: as of the dataset.
    """
    values, labels = scroll.paths
    return fastpipe.FastPatchDataset(
        values, scroll.sizes.patch, labels=labels, sampling=fastpipe.sampling.Uniform(scroll.epoch),
        cache=fastpipe.Cache("ram", max_bytes=budget), seed=seed, threads=threads,
    )  # fmt: skip


def patch_loader(dataset: Any, batch_size: int, kind: str) -> Any:
    """A `FastLoader` of a dataset, on a ``"tour"`` or in ``"uniform"`` order."""
    shuffle = fastpipe.Shuffle(unit="group") if kind == "tour" else True
    return fastpipe.FastLoader(dataset, batch_size, shuffle)


class WholeEpochs:
    """A `Contender` of fastpipe's that goes through whole epochs.

    In the section ``"cold"`` each is the first of a new dataset, which is made before the clock starts; its
    loader, which plans a tour, is made after that.

    Args:
        spec: which loader.
        scroll: what it reads.
        batch_size: patches in a batch.

    Attributes:
        made_s: seconds that making each dataset took.
    """

    workers = 0

    def __init__(self, spec: PatchSpec, scroll: Scroll, batch_size: int) -> None:
        self.spec, self.key, self.chunk = spec, spec.key, scroll.epoch
        self.made_s: list[float] = []
        self._scroll, self._batch_size = scroll, batch_size
        self._loader: Any = None
        self._stages: Counter[str] = Counter()

    @property
    def budget(self) -> int:
        """Bytes that may be remembered: a part, or with room to spare all."""
        return self._scroll.nbytes // QUARTER if self.spec.section == COLD else 2 * self._scroll.nbytes

    def measure(self, count: int) -> float:
        """Consume so many patches; return the seconds it took."""
        return sum(self._epoch() for _ in range(count // self.chunk))

    def made(self, seed: int) -> tuple[fastpipe.FastPatchDataset, Any]:
        """A dataset that has remembered nothing, and its loader."""
        dataset = patch_dataset(self._scroll, self.budget, seed, self.spec.threads)
        return dataset, patch_loader(dataset, self._batch_size, self.spec.kind)

    def batches(self) -> Iterator[Any]:
        """The first epoch of a new dataset, which is opened and planned when the first batch is asked for."""
        yield from self.made(seed=len(self.made_s))[1]

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage that the loaders' clocks have counted so far."""
        return dict(self._stages)

    def plan(self) -> str:
        """What is read how."""
        plan = str(patch_dataset(self._scroll, self.budget).plan)
        return plan.replace(str(self._scroll.folder), self._scroll.folder.name)

    def close(self) -> None:
        """Let go of the loader, which ends its threads and frees its memory."""
        self._loader = None
        gc.collect()

    def _epoch(self) -> float:
        is_new = self._loader is None or self.spec.section == COLD
        if is_new:
            self.close()
            start = time.perf_counter()
            dataset = patch_dataset(self._scroll, self.budget, len(self.made_s), self.spec.threads)
            self.made_s.append(time.perf_counter() - start)
        seen = 0
        start = time.perf_counter()
        if is_new:  # an order that has to be planned is a part of the epoch
            self._loader = patch_loader(dataset, self._batch_size, self.spec.kind)
        before = dict(self._loader.clock.totals())
        for batch in self._loader:
            seen += touch(batch)
        seconds = time.perf_counter() - start
        for stage, total in self._loader.clock.totals().items():
            self._stages[stage] += total - before.get(stage, 0.0)
        if seen != self.chunk:
            raise RuntimeError(f"{self.spec.label} gave {seen} patches of {self.chunk}")
        return seconds


class SlicedRow:
    """A `Contender` that slices arrays patch by patch, in torch's ``DataLoader``.

    Args:
        spec: which loader.
        loader: the loader, which other rows of the same kind have too.
    """

    def __init__(self, spec: PatchSpec, loader: Any) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        self.chunk = loader.batch_size * max(1, spec.num_workers)
        self._loader = loader

    def measure(self, count: int) -> float:
        """Consume so many patches; return the seconds it took."""
        seen = 0
        start = time.perf_counter()
        for batch in self.batches(count):
            seen += touch(batch)
        seconds = time.perf_counter() - start
        if seen != count:
            raise RuntimeError(f"{self.spec.label} gave {seen} patches of {count}")
        return seconds

    def batches(self, count: int) -> Any:
        """An epoch of so many patches."""
        self._loader.sampler.length = count
        return self._loader

    def close(self) -> None:
        """Let go of the loader, which ends its workers."""
        self._loader = None
        gc.collect()


def sliced_loader(spec: PatchSpec, scroll: Scroll, batch_size: int) -> Any:
    """The loader of a row that slices arrays, with a sampler whose length may be set.

    Args:
        spec: which row.
        scroll: what it reads.
        batch_size: patches in a batch.
    """
    data = require("torch.utils.data", extra="torch")
    if spec.kind == "zarr":
        source: Any = ZarrPatches(scroll.paths, scroll.sizes.shape, scroll.sizes.patch, scroll.epoch)
    else:
        source = _MemoryPatches(scroll)
    # Zarr has threads of its own, of which a forked process has none: it would wait for ever.
    workers: dict[str, Any] = {"num_workers": spec.num_workers, "persistent_workers": spec.num_workers > 0}
    context = "spawn" if spec.num_workers else None
    draws = Draws(range(scroll.epoch), scroll.epoch)
    return data.DataLoader(source, batch_size, sampler=draws, multiprocessing_context=context, **workers)


class _MemoryPatches:
    """Slices of arrays in memory."""

    def __init__(self, scroll: Scroll) -> None:
        self._arrays, self._sizes, self._count = scroll.arrays, scroll.sizes, scroll.epoch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        start = start_of(self._sizes.shape, self._sizes.patch, index)
        box = box_at(start, self._sizes.patch)
        return tuple(array[box] for array in self._arrays)
