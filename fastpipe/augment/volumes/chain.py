"""What calling augmentations of volumes does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.base import FLOATS, Chain
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.reference import chain_reference
from fastpipe.augment.tables import untraced
from fastpipe.augment.volumes.reference import VOLUME_CHANGES
from fastpipe.augment.volumes.running import followed_volumes, on_volumes

__all__ = ["VolumeChain"]


class VolumeChain(Chain):
    """Augmentations of volumes."""

    one = "volume"
    shapes = ("(N, D, H, W)", "(N, C, D, H, W)")
    dtypes = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, *FLOATS)

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        self.check_gradient(batch)
        if torch.compiler.is_compiling() or not others:
            return super().given(samples, batch, table, others)
        applied = self.applied(table, batch.shape)
        changed = on_volumes(self.steps, batch, applied, self.memory, kept=self.kept)
        changed = changed.squeeze(1) if samples.ndim < batch.ndim else changed
        return (changed, *self._followed(applied, batch.shape, others))

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        applied = self.applied(table, samples.shape)
        return on_volumes(self.steps, samples, applied, self.memory, kept=self.kept)

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        return untraced(lambda: self._followed(self.applied(table, shape), shape, others))

    def _followed(self, applied: Float64Array, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        twins, columns = self.kept(("labels", shape[1]), lambda: self._of_labels(shape[1]))
        rows, memory = applied[:, columns], self.memory_of_others
        return followed_volumes(twins, rows, shape, others, memory, self.kept)

    def _of_labels(self, channels: int) -> tuple[tuple[Any, ...], npt.NDArray[np.intp]]:
        """What is done with labels, and the columns of what is applied that it needs."""
        twins, columns, begin = [], [np.zeros(0, np.intp)], 0
        for op in self.steps:
            end = begin + len(op.applied_names_for(channels))
            if (twin := op.for_masks()) is not None:
                twins.append(twin)
                columns.append(np.arange(begin, end))
            begin = end
        return tuple(twins), np.concatenate(columns)

    def referred(self, samples: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        return chain_reference(self.ops, samples, parameters, VOLUME_CHANGES)
