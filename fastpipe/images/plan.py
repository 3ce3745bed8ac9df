"""A user's transform, compiled into the work of the kernels, of torchvision and of user code.

A plan has three parts, in this order, each of which may be empty:

* **fused** — recognised steps that fold into one region decode and one kernel pass;
* **drawn** — further recognised steps, run by torchvision's functionals with drawn parameters;
* **stock** — everything from the first transform that is not recognised, run as it is.

The random parameters of the first two parts are drawn beforehand from a key, as plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from fastpipe.core.clock import ranged
from fastpipe.core.extras import require
from fastpipe.core.keys import uniforms
from fastpipe.core.native import native
from fastpipe.core.text import printable_lines
from fastpipe.core.types import Box, EncodedImage, FloatArray, Key, Size
from fastpipe.images.pixels import Conversion, Region, Resampling, Words, draw, fold, part_of, resampling_of
from fastpipe.images.pointwise import (
    Layout,
    conversion_of,
    domain_of,
    first_ramp,
    is_pil,
    layout_of,
    of_kind,
    tensor_over,
    tensor_shaped,
)
from fastpipe.images.steps import (
    Domain,
    Step,
    described_short_side,
    filter_of,
    flatten,
    recognise,
    resized_size,
    state_of,
)


@dataclass(frozen=True)
class TensorSpec:
    """The tensor that a sample becomes, if all samples have the same shape."""

    shape: tuple[int, int, int]  # channels, height, width
    dtype: str  # torch's name, such as "float32"
    word: Any  # NumPy's dtype of the same width, for elements in memory
    layout: Layout  # "channels_last" has the strides of torch's memory format


class Plan:
    """A compiled transform, immutable and usable from any number of threads.

    ``compile_plan`` makes it.  ``print(plan)`` says which step runs where, and why.

    Attributes:
        draws: the number of uniform numbers that a sample needs.
        stock: the transforms that run unchanged, after all others.
        kind: the class of the samples before those: a PIL image or a tensor.
        output: the tensor that each sample becomes; None if shapes may differ or the stock
            part determines it.
        end: for a plan ``as_bytes``, the conversion that its batches still need.
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
        self._fused, self._drawn = tuple(fused), tuple(drawn)
        self._notes = tuple(notes)
        steps = (*fused, *drawn)
        ends = np.cumsum([0, *(step.draws for step in steps)]).tolist()
        self._slices = [slice(a, b) for a, b in pairwise(ends)]
        self._steps = []  # of the fused part, in the native core's form
        for step, domain, part in zip(self._fused, domains, self._slices, strict=False):
            if step.described is not None:
                described = step.described(domain)
                described.draw = part.start
                self._steps.append(described)
        self.draws = int(ends[-1])
        self.kind = type(ramp)
        self._dtype = "" if is_pil(ramp) else str(ramp.dtype).removeprefix("torch.")
        # If torchvision or user code continues, keep the strides that it would have received: the
        # last bit of torch's arithmetic depends on them.
        self._layout: Layout = layout_of(ramp) if drawn or stock else layout
        self._how = conversion_of(ramp, self._layout)
        self.output = self._fixed_output()
        self.end: Conversion | None = None
        self._bytes: Plan | None = None
        self._native: dict[tuple[int | None, bool, bool, int | None], Any] = {}
        self._of_dtype: dict[str, Plan] = {}
        self._made_by: Callable[[], Plan]  # set by the maker

    def __reduce__(self) -> tuple[Callable[[], Plan], tuple[()]]:
        return self._made_by, ()  # its steps hold nested functions and native objects

    def _changed(self, method: str, arguments: tuple[Any, ...], how: Conversion, dtype: str) -> Plan:
        """Return a copy with another conversion; ``method`` is the name of the method that makes it."""
        plan = Plan.__new__(Plan)
        made_by = partial(_made_again, self._made_by, method, *arguments)
        plan.__dict__.update(
            self.__dict__, _made_by=made_by, _how=how, _dtype=dtype, _native={}, _of_dtype={}
        )
        plan.output = plan._fixed_output()
        return plan

    def __repr__(self) -> str:
        return printable_lines("Plan(\n" + "".join(f"  {note}\n" for note in self._notes) + ")")

    def draw(self, key: Key) -> FloatArray:
        """Draw the random parameters of a batch: float64 (N, draws), in [0, 1)."""
        if not self.draws:  # its seed may not be drawn yet
            return np.empty((len(key.draws), 0))
        return uniforms(key.seed, key.epoch, key.draws, self.draws)

    def reference(self, image: Any, parameters: Sequence[float]) -> Any:
        """Transform a PIL image with torchvision's functionals, a row of ``draw``, and the user's own
        transforms: the reference for parity."""
        value = self._by_functionals((*self._fused, *self._drawn), 0, image, parameters)
        for transform in self.stock:
            value = transform(value)
        return value

    @ranged("transform")
    def apply(self, image: EncodedImage, parameters: Sequence[float], out: Words | None = None) -> Any:
        """Apply all but the stock part to one sample, with a row of ``draw``; return a PIL image or a tensor.

        With ``out``, memory ``output.word`` (C * H * W,) for the sample's tensor, write that and return None.
        """
        region = self._region(parameters, image.size)
        if region is None:
            value = self._by_functionals((*self._fused, *self._drawn), 0, image.pil(), parameters)
            if out is None:
                return value
            spec = self.output
            if spec is None or tuple(value.shape) != spec.shape:
                raise ValueError(f"the transform gave shape {tuple(value.shape)}, the plan expects {spec}")
            torch = require("torch", extra="torch")
            tensor_over(out, spec.shape, spec.dtype, spec.layout).copy_(value.as_subclass(torch.Tensor))
            return None
        if out is not None:
            draw(image, region, self._how, out)
            return None
        shape = (self._how.channels, region.window.height, region.window.width)
        made = np.empty(math.prod(shape), self._how.word)
        draw(image, region, self._how, made)
        return self._finished(made, shape, parameters, image.info)

    def native(self, max_pixels: int | None, turns: bool, scaled: bool, short_side: int | None = None) -> Any:
        """Return this plan, up to its drawn and stock parts, as a ``native.ImagePlan``; None if the native
        core does not shrink images as the installed Pillow does.

        Args:
            max_pixels: decline images with more pixels.
            turns: decline images that EXIF turns.
            scaled: decode at a reduced size if that loses no detail.
            short_side: first shrink larger images to this number of pixels on the short side.
        """
        key = max_pixels, turns, scaled, short_side
        found = self._native.get(key)
        if found is None:
            limit = -1 if max_pixels is None else max_pixels
            shrink = [] if short_side is None else [described_short_side(short_side)]
            if None in shrink:
                return None
            found = native.ImagePlan(self._steps, self._how.native, self.draws, limit, turns, scaled, shrink)
            self._native = {key: found}  # if a script changes it, the last one
        return found

    @property
    def makes_images(self) -> bool:
        """Return whether samples are PIL images before the drawn and stock parts."""
        return not self._dtype

    def finished(
        self, memory: Words, size: tuple[int, int], parameters: Sequence[float],
        info: Callable[[], dict[Any, Any]],
    ) -> Any:  # fmt: skip
        """Return the result of ``apply`` for a sample's bytes made elsewhere, up to the drawn part."""
        shape = (self._how.channels, *size)
        return self._finished(memory.view(self._how.word), shape, parameters, info)

    def _finished(self, memory: Words, shape: tuple[int, int, int], parameters: Any, info: Any) -> Any:
        value = self._sample(memory, shape)
        if is_pil(value):  # for user code, which may read EXIF data or profiles
            value.info = info()
        return self._by_functionals(self._drawn, len(self._fused), value, parameters)

    def part(self, image: EncodedImage, parameters: Sequence[float]) -> Box | None:
        """Return the part of an image that ``apply`` will request by ``region``; None if all or none."""
        region = self._region(parameters, image.size)
        return None if region is None else part_of(image, region)

    def resampling(self, image: EncodedImage, parameters: Sequence[float]) -> Resampling | None:
        """Return the resampling of ``apply`` before it writes bytes; None if it does more than resampling."""
        region = self._region(parameters, image.size)
        return None if region is None else resampling_of(image, region)

    @property
    def writes_bytes(self) -> bool:
        """Return whether samples are resampled bytes of three colours, all of one shape."""
        return self.output is not None and self._how.kind == "bytes" and self._how.channels == 3

    def over(self, storage: Any, shape: tuple[int, ...]) -> Any:
        """Return a batch (N, C, H, W) over a flat uint8 tensor's storage, such as shared memory."""
        return tensor_shaped(storage, shape, self._dtype, self._layout)

    def as_bytes(self) -> Plan:
        """Return this plan without its ``end``, with uint8 samples, if only the computation of floats from
        bytes remains, which can be done elsewhere.  Otherwise return this plan."""
        if self.output is None or self._how.kind != "affine":
            return self
        if self._bytes is None:
            how = replace(self._how, kind="bytes", word=np.uint8)
            plan = self._changed("as_bytes", (), how, "uint8")
            plan.end, plan.kind = self._how, require("torch", extra="torch").Tensor
            self._bytes = plan  # complete, as other threads read it
        return self._bytes

    def of_dtype(self, dtype: str) -> Plan:
        """Return this plan with the kernels' float32 samples rounded to a 16-bit dtype, such as
        ``"bfloat16"``.  For other samples, and for ``""``, return this plan."""
        if not dtype or self.output is None or self._how.kind != "affine":
            return self
        if dtype not in self._of_dtype:
            torch, how = require("torch", extra="torch"), self._how
            ramp = torch.arange(256, dtype=torch.uint8).expand(1, how.channels, 1, 256)
            values = how.of_tensor(ramp).to(getattr(torch, dtype)).view(torch.int16).numpy()
            table = np.ascontiguousarray(values).view(np.uint16).reshape(-1)
            new = Conversion("table", how.channels, how.interleaved, np.uint16, table=table)
            self._of_dtype = {dtype: self._changed("of_dtype", (dtype,), new, dtype)}
        return self._of_dtype[dtype]

    def _sample(self, memory: Words, shape: tuple[int, int, int]) -> Any:
        """Return memory (C, H, W) that was written as the transform's result: a tensor or a PIL image."""
        if not self._dtype:
            image = memory.reshape(shape[1], shape[2], shape[0])
            return require("PIL.Image", extra="image").fromarray(image[:, :, 0] if shape[0] == 1 else image)
        return of_kind(tensor_over(memory, shape, self._dtype, self._layout), self.kind)

    def _by_functionals(self, steps: Sequence[Step], first: int, value: Any, parameters: Any) -> Any:
        for number, step in enumerate(steps, first):
            value = step.reference(value, parameters[self._slices[number]])
        return value

    def _region(self, parameters: Any, size: Size) -> Region | None:
        return fold(self._steps, size, parameters) if self._fused else None

    def _fixed_output(self) -> TensorSpec | None:
        if self._drawn or self.stock or not self._dtype:
            return None
        size: Size | None = None
        for step in self._fused:
            if step.static_size is not None:
                size = step.static_size
            elif step.name == "Resize" and size is not None:
                size = resized_size(step.transform, size)
        if size is None:
            return None
        return TensorSpec((self._how.channels, *size), self._dtype, self._how.word, self._layout)


