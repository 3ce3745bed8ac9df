"""How far the user has come in an epoch, and where the next one goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fastpipe.errors import OptionError

__all__ = ["Asked", "AskedSampler", "Progress", "ResumePoint"]


@dataclass(frozen=True)
class ResumePoint:
    """Where the next epoch goes on.

    Attributes:
        epoch: its number.
        begun: number of the epoch under the same base seed.
        batches: batches that the user has received.
        taken: index batches of the sampler that they took.
        offset: samples of the index batch behind those that they took as well.
        position: where the next batch begins, if the order is a function of the epoch.
        base_seed: seed of the keys, if no other is given.
        generator: state of the sampler's generator when the epoch began.
        asked: how often the sampler was asked in the epoch, also ahead of the user and for its end; None
            if that is not known.
        now: state of the sampler's generator behind these draws, and those of others.
        seeds: state of the generator from which base seeds alone are drawn.
    """

    epoch: int
    begun: int = 0
    batches: int = 0
    taken: int = 0
    offset: int = 0
    position: int = 0
    base_seed: int | None = None
    generator: torch.Tensor | None = None
    asked: int | None = None
    now: torch.Tensor | None = None
    seeds: torch.Tensor | None = None

    @property
    def is_within(self) -> bool:
        """Return whether the epoch has begun there: nothing is drawn for it any more."""
        is_begun = self.base_seed is not None or self.generator is not None
        return is_begun or bool(self.batches or self.taken or self.offset or self.position)


class Asked(Protocol):
    """An iterator over a sampler that knows how often it was asked."""

    def look(self, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
        """Return that, and the state that its generator has by that."""


class AskedSampler:
    """An iterator over a sampler that counts how often it was asked.  From any threads.

    Args:
        sampler: the iterator.
        generator: from which it draws more and more of an epoch; None if it does not.
    """

    def __init__(self, sampler: Iterator[Any], generator: torch.Generator | None) -> None:
        self._sampler, self._generator = sampler, generator
        self._asked = 0
        self._left: torch.Tensor | None = None  # the generator's state behind the last draw
        self._is_shared = False
        self._lock = threading.Lock()

    def __iter__(self) -> AskedSampler:
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._asked += 1
            if self._generator is None:
                return next(self._sampler)
            found = self._generator.get_state()
            try:
                return next(self._sampler)
            finally:
                left, self._left = self._left, self._generator.get_state()
                if left is not None and not torch.equal(found, self._left):  # it has drawn again
                    self._is_shared = self._is_shared or not torch.equal(left, found)

    def look(self, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
        """How often it was asked, and the state that its generator has by that.

        Raises:
            OptionError: others have drawn from the generator, so that the draws cannot be made again.
        """
        with self._lock:
            if self._is_shared:
                raise OptionError(
                    "the sampler draws more and more of its epoch from a generator that something else has "
                    "drawn from in this epoch, so that its draws cannot be made again: give the sampler a "
                    "generator of its own"
                )
            return self._asked, None if generator is None else generator.get_state()


@dataclass(frozen=True)
class _Copied:
    """How often an iterator was asked that is elsewhere."""

    asked: int

    def look(self, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
        return self.asked, None if generator is None else generator.get_state()


class Progress:
    """How far the user has come in an epoch.

    Attributes:
        point: where the iterator began.
        received: batches that it has given.
        taken: index batches that these took, if not one each.
        offset: samples of the next index batch that these took.
        is_over: whether it has said that there are no more.
        is_stale: whether another epoch is wanted instead, before the first batch of this one.
        held: what the user has of it (received, taken, offset), where who gives batches on is ahead.
        base_seed: the iterator's.
        generator: state of the sampler's generator when the epoch began.
        sampler: state of the user's sampler when the epoch began.
        asked: the sampler's iterator; None where no sampler decides.
    """

    def __init__(
        self, point: ResumePoint, generator: torch.Tensor | None, sampler: Any, asked: Asked | None
    ) -> None:
        self.point, self.generator, self.sampler, self.asked = point, generator, sampler, asked
        self.received = 0
        self.taken: int | None = None
        self.offset = 0
        self.is_over = False
        self.is_stale = False
        self.held: tuple[int, int | None, int] | None = None
        self.base_seed: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not go on with the iterator, but knows where it was.
        asked = None if self.asked is None else _Copied(self.asked.look(None)[0])
        return {**self.__dict__, "asked": asked}

    def hold(self) -> None:
        """Count what is received from now on as not yet the user's."""
        self.held = (self.received, self.taken, self.offset)
