"""Steps: augmentations in the form that the native core takes, each with its columns in a table."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy.typing as npt

from fastpipe.augment.parameters import Float64Array
from fastpipe.core.native import native
from fastpipe.errors import AugmentError

_NO_MEMORY = 1  # of fastpipe/native/augment.h


class Step(NamedTuple):
    """One change of each sample.

    Attributes:
        kind: its name in the native core.  ``"skip"`` skips the next ``options[0]`` steps for samples whose
            number is 0.
        column: the first of its columns in the table.
        options: integers, the same for all samples.
        numbers: floats, the same for all samples.
    """

    kind: str
    column: int
    options: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()


@lru_cache(maxsize=256)
def plan_of(steps: tuple[Step, ...], columns: int) -> Any:
    """Return the ``native.AugmentPlan`` of steps, for a table of this number of columns."""
    return native.AugmentPlan(list(steps), columns)


def run_plan(
    plan: Any,
    rows: Float64Array,
    images: npt.NDArray[Any],
    out: npt.NDArray[Any],
    elements: tuple[str, str],
    threads: int,
) -> None:
    """Change a batch of images by a plan; the GIL is released meanwhile."""
    try:
        batch = native.augment_batch(plan, rows, images, elements[0], out, elements[1])
    except ValueError as wrong:
        raise AugmentError(f"the kernels take {wrong}, got images {images.shape}") from wrong
    native.run_in_threads(batch, threads)
    check_change(*batch.problem)


def aligned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or a copy if its memory starts within an element, as in a view of a byte buffer."""
    return values.copy() if values.ctypes.data % values.itemsize else values


def check_change(problem: int, number: int) -> None:
    """Raise an error if the native core reports one for a changed image."""
    if problem == _NO_MEMORY:
        raise MemoryError("there is no memory to augment images in")
    if problem:
        raise AugmentError(f"parameters of sample {number} of the batch are of pixels outside of it")
