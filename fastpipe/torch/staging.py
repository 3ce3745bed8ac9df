"""Remote images of a dataset: listing them in their store, and fetching them."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.class_folders import IndexCache
from fastpipe.core.file_identity import states_of_objects
from fastpipe.core.files import is_url
from fastpipe.core.sample_tables import PackedPaths, RowTable, SampleTable, packed_paths
from fastpipe.core.shards import Samples
from fastpipe.errors import OptionError
from fastpipe.images.batch import Arriving
from fastpipe.images.reader import load_image
from fastpipe.options import Stage, Subset
from fastpipe.stores.class_folders import find_remote_classes, scan_store
from fastpipe.stores.fetching import ObjectReader, new_reader
from fastpipe.stores.listing import Listing
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.retrying import RetryingStore
from fastpipe.stores.shards import ShardStore, find_shards, read_remote_shards
from fastpipe.stores.stage import StageFolder
from fastpipe.torch.upcoming import UpcomingIndices
from fastpipe.torch.wrappers import indices_in

Int64Array = npt.NDArray[np.int64]

_log = logging.getLogger("fastpipe.stage")

_UNKNOWN = 1 << 62
_FOUND = 4096  # number of paths whose rows are cached; more samples are never made at the same time


class RemoteImages:
    """The images of one dataset in a store.  A *row* is the number of an object in the store's listing."""

    listing: Listing  # set by ``scan``

    def __init__(
        self, root: str, storage_options: Mapping[str, Any] | None, stage: Stage | None, refresh: bool
    ) -> None:
        self._bare, self._location = open_store(root, storage_options)
        # The common prefix of all paths.  A folder stays as the user wrote it, as in torchvision.
        self._root = self._location.root if is_url(root) else os.path.join(os.path.expanduser(root), "")
        self._store = RetryingStore(self._bare)
        self._stage, self._refresh = stage, refresh
        self._reader: ObjectReader | None = None
        self._pid = os.getpid()

    def find_classes(
        self,
        classes: Sequence[str] | Callable[[list[str]], Sequence[str]] | Subset | None,
        cache: IndexCache | None,
    ) -> tuple[list[str], dict[str, int]]:
        return find_remote_classes(
            self._store, self._root, self._location.prefix, classes, cache=cache, refresh=self._refresh
        )

    def scan(self, class_to_idx: Mapping[str, int], **options: Any) -> SampleTable:
        """List the samples; ``options`` are further arguments of ``scan_store``."""
        table, self.listing = scan_store(
            self._store, self._root, self._location.prefix, class_to_idx, refresh=self._refresh, **options
        )  # fmt: skip
        self._table = table.copy()
        if self._stage is not None:
            StageFolder(self._stage).close()  # raises an error now if the stage folder cannot be used
        return table

    @property
    def downloaded(self) -> tuple[int, int]:
        return (0, 0) if self._reader is None else self._reader.counted()

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and self._pid == os.getpid():
            reader.close()

    def describe(self) -> str:
        near = "fetched ahead" if self._stage is None else f"staged in {str(self._stage.dir)!r}"
        return f"{self._root}  →  {self._store.describe()}, {near}"

    def state(self, path: str) -> bytes:
        """Return 16 bytes that identify the listed version of an image."""
        row = self._row_of(path)
        return bytes(16) if row < 0 else self.listing.name(row, self._store.name)

    def read(self, path: str) -> bytes:
        row = self._row_of(path)
        return self.reader().read(path, row)

    def load(self, path: str) -> Any:
        """Return an image as torchvision's default loader would."""
        return load_image(self.read(path))

    def rows(self, samples: Any, positions: Int64Array) -> Int64Array:
        """Return the row (the number of the object in the listing) of each sample at ``positions``.  It is -1
        for a sample that was not listed."""
        if isinstance(samples, SampleTable):
            if samples.has_items_of(self._table):
                return positions
            paths = [samples.path(position) for position in positions.tolist()]
        else:
            paths = [os.fspath(samples[position][0]) for position in positions.tolist()]
        return np.array([self._row_of(path) for path in paths], np.int64)

    def arriving(
        self, rows: Int64Array, paths: Sequence[str], has_cache: bool
    ) -> tuple[PackedPaths, Arriving]:
        """Return the paths of the images in ``rows``, and an object that fetches images that are not staged
        yet.  The path of a staged image is that of its local copy."""
        reader, store = self.reader(), self._store.name
        staged = reader.files(rows)
        states = None
        if has_cache:
            states = states_of_objects(
                [bytes(16) if row < 0 else self.listing.name(row, store) for row in rows.tolist()]
            )
        away = [number for number, path in enumerate(staged) if path is None]
        arriving = Arriving(states, away, lambda number: reader.read(paths[number], int(rows[number])))
        return packed_paths(
            [path if one is None else one for one, path in zip(staged, paths, strict=True)]
        ), arriving

    def reader(self) -> ObjectReader:
        if self._reader is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._reader = new_reader(self._bare, self.listing, self._stage, self._key_of)
        return self._reader

    @cached_property
    def _row_of(self) -> Callable[[str], int]:
        """A function that returns the row of a path, or -1 if the path was not listed.  It caches results."""
        return lru_cache(_FOUND)(self.listing.find)

    @property
    def is_shared(self) -> bool:
        """True if other processes can use the images that this process fetches."""
        return self._stage is not None

    def _key_of(self, path: str) -> str:
        if path.startswith(self._root):
            return self._location.prefix + path[len(self._root) :]
        return self._location.key(path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_row_of"} | {"_reader": None}


class RemoteShards(RemoteImages):
    """The images of one dataset in tar files of a store.

    Args:
        patterns: URLs, see ``stores.shards.find_shards``.
    """

    def __init__(
        self, patterns: Sequence[str], storage_options: Mapping[str, Any] | None, stage: Stage | None
    ) -> None:
        location = Location.of(os.path.dirname(patterns[0]))
        super().__init__(location.store, storage_options, stage, refresh=False)
        found = find_shards(self._store, self._location, patterns)
        self.paths = [self._location.path(one.key) for one in found]
        self._shards = dict(zip(self.paths, found, strict=True))
        self._bare = ShardStore(self._bare)
        self._table = SampleTable()

    def read_samples(self, paths: Sequence[str], image: str, names: Sequence[str], keeps: bool) -> Samples:
        """Return the samples of some of ``paths``, as ``core.shards.read_shards``."""
        shards = [self._shards[path] for path in paths]
        samples, self.listing = read_remote_shards(self._store, self._location, shards, image, names, keeps)
        return samples

    def hold(self, samples: SampleTable | RowTable) -> None:
        """Take the samples of the dataset, to find their rows without a search."""
        if isinstance(samples, SampleTable):
            self._table = samples.copy()


def remote_images(
    root: str | Path, storage_options: Mapping[str, Any] | None, stage: Stage | None, refresh: bool
) -> RemoteImages | None:
    if is_url(root) or (stage is not None and storage_options is None):  # a network folder
        return RemoteImages(os.fspath(root), storage_options, stage, refresh)
    for name, is_given in {"storage_options": storage_options is not None, "refresh": refresh}.items():
        if is_given:
            raise OptionError(
                f"{name}= is for a root that is a URL, such as 's3://bucket/train'; got {str(root)!r}"
            )
    return None


class UpcomingRows:
    """The images of one dataset that a loader will need next, as rows: numbers of objects in a store's
    listing.  This object does not keep the dataset alive, because deleting the dataset must end its
    threads."""

    def __init__(
        self, upcoming: UpcomingIndices, dataset: Any, rows: Callable[[Int64Array], Int64Array]
    ) -> None:
        self._upcoming, self._dataset, self._rows = upcoming, weakref.ref(dataset), weakref.WeakMethod(rows)
        self._places: tuple[Int64Array, Int64Array] | None = None

    def order(self) -> Iterator[Int64Array]:
        """Yield arrays of rows in the order in which this process needs the images."""
        for indices in self._upcoming.indices():
            rows = self._of(indices)[1]
            yield rows[rows >= 0]

    @property
    def tag(self) -> bytes:
        return self._upcoming.tag()

    def next_uses(self, rows: Int64Array) -> Int64Array:
        """For each row, return when any rank needs it next, int64 (N,).  The unit is samples since the start
        of epoch 0.  The value 2**62 means that no later use is known."""
        upcoming = self._upcoming
        if self._places is None:
            self._places = self._in_order(0), self._in_order(1)
        # A row beyond the end of an order is not in it; the last element says so.
        first, second = (order[np.minimum(rows, len(order) - 1)] for order in self._places)
        is_in_epoch = (first >= upcoming.now) & (first < _UNKNOWN)
        now = np.where(is_in_epoch, first, second + upcoming.count)
        return np.where(now >= _UNKNOWN, _UNKNOWN, now + upcoming.epoch * upcoming.count)

    def _in_order(self, later: int) -> Int64Array:
        """Return the position of each row in the order of the epoch that begins ``later`` epochs after this
        one.  A row that is not in the order has the position 2**62; the last element has it, too."""
        places, rows = self._of(self._upcoming.whole(later))
        found = np.full(int(rows.max(initial=-1)) + 2, _UNKNOWN, np.int64)
        found[rows[::-1]] = places[::-1]  # keeps each row's first position; row -1 (not listed) is last
        found[-1] = _UNKNOWN
        return found

    def _of(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return two arrays: the places in ``indices`` of this dataset's samples, and the rows of these
        samples."""
        rows = self._rows()
        if rows is None:  # the dataset is gone
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        base: Any = rows
        places, local = indices_in(self._dataset(), base.__self__, indices)
        return places, rows(local)
