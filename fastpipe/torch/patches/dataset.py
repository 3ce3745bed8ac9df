"""``FastPatchDataset``: patches of volumes, read and decoded a batch at a time."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.engine.bad import Item
from fastpipe.engine.reads import ReadPolicy
from fastpipe.index.arrays import default_file_arrays
from fastpipe.index.patches import PatchSpace, Places
from fastpipe.options import BadSamples, Cache, Stage
from fastpipe.read.volumes.memory import received, sendable
from fastpipe.sampling import Sampling, Uniform
from fastpipe.torch.ahead import Lookout
from fastpipe.torch.locality import TouredSamples
from fastpipe.torch.patches.checks import checked_nan, checked_size, filling
from fastpipe.torch.patches.chunks import PatchChunks, PatchLookout
from fastpipe.torch.patches.code import JointCode
from fastpipe.torch.patches.indices import KeyedIndex, keys_of
from fastpipe.torch.patches.padding import Padding
from fastpipe.torch.patches.places import places_of
from fastpipe.torch.patches.plan import PatchPlan
from fastpipe.torch.patches.remembering import Remembered, budget_of, planned_room
from fastpipe.torch.patches.runtime import Options, PatchTask, Runtime, is_bad
from fastpipe.torch.patches.sources import opened_roles
from fastpipe.torch.patches.stock import SlicedDataset
from fastpipe.torch.patches.touring import Touring
from fastpipe.torch.rows.dataset import Reading, RowsDataset, checked_threads, drawn_substitute
from fastpipe.torch.rows.samples import Form, Value
from fastpipe.transform.keys import sample_seed
from fastpipe.types import Key

__all__ = ["FastPatchDataset"]

_GIVEN = ("volume", "labels", "mask")  # paths, or arrays
_MOST_DRAWN = 101  # random places of which substitutes are drawn, where an epoch has fewer
_MOST_EXPECTED = 1 << 20  # patches of an epoch, to know which parts of volumes are not used again


class FastPatchDataset(RowsDataset, TouredSamples):
    """Patches of volumes that are larger than memory, as NumPy cuts them from the whole array.

    What is decoded for a patch is remembered, within a budget that all threads and worker processes have
    together, for the patches that follow.  It works in any ``DataLoader``; in a :class:`fastpipe.FastLoader`
    the next batches are read while the current one is used, and ``shuffle=Shuffle(unit="group")`` visits
    patches in an order that decodes little more than it uses.

    Args:
        volume: a path (Zarr, N5, HDF5, TIFF, NIfTI, Blosc2's .b2nd, NumPy's .npy; behind a slash the name of
            an array within a file or folder; a folder of TIFF files is one volume), a URL of a Zarr array
            (which chunks it has is listed each time that a dataset is made), a pattern such as
            ``"cases/*/image.zarr"``, or a NumPy array, of which spawned workers get copies (of a
            ``numpy.memmap`` they map the file); or a sequence of these; or a table, a sequence of tuples
            (volume, labels[, mask]) or a ``.csv`` file with columns of these names.
        patch_size: voxels along each of the last dimensions; the dimensions in front, such as channels, are
            taken as a whole.
        labels, mask: volumes of the same voxels, cut at the same places: samples are then tuples.
        sampling: which patches an epoch has, one of :mod:`fastpipe.sampling`.  None is ``Uniform``, with as
            many patches as have the volumes' size.
        padding: what is beyond the ends of a volume: ``"error"`` refuses patches that reach there;
            ``"constant"``, ``("constant", value[, value of labels])``, ``"edge"``, ``"reflect"``,
            ``"symmetric"`` and ``"wrap"`` are those of ``numpy.pad``.  A patch that is larger than a volume
            is put around its middle.
        transform: called with the sample's values, ``transform(volume, labels, mask)`` as far as they are
            there; what it returns is the sample.
        seed: makes places, order and augmentation a pure function of (seed, epoch) under a ``FastLoader``.
            Anywhere else randomness comes from torch's global generator.
        cache: the budget for what is remembered, a :class:`fastpipe.Cache` of ``"ram"`` or its ``where``.
            ``"auto"`` is a quarter of the memory that is free; ``"off"`` remembers nothing.  Ranks of a job
            on one machine share it, as worker processes do.
        stage: a folder on a local disk where chunks of remote Zarr arrays are copied before they are needed,
            a :class:`fastpipe.Stage` or its path.  Without one they are fetched ahead into memory.  Where no
            volume is a URL, those that are Zarr are taken to be on a network, or a mount, and are staged.
        storage_options: for volumes that are URLs, such as ``"s3://bucket/scan.zarr"``: credentials and
            settings, as fsspec's file system for them takes them (``key``, ``secret``, ``endpoint_url`` …).
        nan: what is done about elements of ``volume`` that are no number: ``"keep"``, ``"error"`` (such a
            patch is bad), or a number in their place.
        bad_samples: what happens to patches that cannot be read, a :class:`fastpipe.BadSamples` or its
            policy's name.  ``"replace"`` takes another patch.
        threads: reading threads; ``"auto"`` is cores ÷ (ranks on this machine × workers).
        thread_safe: promise that ``transform`` may be called from several threads at once.

    Attributes:
        volume, labels, mask, patch_size, sampling, padding, transform, seed, stage, nan: as given.

    ``dataset[i]`` is an array (\\*channels, \\*patch_size) of the volume's dtype, or a tuple of such; a batch
    is collated to tensors.  With a random sampling the i-th patch of an epoch is a function of (seed, epoch,
    i).  ``print(dataset)`` says what is read how.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        VolumeError: a volume cannot be opened, or is damaged.
        StoreError: a store does not answer as it must; ``StoreAccessError`` where it does not let you in.
        OptionError: an option's value cannot work, or the volumes do not fit together.

    >>> from fastpipe.sampling import Grid
    >>> volume = np.arange(4 * 6 * 6, dtype=np.uint16).reshape(4, 6, 6)
    >>> dataset = FastPatchDataset(volume, (2, 3, 3), sampling=Grid())
    >>> len(dataset), dataset[7].tolist() == volume[2:4, 3:6, 3:6].tolist()
    (8, True)
    """

    _spare_nbytes = 1 << 26  # beside the budget, which is to be all

    def __init__(
        self,
        volume: Any,
        patch_size: Sequence[int],
        *,
        labels: Any = None,
        mask: Any = None,
        sampling: Sampling | None = None,
        padding: Any = "error",
        transform: Callable[..., Any] | None = None,
        seed: int | None = None,
        cache: Cache | Literal["auto", "ram", "off"] = "auto",
        stage: Stage | str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        nan: Literal["keep", "error"] | float = "keep",
        bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
        threads: int | Literal["auto"] = "auto",
        thread_safe: bool = False,
    ) -> None:
        self.patch_size = checked_size(patch_size)
        self._padding = Padding.of(padding)
        self.volume, self.labels, self.mask, self.padding = volume, labels, mask, padding
        self.transform, self.thread_safe = transform, thread_safe
        self.seed = seed if seed is None else operator.index(seed)
        self.cache = Cache.of(cache)
        self.nan = checked_nan(nan)
        self.bad_samples = BadSamples.of(bad_samples)
        self.threads = checked_threads(threads)
        self.stage = None if stage is None else Stage.of(stage)
        self._roles, self._remote = opened_roles(
            volume, labels, mask, len(self.patch_size), may_write=self.cache.where != "off",
            storage_options=storage_options, stage=self.stage,
        )  # fmt: skip
        self._chunks = PatchChunks.of(self._roles, self.patch_size)
        for role in self._roles:
            self._padding.check(role.name, role.dtype)
        first = self._roles[0]
        count = len(first.volumes)
        self._space = PatchSpace(
            [first.spatial(number) for number in range(count)], self.patch_size,
            [one.name for one in first.volumes], self._padding.pads,
        )  # fmt: skip
        self.sampling = sampling or Uniform(filling(self._space))
        kept = None if self.cache.where == "off" else default_file_arrays()
        self._places = places_of(self.sampling, self._space, self._roles, self._padding.pads, kept)
        names = tuple(role.name for role in self._roles)
        self._form = Form("tuple" if len(names) > 1 else "value", (), names)
        self._values = [Value.of(role.dtype, (*role.lead, *self.patch_size)) for role in self._roles]
        self._remembered = Remembered(
            self._roles, budget_of(self.cache), is_fixed=self.cache.max_bytes != "auto"
        )
        self._touring = Touring(self._roles, self._space, self._places, planned_room(self.cache))
        self._runtime: Runtime | None = None

    def __len__(self) -> int:
        return self._places.count

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: sendable(getattr(self, name)) for name in _GIVEN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {name: received(state[name]) for name in _GIVEN}

    def places(self, epoch: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the patches of an epoch are.

        Args:
            epoch: its number; the dataset's ``seed`` is taken, or 0.

        Returns:
            int64 (N,), the number of each patch's volume; int64 (N, D), where it begins there.
        """
        return self._places.places(self.seed or 0, epoch, np.arange(len(self)))

    def locality_groups(self, epoch: int = 0) -> npt.NDArray[np.int64]:
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
        if runtime is not None and runtime.pool is not None:
            runtime.pool.close()

    @property
    def plan(self) -> PatchPlan:
        """What is read how; ``print`` it."""
        decoded, used = self._running().counts.nbytes
        return PatchPlan(
            self._roles, self.patch_size, self._remembered.note, decoded / used if used else None
        )

    def __repr__(self) -> str:
        lines = [f"Number of samples: {len(self):,} ({self.sampling!r})", *self.plan.lines]
        if self._padding.pads:
            lines.append(f"Padding: {self.padding!r}")
        if self.nan != "keep":
            lines.append(f"NaN: {self.nan!r}")
        if self.transform is not None:
            lines.append(f"Transform: {self.transform!r}")
        if self.bad_samples != BadSamples():
            lines.append(f"Bad samples: {self.bad_samples!r}")
        if self.seed is not None:
            lines.append(f"Seed: {self.seed}")
        return "\n    ".join([f"{type(self).__name__}", *lines])

    # ---- orders -------------------------------------------------------------------------------

    def _lookout(self, dataset: Any, *, is_here: bool) -> Lookout | None:
        chunks, remote = self._chunks, self._remote
        if chunks is None or remote is None or not (is_here or remote.is_shared):
            return None
        return PatchLookout(
            dataset, self, self._places, chunks, self._remembered.foreseen, self._remembered.slots, is_here
        )

    def _tour_window(self) -> int:
        return self._touring.planned(None)[0]

    def _tour_ranks(self, window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        return self._touring.ranks(window, seed, epoch)

    def _tour_about(self, window: int) -> str:
        return f"{self.sampling!r} in {self._touring.about(window)}"

    def _tour_amplification(self, window: int) -> float:
        return self._touring.planned(window)[2]

    def _keyed_indices(self, indices: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Indices that say, to a stock loader's dataset, of which seed and epoch they are."""
        return [KeyedIndex(index, seed, epoch) for index in indices] if self._draws_samples else indices

    @property
    def _draws_samples(self) -> bool:
        return self._places.is_random

    def _places_in_files(self) -> npt.NDArray[np.int64] | None:
        is_known = len(self._space.shapes) > 1 and not self._places.is_random
        return self.places()[0] if is_known else None

    # ---- how a batch is made ------------------------------------------------------------------

    @property
    def _wants_key(self) -> bool:
        return self._places.is_random or self.transform is not None

    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]],
    ) -> Reading:  # fmt: skip
        places = self._places_of(indices, samples, key)
        self._expect_epoch(indices, key if is_keyed else None, runtime)
        batch = _Batch(self, samples, places, key, runtime, arrays)
        # What is counted there are places: those of the batch, and behind them those drawn in their stead.
        return Reading(
            batch.tasks, np.arange(len(samples)),
            ReadPolicy(self.bad_samples.policy, runtime.log, is_bad, batch.item),
            None if key is None else batch.substitute, lambda: batch.item(0).path,
        )  # fmt: skip

    def _places_of(
        self, indices: Sequence[int] | npt.NDArray[np.int64], samples: npt.NDArray[np.int64], key: Key | None
    ) -> Places:
        """Where samples are."""
        if not self._places.is_random:
            return self._places.places(0, 0, samples)
        assert key is not None
        found = keys_of(indices) or {(key.seed, key.epoch): np.arange(len(samples))}
        volumes = np.empty(len(samples), np.int64)
        starts = np.empty((len(samples), len(self.patch_size)), np.int64)
        for (seed, epoch), rows in found.items():
            volumes[rows], starts[rows] = self._places.places(seed, epoch, samples[rows])
        return Places(volumes, starts)

    def _expect_epoch(
        self,
        indices: Sequence[int] | npt.NDArray[np.int64],
        key: Key | None,
        runtime: Runtime,
    ) -> None:
        """Say which patches the epoch of a batch has, if that is known."""
        found = list(keys_of(indices)) or ([(key.seed, key.epoch)] if key is not None else [])
        if self._remembered.keeps_all or len(found) != 1 or len(self) > _MOST_EXPECTED:
            return
        seed, epoch = found[0]

        def uses() -> Callable[[int], npt.NDArray[np.int32]]:
            everything = self._places.places(seed, epoch, np.arange(len(self)))
            return self._remembered.uses(everything, self.patch_size)

        runtime.expect(seed, epoch, uses)

    def _item(self, index: int, places: Places, place: int) -> Item:
        volume = self._roles[0].volumes[int(places.volumes[place])]
        size, start = "×".join(map(str, self.patch_size)), places.starts[place].tolist()
        return Item(index, f"{volume.name}, patch of {size} at {tuple(start)}")

    def _code(self) -> JointCode:
        return JointCode(self._form, self.transform, self.thread_safe)

    def _stock(self) -> SlicedDataset:
        """The same samples without fastpipe."""
        return SlicedDataset(
            self._roles, self._places, self._padding, self.nan, self.patch_size, self._code()
        )

    def _running(self) -> Runtime:
        """Threads, open volumes and memory of this process, made when first needed."""
        runtime, options = self._runtime, Options(self.bad_samples, self.threads, self._padding, self.nan)
        if runtime is None or not runtime.fits(options):
            runtime = self._runtime = Runtime(options, self._roles, self._remembered, self._chunks)
        return runtime


class _Batch:
    """The places of a batch, and those that were drawn in the place of bad ones."""

    def __init__(
        self,
        dataset: FastPatchDataset,
        samples: npt.NDArray[np.int64],
        places: Places,
        key: Key | None,
        runtime: Runtime,
        arrays: Sequence[npt.NDArray[Any]],
    ) -> None:
        self._dataset, self._samples, self._places, self._key = dataset, samples, places, key
        self._runtime, self._arrays = runtime, arrays
        self._rows = list(range(len(samples)))  # for which each place is

    def tasks(self, places: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> list[PatchTask]:
        """What is to be done to have patches at rows of the batch."""
        volumes, starts = self._places
        needed = self._runtime.need(Places(volumes[places], starts[places]))
        found = []
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            outs = [array[row] for array in self._arrays]
            found += self._runtime.tasks(row, int(volumes[place]), starts[place].tolist(), outs, needed)
        return found

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
