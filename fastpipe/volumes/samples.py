"""The patches of volumes: what a dataset of any framework is made of."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import default_file_arrays
from fastpipe.core.array_samples import Form, checked_threads, drawn_substitute
from fastpipe.core.bad_samples import Item, is_of_samples
from fastpipe.core.keys import sample_seed
from fastpipe.core.order import TouredSamples
from fastpipe.core.pool import Process
from fastpipe.core.reads import Reading, ReadPolicy, Started
from fastpipe.core.types import Key
from fastpipe.options import BadSamples, Cache, Stage
from fastpipe.sampling import Sampling, Uniform
from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places, keys_of
from fastpipe.volumes.reader import (
    Padding,
    WithMargin,
    check_held,
    checked_margin,
    checked_nan,
    checked_size,
    filling,
)
from fastpipe.volumes.runtime import Options, Runtime
from fastpipe.volumes.sampling import places_of
from fastpipe.volumes.sources import PatchPlan, opened_roles
from fastpipe.volumes.stock import SlicedPatches
from fastpipe.volumes.tours import Touring
from fastpipe.volumes.units import PatchChunks, Remembered, budget_of, planned_room
from fastpipe.volumes.volume import DamagedUnitError, Int64Array

__all__ = ["PatchSamples"]

_MOST_DRAWN = 101  # random places of which substitutes are drawn, where an epoch has fewer
_MOST_EXPECTED = 1 << 23  # uses of parts of volumes in an epoch, to list them before it

_is_bad = partial(is_of_samples, damaged=DamagedUnitError)


class PatchSamples(TouredSamples):
    """Patches of volumes.

    Attributes:
        cache, nan, bad_samples, threads: these options; what is changed counts from the next batch on.
    """

    seed: int | None = None

    def __init__(
        self,
        process: Callable[[int | str, str], Process],
        volume: Any,
        patch_size: Sequence[int],
        *,
        labels: Any,
        mask: Any,
        sampling: Sampling | None,
        padding: Any,
        margin: Any,
        cache: Cache | Literal["auto", "ram", "off"],
        stage: Stage | str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
        nan: Literal["keep", "error"] | float,
        bad_samples: BadSamples | Literal["raise", "replace", "skip"],
        threads: int | Literal["auto"],
    ) -> None:
        self._process = process
        self.patch_size = checked_size(patch_size)
        self.margin = checked_margin(margin, self.patch_size)
        self._cut = tuple(size + 2 * more for size, more in zip(self.patch_size, self.margin, strict=True))
        self._padding = Padding.of(padding)
        self.volume, self.labels, self.mask, self.padding = volume, labels, mask, padding
        self.cache = Cache.of(cache)
        self.bad_samples = BadSamples.of(bad_samples)
        self.threads = checked_threads(threads)
        self.stage = None if stage is None else Stage.of(stage)
        self._roles, self._remote = opened_roles(
            volume, labels, mask, len(self.patch_size), may_write=self.cache.where != "off",
            storage_options=storage_options, stage=self.stage,
        )  # fmt: skip
        self._chunks = PatchChunks.of(self._roles, self._cut)
        self.nan = checked_nan(nan, self._roles[0].dtype)
        for role in self._roles:
            self._padding.check(role.name, role.dtype)
        first = self._roles[0]
        if self.nan not in ("keep", "error") and first.dtype.kind in "fc":
            check_held(self.nan, first.dtype, "nan=")
        count = len(first.volumes)
        shapes, titles = [first.spatial(n) for n in range(count)], [one.name for one in first.volumes]
        self._space = PatchSpace(shapes, self.patch_size, titles, self._padding.pads)
        self.sampling = sampling or Uniform(filling(self._space))
        kept = None if self.cache.where == "off" else default_file_arrays()
        self._own_places = places_of(self.sampling, self._space, self._roles, self._padding.pads, kept)
        self._places: PatchPlaces = self._own_places
        cut_space = self._space
        if any(self.margin):  # which may be beyond the volume, wherever the patch is
            self._places = WithMargin(self._own_places, self.margin)
            cut_space = PatchSpace(shapes, self._cut, titles, pads=True)
        names = tuple(role.name for role in self._roles)
        self._form = Form("tuple" if len(names) > 1 else "value", (), names)
        self._remembered = Remembered(
            self._roles, budget_of(self.cache), is_fixed=self.cache.max_bytes != "auto"
        )
        self._most_uses = self._remembered.most_uses(self._cut)
        self._touring = Touring(self._roles, cut_space, self._places, planned_room(self.cache))
        self._runtime: Runtime | None = None

    def __len__(self) -> int:
        return self._places.count

    def __getstate__(self) -> dict[str, Any]:
        # Threads and open files stay here; the copy has its own when it needs them.
        return {**self.__dict__, "_runtime": None}

    @property
    def kinds(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """For each of a sample's values the type of its elements, and its shape."""
        return [(role.dtype, (*role.lead, *self._cut)) for role in self._roles]

    def places(self, epoch: int = 0) -> tuple[Int64Array, Int64Array]:
        """Where the patches of an epoch are.

        Args:
            epoch: its number; the dataset's ``seed`` is taken, or 0.

        Returns:
            int64 (N,), the number of each patch's volume; int64 (N, D), where it begins there, without its
            margin.
        """
        return self._own_places.places(self.seed or 0, epoch, np.arange(len(self)))

    def locality_groups(self, epoch: int = 0) -> Int64Array:
        """The group of each sample: int64 (N,).  Patches of one group begin in the same unit of a volume,
        the least of it that is decoded by itself."""
        return self._touring.groups(self._places.places(self.seed or 0, epoch, np.arange(len(self))))

    @property
    def amplification(self) -> float:
        """Bytes that were decoded for each that was used, so far, in all processes that share the memory."""
        decoded, used = self._running().counts.nbytes
        return decoded / max(1, used)

    @property
    def downloaded(self) -> tuple[int, int]:
        """Objects and bytes that this process has fetched from stores."""
        return (0, 0) if self._remote is None else self._remote.downloaded

    def close(self) -> None:
        """End the threads of this process, and let go of stage and stores, as a dataset that is dropped does
        by itself; the next use begins anew."""
        runtime, self._runtime = self._runtime, None
        if self._remote is not None:
            self._remote.close()
        if runtime is not None:
            runtime.close()

    @property
    def plan(self) -> PatchPlan:
        """What is read how; ``print`` it."""
        decoded, used = self._running().counts.nbytes
        return PatchPlan(self._roles, self._cut, self._remembered.note, decoded / used if used else None)

    @property
    def _beyond(self) -> Padding:
        """What is beyond the ends of volumes: of patches that fit, margins may not."""
        return self._padding if self._padding.pads or not any(self.margin) else Padding("constant")

    def _sliced(self) -> SlicedPatches:
        """The same patches without fastpipe."""
        return SlicedPatches(self._roles, self._places, self._beyond, self.nan, self._cut)

    # ---- orders -------------------------------------------------------------------------------

    def _tour_window(self) -> int:
        return self._touring.planned(None)[0]

    def _tour_ranks(self, window: int, seed: int, epoch: int) -> Int64Array:
        return self._touring.ranks(window, seed, epoch)

    def _tour_about(self, window: int) -> str:
        return f"{self.sampling!r} in {self._touring.about(window)}"

    def _tour_amplification(self, window: int) -> float:
        return self._touring.planned(window)[2]

    @property
    def _draws_samples(self) -> bool:
        """Whether which samples there are is drawn for each epoch."""
        return self._places.is_random

    def follow(self, batches: Callable[[], Iterator[Int64Array]], seed: int, epoch: int) -> None:
        """Have fetched ahead what an epoch needs; as of `BatchReader`."""
        if self._chunks is None:
            return
        self._chunks.expect_nothing()
        for store in self._chunks.stores:
            order = _followed(weakref.ref(self), store.location.store, batches(), seed, epoch)
            store.reader().follow(order, None, is_here=True)

    # ---- how a batch is made ------------------------------------------------------------------

    def _reading(
        self, indices: Any, samples: Int64Array, key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]],
    ) -> Reading:  # fmt: skip
        """How a batch is read; as of `BatchReader`."""
        places = self._places_of(indices, samples, key)
        found = list(keys_of(indices)) or ([(key.seed, key.epoch)] if key is not None and is_keyed else [])
        if len(found) == 1:
            self._expect_epoch(*found[0])
        batch = _Batch(self, samples, places, key, runtime, arrays)
        # What is counted there are places: those of the batch, and behind them those drawn in their stead.
        return Reading(
            batch.start, batch.read_alone, np.arange(len(samples)),
            ReadPolicy(self.bad_samples.policy, runtime.log, _is_bad, batch.item),
            None if key is None else batch.substitute, batch.heard, lambda: batch.item(0).path,
        )  # fmt: skip

    def _places_of(self, indices: Sequence[int] | Int64Array, samples: Int64Array, key: Key | None) -> Places:
        """Where samples are."""
        if not self._places.is_random:
            return self._places.places(0, 0, samples)
        assert key is not None
        found = keys_of(indices)
        if not found:
            return self._places.places(key.seed, key.epoch, samples)
        volumes = np.empty(len(samples), np.int64)
        starts = np.empty((len(samples), len(self._cut)), np.int64)
        for (seed, epoch), rows in found.items():
            volumes[rows], starts[rows] = self._places.places(seed, epoch, samples[rows])
        return Places(volumes, starts)

    def _expect_epoch(
        self, seed: int, epoch: int, order: Callable[[], Int64Array | None] = lambda: None
    ) -> None:
        """Say which patches an epoch has, and in which order they are asked for, if that is known."""
        if self._remembered.keeps_all or len(self) * self._most_uses > _MOST_EXPECTED:
            return

        def uses() -> tuple[Callable[[int], Int64Array], bool]:
            given = order()
            indices = np.arange(len(self)) if given is None else given
            places = self._places.places(seed, epoch, indices)
            return self._remembered.uses(places, self._cut), given is not None

        self._running().expect(seed, epoch, uses)

    def _item(self, index: int, places: Places, place: int) -> Item:
        volume = self._roles[0].volumes[int(places.volumes[place])]
        size, start = "×".join(map(str, self._cut)), places.starts[place].tolist()
        return Item(index, f"{volume.name}, patch of {size} at {tuple(start)}")

    def _running(self) -> Runtime:
        """Threads, open volumes and memory of this process, made when first needed."""
        runtime, options = self._runtime, Options(self.bad_samples, self.threads, self._beyond, self.nan)
        if runtime is None or not runtime.fits(options):
            process = self._process(self.threads, "fastpipe-patch")
            runtime = self._runtime = Runtime(
                options, self._roles, self._cut, self._remembered, process, self._chunks
            )
        return runtime


