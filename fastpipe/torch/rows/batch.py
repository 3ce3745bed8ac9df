"""A batch of rows in the making: its memory, and the user code that is still to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from fastpipe.core.array_samples import Form
from fastpipe.core.bad_samples import Item, why_nothing_is_left
from fastpipe.core.batches import say_where
from fastpipe.core.keys import sample_seed
from fastpipe.core.pool import Job, ThreadPool
from fastpipe.core.reads import PendingRead
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.torch.generators import preserved_generators, run_keyed, seed_generators
from fastpipe.torch.rows.samples import Part, SampleRows, copied
from fastpipe.torch.stock import is_thread_safe
from fastpipe.torch.threads import note

__all__ = ["Code", "RowsBatch", "UserCode"]


class Code(Protocol):
    """What a script does to the values of a sample.

    Attributes:
        is_safe: whether ``transformed`` may be called from several threads at once.
    """

    is_safe: bool

    def __bool__(self) -> bool:
        """Whether it does anything."""

    @property
    def runs_here(self) -> bool:
        """Whether some of it runs in the consumer's thread only."""

    def transformed(self, values: list[Any], seed: Callable[[], int] | None) -> list[Any]:
        """The values after what may run in threads, its draws through torch from the seed that a function
        gives, if there is one."""

    def sample(self, values: list[Any]) -> Any:
        """The sample of such values."""


class UserCode:
    """What the script does to samples.

    Args:
        form: what a sample is made of.
        transform: called with the first value of a tuple, else with the sample; or None.
        target_transform: called with the second value of a tuple; or None.
        is_safe: whether ``transform`` may be called from several threads at once, whatever it is.
    """

    def __init__(
        self,
        form: Form,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        is_safe: bool,
    ) -> None:
        self._form, self._transform, self._target_transform = form, transform, target_transform
        self.is_safe = is_safe or transform is None or is_thread_safe([transform])

    def __bool__(self) -> bool:
        return self._transform is not None or self._target_transform is not None

    @property
    def runs_here(self) -> bool:
        """Whether some of it runs in the consumer's thread only."""
        return self._target_transform is not None or not self.is_safe

    def transformed(self, values: list[Any], seed: Callable[[], int] | None) -> list[Any]:
        """Values of a sample after ``transform``, its draws through torch from the seed that a function
        gives, if there is one."""
        if self._transform is None:
            return values
        value = self._form.sample(values) if self._form.kind == "dict" else values[0]
        made = self._transform(value) if seed is None else run_keyed([self._transform], value, seed)
        return [made] if self._form.kind == "dict" else [made, *values[1:]]

    def sample(self, values: list[Any]) -> Any:
        """The sample of such values, after ``target_transform``."""
        if self._form.kind == "dict" and self._transform is not None:
            return values[0]
        if self._target_transform is not None:
            values[1] = self._target_transform(values[1])
        return self._form.sample(values)


class RowsBatch:
    """A batch that is being read, and what is needed to finish it.

    Attributes:
        pending: the batch in the engine.
        parts: its memory.
        kept: numbers of the samples that are there, once it is finished.

    Args:
        pending, parts: as above.
        pool: the threads that read it; None for this one.
        form: what a sample is made of.
        code: what the script does to samples.
        key: the key of its random parameters; None where nothing is drawn.
        is_keyed: whether a loader set the key.
        is_threaded: whether other threads than this one may be used.
    """

    def __init__(
        self,
        pending: PendingRead,
        parts: Sequence[Part],
        pool: ThreadPool | None,
        form: Form,
        code: Code,
        key: Key | None,
        is_keyed: bool,
        is_threaded: bool,
    ) -> None:
        self.pending, self.parts = pending, parts
        # The threads must outlive the batch, also when the dataset gets new ones meanwhile.
        self._pool, self._form, self._code = pool, form, code
        self._key, self._is_keyed, self._is_threaded = key, is_keyed, is_threaded
        self.kept: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""
        return sum(part.array.nbytes for part in self.parts)

    def jobs(self) -> list[Job]:
        """What its threads are doing."""
        return self.pending.jobs

    def finish(self) -> Sequence[Any]:
        """Wait for it; run what must run in this thread, in order; return its samples."""
        self.kept = self.pending.wait()
        if self._code:
            return self._transformed()
        parts = self.parts
        if len(self.kept) < len(self.pending.samples):
            parts = [_chosen(part, self.kept) for part in parts]
        if self._form.kind == "value" and parts[0].array.ndim == 1:
            values = list(parts[0].array)  # scalars, which torch collates by their own types
            return list(map(copied, values)) if parts[0].array.dtype.kind == "V" else values
        return SampleRows(self._form, parts)

    def why_empty(self) -> BadSampleError | None:
        """Why it has no sample once it is finished; None if none was asked for."""
        return why_nothing_is_left(self.pending.left_out, len(self.pending.samples))

    def cancel(self) -> None:
        """Give it up."""
        self.pending.cancel()

    def _transformed(self) -> list[Any]:
        made: dict[int, list[Any]] = {}
        failed: dict[int, Exception] = {}

        def make(number: int) -> None:
            row = self.kept[number]
            try:
                # Without a key there is no transform either, and only ``target_transform`` is to run.
                seed = partial(self._seed, row) if self._code.is_safe and self._key is not None else None
                made[row] = self._code.transformed(self._values(row), seed)
            except Exception as error:  # raised where its sample is the first that failed
                failed[row] = error

        if self._code.is_safe and self._is_threaded and self._pool is not None:
            self._pool.submit(make, len(self.kept)).wait()
        elif self._code.is_safe:
            for number in range(len(self.kept)):
                make(number)
        samples = []
        with preserved_generators() if self._is_keyed and self._code.runs_here else nullcontext():
            for row in self.kept:
                note(self._item(row).path)
                try:
                    if row in failed:
                        raise failed.pop(row)
                    if self._is_keyed and self._code.runs_here:
                        seed_generators(self._seed(row))
                    values = made.pop(row, None)
                    if values is None:
                        values = self._code.transformed(self._values(row), None)
                    samples.append(self._code.sample(values))
                except Exception as error:
                    failed.clear()  # a traceback refers to this batch and its memory
                    say_where(error, self._item(row))
                    raise
        return samples

    def _values(self, row: int) -> list[Any]:
        # Of their own: what a transform returns is often a view of what it was given.
        return [copied(part.array[row]) for part in self.parts]

    def _seed(self, row: int) -> int:
        assert self._key is not None
        return sample_seed(self._key.seed, self._key.epoch, int(self._key.draws[row]))

    def _item(self, row: int) -> Item:
        return self.pending.item(row)


def _chosen(part: Part, rows: Sequence[int]) -> Part:
    """Some rows of a part."""
    array = part.array[list(rows)]
    return Part(array, None if part.tensor is None else torch.from_numpy(array))
