"""A transform in two: up to images of one size, which decoding does, and the rest, for augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchvision import transforms as v1

from fastpipe.errors import AugmentError
from fastpipe.images.plan import Layout, Plan, compile_plan, shortened
from fastpipe.images.pointwise import of_kind
from fastpipe.images.steps import flatten
from fastpipe.torch.generators import run_keyed
from fastpipe.torch.likeness import Like
from fastpipe.torch.source import SplitError
from fastpipe.torch.stock import is_thread_safe

if TYPE_CHECKING:
    from fastpipe.augment.images import ImageChain

__all__ = ["Split", "split_of"]


@dataclass(frozen=True)
class Split:
    """A transform in two.

    Attributes:
        given: what ``split_of`` was called with.
        head: makes images of bytes, all of one size.
        chain: what is left to do with them.
        like: what samples become by that.
        rest: the same in the user's own transforms.
        example: an image as these get it.
        values: its values, uint8 (C, H, W).
        notes: what the head does how, in lines.
    """

    given: tuple[Any, ...]
    head: Plan
    chain: ImageChain
    like: Like
    rest: tuple[Any, ...]
    example: Any
    values: torch.Tensor
    notes: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return split_of, self.given

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the images between the two, (C, H, W)."""
        assert self.head.output is not None
        return self.head.output.shape

    def describe(self, where: str) -> list[str]:
        """What is done how, in lines.

        Args:
            where: the augmentations are done.
        """
        return [*self.notes, *(f"{shortened(item)}  →  fastpipe.augment, {where}" for item in self.rest)]


def split_of(transform: Any, layout: Layout = "contiguous", decode_note: str = "") -> Split:
    """Split a transform where its images have got one size.

    Args:
        transform: of torchvision's, or several.
        layout: memory order of the images between the two.
        decode_note: says, for ``describe``, what decodes the images.

    Raises:
        SplitError: it cannot be split, or nothing of it would be left for augmentation.
    """
    items = flatten(transform)
    plan = compile_plan(transform)
    if plan.output is not None:
        raise SplitError("all of the transform is in the decoding kernel")
    head, count, is_pil = _head(items, layout)
    rest = tuple(items[count:])

    from fastpipe import augment  # which only this needs
    from fastpipe.augment.images import ImageChain

    try:
        chain = ImageChain(augment.from_torchvision(rest).ops, "the rest of the transform")
        values = torch.from_numpy(np.random.default_rng(0).integers(0, 256, _shape(head), np.uint8))
        example = v1.ToPILImage()(values) if is_pil else of_kind(values, head.kind)
        like = _like(rest, example)
        chain.checked(values[None])
    except AugmentError as error:
        raise SplitError(str(error)) from None
    shape, dtype = chain.form_after(values.shape, torch.uint8)
    if (like.shape, like.dtype) != (shape, dtype):
        raise SplitError(
            f"augmentations would make images of {dtype}, {shape}, and it makes {like.dtype}, {like.shape}"
        )
    notes = repr(compile_plan(v1.Compose(items[:count]), decode_note=decode_note)).splitlines()[1:-1]
    given = transform, layout, decode_note
    return Split(given, head, chain, like, rest, example, values, tuple(note.strip() for note in notes))


def _head(items: Sequence[Any], layout: Layout) -> tuple[Plan, int, bool]:
    """The plan of as many transforms as make bytes of one size, their number, and whether the next one gets
    PIL images."""
    for count in range(len(items), 0, -1):
        for ends in ([v1.PILToTensor()], []):
            head = compile_plan(v1.Compose([*items[:count], *ends]), layout=layout)
            if head.output is not None and head.output.dtype == "uint8":
                return head, count, bool(ends)
    raise SplitError("its images have no single size before the first transform that is not part of decoding")


def _shape(head: Plan) -> tuple[int, int, int]:
    assert head.output is not None
    return head.output.shape


def _like(rest: Sequence[Any], example: Any) -> Like:
    """What samples become."""
    if not is_thread_safe(rest):
        raise SplitError("fastpipe does not know all of its transforms")
    try:
        value = run_keyed(rest, example, 0)
    except Exception as error:  # which awaits the user's samples: let it
        raise SplitError(f"it fails on an image ({type(error).__name__}: {error})") from error
    if not isinstance(value, torch.Tensor):
        raise SplitError("it does not end in tensors")
    return Like(type(value), tuple(value.shape), value.dtype)
