"""A vector building block that a compiler does not find in plain loops, in LLVM's vector types."""

from __future__ import annotations

from typing import Any

from fastpipe._extras import require

__all__ = ["between_pixels"]

_ir = require("llvmlite.ir", extra="tf")
_types = require("numba.types", extra="tf")
_intrinsic = require("numba.extending", extra="tf").intrinsic

_I8, _I32 = _ir.IntType(8), _ir.IntType(32)
_F32 = _ir.FloatType()


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _vector_at(builder: Any, pointer: Any, offset: Any, vector: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [offset]), vector.as_pointer())


@_intrinsic  # type: ignore[untyped-decorator]
def between_pixels(
    typing_context: Any, src: Any, left: Any, right: Any, part: Any, dst: Any, dst_offset: Any
) -> Any:
    """Four floats between four bytes and four others, each operation rounded.

    ``dst[dst_offset + c] = src[left + c] + (src[right + c] - src[left + c]) * part``, for c of 0 to 3: the
    fourth is beside a pixel of three colours.
    """
    signature = _types.void(src, left, right, part, dst, dst_offset)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_type, floats_type = _ir.VectorType(_I8, 4), _ir.VectorType(_F32, 4)
        source = _data(context, builder, signature.args[0], args[0])
        target = _data(context, builder, signature.args[4], args[4])

        def pixel(offset: Any) -> Any:
            loaded = builder.load(_vector_at(builder, source, offset, bytes_type), align=1)
            return builder.uitofp(loaded, floats_type)

        undefined = _ir.Constant(floats_type, _ir.Undefined)
        factor = builder.insert_element(undefined, args[3], _ir.Constant(_I32, 0))
        factor = builder.shuffle_vector(factor, undefined, _ir.Constant(_ir.VectorType(_I32, 4), [0] * 4))
        first = pixel(args[1])
        more = builder.fmul(builder.fsub(pixel(args[2]), first), factor)
        builder.store(builder.fadd(first, more), _vector_at(builder, target, args[5], floats_type), align=4)
        return context.get_dummy_value()

    return signature, codegen
