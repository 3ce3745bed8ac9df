"""Batches of patches, described once by arrays for the native core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.arrays.patches.padding import Padding
from fastpipe.arrays.patches.sources import Role
from fastpipe.core.jobs import NativeJob
from fastpipe.core.native import native
from fastpipe.engine.clock import StageClock
from fastpipe.engine.pool import Job
from fastpipe.engine.reads import Task
from fastpipe.errors import ClosedError
from fastpipe.index.patches import Places
from fastpipe.read.volumes.patches import Counts

__all__ = ["NativeBatch", "NativePatches"]

_PENDING, _MADE = 0, 1  # outcomes of fastpipe/native/status.h
_PADDING = ("error", "constant", "edge", "reflect", "symmetric", "wrap")  # of fastpipe/native/patches.h
_KEEP, _DECLINE, _REPLACE = 0, 1, 2  # what is done about NaN
_MOST_DESCRIBED = 4096  # volumes


class NativePatches:
    """Describes batches of patches of one dataset in one process.

    Args:
        roles: the arrays.
        units: of all volumes of each role, the ``native.UnitMemory`` of its units, or None, and the number
            there of its first.
        size: of the patches.
        padding, nan: the dataset's options.
        threads: of the core, that are busy with them.
        clock, counts: hear of a batch that was read.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        units: Sequence[tuple[Any, int]],
        size: Sequence[int],
        padding: Padding,
        nan: str | float,
        threads: int,
        clock: StageClock,
        counts: Counts,
    ) -> None:
        self._roles, self._units = roles, units
        self._firsts = np.cumsum([0, *(len(role.volumes) for role in roles)]).tolist()
        self._kinds = [
            _kind(role, size, padding, "keep" if number else nan) for number, role in enumerate(roles)
        ]
        self._volumes: dict[tuple[int, int], Any] = {}
        self.channel, self.threads = native.Channel(threads), threads
        self.clock, self.counts = clock, counts

    def batch(
        self,
        places: Places,
        arrays: Sequence[npt.NDArray[Any]],
        task: Callable[[int, int], Task],
    ) -> NativeBatch | None:
        """Describe a batch; None where Python reads all of it.

        Args:
            places: of its patches.
            arrays: for each role the memory, (N, *lead, *patch).
            task: reads, for a row and a role, what the core declines.
        """
        if not len(places.volumes) or None in self._kinds:
            return None
        roles = range(len(self._roles))
        volumes = [self._volume(role, volume) for volume in places.volumes.tolist() for role in roles]
        if all(volume is None for volume in volumes):
            return None
        statuses = np.zeros((len(volumes), 8), np.uint8)
        batch = native.patch_batch(
            self._kinds, [array.reshape(len(array), -1).view(np.uint8) for array in arrays], volumes,
            np.ascontiguousarray(places.starts, np.int64), np.arange(len(places.volumes)), statuses,
        )  # fmt: skip
        return NativeBatch(self, batch, statuses, task)

    def _volume(self, role: int, number: int) -> Any:
        """A volume as the core reads it; None where it does not."""
        try:
            return self._volumes[role, number]
        except KeyError:
            pass
        if len(self._volumes) >= _MOST_DESCRIBED:
            self._volumes.clear()
        volume, made = self._roles[role].volumes[number], None
        units, first = self._units[self._firsts[role] + number]
        try:
            source = volume.native_source()
            if source is not None:
                made = native.Volume(
                    volume.shape, volume.grid.unit, volume.dtype.itemsize, source, units, first
                )
        except ValueError:  # of sizes that are not read there
            pass
        self._volumes[role, number] = made
        return made


def _kind(role: Role, size: Sequence[int], padding: Padding, nan: str | float) -> Any:
    """A role as the core knows it; None of elements that it does not know."""
    dtype, constant, number = role.dtype, np.zeros((), role.dtype), np.zeros((), role.dtype)
    if padding.mode == "constant":
        constant[...] = padding.constant(role.name)
    done = _KEEP
    if nan != "keep" and dtype.kind in "fc":
        done = _DECLINE if nan == "error" else _REPLACE
        number[...] = 0 if nan == "error" else nan
    word = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    try:
        return native.PatchKind(
            (*role.lead, *size), len(size), dtype.itemsize, _PADDING.index(padding.mode), constant.tobytes(),
            done, word, number.tobytes(),
        )  # fmt: skip
    except ValueError:
        return None


class NativeBatch:
    """A batch that the core reads, as far as it can; as of ``NativeRead``."""

    def __init__(
        self,
        patches: NativePatches,
        batch: Any,
        statuses: npt.NDArray[np.uint8],
        task: Callable[[int, int], Task],
    ) -> None:
        self._patches, self._batch, self._statuses, self._task = patches, batch, statuses, task

    def begin(self, last: Callable[[], None]) -> Job:
        """Begin it in the core's threads."""
        return NativeJob(self._batch, self._patches.channel, self._patches.threads, last)

    def run_here(self) -> None:
        """Read it in this thread."""
        native.run_here(self._batch)

    def left(self) -> list[Task]:
        """What was declined."""
        patches, outcomes = self._patches, self._statuses[:, 0]
        for stage, nanoseconds in zip(("decode", "copy"), self._batch.times, strict=True):
            patches.clock.add(stage, nanoseconds)
        patches.counts.add(*self._batch.nbytes)
        if (outcomes == _PENDING).any():
            raise ClosedError("the interpreter ends before the batch is made")
        roles = len(patches._roles)
        return [self._task(*divmod(item, roles)) for item in np.flatnonzero(outcomes != _MADE).tolist()]
