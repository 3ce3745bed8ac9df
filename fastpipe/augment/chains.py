"""What calling an augmentation, or a chain of them, does: checks, draws, applies, and takes along."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.draws import uniform_rows
from fastpipe.augment.following import follow
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.reference import chain_reference
from fastpipe.augment.running import (
    applied_table,
    by_image,
    drawn_table,
    dtype_after,
    on_device,
    on_processor,
    size_after,
)
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import AugmentError
from fastpipe.types import Key

if TYPE_CHECKING:
    from fastpipe.augment.base import BatchTransform

__all__ = ["Chain"]

_SLOTS = 3  # batches whose memory is kept, for the next ones; what mixes needs two
_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


class Chain:
    """Augmentations one after the other, as a call runs them.

    Args:
        ops: the augmentations.
        name: who is called, for messages.
        steps: what is done in their place, with the same parameters in the same order; default: they are.
    """

    def __init__(
        self, ops: Sequence[BatchTransform], name: str, steps: Sequence[BatchTransform] | None = None
    ) -> None:
        self.ops, self.name = tuple(ops), name
        self.steps = self.ops if steps is None else tuple(steps)
        self.memory = SlotPool(_SLOTS)
        self.number = _register(self)

    def __reduce__(self) -> tuple[type[Chain], tuple[Any, ...]]:
        return Chain, (self.ops, self.name, self.steps)  # a copy has a number of its own

    @property
    def draws(self) -> int:
        """Uniform numbers that a sample needs."""
        return sum(op.draws for op in self.ops)

    @property
    def columns(self) -> int:
        """Parameters of a sample."""
        return sum(len(op.names) for op in self.ops)

    @property
    def applied_columns(self) -> int:
        """Numbers that are applied to a sample."""
        return sum(len(op.names_applied) for op in self.steps)

    def __call__(
        self, images: Any, others: Sequence[Any], generator: torch.Generator | None, key: Key | None
    ) -> Any:
        """What calling the chain gives: see ``BatchTransform.__call__``."""
        batch = self.checked(images)
        if torch.compiler.is_compiling() and generator is None and key is None:
            count, _, height, width = batch.shape
            table: Tensor = torch.ops.fastpipe.drawn(self.number, count, self.columns, height, width)
        else:
            table = self._drawn(batch.shape, generator, key)
        if any(op.mixes for op in self.ops):
            others = [self._mixed_labels(others[0] if others else None, batch, table), *others[1:]]
        changed = self._applied(batch, table)
        changed = changed.squeeze(1) if images.ndim == 3 else changed
        return (changed, *follow(self.steps, table, batch.shape, others)) if others else changed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _drawn(self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None) -> Tensor:
        return torch.from_numpy(self.table(shape, generator, key))

    def table(self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None) -> Float64Array:
        """Parameters for a batch of this shape, (N, columns)."""
        u = uniform_rows(shape[0], self.draws, generator, key)
        return drawn_table(self.ops, u, shape[-2], shape[-1])

    def form_after(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of images, (…, H, W), afterwards."""
        size = size_after(self.steps, shape[-2], shape[-1])
        return (*shape[:-2], *size), dtype_after(self.steps, dtype)

    def by_image(self, shape: Sequence[int], key: Key) -> Callable[[int, Tensor, Tensor], None]:
        """What changes the images of a batch of this shape one by one, on the processor, in any thread;
        see ``running.by_image``.  Each is what it would be in the whole batch."""
        table = self.table(shape, None, key)
        return by_image(self.steps, applied_table(self.steps, table, shape[-2], shape[-1]))

    def draw(
        self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None
    ) -> list[Parameters]:
        """Parameters of each operation."""
        self._check_shape(shape)
        table, found, begin = self.table(shape, generator, key), [], 0
        for op in self.ops:
            found.append(Parameters.of_table(op.names, table[:, begin : begin + len(op.names)]))
            begin += len(op.names)
        return found

    def apply(self, images: Any, parameters: Sequence[Parameters]) -> Tensor:
        """Images changed by parameters of each operation."""
        batch = self._checked_with(images, parameters)
        tables = [np.zeros((len(batch), 0)), *(one.table for one in parameters)]
        changed = self._applied(batch, torch.from_numpy(np.concatenate(tables, axis=1)))
        return changed.squeeze(1) if images.ndim == 3 else changed

    def reference(self, images: Any, parameters: Sequence[Parameters]) -> Tensor:
        """Images as torchvision changes them by the same parameters."""
        changed = chain_reference(self.ops, self._checked_with(images, parameters), parameters)
        return changed.squeeze(1) if images.ndim == 3 else changed

    def _checked_with(self, images: Any, parameters: Sequence[Parameters]) -> Tensor:
        batch = self.checked(images)
        if len(parameters) != len(self.ops):
            raise AugmentError(
                f"{self.name} has {len(self.ops)} operations, got {len(parameters)} parameters"
            )
        for op, one in zip(self.ops, parameters, strict=True):
            if len(one.table) != len(batch) or tuple(one) != op.names:
                raise AugmentError(
                    f"{type(op).__name__} takes parameters {op.names} of {len(batch)} samples, got {one}"
                )
        return batch

    def _mixed_labels(self, labels: Any, images: Tensor, table: Tensor) -> Tensor:
        next(op for op in self.steps if op.mixes).check_labels(labels, len(images))
        _, _, height, width = images.shape
        applied = torch.ops.fastpipe.applied(table, self.number, height, width, labels.is_cuda)
        applied, begin = applied.to(labels.device, non_blocking=True), 0
        for op in self.steps:
            end = begin + len(op.names_applied)
            if op.mixes:
                op.check_labels(labels, len(images))
                columns = dict(zip(op.names_applied, applied[:, begin:end].unbind(1), strict=True))
                labels = op.mixed_labels(labels, columns)
            begin = end
        mixed: Tensor = labels
        return mixed

    def _applied(self, images: Tensor, table: Tensor) -> Tensor:
        height, width = images.shape[2:]
        is_recorded = images.requires_grad and torch.is_grad_enabled()
        if images.device.type == "cpu" and not is_recorded:
            if torch.compiler.is_compiling():
                found: Tensor = torch.ops.fastpipe.augmented(images, table, self.number)
                return found
            applied = applied_table(self.steps, table.numpy(), height, width)
            return on_processor(self.steps, images, applied, self.memory)
        columns: Tensor = torch.ops.fastpipe.applied(table, self.number, height, width, images.is_cuda)
        return on_device(self.steps, images, columns.to(images.device, non_blocking=True))

    # ---- checks --------------------------------------------------------------------------------

    def checked(self, images: Any) -> Tensor:
        """A batch (N, C, H, W) of what was given.

        Raises:
            AugmentError: it cannot be augmented; says what was got, and what to do.
        """
        if not isinstance(images, Tensor):
            raise AugmentError(f"{self.name} takes a tensor (N, C, H, W), got {type(images).__name__}")
        self._check_shape(images.shape)
        if images.dtype not in _DTYPES:
            raise AugmentError(f"{self.name} takes uint8, float16, bfloat16 or float32, got {images.dtype}")
        dtype_after(self.ops, images.dtype)
        return images.unsqueeze(1) if images.ndim == 3 else images

    def _check_shape(self, shape: Sequence[int]) -> None:
        takes_spectrograms = bool(self.ops) and all(3 in op.ranks for op in self.ops)
        if len(shape) != 4 and not (takes_spectrograms and len(shape) == 3):
            wanted = "(N, F, T) or (N, C, F, T)" if takes_spectrograms else "(N, C, H, W)"
            hint = ": give one image as image[None]" if len(shape) == 3 else ""
            raise AugmentError(f"{self.name} takes a batch {wanted}, got shape {tuple(shape)}{hint}")
        if 0 in shape:
            raise AugmentError(f"{self.name} got an empty batch, of shape {tuple(shape)}")
        at = [shape[0], 1 if len(shape) == 3 else shape[1], *shape[-2:]]
        for op in self.ops:
            op.check(at)
            at[2:] = op.size_after(at[2], at[3])


