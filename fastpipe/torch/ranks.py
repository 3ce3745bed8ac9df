"""A look at what the other ranks of a sharded loader say, without waiting for any of them."""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import torch.distributed as dist

from fastpipe.options import Shard

__all__ = ["RankCheck"]

_numbers = itertools.count()


class RankCheck:
    """Compares what must be the same on all ranks, through the store of ``torch.distributed``.

    Each rank writes its own values and reads those that are there already, so that whoever comes
    last sees all of them.  Nothing is collective: a loader that only some ranks iterate over
    cannot make them hang.  Loaders are told apart by the order in which they are made.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._has_warned = False

    def warn_if_ranks_disagree(self, shard: Shard, values: dict[str, Any]) -> None:
        """Warn if another rank of this loader has other values.

        Args:
            shard: this rank's.
            values: by name, for JSON.
        """
        if self._has_warned or shard.world == 1 or not dist.is_available() or not dist.is_initialized():
            return
        if dist.get_world_size() != shard.world:
            return
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(self._name(shard.mode, shard.rank), json.dumps(values))
        for rank in range(shard.world):
            name = self._name(shard.mode, rank)
            if rank == shard.rank or not store.check([name]):
                continue
            theirs = json.loads(store.get(name))
            differing = [key for key in values if values[key] != theirs.get(key)]
            if differing:
                self._has_warned = True
                said = ", ".join(
                    f"{key} is {values[key]!r} here and {theirs.get(key)!r} there" for key in differing
                )
                warnings.warn(
                    f"rank {shard.rank} and rank {rank} do not share one epoch: {said}. Each takes a part "
                    "of another order, so that samples are missed or come twice: give all ranks the same "
                    "dataset and seed",
                    stacklevel=4,
                )
                return

    def _name(self, mode: str, rank: int) -> str:
        return f"fastpipe/loader/{self._number}/{mode}/{rank}"
