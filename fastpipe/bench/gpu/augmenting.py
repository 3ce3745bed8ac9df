"""The rows that augment one batch again and again, on the processor and on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.bench.augment.data import Batches, made_batches, made_volumes
from fastpipe.bench.augment.recipes import RECIPES, chain_of
from fastpipe.bench.augment.rows import AugmentRow, Place
from fastpipe.bench.gpu.sizes import Sizes
from fastpipe.bench.results import RowInfo

__all__ = ["AUGMENTED", "augment_rows", "batches_of"]

# Section → the recipe's key, as of the case ``augment``.
AUGMENTED = {"augment-images": "simclr", "augment-volumes": "volume"}
_DTYPE = "float32"


def batches_of(folder: Path, name: str, sizes: Sizes) -> Batches:
    """What is augmented: photos of a folder, and made-up volumes.

    Args:
        folder: an image folder.
        name: what the report calls it.
        sizes: how much.
    """
    made = made_batches(folder, name, sizes.augmented)
    volumes, labels = made_volumes(np.random.default_rng(0), len(made.volumes), sizes.volume)
    return Batches(made.name, made.photos, made.spectrograms, volumes, labels, made.motion, made.lengths)


def augment_rows(
    section: str, batches: Batches, device: str
) -> list[tuple[RowInfo, Callable[[], AugmentRow]]]:
    """The rows of a section, and what makes them: fastpipe's chain on the processor, then on a GPU.

    Args:
        section: of `AUGMENTED`.
        batches: what is augmented.
        device: ``"cuda"``, or ``"cpu"``, where there is only the first of them.
    """
    recipe = next(one for one in RECIPES if one.key == AUGMENTED[section])

    def row(kind: str, label: str, group: str, where: str) -> tuple[RowInfo, Callable[[], AugmentRow]]:
        info = RowInfo(f"{section}-{kind}", label, group, None, _DTYPE, "", section=section, unit=recipe.unit)
        return info, lambda: _row(info.key, Place(recipe, _DTYPE, where), batches)

    rows = [row("replaced", "augment.Compose, on the processor", "replaced", "cpu")]
    if device == "cuda":
        rows.append(row("device", "augment.Compose, on the GPU", "fastpipe", "cuda"))
    return rows


def _row(key: str, place: Place, batches: Batches) -> AugmentRow:
    given: tuple[Any, ...] = place.given(batches)
    chain = chain_of(place.recipe, place.dtype)
    return AugmentRow(key, lambda: _first(chain(*given)), len(given[0]), place.device)


def _first(found: Any) -> Any:
    """The augmented batch, without the labels beside it."""
    return found[0] if isinstance(found, (list, tuple)) else found
