"""What reads a store's objects in a process, by way of a stage or without."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastpipe.core.machine import free_memory
from fastpipe.core.types import Store
from fastpipe.errors import StageError
from fastpipe.options import Stage
from fastpipe.stage.folder import StageFolder
from fastpipe.stage.reading import ObjectReader
from fastpipe.stage.stores import RetryingStore
from fastpipe.stage.table import StageTable
from fastpipe.stores.listing import Listing

__all__ = ["new_reader"]

_log = logging.getLogger("fastpipe.stage")

_READ_AHEAD = 256 << 20


def new_reader(
    store: Store, listing: Listing, stage: Stage | None, key_of: Callable[[str], str]
) -> ObjectReader:
    """What reads objects in this process.

    Args:
        store: where they are; it is asked again where that may help.
        listing: which they are.
        stage: where they are copied near, or None.
        key_of: the key that a path stands for, listed or not.
    """
    read_ahead: int | str = "auto" if stage is None else stage.read_ahead
    if read_ahead == "auto":
        read_ahead = min(_READ_AHEAD, (free_memory() or _READ_AHEAD * 8) // 8)
    staged = None if stage is None else _opened_stage(stage, listing, store.name)
    connections = "auto" if stage is None else stage.connections
    # A store of its own, which it closes.
    return ObjectReader(
        RetryingStore(store), listing, staged, key_of, connections=connections,
        read_ahead=int(read_ahead), everything=stage is not None and stage.mode == "mirror",
    )  # fmt: skip


def _opened_stage(stage: Stage, listing: Listing, store: str) -> StageTable | None:
    """The staged objects; None where the stage cannot be used any more."""
    try:
        return StageFolder(stage).open_table(
            listing.digest, listing.sizes, lambda row: listing.name(row, store)
        )
    except StageError as error:
        _log.warning("What is needed is fetched each time: %s", str(error))
        return None
