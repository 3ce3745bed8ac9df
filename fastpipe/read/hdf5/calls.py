"""C functions, called from kernels by their addresses."""

from __future__ import annotations

from typing import Any

from fastpipe._extras import require

__all__ = ["call"]

_t = require("numba.types", extra="hdf5")
_ir = require("llvmlite.ir", extra="hdf5")
_WORDS = 6  # arguments, as many as are passed in registers where this is used


@require("numba.extending", extra="hdf5").intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def call(context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call the C function at an address with six words, of which it takes the first ones.

    The result is a word too; of a shorter one the upper bits are arbitrary.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = _ir.IntType(_t.uintp.bitwidth)
        kind = _ir.FunctionType(word, [word] * _WORDS)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return _t.uintp(*[_t.uintp] * (_WORDS + 1)), generate