# ---- for torch.compile ---------------------------------------------------------------------------
#
# Drawing and the processor's kernels are opaque to the compiler: operations of torch's, which know a chain
# by its number.

_chains: weakref.WeakValueDictionary[int, Chain] = weakref.WeakValueDictionary()
_count = 0


def _register(chain: Chain) -> int:
    global _count
    _count += 1
    _chains[_count] = chain
    return _count


def _drawn(number: int, count: int, columns: int, height: int, width: int) -> Tensor:
    return torch.from_numpy(_chains[number].table((count, 1, height, width), None, None))


def _applied(table: Tensor, number: int, height: int, width: int, is_pinned: bool) -> Tensor:
    found = applied_table(_chains[number].steps, table.numpy(), height, width).astype(np.float32)
    # Nobody waits for pinned memory's way to the device.
    return torch.from_numpy(found).pin_memory() if is_pinned else torch.from_numpy(found)


def _augmented(images: Tensor, table: Tensor, number: int) -> Tensor:
    chain = _chains[number]
    applied = applied_table(chain.steps, table.numpy(), *images.shape[2:])
    return on_processor(chain.steps, images, applied, chain.memory)


def _define() -> None:
    library = torch.library
    seeded = torch.Tag.nondeterministic_seeded  # two draws are not one
    library.define(
        "fastpipe::drawn",
        "(int number, int count, int columns, int height, int width) -> Tensor",
        tags=seeded,
    )
    library.impl("fastpipe::drawn", "CompositeExplicitAutograd", _drawn)
    library.define(
        "fastpipe::applied", "(Tensor table, int number, int height, int width, bool is_pinned) -> Tensor"
    )
    library.impl("fastpipe::applied", "CPU", _applied)
    library.define("fastpipe::augmented", "(Tensor images, Tensor table, int number) -> Tensor")
    library.impl("fastpipe::augmented", "CPU", _augmented)

    @library.register_fake("fastpipe::drawn")  # type: ignore[untyped-decorator]
    def drawn(number: int, count: int, columns: int, height: int, width: int) -> Tensor:
        return torch.empty((count, columns), dtype=torch.float64)

    @library.register_fake("fastpipe::applied")  # type: ignore[untyped-decorator]
    def applied(table: Tensor, number: int, height: int, width: int, is_pinned: bool) -> Tensor:
        return table.new_empty((len(table), _chains[number].applied_columns), dtype=torch.float32)

    @library.register_fake("fastpipe::augmented")  # type: ignore[untyped-decorator]
    def augmented(images: Tensor, table: Tensor, number: int) -> Tensor:
        shape, dtype = _chains[number].form_after(images.shape, images.dtype)
        return images.new_empty(shape, dtype=dtype)


_define()
