"""Detection of values that another dtype cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# For each kind of dtype, the kinds of dtypes that can hold its values.
_HELD_BY = {"b": "biufc", "i": "biufc", "u": "biufc", "f": "fc", "c": "c", "S": "S", "U": "U"}


def unheld(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Return which ``values`` the dtype cannot hold, as a bool array of the same shape.

    Integers and strings must stay exact.  A float may be rounded, but not to infinity or to an integer type.

    >>> unheld(np.array([1, 300, -1]), np.dtype("uint8")).tolist()
    [False, True, True]
    >>> unheld(np.array([0.1, 1e300]), np.dtype("float32")).tolist()
    [False, True]
    """
    if values.dtype == dtype:
        return np.zeros(values.shape, np.bool_)
    kind = values.dtype.kind
    if dtype.kind not in _HELD_BY.get(kind, ""):
        return np.ones(values.shape, np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        made = values.astype(dtype)
        if kind in "fc":
            return np.asarray(np.isfinite(made) != np.isfinite(values))
        made = made.real if dtype.kind == "c" else made
        found = np.asarray(made.astype(values.dtype) != values)
        # Some changed integers convert back to equal ones: a lost sign bit, a float above the maximum.
        if kind in "iu":
            found |= (made < 0) != (values < 0)
            if made.dtype.kind == "f":
                found |= made >= 2.0 ** (8 * values.itemsize - (kind == "i"))
    return found
