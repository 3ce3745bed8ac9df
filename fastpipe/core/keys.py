"""Random numbers that depend on a sample's key ``(seed, epoch, draw)`` and on nothing else.

The generator is SplitMix64 (G. L. Steele Jr., D. Lea, C. H. Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), used as a counter-based generator.  *mix* is
SplitMix64's 64-bit finaliser (D. Stafford's variant 13) and *golden* is its increment.  All
arithmetic is modulo 2**64::

    state   = mix(mix(mix(seed + golden) + (epoch + 1) · golden) + (draw + 1) · golden)
    value_j = mix(state + (j + 1) · golden)                  j = 0, 1, 2, …

So any value of any sample can be computed directly, in any order, on any machine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_BITS = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB

# These NumPy scalars are made once, because Python integers would be converted at each operation.
_GOLDEN_U, _MIX_1_U, _MIX_2_U = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
_U11, _U27, _U30, _U31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
_TO_UNIT = 2.0**-53

# sample_seed is a value of a sample's stream of random numbers, at a position that no transform reaches.
_SEED_SLOT = 1 << 32

# The most files tried as replacements of a bad file.  The number is large enough for a class with many
# damaged files, and small enough to end soon if the disk is lost.
_MOST_REPLACEMENTS = 100


def uniforms(seed: int, epoch: int, draws: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """Return uniform random numbers for a batch.  A sample's numbers depend only on the sample's own key.

    ``seed`` and ``epoch`` are any integers, taken modulo 2**64.  ``draws``, int64 (N,), are the samples'
    positions in the epoch's order of all ranks.  ``count``, 0 to 2**32, is the number of random numbers for
    each sample.  A larger ``count`` only appends numbers to each row of the result.

    Returns:
        float64 array (N, count), each number a multiple of 2**-53 in [0, 1).

    >>> uniforms(0, 0, np.array([5, 6]), 2).round(3)
    array([[0.077, 0.132],
           [0.78 , 0.682]])
    """
    states = np.asarray(draws, dtype=np.int64).astype(np.uint64)
    states += np.uint64(1)
    states *= _GOLDEN_U
    states += np.uint64(_epoch_state(seed, epoch))
    bits = _mix_array(_mix_array(states)[:, None] + _steps(count))
    bits >>= _U11
    return np.multiply(bits, _TO_UNIT, dtype=np.float64)


def sample_seed(seed: int, epoch: int, draw: int) -> int:
    """Return one 64-bit seed for a sample, from the state that :func:`uniforms` starts from.

    The seed is for transforms that generate their own random numbers.  The seed is independent of the
    sample's numbers from :func:`uniforms`.

    >>> sample_seed(0, 0, 5) == sample_seed(2**64, 0, 5)
    True
    """
    state = _mix(_epoch_state(seed, epoch) + (int(draw) + 1) * _GOLDEN)
    return _mix(state + (_SEED_SLOT + 1) * _GOLDEN)


@lru_cache(maxsize=64)
def _steps(count: int) -> npt.NDArray[np.uint64]:
    """Return ``golden * (1, …, count)``.  The array is read-only, because several calls share it."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN_U
    steps.flags.writeable = False
    return steps


def _epoch_state(seed: int, epoch: int) -> int:
    return _mix(_mix(int(seed) + _GOLDEN) + (int(epoch) + 1) * _GOLDEN)


def _mix(value: int) -> int:
    value &= _BITS
    value = ((value ^ (value >> 30)) * _MIX_1) & _BITS
    value = ((value ^ (value >> 27)) * _MIX_2) & _BITS
    return value ^ (value >> 31)


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply *mix* to ``values`` in place, and return ``values``."""
    shifted = values >> _U30
    values ^= shifted
    values *= _MIX_1_U
    np.right_shift(values, _U27, out=shifted)
    values ^= shifted
    values *= _MIX_2_U
    np.right_shift(values, _U31, out=shifted)
    values ^= shifted
    return values


def another_of_its_class(
    targets: npt.NDArray[Any], target: Any, position: int, seed: int, attempt: int
) -> int | None:
    """Return another sample of class ``target``, to replace the sample at ``position``.  Return None if no
    sample is left.

    The candidates are in a random order that depends on ``seed``.  ``attempt``, from 1, is the place of the
    returned sample in this order.
    """
    same = np.flatnonzero(targets == target)
    others = same[same != position]
    if attempt > min(len(others), _MOST_REPLACEMENTS):
        return None
    order = np.argsort(uniforms(seed, 0, np.array([0]), len(others))[0], kind="stable")
    return int(others[order[attempt - 1]])