def compile_plan(
    transform: Any,
    *,
    layout: Layout = "contiguous",
    stock_note: Callable[[Sequence[Any]], str] | None = None,
    decode_note: str = "",
) -> Plan:
    """Compile a torchvision transform.

    Every transform is supported: unrecognised ones become the stock part.

    Args:
        transform: a transform, a ``Compose`` or ``Sequential`` of them, any callable, or None.
        layout: memory order of the resulting tensors.
        stock_note, decode_note: texts for ``print(plan)``: how unrecognised transforms will run, and what
            decodes the images.
    """
    transforms = flatten(transform)
    steps: list[Step] = []
    for item in transforms:
        step = recognise(item)
        if step is None:
            break
        steps.append(step)
    ramp = first_ramp()
    domains: list[Domain] = []
    why, resized = "", False
    for step in steps:
        domain = domain_of(ramp)
        ramp_after, why, resized = _try_to_fuse(step, domain, ramp, resized)
        if why:
            break
        ramp, domains = ramp_after, [*domains, domain]
    count = len(domains)
    stock = transforms[len(steps) :]
    notes = [decode_note] if decode_note else []
    notes += _describe(steps, count, stock, ramp, why, stock_note)
    plan = Plan(steps[:count], steps[count:], stock, domains, ramp, layout, notes)
    plan._made_by = partial(
        compile_plan, transform, layout=layout, stock_note=stock_note, decode_note=decode_note
    )
    return plan


