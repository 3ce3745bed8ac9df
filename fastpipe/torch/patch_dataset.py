"""``FastPatchDataset``: patches of volumes, which are read and decoded a batch at a time."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.options import BadSamples, Cache, Rescale, Stage, ZScore
from fastpipe.sampling import Sampling
from fastpipe.torch.array_dataset import RowsDataset, StockSamples, UserCode
from fastpipe.torch.randomness import take_key
from fastpipe.torch.samples import Value
from fastpipe.torch.threads import process_of
from fastpipe.torch.upcoming import Prefetcher, UpcomingIndices
from fastpipe.torch.wrappers import indices_in
from fastpipe.volumes.places import KeyedIndex, Places
from fastpipe.volumes.raw import received, sendable
from fastpipe.volumes.samples import PatchSamples
from fastpipe.volumes.sources import Given
from fastpipe.volumes.units import Foreseen, PatchChunks

Int64Array = npt.NDArray[np.int64]


class PatchPrefetcher:
    """Fetches the chunks of remote volumes before they are needed.  If worker processes make the batches, the
    chunks are only copied to the stage folder."""

    def __init__(self, dataset: Any, base: FastPatchDataset, chunks: PatchChunks, is_here: bool) -> None:
        self._dataset, self._base, self._chunks, self._is_here = dataset, base, chunks, is_here
        self._upcoming: UpcomingIndices | None = None

    def begin_epoch(self, upcoming: UpcomingIndices) -> None:
        self._upcoming = upcoming
        self._chunks.expect_nothing()
        for store in self._chunks.stores:
            order = _order(weakref.ref(self), store.location.store, upcoming)
            store.reader().follow(order, None, is_here=self._is_here)

    def requested(self, indices: Sequence[int]) -> None:
        if self._is_here or self._upcoming is None:
            return  # the batch itself requests its chunks, and raises their errors
        places = self._at(indices, self._upcoming, 0)
        if places is not None:
            self._chunks.need(places, self._base._remembered.slots())

    def rows(
        self, store: str, indices: Int64Array, upcoming: UpcomingIndices, later: int, foreseen: Foreseen
    ) -> Any:
        """Return the numbers of a store's objects that samples will need, int64 (N,); None if unknown.

        ``indices`` are the samples' indices in the epoch that begins ``later`` epochs after the current
        epoch.
        """
        places = self._at(indices, upcoming, later)
        if places is None:
            return None
        found = next(one for one in self._chunks.stores if one.location.store == store)
        rows = self._chunks.foreseen(found, places, foreseen)
        if self._is_here:
            self._chunks.expect(found, places, rows)
        return rows

    def look(self) -> Foreseen:
        return self._base._remembered.foreseen(self._base._remembered.slots())

    def _at(
        self, indices: Sequence[int] | Int64Array, upcoming: UpcomingIndices, later: int
    ) -> Places | None:
        drawn_by = upcoming.drawn_by(later) if self._base._places.is_random else (0, 0)
        if drawn_by is None:
            return None
        local = indices_in(self._dataset, self._base, indices)[1]
        found: Places = self._base._places.places(*drawn_by, local)
        return found


def _order(
    prefetcher: weakref.ref[PatchPrefetcher], store: str, upcoming: UpcomingIndices
) -> Iterator[Int64Array]:
    """Yield the numbers of a store's objects that will be needed.  The generator does not keep the dataset
    alive."""
    seer = prefetcher()
    foreseen = None if seer is None else seer.look()
    del seer
    for later, indices in upcoming.parts():
        seer = prefetcher()
        if seer is None or foreseen is None:
            return
        rows = seer.rows(store, indices, upcoming, later, foreseen)
        del seer
        if rows is None:
            return
        yield rows


class _SlicedSamples(StockSamples):
    def _values(self, index: int) -> list[Any]:
        seed, epoch = 0, 0
        if self._rows.is_random:
            key, _ = take_key(1)
            seed, epoch = key.seed, key.epoch
        found: list[Any] = self._rows.values(index, seed, epoch)
        return found


_GIVEN = ("volume", "labels", "mask")  # arguments that are paths or arrays


class FastPatchDataset(PatchSamples, RowsDataset):
    """A dataset of patches of volumes, which may be larger than memory.

    Each patch equals NumPy's slice of the whole array.  Decoded data are kept for the next patches, within a
    budget that all threads and worker processes share.  The dataset works in any ``DataLoader``.  In a
    :class:`fastpipe.FastLoader`, the next batches are read while the current batch is used.
    ``shuffle=Shuffle(unit="group")`` orders the patches so that few data are decoded more than once.

    Args:
        volume: a path, URL, pattern or array, a sequence of these, or a table.  A path is that of a Zarr, N5,
            HDF5, TIFF, NIfTI, DICOM, Blosc2 (.b2nd) or NumPy (.npy) file or folder.  Append ``/name`` for an
            array inside it.  A URL is that of a Zarr array.  Each new dataset lists the array's chunks.  The
            matches of a pattern such as ``"cases/*/image.zarr"`` are in natural order (``case_2`` before
            ``case_10``).  Spawned workers get a copy of a NumPy array.  From a ``numpy.memmap``, they map the
            file.  A table is a sequence of tuples (volume, labels[, mask]) or a ``.csv`` file with columns of
            these names.  A folder of TIFF files is one volume whose slices are in natural order.  A list of
            TIFF files inside the sequence is one volume whose slices are in the order of the list:
            ``[sorted(glob.glob("scan/*.tif"))]``.  A folder or a list of DICOM files is one series, whose
            slices are sorted by position, as by SimpleITK.  If a folder has several series, append ``/UID``.
        patch_size: number of voxels along each of the last dimensions.  A patch contains all elements of the
            leading dimensions, such as channels.
        labels, mask: volumes with the same numbers of voxels as ``volume``.  Their patches are cut at the
            same positions.  Samples are then tuples.
        channel_dim: the dimension of channels, if it does not come first: ``-1`` for NIfTI images with
            channels or time points, whose shape is (x, y, z, channels).  It may be several dimensions.  In
            patches, they come first.  An array with no more dimensions than ``patch_size`` has no channels.
            Possible for NIfTI, for arrays in memory, and for arrays that lie uncompressed in one file.
        orientation: three letters, such as ``"RAS"``.  The dimensions of NIfTI images and DICOM series are
            reordered and reversed by each image's affine, as by MONAI's ``Orientation`` and
            ``nibabel.as_closest_canonical``.  Voxels are not resampled.
        sampling: how an epoch's patches are chosen, one of :mod:`fastpipe.sampling`.  None means ``Uniform``
            with a default number of patches: those of an epoch have as many voxels in total as the volumes.
        padding: how to get values outside a volume.  ``"error"`` raises an error for patches that reach
            outside.  ``"constant"``, ``("constant", value[, value of labels])``, ``"edge"``, ``"reflect"``,
            ``"symmetric"`` and ``"wrap"`` are those of ``numpy.pad``.  A patch that is larger than a volume
            is centred on the volume.
        margin: number of additional voxels to cut around each patch, on both sides: one number, or a number
            for each dimension.  The margin does not move the patches.  Without ``padding``, the margin is 0
            outside a volume.  An augmentation of :mod:`fastpipe.augment` defines the margin that it needs,
            and cuts the margin off again: ``margin=augment.nnunet_default(patch_size)``.
        normalize: how to normalise ``volume`` before patches are cut, by statistics of each whole volume:
            :class:`fastpipe.ZScore` or :class:`fastpipe.Rescale`.  Patches of ``volume`` are then float32.
            Padding follows, so its constant is a normalised value, as with MONAI's transforms.  The
            statistics are computed when the dataset is created, from all voxels.  They are kept in the user's
            cache folder until the volume's file changes, unless ``cache="off"``.
        transform: a function of the sample's values, ``transform(volume[, labels][, mask])``, that returns
            the new sample.
        seed: with a seed, positions, order and augmentation in a ``FastLoader`` depend only on the seed and
            the epoch.  In any other loader, random numbers come from torch's global generator.
        cache: how much memory may keep decoded data, a :class:`fastpipe.Cache` of ``"ram"`` or its ``where``.
            ``"auto"`` is a quarter of the free memory.  ``"off"`` keeps nothing.  The worker processes and
            the ranks of a job on one machine share this amount.
        stage: a folder on a local disk, a :class:`fastpipe.Stage` or its path.  The chunks of remote Zarr
            arrays are copied there before they are needed.  Without a stage, chunks are prefetched into
            memory.  If no volume is a URL, Zarr volumes are assumed to be on a network drive or a mounted
            bucket, and their chunks are copied.
        storage_options: for volumes that are URLs, such as ``"s3://bucket/scan.zarr"``: credentials and
            settings for their fsspec file system (``key``, ``secret``, ``endpoint_url`` …).
        nan: handling of NaN in ``volume``: ``"keep"``, ``"error"`` (a patch with NaN is a bad sample), or a
            number that replaces NaN, before ``normalize``.  A volume with NaN cannot be normalised without
            such a number.
        bad_samples: how to handle patches that cannot be read, a :class:`fastpipe.BadSamples` or its
            policy's name.  ``"replace"`` uses another patch instead.
        threads: number of reading threads.  ``"auto"`` is cores ÷ (ranks on this machine × workers), minus
            one if this is 8 or more and the loader has at most one worker.
        thread_safe: promise that ``transform`` may be called from several threads at once.

    Attributes:
        volume, labels, mask, patch_size, channel_dim, orientation, sampling, padding, normalize, transform,
            seed, stage, nan: as given.
        margin: number of voxels for each dimension.

    ``dataset[i]`` is an array (\\*channels, \\*patch_size), including the margin, of the volume's dtype, or
    float32 with ``normalize``.  With labels or a mask, it is a tuple of such arrays.  Batches are collated to
    tensors.  With random sampling, the i-th patch of an epoch depends only on (seed, epoch, i).
    ``print(dataset)`` shows how each volume is read.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        VolumeError: a volume cannot be opened, or is damaged.
        StoreError: a store sends no answer or a wrong answer.  If it denies access, the error is a
            ``StoreAccessError``.
        OptionError: an option's value cannot work, or the volumes do not fit together.

    >>> from fastpipe.sampling import Grid
    >>> volume = np.arange(4 * 6 * 6, dtype=np.uint16).reshape(4, 6, 6)
    >>> dataset = FastPatchDataset(volume, (2, 3, 3), sampling=Grid())
    >>> len(dataset), dataset[7].tolist() == volume[2:4, 3:6, 3:6].tolist()
    (8, True)
    """

    _spare_nbytes = 1 << 26  # small, because users expect the cache budget to limit all memory

    def __init__(
        self,
        volume: Any,
        patch_size: Sequence[int],
        *,
        labels: Any = None,
        mask: Any = None,
        channel_dim: int | Sequence[int] | None = None,
        orientation: str | None = None,
        sampling: Sampling | None = None,
        padding: Any = "error",
        margin: Any = 0,
        normalize: ZScore | Rescale | None = None,
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
        super().__init__(
            process_of, Given(volume, labels, mask, stage, storage_options, channel_dim, orientation),
            patch_size, sampling=sampling, padding=padding, margin=margin, normalize=normalize, cache=cache,
            nan=nan, bad_samples=bad_samples, threads=threads,
        )  # fmt: skip
        self.transform, self.thread_safe = transform, thread_safe
        self.seed = seed if seed is None else operator.index(seed)
        self._values = [Value.of(*kind) for kind in self.kinds]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: sendable(getattr(self, name)) for name in _GIVEN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {name: received(state[name]) for name in _GIVEN}

    def __repr__(self) -> str:
        lines = [f"Number of samples: {len(self):,} ({self.sampling!r})", *self.plan.lines]
        return self._shown(
            lines, Padding=self.padding if self._padding.pads else None,
            Margin=self.margin if any(self.margin) else None, NaN=None if self.nan == "keep" else self.nan,
            Orientation=self.orientation, Transform=self.transform,
        )  # fmt: skip

    # ---- orders -------------------------------------------------------------------------------

    def _prefetcher(self, dataset: Any, *, is_here: bool) -> Prefetcher | None:
        chunks, remote = self._chunks, self._remote
        if chunks is None or remote is None or not (is_here or remote.is_shared):
            return None
        return PatchPrefetcher(dataset, self, chunks, is_here)

    def _keyed_indices(self, indices: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Return indices that contain the seed and the epoch, for a dataset in torch's own loader."""
        return [KeyedIndex(index, seed, epoch) for index in indices] if self._draws_samples else indices

    def _places_in_files(self) -> npt.NDArray[np.int64] | None:
        is_known = len(self._space.shapes) > 1 and not self._places.is_random
        return self.places()[0] if is_known else None

    # ---- how a batch is made ------------------------------------------------------------------

    @property
    def _wants_key(self) -> bool:
        return self._places.is_random or self.transform is not None

    def _code(self) -> UserCode:
        return UserCode(self._form, self.transform, self.thread_safe, joint=True)

    def _stock(self) -> StockSamples:
        return _SlicedSamples(self._sliced(), self._code())
