"""What is done to a batch: recipes of papers, and single operations.

Arguments of ``fastpipe.augment`` are torchvision's, so one text makes both: it is given a *kit*, the module
that has the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe import augment
from fastpipe.bench.augment import motion_scripts, scripts, volume_scripts
from fastpipe.bench.augment.data import CLASSES
from fastpipe.bench.loaders import MEAN, SIDE, STD
from fastpipe.core.extras import require

__all__ = ["PAIRS", "POLICIES", "RECIPES", "SINGLE", "Recipe", "chain_of", "sampled"]

Kit = Any
_BOTH = ("float32", "uint8")
# What scripts have of what torchvision has not.
_SCRIPTS = {"spectrograms": scripts, "volumes": volume_scripts, "sequences": motion_scripts}
# Joints that change places in a mirror: of 25 those of left and right.
PAIRS = tuple((joint, joint + 1) for joint in range(1, 25, 2))
# Augmentations that draw from a list of changes.
POLICIES = ("RandAugment", "TrivialAugmentWide")


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
        unit: ``"images"``, ``"spectrograms"``, ``"volumes"`` or ``"sequences"`` of motion.
        takes_more: whether labels of volumes, or lengths of sequences, are given beside them.
        has_policy: whether changes are drawn from a list, some of which make bytes of floats and count them.
    """

    key: str
    label: str
    ops: Callable[[Kit, str], list[Any]]
    mixes: Callable[[Kit], list[Any]] = _none
    dtypes: Sequence[str] = _BOTH
    unit: str = "images"
    has_policy: bool = False
    takes_more: bool = False

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


def _after_the_crop(name: str) -> Callable[[Kit, str], list[Any]]:
    """A policy with torchvision's defaults, as what follows the crop in a script."""
    return lambda kit, dtype: [kit.RandomHorizontalFlip(), getattr(kit, name)(), *_ended(kit, dtype)]


def _mixed_up(kit: Kit) -> list[Any]:
    return [kit.MixUp(num_classes=CLASSES)]


def _cut_mixed(kit: Kit) -> list[Any]:
    return [kit.CutMix(num_classes=CLASSES)]


def _volume(kit: Kit, dtype: str) -> list[Any]:
    """``augment.nnunet_default``, whose list it is."""
    return [
        kit.RandomAffine3D(30, (0.7, 1.4), p_rotation=0.2, p_scale=0.2),
        kit.RandomApply(kit.GaussianNoise3D((0.0, 0.1)), 0.1),
        kit.RandomApply(kit.GaussianBlur3D((0.5, 1.0), p_channel=0.5), 0.2),
        kit.RandomApply(kit.Brightness3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.Contrast3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.LowResolution3D((0.5, 1.0), p_channel=0.5), 0.25),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5), inverted=True), 0.1),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5)), 0.3),
        kit.RandomFlip3D(),
    ]


def _motion(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.MotionSpeed((0.8, 1.25)),
        kit.MotionTranslation(0.1),
        kit.MotionScale((0.9, 1.1)),
        kit.MotionMirror(PAIRS),
    ]


RECIPES = (
    Recipe("simclr", "SimCLR", _simclr),
    Recipe("deit", "DeiT", _deit, _mixed_up, has_policy=True),
    Recipe(
        "specaugment", "SpecAugment", lambda kit, dtype: [kit.SpecAugment(2, 30, 2, 20)],
        dtypes=("float32",), unit="spectrograms",
    ),
    Recipe(
        "volume", "nnU-Net's default", _volume, dtypes=("float32",), unit="volumes", takes_more=True,
    ),
    Recipe(
        "motion", "motion: speed, translation, scale, mirror", _motion, dtypes=("float32",), unit="sequences",
        takes_more=True,
    ),
    *(
        Recipe(name.lower(), f"{name} after the crop", _after_the_crop(name), has_policy=True)
        for name in POLICIES
    ),
)  # fmt: skip


