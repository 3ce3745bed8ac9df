"""Batches of datasets of rows, begun ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.types import Key
from fastpipe.torch.ahead import Lookout, Lookouts
from fastpipe.torch.order_samplers import EpochBatches
from fastpipe.torch.rows.batch import RowsBatch
from fastpipe.torch.rows.dataset import RowsDataset
from fastpipe.torch.rows.samples import LazySamples, SampleRows
from fastpipe.torch.source import MixedBatch, Source
from fastpipe.torch.views import integers, located

__all__ = ["RowsSource"]


class RowsSource(Source):
    """Makes batches of the datasets of rows behind a dataset of the user's.

    Args:
        dataset: the user's.
        ends: the datasets behind it, of HDF5 files or volumes.
    """

    def __init__(self, dataset: Any, ends: Sequence[RowsDataset]) -> None:
        self._dataset = dataset
        self.bases: list[RowsDataset] = list(dict.fromkeys(ends))
        self._batches: EpochBatches | None = None

    def start(self, indices: Sequence[int], key: Key) -> RowsBatch | _Mixed:
        """Begin a batch."""
        parts = located(self._dataset, integers(indices))
        if len(parts) > 1:
            return _Mixed(parts, key)
        base, _, local = parts[0] if parts else (self.bases[0], None, ())
        if self._batches is not None and base is self._dataset:
            base._expect_order(key, self._batches.order)
        batch: RowsBatch = base._start_batch(local, key)
        return batch

    def lookout(self, *, is_here: bool) -> Lookout | None:
        """Who has what is somewhere else fetched before it is asked for."""
        found = [base._lookout(self._dataset, is_here=is_here) for base in self.bases]
        some = [lookout for lookout in found if lookout is not None]
        return Lookouts(some) if some else None

    def follow_order(self, batches: EpochBatches | None) -> None:
        """Hear in which order samples will be asked for, where that is a function of the epoch."""
        # What ranks share is used in the order of none of them.
        self._batches = batches if batches is not None and batches.shard.world == 1 else None

    def made_by(self) -> object:
        """Return what a batch is made by: whatever the script sets, rows change by its functions only."""
        return super().made_by() if any(base._code() for base in self.bases) else None

    def tensors(self, batch_size: int) -> int:
        """Large tensors in a batch."""
        return max(base._large_parts(batch_size) for base in self.bases)

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the script's are called on the way, other than in threads."""
        return any(base._runs_user_code() for base in self.bases)

    @property
    def spare_nbytes(self) -> int:
        """Bytes of batches that may be begun while one sample holds up the one that is due."""
        return min((base._spare_nbytes for base in self.bases), default=super().spare_nbytes)

    def describe(self) -> list[str]:
        """What is read how."""
        return list(dict.fromkeys(line for base in self.bases for line in base.plan.lines))


class _Mixed(MixedBatch):
    """A batch of several datasets."""

    def __init__(
        self, parts: Sequence[tuple[RowsDataset, npt.NDArray[np.int64], npt.NDArray[np.int64]]], key: Key
    ) -> None:
        super().__init__()
        for base, rows, local in parts:
            part = Key(key.seed, key.epoch, key.draws[rows])
            self.parts.append((base, rows, base._start_batch(local, part)))
        self.nbytes = sum(batch.nbytes for _, _, batch in self.parts)

    def finish(self) -> Sequence[Any]:
        """Wait for it, and return its samples."""
        found, are_rows = dict[int, Any](), True
        for _, rows, batch in self.parts:
            made = batch.finish()
            if isinstance(made, SampleRows):
                made = made.to_collate()
            else:
                are_rows = False
            found.update(zip(rows[list(batch.kept)].tolist(), made, strict=True))
        self.kept = sorted(found)
        samples = [found[number] for number in self.kept]
        return LazySamples(samples) if are_rows else samples
