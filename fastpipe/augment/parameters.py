"""What is drawn for a batch, apart from what is done with it: plain NumPy arrays, one row for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Float32Array", "Float64Array", "Parameters"]

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


class Parameters(Mapping[str, Float64Array]):
    """Named columns, each with a number for each sample.

    All kinds of parameters are kept as float64: flags as 0 and 1, pixels and indices as whole numbers.

    Args:
        columns: name → array (N,) of numbers or flags.

    >>> flip = Parameters(flipped=np.array([True, False]))
    >>> flip["flipped"], len(flip.table), flip
    (array([1., 0.]), 2, Parameters(2 samples: flipped))
    """

    def __init__(self, **columns: npt.ArrayLike) -> None:
        self._names = tuple(columns)
        arrays = [np.asarray(column, np.float64) for column in columns.values()]
        self.table: Float64Array = np.stack(arrays, axis=1) if arrays else np.zeros((0, 0))

    @classmethod
    def of_table(cls, names: Sequence[str], table: Float64Array) -> Parameters:
        """The parameters whose ``table``, (N, columns), it is."""
        made = cls.__new__(cls)
        made._names, made.table = tuple(names), table
        return made

    def __getitem__(self, name: str) -> Float64Array:
        try:
            return self.table[:, self._names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def rows(self, which: Any) -> Parameters:
        """Those of some samples: an index, a slice or a mask over them."""
        return Parameters.of_table(self._names, self.table[which])

    def __repr__(self) -> str:
        return f"Parameters({len(self.table)} samples: {', '.join(self._names)})"
