"""The base class of all augmentations of volumes, and functions that run several augmentations in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import (
    FLOATS,
    Augmentation,
    Chain,
    Ops,
    Shape,
    columns_of,
    dtype_after,
    for_masks,
    shape_after,
    shaped_as,
    untraced,
)
from fastpipe.augment.parameters import Float64Array, plain
from fastpipe.augment.steps import Step, aligned
from fastpipe.augment.volumes.reference import VOLUME_CHANGES
from fastpipe.augment.volumes.volume import Volume
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.errors import AugmentError

# ---- chains ----------------------------------------------------------------------------------------

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class VolumeChain(Chain):
    """A chain of augmentations of volumes."""

    one = "volume"
    changes = VOLUME_CHANGES
    shapes = ("(N, D, H, W)", "(N, C, D, H, W)")
    dtypes = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, *FLOATS)

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        self.check_gradient(batch)
        if torch.compiler.is_compiling() or not others:
            return super().given(samples, batch, table, others)
        applied = self.applied(table, batch.shape)
        changed = on_volumes(self.steps, batch, applied, self.memory, kept=self.kept)
        return (shaped_as(samples, changed), *self._followed(applied, batch.shape, others))

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        applied = self.applied(table, samples.shape)
        return on_volumes(self.steps, samples, applied, self.memory, kept=self.kept)

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        return untraced(lambda: self._followed(self.applied(table, shape), shape, others))

    def _followed(self, applied: Float64Array, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        twins, columns = self.kept(("labels", shape[1]), lambda: for_masks(self.steps, shape[1]))
        rows = applied[:, columns]

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
            found = on_volumes(twins, labels, rows, self.memory_of_others, shape[1], kept=self.kept)
            return found.squeeze(1) if thing.ndim == 4 else found

        return [followed(thing) for thing in others]


def on_volumes(
    ops: Sequence[Any],
    volumes: Tensor,
    applied: Float64Array,
    memory: SlotPool,
    channels: int | None = None,
    is_host: bool | None = None,
    kept: Callable[[Any, Callable[[], Any]], Any] = lambda key, make: make(),
) -> Tensor:
    """Apply several augmentations to volumes, on the device of the given volumes. Return the new volumes.

    A device's memory holds the given volumes, the new volumes, and less than two further volumes at a time.

    Args:
        ops: the augmentations, in order.
        volumes: (N, C, D, H, W).
        applied: numbers that were computed from the parameters and that change the volumes, (N, columns).
        memory: host memory for the new volumes.
        channels: if ``volumes`` are labels, the number of channels for which the parameters were drawn.
        is_host: whether to use the native core instead of torch operations.  Default: True for volumes on the
            CPU.
        kept: caches plans of the native core for these augmentations; see ``Chain.kept``.
    """
    device, shape, channels = volumes.device.type, tuple(volumes.shape[1:]), channels or volumes.shape[1]
    after, dtype = (len(volumes), *shape_after(ops, shape)), dtype_after(ops, volumes.dtype)
    if device == "cpu" if is_host is None else is_host:
        form = (tuple(ops), channels, shape, volumes.dtype)
        plan = kept(("plan", *form), lambda: _plan(*form))
        return _on_host(plan, volumes.detach(), applied, memory, after, dtype)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        out = torch.empty(after, dtype=dtype, device=volumes.device)
        volumes, goal = volumes.detach(), out
        if dtype in _SIGNED and dtype == volumes.dtype:
            # Few operations on devices accept these unsigned dtypes. View them as signed, because bits are
            # only moved.
            volumes, goal = volumes.view(_SIGNED[dtype]), out.view(_SIGNED[dtype])
        _on_device(ops, volumes, applied, goal, channels)
    return out


def _on_device(ops: Ops, volumes: Tensor, applied: Float64Array, out: Tensor, channels: int) -> None:
    columns = list(columns_of(ops, channels, of_applied=True))
    steps = [(op, np.ascontiguousarray(applied[:, own])) for op, own in columns]
    # 16-bit floats are used for input and output only, because each operation would lose precision.
    is_half = out.dtype in (torch.float16, torch.bfloat16)
    for number, target in enumerate(out):
        goal = target.new_empty(target.shape, dtype=torch.float32) if is_half else target
        volume = Volume(volumes[number], goal, channels)
        for op, rows in steps:
            op.on_canvas(volume, rows[number])
        volume.end()
        if goal is not target:
            target.copy_(goal, non_blocking=True)


def _on_host(
    plan: Any, volumes: Tensor, applied: Float64Array, memory: SlotPool, shape: Shape, dtype: torch.dtype
) -> Tensor:
    out = memory.take(shape, np.dtype("int16" if dtype == torch.bfloat16 else _name(dtype)))
    values = (volumes.view(torch.int16) if volumes.dtype == torch.bfloat16 else volumes).numpy()
    threads = torch.get_num_threads()
    native.augment_volumes(plan, aligned(values), np.ascontiguousarray(applied), out, threads)
    with torch.inference_mode(False):
        made = torch.from_numpy(out)
        return made if made.dtype == dtype else made.view(dtype)


def _plan(ops: Ops, channels: int, shape: Shape, dtype: torch.dtype) -> Any:
    """Return the native core's plan for volumes of this shape, (C, D, H, W)."""
    steps: list[Step] = []
    at = (channels, *shape[1:])
    for op, own in columns_of(ops, channels, of_applied=True):
        steps += op.steps(own.start, at)
        at = op.shape_after(at)
    return native.VolumePlan(steps, shape, _name(dtype), _name(dtype_after(ops, dtype)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_of(thing: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor holds labels for all voxels of volumes of this shape, (N, C, D, H, W)."""
    if thing.ndim not in (4, 5) or len(thing) != shape[0]:
        return False
    is_whole = tuple(thing.shape[-3:]) == tuple(shape[-3:])
    if thing.ndim == 5 and not is_whole:  # a tensor with four axes may be something else
        raise AugmentError(
            f"volumes of {tuple(shape[-3:])} come with others of {tuple(thing.shape[-3:])}, which cannot be "
            "moved as they are: make labels of other sizes after the augmentation"
        )
    return is_whole


# ---- transforms ------------------------------------------------------------------------------------

AXES = ("depth", "height", "width")


class VolumeTransform(Augmentation, ABC):
    """The base class of augmentations of volumes, (N, C, D, H, W) or (N, D, H, W).

    The CPU knows the parameters. Therefore volumes that an augmentation leaves unchanged take no time.
    """

    kind = "volumes"
    chain_type = VolumeChain
    ranks = (4, 5)

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in FLOATS else torch.float32

    @abstractmethod
    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        """Change one volume on a device with torch operations. ``row`` holds the numbers that change it."""


class PerChannel(VolumeTransform):
    """The base class of augmentations that change some channels, each channel with its own parameters.

    Attributes:
        p_channel: the probability that a channel is changed, from 0 to 1.
        of_channel: the names of a channel's parameters. Each parameter is computed from its own uniform
            random number. The first parameter says whether the channel is changed.
    """

    p_channel: float
    native_step: str
    of_channel: tuple[str, ...]

    def draws_for(self, channels: int) -> int:
        return channels * len(self.of_channel)

    def names_for(self, channels: int) -> tuple[str, ...]:
        return tuple(f"{c}.{name}" for c in range(channels) for name in self.of_channel)

    def applied_names_for(self, channels: int = 1) -> tuple[str, ...]:
        return self.names_for(channels)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        u = u.reshape(len(u), -1, len(self.of_channel))
        found = np.empty_like(u)
        found[..., 0], found[..., 1:] = u[..., 0] < self.p_channel, self.numbers(u[..., 1:])
        return found.reshape(len(u), -1)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step(self.native_step, column, self.step_options())]

    def step_options(self) -> tuple[int, ...]:
        """Return the options of the native core's step, which are equal for all volumes."""
        return ()

    @abstractmethod
    def numbers(self, u: Float64Array) -> Float64Array:
        """Convert uniform random numbers, (N, C, K), to the channels' parameters, except the first
        parameter."""

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        for channel, (is_changed, *numbers) in enumerate(row.reshape(-1, len(self.of_channel)).tolist()):
            if is_changed:
                self.on_channel(canvas, channel, *numbers)

    @abstractmethod
    def on_channel(self, canvas: Volume, channel: int, *numbers: float) -> None:
        """Change one channel of a volume in place."""


def axes_of(value: int | Sequence[int], name: str = "axes") -> tuple[int, ...]:
    """Return axes of (D, H, W) in increasing order, or raise an error."""
    given = plain(value)
    given = [given] if isinstance(given, int) else list(given)
    if not all(isinstance(axis, int) and 0 <= axis < 3 for axis in given) or len(set(given)) < len(given):
        raise AugmentError(
            f"{name} must be a selection of 0, 1 and 2 (depth, height and width), got {value!r}"
        )
    return tuple(sorted(given))
