"""Pointwise transforms, learned from what they do to every byte value.

``ToTensor``, ``Normalize`` and their like treat each value alone.  So an image that holds all
256 values, the *ramp*, is sent through the user's own objects once; the result says exactly
what any byte becomes.  The kernels then compute it, where float32 arithmetic gives the very
same values, or look it up.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.images.pixels import Conversion, Words
from fastpipe.images.steps import Domain

Layout = Literal["contiguous", "channels_last"]

# Memory types: for each torch dtype the NumPy type of the same width that holds its bits.
_WORDS: dict[str, Any] = {
    "uint8": np.uint8, "int8": np.uint8, "float16": np.uint16, "bfloat16": np.uint16, "int16": np.uint16,
    "float32": np.float32, "int32": np.uint32, "float64": np.uint64, "int64": np.uint64,
}  # fmt: skip


def first_ramp() -> Any:
    """Return an RGB image of the 256 grey values, as wide as it has values."""
    values = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    return require("PIL.Image", extra="image").fromarray(values)


def is_pil(value: Any) -> bool:
    return hasattr(value, "getbands")


def domain_of(ramp: Any) -> Domain:
    if is_pil(ramp):
        return "pil"
    return "bytes" if conversion_of(ramp, "contiguous").kind == "bytes" else "other"


def layout_of(ramp: Any) -> Layout:
    """Return the memory order that the user's own objects gave the ramp; ``ToImage`` leaves Pillow's."""
    return "contiguous" if is_pil(ramp) or ramp.stride()[0] != 1 else "channels_last"


def conversion_of(ramp: Any, layout: Layout) -> Conversion:
    """Return the conversion that does to every byte what the pointwise steps did to the ramp."""
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
    """``(v / 255 - mean) / std`` if float32 arithmetic gives exactly the ramp's values so.

    Mean and deviation are read off the ramp's ends and then taken from the candidates near
    by; only an exact reproduction of all values counts, so a wrong guess costs speed alone.
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
    """Return float32 numbers around a value, the nearest first."""
    # A user writes short decimals: the guess, rounded to few digits, is the likeliest.
    near = [np.float32(round(float(value), digits)) for digits in (3, 4, 5, 6, 7)]
    up = down = value
    near.append(value)
    for _ in range(reach):
        up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(-np.inf))
        near += [up, down]
    return near


def tensor_over(memory: Words, shape: tuple[int, ...], dtype: str, layout: Layout) -> Any:
    """Return a torch tensor over memory, in the order of the layout."""
    torch = require("torch", extra="torch")
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[memory.itemsize]
    return tensor_shaped(torch.from_numpy(memory.reshape(-1).view(signed)), shape, dtype, layout)


def of_kind(tensor: Any, kind: type) -> Any:
    """Return a tensor as the class that a sample has: ``tv_tensors.Image`` where torchvision gives one."""
    return tensor if kind is require("torch", extra="torch").Tensor else tensor.as_subclass(kind)


def rows_of(batch: Any, kind: type) -> list[Any]:
    """Return the samples of a batch tensor, which is a plain one whatever they are, as views of it."""
    rows = batch.unbind(0)
    if kind is require("torch", extra="torch").Tensor:
        return list(rows)
    return [row.as_subclass(kind) for row in rows]


def tensor_shaped(flat: Any, shape: tuple[int, ...], dtype: str, layout: Layout) -> Any:
    """Return a flat tensor's storage with a dtype and a shape."""
    typed = flat.view(getattr(require("torch", extra="torch"), dtype))
    if layout == "contiguous":
        return typed.view(shape)
    *batch, channels, height, width = shape
    return typed.view(*batch, height, width, channels).movedim(-1, -3)
