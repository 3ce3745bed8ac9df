"""The rows of the case that augment in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastpipe.bench.augment.data import Batches
from fastpipe.bench.augment.recipes import Recipe, chain_of, sampled
from fastpipe.bench.loaders import touch
from fastpipe.bench.results import RowInfo
from fastpipe.core.extras import require

__all__ = ["WAYS", "WHOSE", "AugmentRow", "Place", "Way", "own_rows", "ways_of"]


@dataclass(frozen=True)
class Way:
    """A row of fastpipe's in each section of a recipe.

    Attributes:
        kind: the end of its key.
        label: its name in tables.
        options: of ``augment.Compose``.
        apart: of one that does not compute what torchvision does, how far values may be apart on average.
        note: what a reader should know.
    """

    kind: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: float | None = None
    note: str = ""


# What scripts do where torchvision has nothing.
WHOSE = {"spectrograms": "slices in torch", "volumes": "NumPy and SciPy", "sequences": "NumPy"}
# Another way to apply a chain is another line here.
WAYS = (
    Way("batch", "augment.Compose"),
    Way("fused", "augment.Compose, fuse=True", {"fuse": True}, 0.3, "one resampling; changes pixels"),
)


_ON_HOST = ("volumes", "sequences")


@dataclass(frozen=True)
class Place:
    """A recipe with what it is applied to: a section of the result, or a single operation.

    Attributes:
        recipe: what is done.
        dtype: of the batch.
        device: where it is, ``"cpu"`` or ``"cuda"``.
    """

    recipe: Recipe
    dtype: str
    device: str = "cpu"

    @property
    def is_single(self) -> bool:
        """Whether it is a single operation."""
        return self.recipe.key.startswith("op-")

    @property
    def task(self) -> str:
        """Its name, whatever the device."""
        return f"{self.recipe.key}-{self.dtype}"

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return self.task if self.device == "cpu" else f"{self.task}-{self.device}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        where = "" if self.device == "cpu" else ", on CUDA"
        return f"{self.recipe.label}, {self.dtype}{where}"

    def info(self, kind: str, label: str, group: str, note: str = "") -> RowInfo:
        """What the report calls one of its rows."""
        return RowInfo(
            f"{self.key}-{kind}", label, group, None, "float32", note,
            section=self.key, unit=self.recipe.unit,
        )  # fmt: skip

    def given(self, batches: Batches) -> tuple[Any, ...]:
        """The batch, with labels where the recipe mixes, or what is given beside it."""
        images = batches.tensor(self.recipe.unit, self.dtype, self.device)
        if self.recipe.takes_more:
            return images, batches.more(self.recipe.unit, self.device)
        return (images, batches.labels(self.device)) if self.recipe.takes_labels else (images,)


class AugmentRow:
    """A `Contender` that augments one batch again and again.

    Args:
        key: its name.
        work: augments the batch once.
        batch_size: samples in it.
        device: where it is; the clock is read when a device has done everything.
        threads: how many threads torch may use; None for as many as it does by itself.
    """

    workers = 0

    def __init__(
        self,
        key: str,
        work: Callable[[], Any],
        batch_size: int,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.key, self.chunk = key, batch_size
        self._work, self._device, self._threads = work, device, threads

    def measure(self, count: int) -> float:
        """Augment so many samples; return the seconds it took."""
        with _threads(self._threads):
            self._wait()
            start = time.perf_counter()
            for _ in range(count // self.chunk):
                found = self._work()
                # To look at a number is to wait for the device.
                if self._device == "cpu":
                    touch(found)
            self._wait()
            return time.perf_counter() - start

    def close(self) -> None:
        """Let go of the batch."""
        self._work = lambda: None

    def _wait(self) -> None:
        if self._device != "cpu":
            require("torch", extra="torch").cuda.synchronize()


def own_rows(place: Place, batches: Batches) -> Iterator[tuple[RowInfo, AugmentRow]]:
    """The rows of a recipe in this process; what scripts do comes first.  Single operations have fewer.

    Args:
        place: the recipe.
        batches: what it is applied to.
    """
    recipe, dtype, given = place.recipe, place.dtype, place.given(batches)

    def row(
        kind: str, label: str, group: str, change: Any, note: str = "", threads: int | None = None
    ) -> tuple[RowInfo, AugmentRow]:
        info = place.info(kind, label, group, note)
        return info, AugmentRow(info.key, lambda: change(*given), len(given[0]), place.device, threads)

    stock, each = sampled(recipe, dtype), f"{WHOSE.get(recipe.unit, 'torchvision v2')}, sample by sample"
    if place.recipe.unit in _ON_HOST and place.device != "cpu":
        pass  # NumPy has nothing there
    elif place.device == "cpu":
        count = require("torch", extra="torch").get_num_threads()
        note = f"torch's default, {count} thread{'s' if count != 1 else ''}"
        yield row("replaced", each, "replaced", stock, note)
        if not place.is_single:
            yield row("worker", f"{each}, one thread", "replaced", stock, "as in a worker process", 1)
    else:
        yield row("replaced", each, "replaced", stock)
    for way in ways_of(place):
        yield row(way.kind, way.label, "fastpipe", chain_of(recipe, dtype, **way.options), way.note)


def ways_of(place: Place) -> tuple[Way, ...]:
    """The ways that are measured: of a single operation, and of what are no images, nothing can be fused."""
    return WAYS[:1] if place.is_single or place.recipe.unit != "images" else WAYS


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads within an operation."""
    if count is None:
        yield
        return
    torch = require("torch", extra="torch")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
