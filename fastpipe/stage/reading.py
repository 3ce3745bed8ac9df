"""Reads the objects of a listing from wherever they are nearest: fetched ahead, staged, or in their store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from fastpipe.core.clock import ranged
from fastpipe.core.types import ListedObjects, NextUses, StagedObjects, Store
from fastpipe.stage.fetching import Fetcher
from fastpipe.stage.filling import fill, verify
from fastpipe.stage.pace import Pace
from fastpipe.stage.prefetch import Prefetcher
from fastpipe.stage.transfers import Int64Array, in_parts

__all__ = ["ObjectReader"]


class ObjectReader:
    """Reads objects, in one process; from any thread.

    Args:
        store: where they are.
        listing: which they are.
        staged: those on a local disk, or None.
        key_of: the key that a path stands for, listed or not.
        connections: requests under way at a time, or ``"auto"``.
        read_ahead: bytes that are fetched before they are needed.
        everything: whether all objects are to be staged as soon as may be, not only those that are needed
            next.
    """

    def __init__(
        self,
        store: Store,
        listing: ListedObjects,
        staged: StagedObjects | None,
        key_of: Callable[[str], str],
        *,
        connections: int | str,
        read_ahead: int,
        everything: bool = False,
    ) -> None:
        self._fetcher = Fetcher(store, listing, staged, Pace(connections))
        self._listing, self._staged, self._key_of = listing, staged, key_of
        self._everything = everything and staged is not None
        self.prefetcher = Prefetcher(self._fetcher, read_ahead, self._fetcher.pace, spills=self._everything)

    @ranged("read")
    def read(self, path: str, row: int) -> bytes:
        """An object's content.

        Args:
            path: its path.
            row: its row; -1 where it was not listed.

        Raises:
            FileNotFoundError: it is not in the store any more.
            StoreError: the store does not give it.
        """
        if row < 0:  # somebody put the path there
            return self._fetcher.timed(self._key_of(path), "").data
        return self.prefetcher.take(row)

    def files(self, rows: Int64Array) -> list[str | None]:
        """The files of objects that are staged, as far as is known without looking; None of those that are to
        be asked for by ``read``, as they are elsewhere or in memory already.

        Args:
            rows: which objects; -1 of one that was not listed.
        """
        if self._staged is None:
            return [None] * len(rows)
        near = (rows >= 0) & self._staged.have(rows)
        near &= ~self.prefetcher.have(rows)
        return [
            self._staged.file(row) if is_near else None
            for row, is_near in zip(rows.tolist(), near, strict=True)
        ]

    def need(self, rows: Int64Array) -> None:
        """Say that a batch of these rows is being made; -1 stands for one that was not listed."""
        rows = rows[rows >= 0]
        self.prefetcher.need(rows)
        if self._staged is not None:
            self._staged.used(rows)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Say that rows will not be read, or once less than was said.

        Args:
            rows: which.
            were_needed: whether ``need`` was told of them; else only the order has them now.
        """
        self.prefetcher.forgo(rows, were_needed=were_needed)

    def follow(self, order: Iterator[Int64Array], uses: NextUses | None, *, is_here: bool) -> None:
        """Fetch ahead of an order of rows.

        Args:
            order: rows in the order in which this process needs them.
            uses: when the machine needs them next, by which a full stage makes room.
            is_here: whether who needs them is in this process; else they are only staged.
        """
        if self._staged is not None:
            self._staged.follow(uses)
        if self._everything:
            order = chain(order, in_parts(np.arange(len(self._listing), dtype=np.int64)))
        self.prefetcher.follow(order, holds=is_here)

    def stage_all(self, heard: Callable[[int, int], None]) -> list[tuple[str, Exception]]:
        """Download every object that is not staged yet; see ``filling.fill``."""
        assert self._staged is not None
        return fill(self._fetcher, self._listing, self._staged, heard)

    def verify(self, heard: Callable[[int], None]) -> list[str]:
        """Compare what is staged with what was listed; see ``filling.verify``."""
        assert self._staged is not None
        return verify(self._fetcher, self._listing, self._staged, heard)

    def counted(self) -> tuple[int, int]:
        """Objects and bytes that this process has downloaded."""
        return self._fetcher.objects, self._fetcher.bytes

    def close(self) -> None:
        """End the threads, and let go of the stage and of connections."""
        self._fetcher.store.close()
        self.prefetcher.close()
        if self._staged is not None:
            self._staged.close()
