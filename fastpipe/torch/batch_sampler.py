"""Index batches of a dataset for loaders that are not fastpipe's."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from fastpipe.errors import OptionError
from fastpipe.options import Shard, Shuffle
from fastpipe.torch.grouping import arrangement_of, draw_seed
from fastpipe.torch.order import EpochBatches
from fastpipe.torch.state import tensor_of, text_of

__all__ = ["DatasetBatches"]


class DatasetBatches(Sampler[list[int]]):
    """What a dataset's ``batch_sampler`` gives: batches of indices, another order for each epoch.

    Args:
        dataset: with a ``seed``.
        batch_size: samples in a batch.
        shuffle: False, True or a ``Shuffle``.
        drop_last: leave out an incomplete last batch.
        shard: the rank's part; None for everything.

    Attributes:
        batch_size, drop_last: as given.
        epoch: number of the next epoch.
        generator: from which an epoch's seed is drawn, where the dataset has none.
        arrangement: the samples' groups, where these are shuffled.

    Raises:
        OptionError: an option's value cannot work.
    """

    def __init__(
        self, dataset: Any, batch_size: int, shuffle: bool | Shuffle, drop_last: bool, shard: Shard | None
    ) -> None:
        self.batch_size, self.drop_last = operator.index(batch_size), bool(drop_last)
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be a number from 1, got {batch_size}")
        if not isinstance(shuffle, (bool, Shuffle)):
            raise OptionError(f"shuffle must be True, False or a fastpipe.Shuffle, got {shuffle!r}")
        if shard is not None and shuffle and dataset.seed is None:
            raise OptionError(
                "shard= with shuffle needs a dataset with a seed=, the same on every rank: else ranks would "
                "take parts of different orders"
            )
        self._dataset, self._shuffles = dataset, bool(shuffle)
        self._shard = shard or Shard(0, 1)
        self.arrangement = arrangement_of(dataset, shuffle) if isinstance(shuffle, Shuffle) else None
        self.epoch = 0
        is_drawn = self._shuffles and dataset.seed is None
        self.generator: torch.Generator | None = torch.default_generator if is_drawn else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy draws from the global generator of its process, of which torch would make another one.
        is_global = self.generator is torch.default_generator
        return {**self.__dict__, "generator": "global" if is_global else self.generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["generator"] == "global":
            self.generator = torch.default_generator

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; without this call epochs are counted."""
        self.epoch = operator.index(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The number of the next epoch and, where its seed is drawn, the generator's state."""
        if self.generator is None:
            return {"epoch": self.epoch}
        return {"epoch": self.epoch, "generator": text_of(self.generator.get_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that epoch, and put the generator (torch's global one) where it was."""
        self.epoch = state["epoch"]
        drawn = tensor_of(state.get("generator"))
        if self.generator is not None and drawn is not None:
            self.generator.set_state(drawn)

    def __iter__(self) -> Iterator[list[int]]:
        # An epoch begins with its first batch.  A stock loader with workers takes two iterators for one,
        # and who resumes sets the generator before the first draw.
        epoch, self.epoch = self.epoch, self.epoch + 1
        seed = None
        if self._shuffles:
            seed = self._dataset.seed
            if seed is None:
                seed, epoch = draw_seed(self.generator), 0
        # The order may be the samples' own, but these others in each epoch.
        key = self._dataset.seed if seed is None else seed
        keyed = getattr(self._dataset, "_keyed_indices", None)
        for indices, _ in self._batches(seed).indices(epoch):
            yield indices if keyed is None or key is None else keyed(indices, key, epoch)

    def __len__(self) -> int:
        return len(self._batches(None))

    def _batches(self, seed: int | None) -> EpochBatches:
        return EpochBatches(
            len(self._dataset), self.batch_size, self.drop_last, seed, self._shard, self.arrangement
        )
