"""The samples of a dataset, as rows: files, boxes, labels, numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.tf.boxes import Boxes
from fastpipe.tf.options import ImageSpec

__all__ = ["Column", "Rows"]


class Column(NamedTuple):
    """One image of every row.

    Attributes:
        name: of the modality; empty where there is only one image.
        paths: of the files.
        boxes: the parts that are used; None for whole images.
        spec: what becomes of them.
        rescale: factor and offset, or None.
        preprocess: the script's function, or None.
        thread_safe: whether that may be called from several threads.
    """

    name: str
    paths: Sequence[str]
    boxes: Boxes | None
    spec: ImageSpec
    rescale: tuple[float, float] | None
    preprocess: Callable[..., Any] | None
    thread_safe: bool


@dataclass(frozen=True)
class Rows:
    """All samples.

    Attributes:
        columns: their images.
        labels: (N, …) as a batch has them; None without.
        classes: int64 (N,): samples that are alike; None without labels, and where these are measurements.
        tabular: further inputs by name, float32 (N,) or (N, K).
        class_names: of the labels, or None.
        numbers: int64 (N,): which rows of the script's table these are, for messages.
    """

    columns: Sequence[Column]
    labels: npt.NDArray[Any] | None
    classes: npt.NDArray[np.int64] | None
    tabular: dict[str, npt.NDArray[np.float32]]
    class_names: list[str] | None
    numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Some of the rows, in this order."""
        columns = [
            column._replace(
                paths=[column.paths[row] for row in rows.tolist()],
                boxes=None if column.boxes is None else replace(column.boxes, edges=column.boxes.edges[rows]),
            )
            for column in self.columns
        ]
        return replace(
            self,
            columns=columns,
            labels=None if self.labels is None else self.labels[rows],
            classes=None if self.classes is None else self.classes[rows],
            tabular={name: values[rows] for name, values in self.tabular.items()},
            numbers=self.numbers[rows],
        )
