"""A plan: a user's transform, compiled into the work of the kernels (compiled code), of torchvision and of
user code.

A plan has three parts, in this order. Each part may be empty:

* **fused** — the recognised steps that can be combined: one part of the image is decoded, and a kernel makes
  one pass;
* **drawn** — further recognised steps, which call torchvision's functions with random parameters that
  fastpipe has drawn;
* **stock** — all transforms from the first unrecognised transform on, which run unchanged.

The random parameters of the fused and the drawn part are plain numbers, drawn from a key before the steps
run.  A key is the seed, the epoch and the positions of a batch's samples in the epoch.
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
    is_torchvision,
    recognise,
    resized_size,
    state_of,
)


@dataclass(frozen=True)
class TensorSpec:
    """The tensor that each sample becomes, if all samples have the same shape."""

    shape: tuple[int, int, int]  # channels, height, width
    dtype: str  # torch's name, such as "float32"
    word: Any  # NumPy's dtype of the same width, for elements in memory
    layout: Layout  # "channels_last" has the strides of torch's memory format


class Plan:
    """A user's transform, compiled.  A plan is immutable, and any number of threads may use it.

    ``compile_plan`` makes a plan.  ``print(plan)`` shows where each step runs, and why.

    Attributes:
        draws: the number of uniform random numbers that a sample needs.
        stock: the transforms that run unchanged, after all other steps.
        kind: the class of a sample after the kernels' work: a PIL image or a tensor.
        output: the tensor that each sample becomes. None if shapes may differ, if samples are PIL images, or
            if torchvision's or the user's code runs after the kernels.
        end: the conversion that batches still need if ``as_bytes`` made this plan. None for other plans.
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
        self._steps = []  # the steps of the fused part, in the native core's form
        for step, domain, part in zip(self._fused, domains, self._slices, strict=False):
            if step.described is not None:
                described = step.described(domain)
                described.draw = part.start
                self._steps.append(described)
        self.draws = int(ends[-1])
        self.kind = type(ramp)
        self._dtype = "" if is_pil(ramp) else str(ramp.dtype).removeprefix("torch.")
        # If torchvision or user code runs after the fused part, keep the strides that torchvision would have
        # produced, because the last bit of torch's arithmetic depends on the strides.
        self._layout: Layout = layout_of(ramp) if drawn or stock else layout
        self._how = conversion_of(ramp, self._layout)
        self.output = self._fixed_output()
        self.end: Conversion | None = None
        self._bytes: Plan | None = None
        self._native: dict[tuple[int | None, bool, bool, int | None], Any] = {}
        self._of_dtype: dict[str, Plan] = {}
        self._made_by: Callable[[], Plan]  # set by ``compile_plan``

    def __reduce__(self) -> tuple[Callable[[], Plan], tuple[()]]:
        return self._made_by, ()  # the plan's steps hold nested functions and native objects

    def _changed(self, method: str, arguments: tuple[Any, ...], how: Conversion, dtype: str) -> Plan:
        """Return a copy of this plan with the conversion ``how``, for the public method ``method``."""
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
        """Return random numbers for a batch, which depend only on ``key``: float64 (N, draws), in [0, 1)."""
        if not self.draws:  # the key's seed may not be drawn yet
            return np.empty((len(key.draws), 0))
        return uniforms(key.seed, key.epoch, key.draws, self.draws)

    def reference(self, image: Any, parameters: Sequence[float]) -> Any:
        """Transform a PIL image with torchvision's functions and the user's transforms. Tests compare results
        with the result of this method.

        ``parameters`` is a row of the result of ``draw``.
        """
        value = self._by_functionals((*self._fused, *self._drawn), 0, image, parameters)
        for transform in self.stock:
            value = transform(value)
        return value

    @ranged("transform")
    def apply(self, image: EncodedImage, parameters: Sequence[float], out: Words | None = None) -> Any:
        """Apply all steps except ``stock`` to one sample. Return a PIL image or a tensor.

        ``parameters`` is a row of the result of ``draw``.  If ``out`` is given, an array (C * H * W,) of the
        dtype ``output.word``, write the sample's tensor to this array and return None.
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
        """Return the part of this plan that the native core does, as a ``native.ImagePlan``.

        Return None if ``short_side`` is given and the native core cannot shrink as the installed Pillow does.

        Args:
            max_pixels: images with more pixels are left to Python. None means no limit.
            turns: whether images are left to Python if their EXIF data rotate or mirror them.
            scaled: whether to decode at a reduced size if no detail is lost.
            short_side: if given, larger images are first shrunk to this number of pixels on the shorter side.
        """
        key = max_pixels, turns, scaled, short_side
        found = self._native.get(key)
        if found is None:
            limit = -1 if max_pixels is None else max_pixels
            shrink = [] if short_side is None else [described_short_side(short_side)]
            if None in shrink:
                return None
            found = native.ImagePlan(
                self._steps, self._how.native, self.draws, limit, turns, scaled, shrink, reads_png=True
            )
            self._native = {key: found}  # only the last plan is kept, because a script may change the key
        return found

    @property
    def leaves_images(self) -> bool:
        """Return whether the script's own code is the first that receives the image, as a PIL image."""
        return not self._fused and not self._drawn and bool(self.stock) and not is_torchvision(self.stock[0])

    @property
    def makes_images(self) -> bool:
        """Return whether samples are PIL images, not tensors, after the kernels' work."""
        return not self._dtype

    def finished(
        self, memory: Words, size: tuple[int, int], parameters: Sequence[float],
        info: Callable[[], dict[Any, Any]],
    ) -> Any:  # fmt: skip
        """Return the result of ``apply`` for a sample on which other code has already done the kernels'
        work."""
        shape = (self._how.channels, *size)
        return self._finished(memory.view(self._how.word), shape, parameters, info)

    def _finished(self, memory: Words, shape: tuple[int, int, int], parameters: Any, info: Any) -> Any:
        value = self._sample(memory, shape)
        if is_pil(value):  # user code may read EXIF data or profiles from ``info``
            value.info = info()
        return self._by_functionals(self._drawn, len(self._fused), value, parameters)

    def part(self, image: EncodedImage, parameters: Sequence[float]) -> Box | None:
        """Return the part of an image that ``apply`` decodes with the image's method ``region``. Return None
        if ``apply`` does not call this method."""
        region = self._region(parameters, image.size)
        return None if region is None else part_of(image, region)

    def resampling(self, image: EncodedImage, parameters: Sequence[float]) -> Resampling | None:
        """Return the ``Resampling`` that ``apply`` does; None if it does more than decode and resample a
        part."""
        region = self._region(parameters, image.size)
        return None if region is None else resampling_of(image, region)

    @property
    def writes_bytes(self) -> bool:
        """Return whether all samples have the same shape, and are resampled bytes of three colours."""
        return self.output is not None and self._how.kind == "bytes" and self._how.channels == 3

    def over(self, storage: Any, shape: tuple[int, ...]) -> Any:
        """Return a batch (N, C, H, W) that uses the storage of a flat uint8 tensor, such as shared memory."""
        return tensor_shaped(storage, shape, self._dtype, self._layout)

    def as_bytes(self) -> Plan:
        """Return this plan with uint8 samples. Other code then computes floats with the conversion ``end``.

        Return this plan itself if its samples are not floats computed as ``(byte / 255 - mean) / std``.
        """
        if self.output is None or self._how.kind != "affine":
            return self
        if self._bytes is None:
            how = replace(self._how, kind="bytes", word=np.uint8)
            plan = self._changed("as_bytes", (), how, "uint8")
            plan.end, plan.kind = self._how, require("torch", extra="torch").Tensor
            self._bytes = plan  # assigned when complete, because other threads read it
        return self._bytes

    def of_dtype(self, dtype: str) -> Plan:
        """Return this plan with float32 samples rounded to a 16-bit dtype, such as ``"bfloat16"``.

        Return this plan itself if ``dtype`` is ``""``, or if its samples are not float32 computed as
        ``(byte / 255 - mean) / std``.
        """
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
        """Return the memory of a transform's result, (C, H, W), as a tensor or a PIL image."""
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

    Every transform is supported. The first unrecognised transform and all later transforms run unchanged.

    Args:
        transform: a transform, a ``Compose`` or ``Sequential`` of transforms, any callable, or None.
        layout: the memory order of the resulting tensors.
        stock_note, decode_note: texts for ``print(plan)``. ``stock_note`` returns how the unrecognised
            transforms will run, and ``decode_note`` says which library decodes the images.
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
    """Return a value to compare. If it has changed, a plan compiled from ``transform`` is no longer valid."""
    return tuple(state_of(item) for item in flatten(transform))


# ---- decide which steps can be fused --------------------------------------------------------


_RESIZES = ("Resize", "RandomResizedCrop")


def _try_to_fuse(step: Step, domain: Domain, ramp: Any, resized: bool) -> tuple[Any, str, bool]:
    """Return ``ramp`` after the step, why the step is not fused ("" if it is), and if any step resizes."""
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
