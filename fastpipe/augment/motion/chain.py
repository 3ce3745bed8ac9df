"""What calling augmentations of motion does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastpipe.augment.base import FLOATS, Chain
from fastpipe.augment.motion.reference import motion_reference
from fastpipe.augment.motion.running import checked_lengths, on_motion
from fastpipe.augment.parameters import Parameters
from fastpipe.augment.tables import untraced
from fastpipe.errors import AugmentError

__all__ = ["MotionChain"]


class MotionChain(Chain):
    """Augmentations of motion, of which a batch may have the lengths."""

    one = "sequence"
    shapes = ("(N, T, J, C)",)
    dtypes = FLOATS

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        self.check_gradient(batch)
        return untraced(self._given, batch, table, others)

    def _given(self, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        rest, at = list(others), self.lengths_at
        if at is None:
            changed, _ = self.moved(batch, table, None)
            return (changed, *rest) if rest else changed
        if at > len(rest):
            raise AugmentError(
                f"lengths={at} says where a batch has the sequences' lengths, got {1 + len(rest)} parts"
            )
        changed, rest[at - 1] = self.moved(batch, table, checked_lengths(rest[at - 1], batch))
        return (changed, *rest)

    def moved(self, motion: Tensor, table: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Motion and its lengths changed by parameters, (N, columns)."""
        return on_motion(self.steps, motion, self.applied(table, motion.shape), lengths, self.memory)

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        return self.moved(samples, table, None)[0]

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        return others

    def referred(self, samples: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        found: Tensor = motion_reference(self.ops, samples, parameters, None)
        return found

    def apply(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        if lengths is None:
            return super().apply(samples, parameters)
        batch, table = self.checked_with(samples, parameters)
        return self.moved(batch, table, checked_lengths(lengths, batch))

    def reference(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        if lengths is None:
            return super().reference(samples, parameters)
        batch, _ = self.checked_with(samples, parameters)
        given = lengths.cpu() if isinstance(lengths, Tensor) else lengths
        found = motion_reference(self.ops, batch.cpu(), parameters, given)
        return tuple(one.to(batch.device) for one in found)
