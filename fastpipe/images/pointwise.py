"""Pointwise transforms, whose effect is measured on every byte value.

``ToTensor``, ``Normalize`` and similar transforms change each value of an image separately.  An image with
all 256 byte values, the *ramp*, passes through the user's transform objects once.  The result shows the
output value of each byte.  The kernels (compiled code) compute the output values if float32 arithmetic gives
exactly the measured values.  Otherwise the kernels use a look-up table.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.images.pixels import Conversion, Words
from fastpipe.images.steps import Domain

Layout = Literal["contiguous", "channels_last"]

# For each torch dtype, the NumPy dtype of the same width that holds the bits of an element in memory.
_WORDS: dict[str, Any] = {
    "uint8": np.uint8, "int8": np.uint8, "float16": np.uint16, "bfloat16": np.uint16, "int16": np.uint16,
    "float32": np.float32, "int32": np.uint32, "float64": np.uint64, "int64": np.uint64,
}  # fmt: skip


def first_ramp() -> Any:
    """Return an RGB image of the 256 grey values, one value per column."""
    values = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    return require("PIL.Image", extra="image").fromarray(values)


def is_pil(value: Any) -> bool:
    return hasattr(value, "getbands")


def domain_of(ramp: Any) -> Domain:
    if is_pil(ramp):
        return "pil"
    return "bytes" if conversion_of(ramp, "contiguous").kind == "bytes" else "other"


def layout_of(ramp: Any) -> Layout:
    """Return the memory order of ``ramp``, an image that the user's transforms have changed. After
    ``ToImage``, this is Pillow's order, channels last."""
    return "contiguous" if is_pil(ramp) or ramp.stride()[0] != 1 else "channels_last"


def conversion_of(ramp: Any, layout: Layout) -> Conversion:
    """Return the conversion that gives the user's results. ``ramp`` holds these results for all bytes."""
    if is_pil(ramp):
        return Conversion("bytes", len(ramp.getbands()), interleaved=True)
    last = layout == "channels_last"
    dtype = str(ramp.dtype).removeprefix("torch.")
    channels = int(ramp.shape[0])
    if dtype not in _WORDS or ramp.dim() != 3 or channels not in (1, 3) or ramp.shape[1:] != (1, 256):
        raise TypeError(f"cannot convert to {dtype} of shape {tuple(ramp.shape)}")
    word = _WORDS[dtype]
    values = _bits(ramp)  # (channels, 256)
    if dtype == "uint8" and np.array_equal(values, np.broadcast_to(np.arange(256), values.shape)):
        return Conversion("bytes", channels, last)
    if dtype == "float32":
        affine = _as_affine(values, channels, last)
        if affine is not None:
            return affine
    table = np.ascontiguousarray(values).view(np.dtype(f"u{values.itemsize}")).reshape(-1)
    return Conversion("table", channels, last, word, table=table)


def _bits(ramp: Any) -> npt.NDArray[Any]:
    torch = require("torch", extra="torch")
    plain = ramp.detach().as_subclass(torch.Tensor)[:, 0, :].contiguous()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    return plain.numpy()  # type: ignore[no-any-return]


def _as_affine(values: npt.NDArray[Any], channels: int, last: bool) -> Conversion | None:
    """Return the conversion ``(v / 255 - mean) / std`` if its float32 arithmetic gives exactly ``values``,
    the results for all 256 bytes.

    The mean and the standard deviation are estimated from the first and the last value, and nearby numbers
    are tried as well.  A conversion is accepted only if it reproduces all values exactly.  A wrong estimate
    therefore makes the conversion slower, but not wrong.
    """
    codes = np.arange(256, dtype=np.float32)
    for divide in (True, False):
        unit = codes / np.float32(255) if divide else codes * (np.float32(1) / np.float32(255))
        found = [_mean_and_std(unit, values[c].astype(np.float32)) for c in range(channels)]
        if all(found):
            mean, std = (np.array(column, np.float32) for column in zip(*found, strict=True))
            return Conversion("affine", channels, last, np.float32, divide, mean, std)
    return None


def _mean_and_std(unit: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> tuple[Any, Any] | None:
    span = np.float64(values[255]) - np.float64(values[0])
    if not np.isfinite(span) or span == 0:
        return None
    guess_std = np.float32(1 / span)
    guess_mean = np.float32(-np.float64(values[0]) / span)
    for std in _neighbours(guess_std):
        for mean in _neighbours(guess_mean):
            if np.array_equal((unit - mean) / std, values):
                return mean, std
    return None


def _neighbours(value: np.float32, reach: int = 4) -> list[np.float32]:
    """Return float32 numbers around ``value``, the most likely numbers first."""
    # Users write short decimals, so the estimate rounded to few digits is the most likely number.
    near = [np.float32(round(float(value), digits)) for digits in (3, 4, 5, 6, 7)]
    up = down = value
    near.append(value)
    for _ in range(reach):
        up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(-np.inf))
        near += [up, down]
    return near


def tensor_over(memory: Words, shape: tuple[int, ...], dtype: str, layout: Layout) -> Any:
    """Return a torch tensor that shares ``memory``, a NumPy array, and has the memory order ``layout``."""
    torch = require("torch", extra="torch")
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[memory.itemsize]
    return tensor_shaped(torch.from_numpy(memory.reshape(-1).view(signed)), shape, dtype, layout)


def of_kind(tensor: Any, kind: type) -> Any:
    """Return a tensor as an instance of ``kind``, the class of samples, such as ``tv_tensors.Image``."""
    return tensor if kind is require("torch", extra="torch").Tensor else tensor.as_subclass(kind)


def rows_of(batch: Any, kind: type) -> list[Any]:
    """Return the samples of ``batch``, a plain tensor, as views of the class ``kind``."""
    rows = batch.unbind(0)
    if kind is require("torch", extra="torch").Tensor:
        return list(rows)
    return [row.as_subclass(kind) for row in rows]


def tensor_shaped(flat: Any, shape: tuple[int, ...], dtype: str, layout: Layout) -> Any:
    """Return a flat tensor's storage as a tensor with this dtype and shape."""
    typed = flat.view(getattr(require("torch", extra="torch"), dtype))
    if layout == "contiguous":
        return typed.view(shape)
    *batch, channels, height, width = shape
    return typed.view(*batch, height, width, channels).movedim(-1, -3)
