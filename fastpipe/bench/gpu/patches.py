"""Training on patches of a volume: augmented on the processor, or where the step is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fastpipe
from fastpipe import augment
from fastpipe.bench.gpu.training import Trainer
from fastpipe.bench.loaders import Draws
from fastpipe.bench.volume.data import Scroll
from fastpipe.bench.volume.rows import patch_dataset
from fastpipe.core.extras import require

__all__ = ["PATCHED", "PatchFeed", "Patched", "patch_model"]

CLASSES = 2  # within a sheet of the scroll, or not
_MEAN, _STD = 20_000, 10_000  # of its values, about
# Of a patch, points are moved; by how many voxels (standard deviation).  As of examples/volume_patches.
_POINTS, _BEND = (3, 4, 4), 3.0


@dataclass(frozen=True)
class Patched:
    """An augmentation of patches: a section.

    Attributes:
        label: its name in tables.
        chain: makes it.
    """

    label: str
    chain: Callable[[], Callable[..., Any]]


class _Normalised:
    """A chain of volumes of a mean of about 0 and a standard deviation of about 1, which nnU-Net's wants.

    Args:
        chain: of values and labels.
    """

    def __init__(self, chain: Callable[..., Any]) -> None:
        self._chain = chain

    def __call__(self, patches: Any, labels: Any) -> Any:
        return self._chain(patches.float().sub_(_MEAN).div_(_STD), labels)


PATCHED = {
    "patches-elastic": Patched(
        "RandomElastic3D", lambda: _Normalised(augment.RandomElastic3D(_POINTS, _BEND, fill="edge"))
    ),
    "patches-nnunet": Patched("nnU-Net's default", lambda: _Normalised(augment.nnunet_default())),
}


class PatchFeed:
    """A `Feed` of patches, all of whose chunks are remembered: what is left is cutting and augmentation.

    Args:
        scroll: the volume.
        batch_size: patches in a batch.
        chain: augments a batch.
        device: where it is augmented; None for the processor.
    """

    workers = 0

    def __init__(self, scroll: Scroll, batch_size: int, chain: Any, device: str | None) -> None:
        self._draws = Draws(range(scroll.epoch), batch_size)
        dataset = patch_dataset(scroll, 2 * scroll.nbytes)
        self._loader: Any = fastpipe.FastLoader(
            dataset, batch_size, sampler=self._draws, augment=chain, device=device
        )

    def batches(self, count: int) -> Iterator[Any]:
        """So many patches."""
        self._draws.length = count
        yield from self._loader

    def close(self) -> None:
        """Let go of the loader, which ends its threads."""
        self._loader = None
        gc.collect()


def patch_model(device: str) -> Trainer:
    """A step of a small 3D convolutional net that works at a quarter of the resolution."""
    nn = require("torch", extra="torch").nn

    def block(inputs: int, outputs: int, stride: int) -> list[Any]:
        convolution = nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1)
        return [convolution, nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU()]

    layers = [*block(1, 16, 2), *block(16, 32, 2), *block(32, 32, 1), nn.Conv3d(32, CLASSES, 1)]
    model = nn.Sequential(*layers, nn.Upsample(scale_factor=4, mode="trilinear"))
    return Trainer(model, device, lambda patches: patches.unsqueeze(1))
