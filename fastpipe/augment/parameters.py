"""The parameters of a batch, their random numbers, and checks of arguments. The module needs only NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.keys import uniforms
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError, OptionError

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


class Parameters(Mapping[str, Float64Array]):
    """A mapping of named columns, each with one number per sample.

    All parameters are stored as float64. Flags are stored as 0 and 1, and pixels and indices as whole
    numbers.

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
        """Return parameters that hold this ``table``, (N, columns)."""
        made = cls.__new__(cls)
        made._names, made.table = tuple(names), table
        return made

    def __getitem__(self, name: str) -> Float64Array:
        if name not in self._names:
            raise KeyError(name)
        return self.table[:, self._names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def rows(self, which: Any) -> Parameters:
        """Return the parameters of some samples. ``which`` is an index array, a slice or a mask."""
        return Parameters.of_table(self._names, self.table[which])

    def __repr__(self) -> str:
        return f"Parameters({len(self.table)} samples: {', '.join(self._names)})"


# ---- arguments, checked ----------------------------------------------------------------------------

# The value outside an image: one number, or one number per channel. None means 0.
Fill = float | tuple[float, ...] | None


def probability(value: float, name: str = "p") -> float:
    """Return ``value`` as a float, or raise an error if it is not a probability."""
    if not 0.0 <= value <= 1.0:  # false for NaN
        raise AugmentError(f"{name} must be a probability from 0 to 1, got {value!r}")
    return float(value)


def increasing(value: Any, name: str, most: float = np.inf) -> tuple[float, float]:
    """Return ``value`` as two increasing numbers above 0, or raise an error."""
    low, high = two_numbers(value)
    if not 0 < low <= high <= most:  # false for NaN
        raise AugmentError(
            f"{name} must be two positive numbers in increasing order, at most {most}, got {value!r}"
        )
    return low, high


def limits_of(
    value: Any, name: str, least: float = -np.inf, most: float = np.inf, about: float | None = None
) -> tuple[float, float]:
    """Return ``value`` as two increasing numbers, or raise an error.

    If ``value`` is a single number, the range is from ``about - value`` to ``about + value``.  If ``about``
    is None, both limits are ``value``.
    """
    given = plain(value)
    if isinstance(given, Sequence):
        low, high = two_numbers(given)
    elif about is None:
        low, high = two_numbers((given, given))
    else:
        low, high = max(least, about - given) if about else -given, about + given
    if not (least <= low <= high <= most and np.isfinite((low, high)).all()):  # false for NaN
        within = f" within {least:g} and {most:g}," if np.isfinite(most) else ""
        raise AugmentError(
            f"{name} must be a number of at least {max(least, 0):g}, or two in increasing order,{within} got "
            f"{value!r}"
        )
    return float(low), float(high)


def plain(value: Any) -> Any:
    """Return an argument, with a NumPy array converted to a list and a NumPy scalar to a number."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def two_numbers(value: Any) -> tuple[float, float]:
    """Return two numbers as floats; NaN if ``value`` is not two numbers."""
    try:
        first, second = map(float, value)
    except (TypeError, ValueError):
        return np.nan, np.nan
    return first, second


def interpolation_of(value: Any, allowed: Sequence[str]) -> str:
    """Return the name of an interpolation. torchvision's and Pillow's enumerations are accepted."""
    name = getattr(value, "value", value)
    if isinstance(name, int):  # Pillow's numbers, which torchvision accepts as well
        name = {0: "nearest", 2: "bilinear", 3: "bicubic"}.get(name, name)
    if name not in allowed:
        raise AugmentError(f"interpolation must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return str(name)


def filling_of(fill: Any, name: str = "fill") -> Fill:
    """Return a fill as one float or as one float per channel, or raise an error."""
    if fill is None:
        return None
    try:
        return tuple(map(float, fill)) if isinstance(fill, (list, tuple)) else float(fill)
    except (TypeError, ValueError):
        raise AugmentError(f"{name} must be a number, or one number for each channel, got {fill!r}") from None


def check_fill(numbers: Fill, channels: int, name: str = "fill") -> None:
    """Raise an error if a fill and the images have different numbers of channels."""
    if isinstance(numbers, tuple) and len(numbers) not in (1, channels):
        raise AugmentError(f"{name}= has {len(numbers)} numbers for images of {channels} channels")


def fill_numbers(fill: Fill) -> tuple[float, ...]:
    """Return the numbers of a fill; () if the fill is None."""
    if fill is None:
        return ()
    return fill if isinstance(fill, tuple) else (fill,)


# ---- random numbers --------------------------------------------------------------------------------

# With the same key, a batch's random numbers differ from the random numbers of the dataset's transform.
_STREAM = 0x6175676D656E74


def uniform_rows(count: int, columns: int, generator: Any = None, key: Key | None = None) -> Float64Array:
    """Return uniform random numbers in [0, 1), (count, columns), with one row per sample of a batch.

    The random numbers depend only on ``key`` (seed, epoch, positions) if it is given.  Otherwise they depend
    on one number that is drawn from ``generator`` or from torch's global generator.
    """
    if key is not None:
        if generator is not None:
            raise OptionError("pass generator= or key=, not both: each is a source of random numbers")
        if len(key.draws) != count:
            raise OptionError(f"key= has {len(key.draws)} samples, and the batch {count}")
        return uniforms(key.seed ^ _STREAM, key.epoch, np.asarray(key.draws), columns)
    torch = require("torch", extra="torch")
    if generator is not None and generator.device.type != "cpu":
        raise OptionError(
            f"generator= must be of the CPU, got one of {generator.device}: parameters are drawn on the "
            "host, and asking a device would wait for it. Use torch.Generator().manual_seed(…)"
        )
    base = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return uniforms(int(base), 0, np.arange(count), columns)
