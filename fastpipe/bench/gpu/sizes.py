"""How much there is of everything: on a GPU, and for a look on the processor whether the command runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastpipe.bench.augment.data import SIZE
from fastpipe.bench.volume.data import Sizes as ScrollSizes

__all__ = ["FULL", "TINY", "Sizes", "sizes_for"]


@dataclass(frozen=True)
class Sizes:
    """Of a run.

    Attributes:
        side: height and width of images.
        batch: images of a batch, where the device's memory has room for a step on it.
        model: in words.
        blocks: residual blocks of each of the model's four stages; None for ResNet-50.
        checked: photos whose pixels are compared.
        augmented: images of a batch that is augmented.
        volume: voxels of a volume that is augmented.
        scroll: of the volume that patches are of.
        patches: of a batch.
        window_s: seconds of a measurement, at most.
        rounds: at most.
    """

    side: int
    batch: int
    model: str
    blocks: tuple[int, ...] | None
    checked: int
    augmented: int
    volume: tuple[int, int, int]
    scroll: ScrollSizes
    patches: int
    window_s: float
    rounds: int


FULL = Sizes(
    side=224, batch=256, model="ResNet-50", blocks=None, checked=64, augmented=64, volume=SIZE,
    scroll=ScrollSizes((192, 384, 384), (64, 128, 128), SIZE), patches=2, window_s=2.5,
    rounds=7,
)  # fmt: skip
TINY = Sizes(
    side=64, batch=8, model="a ResNet of four blocks", blocks=(1, 1, 1, 1), checked=16, augmented=4,
    volume=(16, 32, 32), scroll=ScrollSizes((32, 64, 64), (16, 32, 32), (16, 32, 32)), patches=2,
    window_s=0.1, rounds=2,
)  # fmt: skip


def sizes_for(device: str) -> Sizes:
    """The sizes of a run on ``"cuda"``, or of one on ``"cpu"``.

    >>> sizes_for("cpu").batch
    8
    """
    return FULL if device == "cuda" else TINY
