"""Whatever a transform gives, as pairs of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["UnlikeError", "array_pairs"]

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class UnlikeError(Exception):
    """Two values differ in more than their numbers; the message says in what."""


def array_pairs(expected: Any, got: Any) -> Iterator[Arrays]:
    """The arrays that two values consist of.

    Args:
        expected, got: tensors, arrays, PIL images, numbers, or lists, tuples and mappings of
            such; anything else that can be compared with ``==`` must be equal.

    Yields:
        Pairs of equal shape and type.

    Raises:
        UnlikeError: they differ in type, shape, mode, length, keys, or are unequal.
        OptionError: they are of a type that cannot be compared.

    >>> [(int(a), int(b)) for a, b in array_pairs({"x": [1, 2]}, {"x": [1, 3]})]
    [(1, 1), (2, 3)]
    """
    if type(expected) is not type(got):
        raise UnlikeError(f"a {type(got).__name__} instead of a {type(expected).__name__}")
    if isinstance(expected, Mapping):
        _check_like("keys", list(expected), list(got))
        for key, value in expected.items():
            yield from array_pairs(value, got[key])
    elif isinstance(expected, (list, tuple)):
        _check_like("length", len(expected), len(got))
        for left, right in zip(expected, got, strict=True):
            yield from array_pairs(left, right)
    else:
        yield from _leaves(expected, got)


def _leaves(expected: Any, got: Any) -> Iterator[Arrays]:
    """As ``array_pairs``, for values that hold no others."""
    torch = require("torch", extra="torch")
    if isinstance(expected, torch.Tensor):
        _check_like("tensor", *(f"{one.dtype} {tuple(one.shape)}" for one in (expected, got)))
        yield _of_tensor(expected), _of_tensor(got)
    elif isinstance(expected, require("PIL.Image", extra="image").Image):
        _check_like("PIL image", *(f"{one.mode} {one.size}" for one in (expected, got)))
        yield np.asarray(expected), np.asarray(got)
    elif isinstance(expected, (np.ndarray, np.generic, bool, int, float, complex)):
        pair = np.asarray(expected), np.asarray(got)
        _check_like("array", *(f"{one.dtype} {one.shape}" for one in pair))
        if pair[0].dtype.kind not in "biufc":
            raise _cannot_be_compared(expected, f" of {pair[0].dtype}")
        yield pair
    elif expected is not None and not _has_equality(type(expected)):
        raise _cannot_be_compared(expected)
    elif not bool(expected == got):
        raise UnlikeError(f"{got!r} instead of {expected!r}")


def _check_like(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise UnlikeError(f"{what} {got} instead of {expected}")


def _of_tensor(tensor: Any) -> npt.NDArray[Any]:
    plain = tensor.detach().cpu()
    # NumPy has no bfloat16; every value of a small float type is one of float32.
    small = plain.is_floating_point() and plain.element_size() <= 2
    array: npt.NDArray[Any] = (plain.float() if small else plain).numpy()
    return array


def _has_equality(kind: type) -> bool:
    """Whether ``==`` looks at the content; that of ``object`` asks for the very same one."""
    return any("__eq__" in vars(base) for base in kind.__mro__ if base is not object)


def _cannot_be_compared(value: Any, more: str = "") -> OptionError:
    return OptionError(
        f"the transform gives a {type(value).__name__}{more}, which cannot be compared; let it give "
        "tensors, arrays, PIL images or numbers, or lists and dicts of them"
    )
