"""What samples of user code have been like so far, so that the next ones find their place ready.

Of a transform that ends in user code, or in torchvision's, nobody can say what it gives.  But
as a rule all its samples are tensors of one shape, and then the threads that make them can put
them side by side, which else would be left to the collation in the consumer's thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torchvision import tv_tensors

from fastpipe.images.pointwise import rows_of

__all__ = ["Like", "Likeness", "fits"]


class Like(NamedTuple):
    """A sample that is a tensor.

    Attributes:
        kind: its exact class, ``torch.Tensor`` or ``tv_tensors.Image``.
        shape: of one sample.
        dtype: of its elements.
    """

    kind: type[torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, tensor: torch.Tensor) -> list[Any]:
        """The samples of a batch tensor, as views of it."""
        return rows_of(tensor, self.kind)


def fits(value: Any, like: Like) -> bool:
    """Whether a sample is like that, and plain memory that can be copied; its strides may differ,
    as collating makes them alike."""
    return (
        type(value) is like.kind
        and value.shape == like.shape
        and value.dtype == like.dtype
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )


class Likeness:
    """Learns from finished batches what the samples of a plan are like.

    The first batch whose samples are all alike decides; the first sample that is not like it
    ends that, and each is a separate value from then on.
    """

    def __init__(self) -> None:
        # Replaced as one: several threads may use a dataset.
        self._known: tuple[object, Like | None] | None = None

    def of(self, plan: object) -> Like | None:
        """What the next samples of the plan will probably be like."""
        known = self._known
        return known[1] if known is not None and known[0] is plan else None

    def learn(self, plan: object, values: Sequence[Any]) -> None:
        """Hear of samples that were separate values.

        Args:
            plan: the plan that made them.
            values: at least one.
        """
        known = self._known
        if known is None or known[0] is not plan:
            like = _like_of(values[0])
        else:
            like = known[1]  # None: they differ
        if like is not None and not all(fits(value, like) for value in values):
            like = None
        self._known = plan, like


def _like_of(value: Any) -> Like | None:
    if type(value) not in (torch.Tensor, tv_tensors.Image) or value.numel() == 0:
        return None
    return Like(type(value), tuple(value.shape), value.dtype)