def _made_again(made_by: Callable[[], Plan], method: str, *arguments: Any) -> Plan:
    plan: Plan = getattr(made_by(), method)(*arguments)
    return plan


def plan_state(transform: Any) -> Any:
    """Return a value that changes when a compiled plan no longer fits the transform."""
    return tuple(state_of(item) for item in flatten(transform))


# ---- deciding what can be fused -------------------------------------------------------------


_RESIZES = ("Resize", "RandomResizedCrop")


def _try_to_fuse(step: Step, domain: Domain, ramp: Any, resized: bool) -> tuple[Any, str, bool]:
    """Return the ramp after the step, why it cannot be fused (or ""), and whether it resizes."""
    if step.described is None or step.name == "Grayscale":
        try:
            after = step.transform(ramp)
            conversion_of(after, "contiguous")
        except Exception as error:  # the user's samples will raise the same error
            return ramp, f"it fails on an image ({type(error).__name__})", resized
        if step.described is None:
            return after, "", resized
        ramp_after = after
    else:
        ramp_after = ramp
    if step.described(domain) is None:
        return ramp, _why_not(step, domain), resized
    resizes = step.name in _RESIZES
    if resizes and resized:
        return ramp, "a second resize rounds a second time", resized
    return ramp_after, "", resized or resizes


