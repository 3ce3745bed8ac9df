"""What was asked of pipelines of TensorFlow, as figures, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.targets import Asked, judged_rates
from fastpipe.bench.runner import Sample

__all__ = ["ASKED", "targets"]


_PILLOW = "× tf.py_function with Pillow"

ASKED = (
    Asked(f"boxes, {_PILLOW}", "crop-threads", "crop-replaced", 2),
    Asked("boxes, × TensorFlow's operations by hand", "crop-threads", "crop-hand", 1.25),
    Asked(f"boxes, kept in memory, {_PILLOW}", "crop-ram", "crop-replaced", 20),
    Asked(f"boxes, kept on disk, {_PILLOW}", "crop-disk", "crop-replaced", 8),
    Asked("folder, × image_dataset_from_directory", "folder-threads", "folder-replaced", 1.5),
)


def targets(samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
    """
    return judged_rates(samples, ASKED)
