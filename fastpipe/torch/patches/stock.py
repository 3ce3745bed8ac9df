"""What a script without fastpipe does, as a dataset of torch's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fastpipe.torch.keys import take_key
from fastpipe.torch.patches.code import JointCode
from fastpipe.volumes.stock import SlicedPatches

__all__ = ["SlicedDataset"]


class SlicedDataset(Dataset[Any]):
    """The samples of a ``FastPatchDataset``, cut by slicing what the formats' own libraries open.

    Args:
        patches: these.
        code: what the script does to samples.
    """

    def __init__(self, patches: SlicedPatches, code: JointCode) -> None:
        self._patches, self._code = patches, code

    def __len__(self) -> int:
        return len(self._patches)

    def __getitem__(self, index: int) -> Any:
        seed, epoch = 0, 0
        if self._patches.is_random:
            key, _ = take_key(1)
            seed, epoch = key.seed, key.epoch
        values = self._patches.values(index, seed, epoch)
        return self._code.sample(self._code.transformed(values, None))
