"""The CPU kernel of noise: ``noise.normal`` in one pass, in vectors.

It releases the GIL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["add"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_given = _t.Array(_t.float32, 1, "C", readonly=True)
_u32s = _t.Array(_t.uint32, 1, "C")
_options: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}
_PAIRS = 256  # at a time: what is made of them stays in the first cache
_FIRST, _SECOND = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_S13, _S16, _S8 = np.uint32(13), np.uint32(16), np.uint32(8)
_LN2, _QUARTER, _HALF, _ONE = np.float32(math.log(2)), np.float32(math.pi / 2), np.float32(0.5), np.float32(1)
# Polynomials of the Cephes library (S. Moshier): log(1 + x) about 0, sine and cosine up to pi/4.
_LOG = tuple(
    map(np.float32, (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ))
)  # fmt: skip
_SINE = tuple(map(np.float32, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)))
_COSINE = tuple(map(np.float32, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)))
_ROOT_HALF, _MANTISSA, _24 = np.int32(0x3F3504F3), np.int32(23), np.int32(24)


@compiled(_t.uint32(_t.uint32), inline="always")
def _mixed(value: Any) -> Any:
    """The finaliser of MurmurHash3 (A. Appleby, 2011)."""
    value = value ^ (value >> _S16)
    value = np.uint32(value * _FIRST)
    value = value ^ (value >> _S13)
    value = np.uint32(value * _SECOND)
    return value ^ (value >> _S16)


@compiled(_t.void(_t.uint32, _t.uint32, _f32, _f32))
def _uniform(first: Any, seed: Any, ones: Any, others: Any) -> None:
    """Two whole numbers of 24 bits for each pair, the first of them one more."""
    for k in range(_PAIRS):
        mixed = _mixed(_mixed(np.uint32(first + np.uint32(k))) ^ seed)
        ones[k] = np.float32(np.int32(_mixed(mixed ^ np.uint32(0x5851F42D)) >> _S8) + np.int32(1))
        others[k] = np.float32(np.int32(_mixed(mixed ^ np.uint32(0x14057B7E)) >> _S8))


@compiled(_t.void(_f32, _t.float32, _f32, _f32), **_options)
def _radius(ones: Any, std: Any, exponents: Any, mantissas: Any) -> None:
    """Standard deviation · sqrt(-2 · log(number / 2**24)), in place."""
    bits, parts = ones.view(np.int32), mantissas.view(np.int32)
    for k in range(_PAIRS):
        exponent = (bits[k] - _ROOT_HALF) >> _MANTISSA
        parts[k] = bits[k] - (exponent << _MANTISSA)
        exponents[k] = np.float32(exponent - _24)
    for k in range(_PAIRS):
        x = mantissas[k] - _ONE
        p = _LOG[0]
        p = p * x + _LOG[1]
        p = p * x + _LOG[2]
        p = p * x + _LOG[3]
        p = p * x + _LOG[4]
        p = p * x + _LOG[5]
        p = p * x + _LOG[6]
        p = p * x + _LOG[7]
        p = p * x + _LOG[8]
        square = x * x
        logarithm = square * x * p - _HALF * square + x + exponents[k] * _LN2
        ones[k] = np.sqrt(np.float32(-2) * logarithm) * std


@compiled(_t.void(_f32, _f32), **_options)
def _direction(turns: Any, sines: Any) -> None:
    """Cosine, in place, and sine of parts of a turn, in 2**24ths."""
    for k in range(_PAIRS):
        quarters = turns[k] * np.float32(2.0**-22)
        whole = np.int32(quarters + _HALF)
        x = (quarters - np.float32(whole)) * _QUARTER
        z = x * x
        sine = ((_SINE[0] * z + _SINE[1]) * z + _SINE[2]) * z * x + x
        cosine = ((_COSINE[0] * z + _COSINE[1]) * z + _COSINE[2]) * z * z - _HALF * z + _ONE
        is_odd, is_negative = (whole & np.int32(1)) != 0, (whole & np.int32(2)) != 0
        across, up = (-sine if is_odd else cosine), (cosine if is_odd else sine)
        turns[k], sines[k] = (-across if is_negative else across), (-up if is_negative else up)


@compiled(_t.void(_given, _f32, _t.int64, _t.uint32, _t.float32))
def add(given: Any, out: Any, begin: Any, seed: Any, std: Any) -> None:
    """Add noise.

    Args:
        given: values, from voxel ``begin`` on, which is even.
        out: the same with noise.
        seed: of the channel.
        std: standard deviation.
    """
    radius, cosines, sines = (
        np.empty(_PAIRS, np.float32),
        np.empty(_PAIRS, np.float32),
        np.empty(_PAIRS, np.float32),
    )
    spare = np.empty(_PAIRS, np.float32)
    count = len(out)
    for pair in range(0, (count + 1) // 2, _PAIRS):
        _uniform(np.uint32(begin // 2 + pair), seed, radius, cosines)
        _radius(radius, std, sines, spare)
        _direction(cosines, sines)
        for k in range(min(_PAIRS, (count - 2 * pair) // 2)):
            at = 2 * (pair + k)
            out[at] = given[at] + radius[k] * cosines[k]
            out[at + 1] = given[at + 1] + radius[k] * sines[k]
        if count % 2 and count - 2 * pair < 2 * _PAIRS:  # the last one is without another
            k = (count - 2 * pair) // 2
            out[count - 1] = given[count - 1] + radius[k] * cosines[k]
