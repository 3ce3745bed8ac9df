"""A user's transform, compiled: what the kernels do, what torchvision does, what user code does.

A plan has three parts, in this order, each of which may be empty:

* **fused** — recognised steps that fold into one region decode and one kernel pass;
* **drawn** — further recognised steps, run by torchvision's functionals with drawn parameters;
* **stock** — everything from the first transform that is not recognised, run as it is.

Random parameters of the first two are drawn beforehand, as plain numbers, from a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.transform import kernels
from fastpipe.transform.geometry import Crop, Operation, Region, Resize, fold
from fastpipe.transform.keys import uniforms
from fastpipe.transform.pixels import Conversion, Words, convert, render
from fastpipe.transform.steps import Domain, Step, flatten, recognise, resized_size, state_of
from fastpipe.types import EncodedImage, FloatArray, Key, Size

__all__ = ["Layout", "Plan", "TensorSpec", "compile_plan", "plan_state"]

Layout = Literal["contiguous", "channels_last"]

# Memory types: for each torch dtype the NumPy type of the same width that holds its bits.
_WORDS: dict[str, Any] = {
    "uint8": np.uint8, "int8": np.uint8, "float16": np.uint16, "bfloat16": np.uint16, "int16": np.uint16,
    "float32": np.float32, "int32": np.uint32, "float64": np.uint64, "int64": np.uint64,
}  # fmt: skip
_PROBE = Size(4096, 4096)  # a size at which every usual crop fits, to ask a step what it does


@dataclass(frozen=True)
class TensorSpec:
    """The tensor that a sample becomes, where every sample has the same shape.

    Attributes:
        shape: (channels, height, width).
        dtype: name of torch's dtype, such as ``"float32"``.
        word: NumPy type of the same width that holds an element in memory.
        layout: memory order; ``"channels_last"`` has the strides of torch's memory format.
    """

    shape: tuple[int, int, int]
    dtype: str
    word: Any
    layout: Layout


class Plan:
    """A compiled transform.  Immutable; may be used from any number of threads.

    Made by ``compile_plan``.  ``print(plan)`` says which step runs where, and why.

    Attributes:
        draws: uniform numbers that a sample needs.
        stock: the transforms that run as they are, last.
        output: the tensor that each sample becomes; None where shapes may differ or the
            stock part decides.
    """

    def __init__(
        self,
        fused: Sequence[Step],
        drawn: Sequence[Step],
        stock: Sequence[Callable[[Any], Any]],
        domains: Sequence[Domain],
        ramp: Any,
        layout: Layout,
        notes: Sequence[str],
    ) -> None:
        self.stock = tuple(stock)
        self._fused, self._drawn, self._domains = tuple(fused), tuple(drawn), tuple(domains)
        self._notes = tuple(notes)
        steps = (*fused, *drawn)
        ends = np.cumsum([0, *(step.draws for step in steps)]).tolist()
        self._slices = [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self.draws = int(ends[-1])
        self._ramp_type = type(ramp)
        self._dtype = "" if _is_pil(ramp) else str(ramp.dtype).removeprefix("torch.")
        self._layout: Layout = layout
        self._how = _conversion(ramp, layout)
        self.output = self._fixed_output()

    def __repr__(self) -> str:
        return "Plan(\n" + "".join(f"  {note}\n" for note in self._notes) + ")"

    def draw(self, key: Key) -> FloatArray:
        """Draw the random parameters of a batch.

        Args:
            key: seed, epoch and, for each sample, its position in the epoch's order.

        Returns:
            float64 (N, draws): numbers in [0, 1), a row for each sample.
        """
        return uniforms(key.seed, key.epoch, key.draws, self.draws)

    def reference(self, image: Any, parameters: Sequence[float]) -> Any:
        """What torchvision makes of an image with these parameters: the oracle of parity.

        Args:
            image: a PIL image.
            parameters: one row of ``draw``.

        Returns:
            The transformed sample, by torchvision's functionals and the user's transforms.
        """
        value = self._by_functionals((*self._fused, *self._drawn), 0, image, parameters)
        for transform in self.stock:
            value = transform(value)
        return value

    def apply(self, image: EncodedImage, parameters: Sequence[float], out: Words | None = None) -> Any:
        """Everything but the stock part, on one sample.

        Args:
            image: the encoded image.
            parameters: one row of ``draw``.
            out: memory of the sample's tensor, ``output.word`` (C * H * W,), if ``output`` is
                not None and the caller keeps the batch; else new memory is made.

        Returns:
            The PIL image or tensor so far; None where ``out`` was given and written.
        """
        region = self._region(parameters, image.size) if self._fused else None
        if region is None:
            value = self._by_functionals((*self._fused, *self._drawn), 0, image.pil(), parameters)
            if out is None:
                return value
            _copy_tensor(value, self.output, out)
            return None
        pixels, size, channels = render(image, region)
        if out is not None:
            convert(pixels, size, channels, self._how, out)
            return None
        count = self._how.channels
        made = np.empty(count * size.height * size.width, self._how.word)
        convert(pixels, size, channels, self._how, made)
        value = self.wrap(made, (count, *size))
        return self._by_functionals(self._drawn, len(self._fused), value, parameters)

    def wrap(self, memory: Words, shape: tuple[int, ...]) -> Any:
        """Memory that this plan wrote, as what the transform gives: a tensor or a PIL image.

        Args:
            memory: contiguous, of the output's word type; shared, not copied.
            shape: (…, C, H, W) in elements.
        """
        if not self._dtype:
            image = memory.reshape(shape[-2], shape[-1], shape[-3])
            return require("PIL.Image", extra="image").fromarray(image[:, :, 0] if shape[-3] == 1 else image)
        tensor = _tensor(memory, shape, self._dtype, self._layout)
        return self._as_sample(tensor) if len(shape) == 3 else tensor

    def over(self, storage: Any, shape: tuple[int, ...]) -> Any:
        """A batch tensor over a flat uint8 tensor's storage, such as shared memory.

        Args:
            storage: uint8 tensor of as many bytes as the batch has.
            shape: (N, C, H, W).
        """
        return _shaped(storage, shape, self._dtype, self._layout)

    def rows(self, batch: Any) -> list[Any]:
        """The samples of a batch tensor (N, C, H, W), as views of the type that a sample has."""
        return [self._as_sample(row) for row in batch.unbind(0)]

    def _as_sample(self, tensor: Any) -> Any:
        torch = require("torch", extra="torch")
        # tv_tensors.Image where torchvision gives one; batches are plain tensors either way.
        return tensor if self._ramp_type is torch.Tensor else tensor.as_subclass(self._ramp_type)

    def _by_functionals(self, steps: Sequence[Step], first: int, value: Any, parameters: Any) -> Any:
        for number, step in enumerate(steps, first):
            value = step.reference(value, parameters[self._slices[number]])
        return value

    def _region(self, parameters: Any, size: Size) -> Region | None:
        operations: list[Operation] = []
        current = size
        for step, domain, part in zip(self._fused, self._domains, self._slices, strict=False):
            made = _operations(step, parameters[part], current, domain)
            if made is None:
                return None
            for operation in made:
                current = _size_after(operation, current)
            operations += made
        return fold(operations, size)

    def _fixed_output(self) -> TensorSpec | None:
        if self._drawn or self.stock or not self._dtype:
            return None
        size: Size | None = None
        for step in self._fused:
            if step.static_size is not None:
                size = step.static_size
            elif step.geometry is not None and step.name == "Resize" and size is not None:
                size = resized_size(step.transform, size)
        if size is None:
            return None
        return TensorSpec((self._how.channels, *size), self._dtype, self._how.word, self._layout)


def compile_plan(
    transform: Any, *, layout: Layout = "contiguous", stock_note: Callable[[Sequence[Any]], str] | None = None
) -> Plan:
    """Compile a torchvision transform.

    Args:
        transform: a transform, a ``Compose`` or ``Sequential`` of them, any callable, or None.
        layout: memory order of the tensors that are made.
        stock_note: says, for ``print(plan)``, how the unrecognised transforms will run.

    Returns:
        The plan.  No transform is unsupported: what is not recognised becomes the stock part.
    """
    transforms = flatten(transform)
    steps: list[Step] = []
    for item in transforms:
        step = recognise(item)
        if step is None:
            break
        steps.append(step)
    ramp = _first_ramp()
    domains: list[Domain] = []
    why, resized = "", False
    for step in steps:
        domain = _domain(ramp)
        ramp_after, why, resized = _try_to_fuse(step, domain, ramp, resized)
        if why:
            break
        ramp, domains = ramp_after, [*domains, domain]
    count = len(domains)
    stock = transforms[len(steps) :]
    notes = _describe(steps, count, stock, ramp, why, stock_note)
    return Plan(steps[:count], steps[count:], stock, domains, ramp, layout, notes)


def plan_state(transform: Any) -> Any:
    """A value that changes when a compiled plan no longer fits the transform."""
    return tuple(state_of(item) for item in flatten(transform))


# ---- deciding what can be fused -------------------------------------------------------------


def _try_to_fuse(step: Step, domain: Domain, ramp: Any, resized: bool) -> tuple[Any, str, bool]:
    """The ramp after the step, why it cannot be fused (or ""), and whether it resizes."""
    if step.geometry is None or step.name == "Grayscale":
        try:
            after = step.transform(ramp)
            _conversion(after, "contiguous")
        except Exception as error:  # the same error awaits the user's samples: let it
            return ramp, f"it fails on an image ({type(error).__name__})", resized
        if step.geometry is None:
            return after, "", resized
        ramp_after = after
    else:
        ramp_after = ramp
    try:
        made = _operations(step, [0.5] * step.draws, _PROBE, domain)
    except ValueError:
        made = ()
    if made is None:
        return ramp, f"not on a value that is {_DOMAIN_WORDS[domain]} at that point", resized
    resizes = any(isinstance(operation, Resize) for operation in made)
    if resizes and resized:
        return ramp, "a second resize rounds a second time", resized
    return ramp_after, "", resized or resizes


_DOMAIN_WORDS = {"pil": "a PIL image", "bytes": "a uint8 tensor", "other": "a float tensor"}


def _operations(step: Step, u: Any, size: Size, domain: Domain) -> Sequence[Operation] | None:
    if step.geometry is None:
        return ()
    made = step.geometry(u, size, domain)
    if made is not None and domain == "other":  # a fill would have to be converted as well
        made = [Crop(item.box, None) if isinstance(item, Crop) else item for item in made]
    return made


def _size_after(operation: Operation, size: Size) -> Size:
    if isinstance(operation, Crop):
        return Size(operation.box.height, operation.box.width)
    return operation.size if isinstance(operation, Resize) else size


def _describe(
    steps: Sequence[Step],
    fused: int,
    stock: Sequence[Any],
    ramp: Any,
    why: str,
    stock_note: Callable[[Sequence[Any]], str] | None,
) -> list[str]:
    how = _conversion(ramp, "contiguous").kind
    words = {"bytes": "bytes as they are", "affine": "fused normalisation", "table": "look-up table"}
    notes = []
    for number, step in enumerate(steps):
        if number < fused:
            where = "region decode and kernel" if step.geometry else f"kernel ({words[how]})"
        else:
            reason = f": {why}" if number == fused else ""
            where = f"torchvision with drawn parameters, in threads{reason}"
        notes.append(f"{_shorten(step.transform)}  →  {where}")
    note = stock_note(stock) if stock_note else "as it is"
    notes += [f"{_shorten(item)}  →  {note}" for item in stock]
    return notes or ["nothing to do  →  PIL images as Pillow decodes them"]


def _shorten(transform: Any) -> str:
    text = " ".join(repr(transform).split())
    return text if len(text) <= 72 else text[:71] + "…"


# ---- the ramp: all byte values, sent through the pointwise steps ---------------------------


def _first_ramp() -> Any:
    """An RGB image of the 256 grey values, as wide as it has values."""
    values = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    return require("PIL.Image", extra="image").fromarray(values)


def _is_pil(value: Any) -> bool:
    return hasattr(value, "getbands")


def _domain(ramp: Any) -> Domain:
    if _is_pil(ramp):
        return "pil"
    return "bytes" if _conversion(ramp, "contiguous").kind == "bytes" else "other"


def _conversion(ramp: Any, layout: Layout) -> Conversion:
    """The conversion that does to every byte what the pointwise steps did to the ramp."""
    if _is_pil(ramp):
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
            mean, std = (np.array(column, np.float32) for column in zip(*found, strict=True))  # type: ignore[arg-type]
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
    """float32 numbers around a value, the nearest first."""
    # A user writes short decimals: the guess, rounded to few digits, is the likeliest.
    near = [np.float32(round(float(value), digits)) for digits in (3, 4, 5, 6, 7)]
    up = down = value
    near.append(value)
    for _ in range(reach):
        up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(-np.inf))
        near += [up, down]
    return near


def _tensor(memory: Words, shape: tuple[int, ...], dtype: str, layout: Layout) -> Any:
    """A torch tensor over memory, in the order of the layout."""
    torch = require("torch", extra="torch")
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[memory.itemsize]
    return _shaped(torch.from_numpy(memory.reshape(-1).view(signed)), shape, dtype, layout)


def _shaped(flat: Any, shape: tuple[int, ...], dtype: str, layout: Layout) -> Any:
    """A flat tensor's storage, seen with a dtype and a shape."""
    typed = flat.view(getattr(require("torch", extra="torch"), dtype))
    if layout == "contiguous":
        return typed.view(shape)
    *batch, channels, height, width = shape
    return typed.view(*batch, height, width, channels).movedim(-1, -3)


def _copy_tensor(value: Any, spec: TensorSpec | None, out: Words) -> None:
    """Write a tensor that torchvision made into a batch's memory."""
    assert spec is not None
    if tuple(value.shape) != spec.shape:
        raise ValueError(f"the transform gave shape {tuple(value.shape)}, the plan expects {spec.shape}")
    torch = require("torch", extra="torch")
    _tensor(out, spec.shape, spec.dtype, spec.layout).copy_(value.as_subclass(torch.Tensor))


_ = kernels  # compiled when the plan's module is imported, never in a decoding thread
