"""What is done to a batch: recipes of papers, and single operations.

Arguments of ``fastpipe.augment`` are torchvision's, so one text makes both: it is given a *kit*, the module
that has the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe import augment
from fastpipe._extras import require
from fastpipe.bench.augment import scripts
from fastpipe.bench.augment.data import CLASSES
from fastpipe.bench.loaders import MEAN, SIDE, STD

__all__ = ["RECIPES", "SINGLE", "Recipe", "chain_of", "sampled"]

Kit = Any
_BOTH = ("float32", "uint8")


def _none(kit: Kit) -> list[Any]:
    return []


@dataclass(frozen=True)
class Recipe:
    """Something done to a batch.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables.
        ops: the operations on each sample, of a kit, for a dtype.
        mixes: those that mix the batch.
        dtypes: what it is measured with.
        unit: ``"images"`` or ``"spectrograms"``.
        has_policy: whether changes are drawn from a list, some of which make bytes of floats and count them.
    """

    key: str
    label: str
    ops: Callable[[Kit, str], list[Any]]
    mixes: Callable[[Kit], list[Any]] = _none
    dtypes: Sequence[str] = _BOTH
    unit: str = "images"
    has_policy: bool = False

    @property
    def takes_labels(self) -> bool:
        """Whether it mixes the batch, with its labels."""
        return self.mixes is not _none


def _floats(kit: Kit) -> Any:
    """Bytes to numbers of 0 to 1."""
    float32 = require("torch", extra="torch").float32
    return kit.ToDtype(float32) if kit is augment else kit.ToDtype(float32, scale=True)


def _ended(kit: Kit, dtype: str) -> list[Any]:
    """How images become a model's input."""
    return [*([_floats(kit)] if dtype == "uint8" else []), kit.Normalize(MEAN, STD)]


def _mode(name: str) -> Any:
    return require("torchvision.transforms", extra="torch").InterpolationMode(name)


def _simclr(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.RandomResizedCrop(SIDE),
        kit.RandomHorizontalFlip(),
        kit.RandomApply([kit.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
        kit.RandomGrayscale(0.2),
        kit.RandomApply([kit.GaussianBlur(23)], 0.5),
        *_ended(kit, dtype),
    ]


def _deit(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.RandomResizedCrop(SIDE, interpolation=_mode("bicubic")),
        kit.RandomHorizontalFlip(),
        kit.RandAugment(2, 9),
        *_ended(kit, dtype),
        kit.RandomErasing(0.25, value="random"),
    ]


def _mixed_up(kit: Kit) -> list[Any]:
    return [kit.MixUp(num_classes=CLASSES)]


def _cut_mixed(kit: Kit) -> list[Any]:
    return [kit.CutMix(num_classes=CLASSES)]


RECIPES = (
    Recipe("simclr", "SimCLR", _simclr),
    Recipe("deit", "DeiT", _deit, _mixed_up, has_policy=True),
    Recipe(
        "specaugment", "SpecAugment", lambda kit, dtype: [kit.SpecAugment(2, 30, 2, 20)],
        dtypes=("float32",), unit="spectrograms",
    ),
)  # fmt: skip


def _single(
    name: str, make: Callable[[Kit], Any], dtypes: Sequence[str] = _BOTH, unit: str = "images"
) -> Recipe:
    return Recipe(f"op-{name}", name, lambda kit, dtype: [make(kit)], dtypes=dtypes, unit=unit)


_FLOAT = ("float32",)
SINGLE = (
    _single("RandomResizedCrop", lambda kit: kit.RandomResizedCrop(SIDE)),
    _single("RandomHorizontalFlip", lambda kit: kit.RandomHorizontalFlip()),
    _single("RandomVerticalFlip", lambda kit: kit.RandomVerticalFlip()),
    _single(
        "RandomAffine",
        lambda kit: kit.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=_mode("bilinear")),
    ),
    _single("RandomRotation", lambda kit: kit.RandomRotation(30, interpolation=_mode("bilinear"))),
    _single("ColorJitter", lambda kit: kit.ColorJitter(0.8, 0.8, 0.8, 0.2)),
    _single("RandomGrayscale", lambda kit: kit.RandomGrayscale(0.2)),
    _single("GaussianBlur", lambda kit: kit.GaussianBlur(23)),
    _single("RandomErasing", lambda kit: kit.RandomErasing(0.25)),
    Recipe("op-RandAugment", "RandAugment", lambda kit, dtype: [kit.RandAugment(2, 9)], has_policy=True),
    _single("ToDtype", _floats, ("uint8",)),
    _single("Normalize", lambda kit: kit.Normalize(MEAN, STD), _FLOAT),
    Recipe("op-MixUp", "MixUp", lambda kit, dtype: [], _mixed_up, _FLOAT),
    Recipe("op-CutMix", "CutMix", lambda kit, dtype: [], _cut_mixed, _FLOAT),
    _single("SpecAugment", lambda kit: kit.SpecAugment(2, 30, 2, 20), _FLOAT, "spectrograms"),
    _single("RandomGain", lambda kit: kit.RandomGain(6.0), _FLOAT, "spectrograms"),
    _single("TimeShift", lambda kit: kit.TimeShift(40), _FLOAT, "spectrograms"),
)


def chain_of(recipe: Recipe, dtype: str, **options: Any) -> Any:
    """A recipe as ``augment.Compose``.

    Args:
        recipe: what is done.
        dtype: of the images before.
        options: of ``Compose``.
    """
    return augment.Compose([*recipe.ops(augment, dtype), *recipe.mixes(augment)], **options)


def sampled(recipe: Recipe, dtype: str) -> Callable[..., Any]:
    """A recipe sample by sample, as a dataset and a collate function do it.

    Args:
        recipe: what is done.
        dtype: of the images before.

    Returns:
        A function of a batch, and labels where the recipe mixes.
    """
    torch = require("torch", extra="torch")
    torchvision = require("torchvision.transforms.v2", extra="torch")
    ops = recipe.ops(scripts if recipe.unit == "spectrograms" else torchvision, dtype)
    mixes = recipe.mixes(torchvision)

    def each(image: Any) -> Any:
        for op in ops:
            image = op(image)
        return image

    def change(images: Any, *labels: Any) -> Any:
        batch = torch.stack([each(image) for image in images]) if ops else images
        for mix in mixes:
            batch, *labels = mix(batch, *labels)
        return (batch, *labels) if mixes else batch

    return change
