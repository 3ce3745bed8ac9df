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
from fastpipe.augment.motion.reference import motion_reference
from fastpipe.augment.motion.running import checked_lengths, on_motion
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.reference import chain_reference
from fastpipe.augment.running import (
    applied_table,
    by_image,
    drawn_table,
    dtype_after,
    on_device,
    on_processor,
    shape_after,
)
from fastpipe.augment.volumes.running import followed_volumes, on_volumes
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import AugmentError
from fastpipe.types import Key

if TYPE_CHECKING:
    from fastpipe.augment.base import Augmentation

__all__ = ["Chain"]

_SLOTS = 3  # batches whose memory is kept, for the next ones; what mixes needs two
Shape = tuple[int, ...]
_ONE = {"images": "image", "volumes": "volume", "motion": "sequence"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES = {
    "images": (torch.uint8, *_FLOATS),
    "motion": _FLOATS,
    "volumes": (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, *_FLOATS),
}


class Chain:
    """Augmentations one after the other, as a call runs them.

    Args:
        ops: the augmentations.
        name: who is called, for messages.
        steps: what is done in their place, with the same parameters in the same order; default: they are.
        lengths_at: which part of a batch of motion has its lengths; None for none.
    """

    def __init__(
        self,
        ops: Sequence[Augmentation],
        name: str,
        steps: Sequence[Augmentation] | None = None,
        lengths_at: int | None = None,
    ) -> None:
        self.ops, self.name, self.lengths_at = tuple(ops), name, lengths_at
        # Of the chain's kind, as what runs them takes them.
        self.steps: tuple[Any, ...] = self.ops if steps is None else tuple(steps)
        self.memory = SlotPool(_SLOTS)
        self.number = _register(self)

    def __reduce__(self) -> tuple[type[Chain], tuple[Any, ...]]:
        return Chain, (self.ops, self.name, self.steps, self.lengths_at)  # a copy has a number of its own

    @property
    def kind(self) -> str:
        """What it is for: see ``Augmentation``."""
        return self.ops[0].kind if self.ops else "images"

    def columns(self, channels: int) -> int:
        """How many parameters a sample has."""
        return sum(len(op.names_for(channels)) for op in self.ops)

    def applied_columns(self, channels: int) -> int:
        """How many numbers are applied to a sample."""
        return sum(len(op.applied_names_for(channels)) for op in self.steps)

    def __call__(
        self, images: Any, others: Sequence[Any], generator: torch.Generator | None, key: Key | None
    ) -> Any:
        """What calling the chain gives: see ``Augmentation.__call__``."""
        batch = self.checked(images)
        if self.kind != "images" and batch.requires_grad and torch.is_grad_enabled():
            raise AugmentError(
                f"{self.name} does not differentiate what it does to {self.kind}: give {self.kind}.detach()"
            )
        if torch.compiler.is_compiling() and generator is None and key is None:
            table: Tensor = torch.ops.fastpipe.drawn(self.number, batch.shape)
        else:
            table = self._drawn(batch.shape, generator, key)
        if any(op.mixes for op in self.ops):
            others = [self._mixed_labels(others[0] if others else None, batch, table), *others[1:]]
        if self.kind == "motion":
            return self._with_lengths(batch, table, others)
        changed = self._applied(batch, table)
        changed = changed.squeeze(1) if images.ndim < batch.ndim else changed
        return (changed, *self._followed(table, batch.shape, others)) if others else changed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _with_lengths(self, motion: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        rest, at = list(others), self.lengths_at
        if at is None:
            changed, _ = self.moved(motion, table, None)
            return (changed, *rest) if rest else changed
        if at > len(rest):
            raise AugmentError(
                f"lengths={at} says where a batch has the sequences' lengths, got {1 + len(rest)} parts"
            )
        changed, rest[at - 1] = self.moved(motion, table, checked_lengths(rest[at - 1], motion))
        return (changed, *rest)

    def moved(self, motion: Tensor, table: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Motion and its lengths changed by parameters, (N, columns)."""
        applied = applied_table(self.steps, table.numpy(), tuple(motion.shape[1:]))
        return on_motion(self.steps, motion, applied, lengths, self.memory)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _drawn(self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None) -> Tensor:
        return torch.from_numpy(self.table(shape, generator, key))

    def table(self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None) -> Float64Array:
        """Parameters for a batch of this shape, (N, columns)."""
        sample = tuple(shape[1:])
        u = uniform_rows(shape[0], sum(op.draws_for(sample[0]) for op in self.ops), generator, key)
        return drawn_table(self.ops, u, sample)

    def form_after(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a batch, (N, C, H, W), afterwards."""
        return (shape[0], *shape_after(self.steps, tuple(shape[1:]))), dtype_after(self.steps, dtype)

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """See ``Augmentation.margin``."""
        before = tuple(size)
        for op in reversed(self.ops):
            before = op.size_before(before)
        return tuple(-(-(more - one) // 2) for more, one in zip(before, size, strict=True))

    def by_image(self, shape: Sequence[int], key: Key) -> Callable[[int, Tensor, Tensor], None]:
        """What changes the images of a batch of this shape one by one, on the processor, in any thread;
        see ``running.by_image``.  Each is what it would be in the whole batch."""
        table = self.table(shape, None, key)
        return by_image(self.steps, applied_table(self.steps, table, tuple(shape[1:])))

    def draw(
        self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None
    ) -> list[Parameters]:
        """Parameters of each operation."""
        whole = self._check_shape(shape)
        table, found, begin = self.table(whole, generator, key), [], 0
        for op in self.ops:
            names = op.names_for(whole[1])
            found.append(Parameters.of_table(names, table[:, begin : begin + len(names)]))
            begin += len(names)
        return found

    def apply(self, images: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        """Images changed by parameters of each operation; motion and its lengths, where they are given."""
        batch = self._checked_with(images, parameters)
        table = torch.from_numpy(
            np.concatenate([np.zeros((len(batch), 0)), *(one.table for one in parameters)], axis=1)
        )
        if self.kind == "motion":
            given = None if lengths is None else checked_lengths(lengths, batch)
            changed, now = self.moved(batch, table, given)
            return changed if lengths is None else (changed, now)
        changed = self._applied(batch, table)
        return changed.squeeze(1) if images.ndim < batch.ndim else changed

    def reference(self, images: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        """Images as torchvision changes them on the CPU by the same parameters; lengths as of ``apply``."""
        batch = self._checked_with(images, parameters)
        there, here = batch.device, batch.cpu()
        if self.kind == "motion":
            given = lengths.cpu() if isinstance(lengths, Tensor) else lengths
            found = motion_reference(self.ops, here, parameters, given)
            return found.to(there) if lengths is None else tuple(one.to(there) for one in found)
        changed = chain_reference(self.ops, here, parameters).to(there)
        return changed.squeeze(1) if images.ndim < batch.ndim else changed

    def _checked_with(self, images: Any, parameters: Sequence[Parameters]) -> Tensor:
        batch = self.checked(images)
        if len(parameters) != len(self.ops):
            raise AugmentError(
                f"{self.name} has {len(self.ops)} operations, got {len(parameters)} parameters"
            )
        for op, one in zip(self.ops, parameters, strict=True):
            names = op.names_for(batch.shape[1])
            if len(one.table) != len(batch) or tuple(one) != names:
                raise AugmentError(
                    f"{type(op).__name__} takes parameters {names} of {len(batch)} samples, got {one}"
                )
        return batch

    def _mixed_labels(self, labels: Any, images: Tensor, table: Tensor) -> Tensor:
        next(op for op in self.steps if op.mixes).check_labels(labels, len(images))
        applied = torch.ops.fastpipe.applied(table, self.number, images.shape[1:], labels.is_cuda)
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

    def _followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        along: Callable[..., Sequence[Any]] = followed_volumes if self.kind == "volumes" else follow
        return along(self.steps, table, shape, others)

    def _applied(self, images: Tensor, table: Tensor) -> Tensor:
        if self.kind != "images":
            if torch.compiler.is_compiling():
                changed: Tensor = torch.ops.fastpipe.augmented(images, table, self.number)
                return changed
            return self.changed(images, table)
        is_recorded = images.requires_grad and torch.is_grad_enabled()
        if images.device.type == "cpu" and not is_recorded:
            if torch.compiler.is_compiling():
                found: Tensor = torch.ops.fastpipe.augmented(images, table, self.number)
                return found
            return self.changed(images, table)
        columns: Tensor = torch.ops.fastpipe.applied(table, self.number, images.shape[1:], images.is_cuda)
        return on_device(self.steps, images, columns.to(images.device, non_blocking=True))

    def changed(self, images: Tensor, table: Tensor) -> Tensor:
        """A batch changed by the kernels of its kind, by parameters (N, columns)."""
        applied = applied_table(self.steps, table.numpy(), tuple(images.shape[1:]))
        run = on_volumes if self.kind == "volumes" else on_processor
        return run(self.steps, images, applied, self.memory)

    # ---- checks --------------------------------------------------------------------------------

    def checked(self, images: Any) -> Tensor:
        """A batch (N, C, H, W) of what was given.

        Raises:
            AugmentError: it cannot be augmented; says what was got, and what to do.
        """
        wanted = self._wanted()
        if not isinstance(images, Tensor):
            raise AugmentError(f"{self.name} takes a tensor {wanted[-1]}, got {type(images).__name__}")
        whole = self._check_shape(images.shape)
        if images.dtype not in _DTYPES[self.kind]:
            told = [str(dtype).removeprefix("torch.") for dtype in _DTYPES[self.kind]]
            raise AugmentError(f"{self.name} takes {', '.join(told[:-1])} or {told[-1]}, got {images.dtype}")
        dtype_after(self.ops, images.dtype)
        return images.unsqueeze(1) if images.ndim < len(whole) else images

    def _wanted(self) -> list[str]:
        """Shapes of batches."""
        if self.kind != "images":
            return ["(N, T, J, C)"] if self.kind == "motion" else ["(N, D, H, W)", "(N, C, D, H, W)"]
        takes_spectrograms = bool(self.ops) and all(3 in op.ranks for op in self.ops)
        return ["(N, F, T)", "(N, C, F, T)"] if takes_spectrograms else ["(N, C, H, W)"]

    def _check_shape(self, shape: Sequence[int]) -> Shape:
        """The shape (N, C, H, W) of a batch of this one."""
        wanted = self._wanted()
        full = wanted[-1].count(",") + 1
        if len(shape) not in range(full - len(wanted) + 1, full + 1):
            word = _ONE[self.kind]
            one = f": give one {word} as {word}[None]"
            hint = one if len(shape) == full - len(wanted) else ""
            raise AugmentError(
                f"{self.name} takes a batch {' or '.join(wanted)}, got shape {tuple(shape)}{hint}"
            )
        if 0 in shape:
            raise AugmentError(f"{self.name} got an empty batch, of shape {tuple(shape)}")
        whole = (shape[0], 1, *shape[1:]) if len(shape) < full else tuple(shape)
        at = whole
        for op in self.ops:
            op.check(at)
            at = (at[0], *op.shape_after(at[1:]))
        return whole


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


def _drawn(number: int, shape: list[int]) -> Tensor:
    return torch.from_numpy(_chains[number].table(shape, None, None))


def _applied(table: Tensor, number: int, shape: list[int], is_pinned: bool) -> Tensor:
    found = applied_table(_chains[number].steps, table.numpy(), tuple(shape)).astype(np.float32)
    # Nobody waits for pinned memory's way to the device.
    return torch.from_numpy(found).pin_memory() if is_pinned else torch.from_numpy(found)


def _augmented(images: Tensor, table: Tensor, number: int) -> Tensor:
    return _chains[number].changed(images, table)


def _define() -> None:
    library = torch.library
    seeded = torch.Tag.nondeterministic_seeded  # two draws are not one
    library.define("fastpipe::drawn", "(int number, SymInt[] shape) -> Tensor", tags=seeded)
    library.impl("fastpipe::drawn", "CompositeExplicitAutograd", _drawn)
    library.define(
        "fastpipe::applied", "(Tensor table, int number, SymInt[] shape, bool is_pinned) -> Tensor"
    )
    library.impl("fastpipe::applied", "CPU", _applied)
    library.define("fastpipe::augmented", "(Tensor images, Tensor table, int number) -> Tensor")
    library.impl("fastpipe::augmented", "CompositeExplicitAutograd", _augmented)

    @library.register_fake("fastpipe::drawn")  # type: ignore[untyped-decorator]
    def drawn(number: int, shape: list[int]) -> Tensor:
        return torch.empty((shape[0], _chains[number].columns(shape[1])), dtype=torch.float64)

    @library.register_fake("fastpipe::applied")  # type: ignore[untyped-decorator]
    def applied(table: Tensor, number: int, shape: list[int], is_pinned: bool) -> Tensor:
        return table.new_empty((len(table), _chains[number].applied_columns(shape[0])), dtype=torch.float32)

    @library.register_fake("fastpipe::augmented")  # type: ignore[untyped-decorator]
    def augmented(images: Tensor, table: Tensor, number: int) -> Tensor:
        shape, dtype = _chains[number].form_after(images.shape, images.dtype)
        return images.new_empty(shape, dtype=dtype)


_define()
