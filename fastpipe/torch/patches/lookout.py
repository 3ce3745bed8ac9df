"""Chunks of remote volumes that a loader's order will need: fetched before they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.torch.ahead import Ahead
from fastpipe.torch.views import integers, located
from fastpipe.volumes.patch_chunks import PatchChunks, Units
from fastpipe.volumes.places import PatchPlaces, Places
from fastpipe.volumes.units import Foreseen

__all__ = ["PatchLookout"]

Int64Array = npt.NDArray[np.int64]


class PatchLookout:
    """Has chunks fetched before they are asked for.

    Args:
        dataset: the loader's.
        base: the dataset of patches behind it.
        places: where these are.
        chunks: which chunks they need.
        foreseen: begins a look at what will be remembered.
        units: gives where units are remembered.
        is_here: whether batches are made in this process; else chunks are only staged, for workers.
    """

    def __init__(
        self,
        dataset: Any,
        base: Any,
        places: PatchPlaces,
        chunks: PatchChunks,
        foreseen: Callable[[Units], Foreseen],
        units: Callable[[], Units],
        is_here: bool,
    ) -> None:
        self._dataset, self._base, self._places, self._chunks = dataset, base, places, chunks
        self._foreseen, self._units, self._is_here = foreseen, units, is_here
        self._ahead: Ahead | None = None

    def follow(self, ahead: Ahead) -> None:
        """An epoch begins, and this is ahead."""
        self._ahead = ahead
        self._chunks.expect_nothing()
        for store in self._chunks.stores:
            order = _order(weakref.ref(self), store.location.store, ahead)
            store.reader().follow(order, None, is_here=self._is_here)

    def asked(self, indices: Sequence[int]) -> None:
        """A batch of these indices was asked for."""
        if self._is_here or self._ahead is None:
            return  # a batch says so itself
        places = self._at(integers(indices), self._ahead, 0)
        if places is not None:
            self._chunks.need(places, self._units())

    def rows(self, store: str, indices: Int64Array, ahead: Ahead, later: int, foreseen: Foreseen) -> Any:
        """The objects of a store that a batch will need: int64 (N,); None if that is not known."""
        places = self._at(indices, ahead, later)
        if places is None:
            return None
        found = next(one for one in self._chunks.stores if one.location.store == store)
        rows = self._chunks.foreseen(found, places, foreseen)
        if self._is_here:
            self._chunks.expect(found, places, rows)
        return rows

    def look(self) -> Foreseen:
        """Begin a look at what will be remembered."""
        return self._foreseen(self._units())

    def _at(self, indices: Int64Array, ahead: Ahead, later: int) -> Places | None:
        """Where the patches of these indices are that are of this dataset; None if that is not known."""
        drawn_by = ahead.drawn_by(later) if self._places.is_random else (0, 0)
        if drawn_by is None:
            return None
        for end, _, local in located(self._dataset, indices):
            if end is self._base:
                return self._places.places(*drawn_by, np.where(local < 0, local + len(end), local))
        return self._places.places(*drawn_by, np.zeros(0, np.int64))


def _order(lookout: weakref.ref[PatchLookout], store: str, ahead: Ahead) -> Iterator[Int64Array]:
    """The objects of a store that will be needed, as long as anybody wants to know: whoever goes on with this
    must not keep the dataset."""
    seer = lookout()
    foreseen = None if seer is None else seer.look()
    del seer
    for later, indices in ahead.parts():
        seer = lookout()
        if seer is None or foreseen is None:
            return
        rows = seer.rows(store, indices, ahead, later, foreseen)
        del seer
        if rows is None:
            return
        yield rows