def _single(
    name: str, make: Callable[[Kit], Any], dtypes: Sequence[str] = _BOTH, unit: str = "images"
) -> Recipe:
    has_more = unit == "sequences"
    return Recipe(
        f"op-{name}", name, lambda kit, dtype: [make(kit)], dtypes=dtypes, unit=unit, takes_more=has_more
    )


def _of_policy(name: str) -> Recipe:
    """With torchvision's defaults."""
    return Recipe(f"op-{name}", name, lambda kit, dtype: [getattr(kit, name)()], has_policy=True)


def _of_volumes(name: str, make: Callable[[Kit], Any]) -> Recipe:
    return _single(name, make, _FLOAT, "volumes")


def _of_motion(name: str, make: Callable[[Kit], Any]) -> Recipe:
    return _single(name, make, _FLOAT, "sequences")


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
    *map(_of_policy, POLICIES),
    _single("ToDtype", _floats, ("uint8",)),
    _single("Normalize", lambda kit: kit.Normalize(MEAN, STD), _FLOAT),
    Recipe("op-MixUp", "MixUp", lambda kit, dtype: [], _mixed_up, _FLOAT),
    Recipe("op-CutMix", "CutMix", lambda kit, dtype: [], _cut_mixed, _FLOAT),
    _single("SpecAugment", lambda kit: kit.SpecAugment(2, 30, 2, 20), _FLOAT, "spectrograms"),
    _single("RandomGain", lambda kit: kit.RandomGain(6.0), _FLOAT, "spectrograms"),
    _single("TimeShift", lambda kit: kit.TimeShift(40), _FLOAT, "spectrograms"),
    _of_volumes("RandomAffine3D", lambda kit: kit.RandomAffine3D(30, (0.7, 1.4))),
    _of_volumes("RandomElastic3D", lambda kit: kit.RandomElastic3D((3, 4, 4), 3.0)),
    _of_volumes("RandomFlip3D", lambda kit: kit.RandomFlip3D()),
    _of_volumes("RandomRotate90", lambda kit: kit.RandomRotate90()),
    _of_volumes("GaussianNoise3D", lambda kit: kit.GaussianNoise3D((0.0, 0.1))),
    _of_volumes("GaussianBlur3D", lambda kit: kit.GaussianBlur3D((0.5, 1.0))),
    _of_volumes("Brightness3D", lambda kit: kit.Brightness3D((0.75, 1.25))),
    _of_volumes("Contrast3D", lambda kit: kit.Contrast3D((0.75, 1.25))),
    _of_volumes("LowResolution3D", lambda kit: kit.LowResolution3D((0.5, 1.0))),
    _of_volumes("Gamma3D", lambda kit: kit.Gamma3D((0.7, 1.5))),
    _of_motion("MotionSpeed", lambda kit: kit.MotionSpeed((0.8, 1.25))),
    _of_motion("MotionTranslation", lambda kit: kit.MotionTranslation(0.1)),
    _of_motion("MotionScale", lambda kit: kit.MotionScale((0.9, 1.1))),
    _of_motion("MotionMirror", lambda kit: kit.MotionMirror(PAIRS)),
)


def chain_of(recipe: Recipe, dtype: str, **options: Any) -> Any:
    """A recipe as ``augment.Compose``.

    Args:
        recipe: what is done.
        dtype: of the images before.
        options: of ``Compose``.
    """
    if recipe.unit == "sequences" and recipe.takes_more:
        options["lengths"] = 1
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
    ops = recipe.ops(_SCRIPTS.get(recipe.unit, torchvision), dtype)
    mixes = recipe.mixes(torchvision)
    if recipe.takes_more:
        return _with_more(ops)

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


def _with_more(ops: Sequence[Any]) -> Callable[..., Any]:
    """Operations on each sample and what is given beside it."""
    torch = require("torch", extra="torch")

    def change(*batch: Any) -> Any:
        rows = []
        for sample in zip(*batch, strict=True):
            for op in ops:
                sample = op(*sample)
            rows.append(sample)
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    return change
