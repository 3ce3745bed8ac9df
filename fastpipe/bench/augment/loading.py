"""The rows of the case that are loaders: recipes from files to a model's input, whole and split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe.bench.augment.recipes import RECIPES, Kit
from fastpipe.bench.data import Photos
from fastpipe.bench.loaders import SIDE, LoaderRow, LoaderSpec, train_transform
from fastpipe.bench.results import RowInfo
from fastpipe.core.extras import require

__all__ = ["LOADED", "Loaded", "loader_rows"]


@dataclass(frozen=True)
class Loaded:
    """A transform of a dataset, from PIL images to tensors.

    Attributes:
        key: the name of its section in the JSON file.
        label: its name in tables.
        transform: makes it.
    """

    key: str
    label: str
    transform: Callable[[], Any]


def _of_recipe(number: int) -> Any:
    """A recipe as a script's transform: what can be done to PIL images is, and tensors are made after it."""
    v2 = require("torchvision.transforms.v2", extra="torch")
    ops = RECIPES[number].ops(v2, "uint8")
    at = next(at for at, op in enumerate(ops) if isinstance(op, v2.ToDtype))
    return v2.Compose([*ops[:at], v2.ToImage(), *ops[at:]])


def _cropped(number: int) -> Any:
    """A recipe that follows the crop, with the crop."""
    v2 = require("torchvision.transforms.v2", extra="torch")
    return v2.Compose([v2.RandomResizedCrop(SIDE), *_of_recipe(number).transforms])


def _grey() -> Any:
    """The least that can be split off."""
    kit: Kit = require("torchvision.transforms", extra="torch")
    crop, flip, *end = train_transform("float32").transforms
    return kit.Compose([crop, flip, kit.RandomGrayscale(0.2), *end])


# Another transform to be loaded with is another line here.
LOADED = (
    Loaded("files-simclr", "from files: SimCLR", lambda: _of_recipe(0)),
    Loaded("files-deit", "from files: DeiT, no MixUp", lambda: _of_recipe(1)),
    Loaded("files-randaugment", "from files: crop, flip, RandAugment, normalise", lambda: _cropped(5)),
    Loaded(
        "files-trivialaugmentwide",
        "from files: crop, flip, TrivialAugmentWide, normalise",
        lambda: _cropped(6),
    ),
    Loaded("files-grey", "from files: crop, flip, RandomGrayscale(.2), normalise", _grey),
    Loaded("files-crop", "from files: crop, flip, normalise", lambda: train_transform("float32")),
)


def loader_rows(
    loaded: Loaded, photos: Photos, batch_size: int, cores: int
) -> list[tuple[RowInfo, Callable[[], LoaderRow]]]:
    """The rows of a section, and what makes them.

    Args:
        loaded: the transform.
        photos: what is loaded.
        batch_size: images in a batch.
        cores: how many workers the replaced loader has.
    """
    fast = "FastImageFolder + FastLoader"
    specs: Sequence[LoaderSpec] = (
        LoaderSpec(
            f"{loaded.key}-replaced", f"ImageFolder + DataLoader(num_workers={cores})", "replaced", cores
        ),
        LoaderSpec(f"{loaded.key}-whole", fast, "fastpipe"),
        LoaderSpec(f"{loaded.key}-auto", f'{fast}, augment="auto"', "fastpipe", augment="auto"),
    )

    def row(spec: LoaderSpec) -> tuple[RowInfo, Callable[[], LoaderRow]]:
        info = RowInfo(
            spec.key, spec.label, spec.group, spec.num_workers, "float32", spec.note, section=loaded.key,
            unit="images",
        )  # fmt: skip
        return info, lambda: LoaderRow(spec, photos.folder, photos.indices, batch_size, loaded.transform())

    return [row(spec) for spec in specs]
