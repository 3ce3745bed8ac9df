"""The two scripts of an example differ by the swap alone."""

from __future__ import annotations

from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_OURS = ("fastpipe", "Fast", "stitch", "sampling", "augment", "group_batches", "SpecAugment", "Stage")
_OF_KERAS = ("Cache", "Augment", "Modality", "image_dataset", "timer.watch", "plain", "kept", "logging")
# The example, its new lines, and how many of them use fastpipe.
_SWAPS = [
    ("imagefolder_resnet", 3, 3), ("hdf5_mel", 9, 6), ("s3_imagenet", 4, 4), ("volume_patches", 15, 8),
    ("motion_generation", 26, 12), ("keras_multimodal", 27, 18),
]  # fmt: skip


@pytest.mark.parametrize(("example", "new_lines", "uses"), _SWAPS)
def test_the_scripts_differ_by_the_swap_alone(example: str, new_lines: int, uses: int) -> None:
    before, after = (
        (_EXAMPLES / example / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
        for name in ("before", "after")
    )
    new = [line for line in after if line and line not in before]
    words = (*_OURS, *_OF_KERAS) if example == "keras_multimodal" else _OURS
    assert (len(new), sum(any(word in line for word in words) for line in new)) == (new_lines, uses)
