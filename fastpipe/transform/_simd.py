"""Vector building blocks that a compiler does not find in plain loops.

All are written in LLVM's vector types, so they compile on every processor: to AVX-512, AVX2,
SSE or NEON code, whichever the machine has.
"""

from __future__ import annotations

from typing import Any

from fastpipe._extras import require

__all__ = ["LANES", "PRECISION_BITS", "between_pixels", "transpose_block", "weighted_lanes"]

_ir = require("llvmlite.ir", extra="image")
_types = require("numba.types", extra="image")
_cgutils = require("numba.core.cgutils", extra="image")
_intrinsic = require("numba.extending", extra="image").intrinsic

# Rows that are resampled side by side, one in each lane of a vector.
LANES = 32
# Weights are integers scaled by 2**22, as in Pillow's 8-bit resampling: the largest scale
# for which the sum of 255 times the weights stays inside 32 bits.
PRECISION_BITS = 22

_I8, _I32 = _ir.IntType(8), _ir.IntType(32)
_F32 = _ir.FloatType()
_BLOCK = 16


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _vector_at(builder: Any, pointer: Any, offset: Any, vector: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [offset]), vector.as_pointer())


@_intrinsic  # type: ignore[untyped-decorator]
def transpose_block(
    typing_context: Any, src: Any, src_offset: Any, src_pitch: Any, dst: Any, dst_offset: Any, dst_pitch: Any
) -> Any:
    """Transpose 16 by 16 bytes: ``dst[j * dst_pitch + i] = src[i * src_pitch + j]``.

    Four rounds of interleaving row i with row i + 8 move bit k of the row number to where
    bit k of the column number was; after four rounds all bits have changed places.
    """
    signature = _types.void(src, src_offset, src_pitch, dst, dst_offset, dst_pitch)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _ir.VectorType(_I8, _BLOCK)
        mask_type = _ir.VectorType(_I32, _BLOCK)
        low = _ir.Constant(mask_type, [k // 2 + 16 * (k % 2) for k in range(16)])
        high = _ir.Constant(mask_type, [8 + k // 2 + 16 * (k % 2) for k in range(16)])
        source = _data(context, builder, signature.args[0], args[0])
        target = _data(context, builder, signature.args[3], args[3])

        def offset(start: Any, pitch: Any, row: int) -> Any:
            return builder.add(start, builder.mul(pitch, _ir.Constant(pitch.type, row)))

        rows = [
            builder.load(_vector_at(builder, source, offset(args[1], args[2], i), vector), align=1)
            for i in range(_BLOCK)
        ]
        for _ in range(4):
            rows = [
                builder.shuffle_vector(rows[i], rows[i + 8], mask) for i in range(8) for mask in (low, high)
            ]
        for j, row in enumerate(rows):
            builder.store(row, _vector_at(builder, target, offset(args[4], args[5], j), vector), align=1)
        return context.get_dummy_value()

    return signature, codegen


@_intrinsic  # type: ignore[untyped-decorator]
def weighted_lanes(
    typing_context: Any, src: Any, src_offset: Any, step: Any, weights: Any, first: Any, count: Any, dst: Any,
    dst_offset: Any,
) -> Any:  # fmt: skip
    """Weighted sum of ``count`` vectors of LANES bytes, rounded and clipped to bytes.

    ``dst[dst_offset + l] = clip((half + sum_k src[src_offset + k * step + l] * weights[first + k]) >> 22)``
    """
    signature = _types.void(src, src_offset, step, weights, first, count, dst, dst_offset)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_type, ints_type = _ir.VectorType(_I8, LANES), _ir.VectorType(_I32, LANES)
        source = _data(context, builder, signature.args[0], args[0])
        weight = _data(context, builder, signature.args[3], args[3])
        target = _data(context, builder, signature.args[6], args[6])

        def every(value: int) -> Any:
            return _ir.Constant(ints_type, [value] * LANES)

        def spread(scalar: Any) -> Any:
            undefined = _ir.Constant(ints_type, _ir.Undefined)
            vector = builder.insert_element(undefined, scalar, _ir.Constant(_I32, 0))
            return builder.shuffle_vector(vector, undefined, every(0))

        total = _cgutils.alloca_once_value(builder, every(1 << (PRECISION_BITS - 1)))
        with _cgutils.for_range(builder, args[5]) as loop:
            offset = builder.add(args[1], builder.mul(loop.index, args[2]))
            pixels = builder.zext(
                builder.load(_vector_at(builder, source, offset, bytes_type), align=1), ints_type
            )
            factor = spread(builder.load(builder.gep(weight, [builder.add(args[4], loop.index)])))
            builder.store(builder.add(builder.load(total), builder.mul(pixels, factor)), total)
        result = builder.ashr(builder.load(total), every(PRECISION_BITS))
        result = builder.select(builder.icmp_signed("<", result, every(0)), every(0), result)
        result = builder.select(builder.icmp_signed(">", result, every(255)), every(255), result)
        builder.store(
            builder.trunc(result, bytes_type), _vector_at(builder, target, args[7], bytes_type), align=1
        )
        return context.get_dummy_value()

    return signature, codegen


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
