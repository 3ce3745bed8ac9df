"""Steps: augmentations in the form that the native core takes, with numbers from a table of all samples."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy.typing as npt

from fastpipe.augment.parameters import Float64Array
from fastpipe.core.native import native
from fastpipe.errors import AugmentError

_NO_MEMORY = 1  # from fastpipe/native/augment.h


class Step(NamedTuple):
    """One change of each sample.

    Attributes:
        kind: the change's name in the native core.  The kind ``"skip"`` skips the next ``options[0]`` steps
            for samples whose number in the column is 0.
        column: the first of the step's columns in the table of numbers, which has a row for each sample.
        options: integers, which are equal for all samples.
        numbers: floats, which are equal for all samples.
    """

    kind: str
    column: int
    options: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()


@lru_cache(maxsize=256)
def plan_of(steps: tuple[Step, ...], columns: int) -> Any:
    """Return the ``native.AugmentPlan`` of steps, for a table with this number of columns."""
    return native.AugmentPlan(list(steps), columns)


def run_plan(
    plan: Any,
    rows: Float64Array,
    images: npt.NDArray[Any],
    out: npt.NDArray[Any],
    elements: tuple[str, str],
    threads: int,
) -> None:
    """Change a batch of images with a plan. The GIL is released during the change."""
    try:
        batch = native.augment_batch(plan, rows, images, elements[0], out, elements[1])
    except ValueError as wrong:
        raise AugmentError(f"the kernels take {wrong}, got images {images.shape}") from wrong
    native.run_in_threads(batch, threads)
    check_change(*batch.problem)


def aligned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or a copy if the memory is not aligned to the elements, as in some buffer views."""
    return values.copy() if values.ctypes.data % values.itemsize else values


def check_change(problem: int, number: int) -> None:
    """Raise an error if the native core reports a problem with a changed image."""
    if problem == _NO_MEMORY:
        raise MemoryError("there is no memory to augment images in")
    if problem:
        raise AugmentError(f"parameters of sample {number} of the batch are of pixels outside of it")