def _why_not(step: Step, domain: Domain) -> str:
    if domain != "pil":
        return f"not on a value that is {_DOMAIN_WORDS[domain]} at that point"
    if step.name == "RandomCrop":
        return "this padding is not a colour"
    is_resampled = step.name in _RESIZES
    if (is_resampled and filter_of(step.transform, domain) is None) or step.name == "Grayscale":
        return "the installed Pillow has an arithmetic of its own here"
    return "its numbers are not plain ones, or torchvision refuses them"


_DOMAIN_WORDS = {"bytes": "a uint8 tensor", "other": "a float tensor"}


def _describe(
    steps: Sequence[Step],
    fused: int,
    stock: Sequence[Any],
    ramp: Any,
    why: str,
    stock_note: Callable[[Sequence[Any]], str] | None,
) -> list[str]:
    how = conversion_of(ramp, "contiguous").kind
    words = {"bytes": "bytes as they are", "affine": "fused normalisation", "table": "look-up table"}
    notes = []
    for number, step in enumerate(steps):
        if number < fused:
            where = "region decode and kernel" if step.described else f"kernel ({words[how]})"
        else:
            reason = f": {why}" if number == fused else ""
            where = f"torchvision with drawn parameters, in threads{reason}"
        notes.append(f"{shortened(step.transform)}  →  {where}")
    note = stock_note(stock) if stock_note else "as it is"
    notes += [f"{shortened(item)}  →  {note}" for item in stock]
    return notes or ["nothing to do  →  PIL images as Pillow decodes them"]


def shortened(transform: Any) -> str:
    """Return a transform's ``repr`` on one line."""
    text = " ".join(repr(transform).split())
    return text if len(text) <= 72 else text[:71] + "…"