def _followed(
    living: weakref.ref[PatchSamples], name: str, batches: Iterator[Int64Array], seed: int,
    epoch: int,
) -> Iterator[Int64Array]:  # fmt: skip
    """The objects of a store that batches will need, as long as the samples are there: whoever goes on with
    this must not keep them."""
    samples = living()
    foreseen = None if samples is None else samples._remembered.foreseen(samples._remembered.slots())
    del samples
    for batch in batches:
        samples = living()
        if samples is None or samples._chunks is None or foreseen is None:
            return
        chunks = samples._chunks
        places = samples._places.places(seed, epoch, batch)
        store = next(one for one in chunks.stores if one.location.store == name)
        rows = chunks.foreseen(store, places, foreseen)
        chunks.expect(store, places, rows)
        del samples, chunks, store
        yield rows


class _Batch:
    """The places of a batch, and those that were drawn in the place of bad ones."""

    def __init__(
        self,
        dataset: PatchSamples,
        samples: Int64Array,
        places: Places,
        key: Key | None,
        runtime: Runtime,
        arrays: Sequence[npt.NDArray[Any]],
    ) -> None:
        self._dataset, self._samples, self._places, self._key = dataset, samples, places, key
        self._runtime, self._arrays = runtime, arrays
        self._rows = list(range(len(samples)))  # for which each place is
        self._started: tuple[Places, Int64Array, Started] | None = None

    def start(self, places: Int64Array, rows: Int64Array) -> Started:
        """What is to be done to have patches at rows of the batch."""
        at = self._at(places)
        started = self._runtime.start(at, rows, self._arrays)
        self._started = at, rows, started
        return started

    def heard(self, _: Any) -> None:
        """Hear that the core has done its part."""
        started, self._started = self._started, None
        if started is not None:
            self._runtime.heard(*started)

    def read_alone(self, place: int, row: int) -> None:
        """Read one patch."""
        self._runtime.read_alone(self._at(np.array([place])), row, self._arrays)

    def _at(self, places: Int64Array) -> Places:
        volumes, starts = self._places
        return Places(volumes[places], starts[places])

    def item(self, place: int) -> Item:
        """What is said of a patch."""
        return self._dataset._item(int(self._samples[self._rows[place]]), self._places, place)

    def substitute(self, row: int, attempt: int) -> int | None:
        """Another patch: the ``attempt``-th in a sequence that the key of the one it replaces draws."""
        key, places = self._key, self._dataset._places
        assert key is not None
        # Of random places any is another one, however few there are in an epoch.
        count = max(len(self._dataset), _MOST_DRAWN) if places.is_random else len(self._dataset)
        other = drawn_substitute(count, self._samples, key, row, attempt)
        if other is None:
            return None
        seed = sample_seed(key.seed, key.epoch, int(key.draws[row]))
        found = places.places(seed, attempt, np.array([other % len(self._dataset)]))
        self._rows.append(row)
        self._places = Places(*(np.concatenate(pair) for pair in zip(self._places, found, strict=True)))
        return len(self._places.volumes) - 1
