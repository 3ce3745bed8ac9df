"""What calling augmentations of volumes does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpipe.augment.base import FLOATS, Chain
from fastpipe.augment.parameters import Parameters
from fastpipe.augment.reference import chain_reference
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
        return super().given(samples, batch, table, others)

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        return on_volumes(self.steps, samples, self.applied(table, samples.shape), self.memory)

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        found: Sequence[Any] = followed_volumes(self.steps, table, shape, others)
        return found

    def referred(self, samples: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        return chain_reference(self.ops, samples, parameters, VOLUME_CHANGES)
