"""What kernels of several formats do: call C functions, fill memory, read files and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["call", "is_read", "little_endian", "memory_at"]

_t = require("numba.types", extra="hdf5")
_ir = require("llvmlite.ir", extra="hdf5")
_WORDS = 6  # arguments, as many as are passed in registers where this is used
_carray = require("numba", extra="hdf5").carray
_intrinsic = require("numba.extending", extra="hdf5").intrinsic


_pread = _t.ExternalFunction("pread", _t.intp(_t.int32, _t.uintp, _t.uintp, _t.int64))


@_intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def call(context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call the C function at an address with six words, of which it takes the first ones.

    The result is a word too; of a shorter one the upper bits are arbitrary.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = _ir.IntType(_t.uintp.bitwidth)
        kind = _ir.FunctionType(word, [word] * _WORDS)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return _t.uintp(*[_t.uintp] * (_WORDS + 1)), generate


@_intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(_t.voidptr))

    return _t.voidptr(_t.uintp), generate


@compiled()
def memory_at(address: Any, nbytes: Any) -> Any:
    """The memory at an address, for which the caller answers: uint8 (nbytes,)."""
    return _carray(_pointer(address), (nbytes,), np.uint8)


@compiled()
def is_read(descriptor: Any, offset: Any, data: Any) -> Any:
    """Whether memory, uint8 (N,), was filled with bytes of a file."""
    done = 0
    while done < data.size:
        to = np.uint64(data.ctypes.data) + np.uint64(done)
        count = _pread(descriptor, to, np.uint64(data.size - done), offset + done)
        if count <= 0:
            return False
        done += count
    return True


@compiled()
def little_endian(data: Any, at: Any) -> Any:
    """A number of 32 bits without a sign."""
    low = np.int64(data[at]) | np.int64(data[at + 1]) << 8
    return low | np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24
