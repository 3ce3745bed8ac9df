"""Steps: augmentations as the native core takes them, each with its columns of a table of numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy.typing as npt

from fastpipe.augment.parameters import Float64Array
from fastpipe.core.native import native
from fastpipe.errors import AugmentError

_NO_MEMORY = 1  # of fastpipe/native/augment.h


class Step(NamedTuple):
    """A change of each sample.

    Attributes:
        kind: its name in the native core.  ``"skip"`` leaves out the next ``options[0]`` steps of samples
            whose number is 0.
        column: where its numbers begin in a sample's row of the table.
        options: whole numbers, the same for all samples.
        numbers: the same for all samples.
    """

    kind: str
    column: int
    options: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()


@lru_cache(maxsize=256)
def plan_of(steps: tuple[Step, ...], columns: int) -> Any:
    """Return the ``native.AugmentPlan`` of steps whose numbers are rows of so many columns."""
    return native.AugmentPlan(list(steps), columns)


def run_plan(
    plan: Any,
    rows: Float64Array,
    images: npt.NDArray[Any],
    out: npt.NDArray[Any],
    elements: tuple[str, str],
    threads: int,
) -> None:
    """Change a batch of images by a plan, without Python's lock."""
    try:
        batch = native.augment_batch(plan, rows, images, elements[0], out, elements[1])
    except ValueError as wrong:
        raise AugmentError(f"the kernels take {wrong}, got images {images.shape}") from wrong
    native.run_in_threads(batch, threads)
    check_change(*batch.problem)


def check_change(problem: int, number: int) -> None:
    """Raise an error for what the native core says of a changed image."""
    if problem == _NO_MEMORY:
        raise MemoryError("there is no memory to augment images in")
    if problem:
        raise AugmentError(f"parameters of sample {number} of the batch are of pixels outside of it")
