"""Runs chains of augmentations of volumes: by the native core, or on a device one volume after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.base import FLOATS, Chain
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.reference import chain_reference
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import dtype_after, shape_after, untraced
from fastpipe.augment.volumes.reference import VOLUME_CHANGES
from fastpipe.augment.volumes.volume import Volume
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.errors import AugmentError

__all__ = ["VolumeChain", "on_volumes"]

Ops = tuple[Any, ...]  # augmentations of volumes
# A ``native.VolumePlan``, the shape and the dtype of a volume afterwards, and how NumPy has that.
_Plan = tuple[native.VolumePlan, tuple[int, ...], torch.dtype, np.dtype[Any]]
Kept = Callable[[Any, Callable[[], Any]], Any]
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class VolumeChain(Chain):
    """Augmentations of volumes."""

    one = "volume"
    shapes = ("(N, D, H, W)", "(N, C, D, H, W)")
    dtypes = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, *FLOATS)

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        self.check_gradient(batch)
        if torch.compiler.is_compiling() or not others:
            return super().given(samples, batch, table, others)
        applied = self.applied(table, batch.shape)
        changed = on_volumes(self.steps, batch, applied, self.memory, kept=self.kept)
        changed = changed.squeeze(1) if samples.ndim < batch.ndim else changed
        return (changed, *self._followed(applied, batch.shape, others))

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        applied = self.applied(table, samples.shape)
        return on_volumes(self.steps, samples, applied, self.memory, kept=self.kept)

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        return untraced(lambda: self._followed(self.applied(table, shape), shape, others))

    def _followed(self, applied: Float64Array, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        twins, columns = self.kept(("labels", shape[1]), lambda: self._of_labels(shape[1]))
        rows, memory = applied[:, columns], self.memory_of_others
        return followed_volumes(twins, rows, shape, others, memory, self.kept)

    def _of_labels(self, channels: int) -> tuple[tuple[Any, ...], npt.NDArray[np.intp]]:
        """Return the operations for labels, and the columns of what is applied that they need."""
        twins, columns, begin = [], [np.zeros(0, np.intp)], 0
        for op in self.steps:
            end = begin + len(op.applied_names_for(channels))
            if (twin := op.for_masks()) is not None:
                twins.append(twin)
                columns.append(np.arange(begin, end))
            begin = end
        return tuple(twins), np.concatenate(columns)

    def referred(self, samples: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        return chain_reference(self.ops, samples, parameters, VOLUME_CHANGES)


def on_volumes(
    ops: Sequence[Any],
    volumes: Tensor,
    applied: Float64Array,
    memory: SlotPool,
    channels: int | None = None,
    is_host: bool | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Changed volumes, wherever they are.

    On a device there are at a time the volumes, those that are made of them, and less than two volumes more.

    Args:
        ops: the chain.
        volumes: (N, C, D, H, W).
        applied: what is applied.
        memory: of the processor, where the new volumes are.
        channels: of the volumes that numbers were drawn for, where these are labels of them.
        is_host: whether the native core does it, or torch's operations.  Default: where it can.
        kept: keeps plans of these operations; see ``Chain.kept``.
    """
    device, ops, channels = volumes.device.type, tuple(ops), channels or volumes.shape[1]
    if device == "cpu" if is_host is None else is_host:
        form = ("plan", ops, tuple(volumes.shape[1:]), volumes.dtype, channels)
        plan = _plan(*form[1:]) if kept is None else kept(form, lambda: _plan(*form[1:]))
        return _on_host(plan, volumes, applied, memory)
    shape = (len(volumes), *shape_after(ops, tuple(volumes.shape[1:])))
    dtype = dtype_after(ops, volumes.dtype)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        if device == "cpu":
            flat = memory.take((math.prod(shape) * dtype.itemsize,), np.uint8)
            out = torch.from_numpy(flat).view(dtype).view(shape)
        else:
            out = torch.empty(shape, dtype=dtype, device=volumes.device)
        volumes, goal = volumes.detach(), out
        if dtype in _SIGNED and dtype == volumes.dtype:
            # Devices move bits of these as those of numbers with a sign: few operations know them.
            volumes, goal = volumes.view(_SIGNED[dtype]), out.view(_SIGNED[dtype])
        _on_device(ops, volumes, applied, goal, channels)
    return out


