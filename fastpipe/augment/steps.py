"""What the native core is told of augmentations: steps, each with its columns of a table of numbers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Step"]


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
