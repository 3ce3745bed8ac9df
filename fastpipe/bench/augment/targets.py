"""What was asked of augmentation, as figures, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastpipe.bench.augment.loading import LOADED
from fastpipe.bench.augment.recipes import POLICIES, RECIPES, Recipe
from fastpipe.bench.runner import Sample
from fastpipe.bench.targets import Asked, judged, judged_rates

__all__ = ["ASKED", "targets"]


def _simclr(dtype: str, times_kornia: float) -> tuple[Asked, ...]:
    section = f"simclr-{dtype}"
    stock = (f"{section}-replaced", f"{section}-worker")
    return (
        Asked(f"SimCLR, {dtype}, × kornia", f"{section}-batch", f"{section}-kornia", times_kornia),
        Asked(f"SimCLR, {dtype}, × torchvision sample by sample", f"{section}-batch", stock, 1.5),
        Asked(f"SimCLR, {dtype}, fused, × unfused", f"{section}-fused", f"{section}-batch", 1.5),
    )


def _policy(recipe: Recipe, dtype: str) -> Asked:
    section = f"{recipe.key}-{dtype}"
    stock = (f"{section}-replaced", f"{section}-worker")
    text = f"{recipe.label}, {dtype}, × torchvision sample by sample"
    return Asked(text, f"{section}-batch", stock, 4)


def _split(key: str, words: str) -> Asked:
    """Never slower than without it, but for noise."""
    return Asked(f'{words}, augment="auto", × without', f"{key}-auto", f"{key}-whole", 0.97)


_VOLUME_PEERS = ("batchgenerators", "batchgenerators-worker", "monai", "monai-worker")
ASKED = (
    *_simclr("float32", 25),
    *_simclr("uint8", 3),
    *(_policy(one, dtype) for one in RECIPES if one.label.startswith(POLICIES) for dtype in one.dtypes),
    Asked(
        "SpecAugment, × torchaudio sample by sample",
        "specaugment-float32-batch",
        "specaugment-float32-torchaudio",
        5,
    ),
    Asked(
        "nnU-Net's default, × the fastest of batchgeneratorsv2 and MONAI volume by volume",
        "volume-float32-batch",
        tuple(f"volume-float32-{kind}" for kind in _VOLUME_PEERS),
        6,
    ),
    Asked(
        "motion, × NumPy sequence by sequence",
        "motion-float32-batch",
        ("motion-float32-replaced", "motion-float32-worker"),
        20,
    ),
    *(_split(one.key, one.label) for one in LOADED),
    Asked(
        "nnU-Net's default, on CUDA, × NumPy and SciPy on the processor",
        "volume-float32-cuda-batch",
        ("volume-float32-replaced", "volume-float32-worker"),
        30,
    ),
    Asked("SimCLR, float32, on CUDA, × kornia", "simclr-float32-cuda-batch", "simclr-float32-cuda-kornia", 5),
)


def targets(
    samples: Mapping[str, Sequence[Sample]], waiting: Sequence[str] | None, recipes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
        waiting: calls that keep the host waiting, from `check.calls_that_wait`; None without CUDA.
        recipes: those that were run; all, where there are none.
    """
    counts = [] if waiting is None else [len(waiting)]
    text = "chains on CUDA whose call keeps the host waiting"
    asked = [one for one in ASKED if not recipes or one.row.startswith(tuple(f"{key}-" for key in recipes))]
    return [*judged_rates(samples, asked), judged(text, 0, "chains", counts, is_most=True)]