def _on_device(ops: Ops, volumes: Tensor, applied: Float64Array, out: Tensor, channels: int) -> None:
    steps, begin = [], 0
    for op in ops:
        end = begin + len(op.applied_names_for(channels))
        steps.append((op, np.ascontiguousarray(applied[:, begin:end])))
        begin = end
    # Half precision is of what is given and taken: ops would lose digits with each.
    is_half = out.dtype in (torch.float16, torch.bfloat16)
    for number, target in enumerate(out):
        goal = target.new_empty(target.shape, dtype=torch.float32) if is_half else target
        volume = Volume(volumes[number], goal, channels)
        for op, rows in steps:
            op.on_canvas(volume, rows[number])
        volume.end()
        if goal is not target:
            target.copy_(goal, non_blocking=True)


# ---- on the processor ----------------------------------------------------------------------------


def _on_host(made_plan: _Plan, volumes: Tensor, applied: Float64Array, memory: SlotPool) -> Tensor:
    plan, shape, dtype, form = made_plan
    shape = (len(volumes), *shape)
    out = memory.take(shape, form)
    table = np.ascontiguousarray(applied)
    native.augment_volumes(plan, _array(volumes), table, out, torch.get_num_threads())
    with torch.inference_mode(False):
        made = torch.from_numpy(out)
        return made if made.dtype == dtype else made.view(dtype)


def _array(volumes: Tensor) -> npt.NDArray[Any]:
    volumes = volumes.detach()
    return (volumes.view(torch.int16) if volumes.dtype == torch.bfloat16 else volumes).numpy()


def _plan(ops: Ops, shape: tuple[int, ...], dtype: torch.dtype, channels: int) -> _Plan:
    """The native core's plan for volumes of a shape (C, D, H, W)."""
    after, dtype_then = shape_after(ops, shape), dtype_after(ops, dtype)
    steps: list[Step] = []
    column, at = 0, (channels, *shape[1:])
    for op in ops:
        steps += op.steps(column, at)
        column += len(op.applied_names_for(channels))
        at = op.shape_after(at)
    plan = native.VolumePlan(steps, shape, _name(dtype), _name(dtype_then))
    form = np.dtype("int16" if dtype_then == torch.bfloat16 else _name(dtype_then))
    return plan, after, dtype_then, form


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- labels --------------------------------------------------------------------------------------


def followed_volumes(
    twins: Ops,
    rows: Float64Array,
    shape: Sequence[int],
    others: Sequence[object],
    memory: SlotPool,
    kept: Kept,
) -> list[object]:
    """What belongs to volumes, after a chain.

    Args:
        twins: what does with labels what was done with the volumes.
        rows: what is applied, (N, columns of these).
        shape: of the volumes before, (N, C, D, H, W).
        others: tensors of as many voxels, (N, D, H, W) or (N, K, D, H, W), go where those of the volumes go,
            from the nearest, also in dictionaries, lists and tuples; anything else is handed through.
        memory: where new labels are, on the processor.
        kept: keeps plans.

    Raises:
        AugmentError: volumes of another size are among them, or labels that cannot be filled up.
    """

    def followed(thing: object) -> object:
        if isinstance(thing, dict):
            return {name: followed(value) for name, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            made: list[Any] = [followed(value) for value in thing]
            return type(thing)(*made) if hasattr(thing, "_fields") else type(thing)(made)
        if not isinstance(thing, Tensor) or not twins or not _is_of(thing, shape):
            return thing
        labels = thing.as_subclass(Tensor)
        labels = labels.unsqueeze(1) if thing.ndim == 4 else labels
        found = on_volumes(twins, labels, rows, memory, shape[1], kept=kept)
        return found.squeeze(1) if thing.ndim == 4 else found

    return [followed(thing) for thing in others]


def _is_of(thing: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor is of the volumes' voxels."""
    if thing.ndim not in (4, 5) or len(thing) != shape[0]:
        return False
    is_whole = tuple(thing.shape[-3:]) == tuple(shape[-3:])
    if thing.ndim == 5 and not is_whole:  # of four axes it may be something else
        raise AugmentError(
            f"volumes of {tuple(shape[-3:])} come with others of {tuple(thing.shape[-3:])}, which cannot be "
            "moved as they are: make labels of other sizes after the augmentation"
        )
    return is_whole
