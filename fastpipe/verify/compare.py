"""Every sample by both datasets: equal, different, or not readable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import fastpipe
from fastpipe.bench.check import Check, index_problems
from fastpipe.core.files import require_regular
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError, OptionError
from fastpipe.verify.chains import Chain
from fastpipe.verify.values import UnlikeError, array_pairs

__all__ = ["Failures", "Outcome", "chosen", "compare_folder"]

# A transform of the user's is called twice for so many images, to see that it gives the same.
TRIED_TWICE = 8

# Of more failures only the number is kept: a disk that is gone makes one for every sample.
MOST_KEPT = 1000


@dataclass(frozen=True)
class Failure:
    """A sample that could not be made.

    Attributes:
        index: its index in the dataset.
        path: its file.
        stock: what torchvision's dataset raised, or ``None``.
        fast: what fastpipe's raised, or ``None``.
    """

    index: int
    path: str
    stock: str | None
    fast: str | None


@dataclass
class Failures:
    """How many samples failed, and the first of them."""

    count: int = 0
    first: list[Failure] = field(default_factory=list)

    def add(self, failure: Failure) -> None:
        """Count one."""
        self.count += 1
        if len(self.first) < MOST_KEPT:
            self.first.append(failure)


@dataclass
class Outcome:
    """What the comparison found.

    Attributes:
        total: images in the folder.
        classes: its classes.
        chosen: how many images were to be compared.
        index_problems: name of what is not equal of the index → a sentence.
        check: the values of all samples that both gave.
        unreadable: samples that neither gives.
        one_sided: samples that only one of them gives.
        plan: what ``FastImageFolder.plan`` prints.
    """

    total: int
    classes: int
    chosen: int
    index_problems: dict[str, str] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    unreadable: Failures = field(default_factory=Failures)
    one_sided: Failures = field(default_factory=Failures)
    plan: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing at all differs."""
        return not (self.index_problems or self.check.photos_differing or self.one_sided.count)

    @property
    def seen(self) -> int:
        """How many samples were tried."""
        return self.check.photos + self.unreadable.count + self.one_sided.count


class _Try(NamedTuple):
    """A sample ``(value, target)``, or in words why there is none."""

    sample: Any = None
    error: str | None = None

    @classmethod
    def failed(cls, error: BaseException) -> _Try:
        """For an error; that of reading, where fastpipe wrapped it."""
        if isinstance(error, BadSampleError) and error.__cause__ is not None:
            error = error.__cause__
        return cls(error=f"{type(error).__name__}: {error}")


def chosen(total: int, count: int | None, seed: int) -> list[int]:
    """Which of ``total`` samples to compare: one drawn from each of ``count`` equal parts.

    >>> chosen(4, None, 0), chosen(4, 9, 0)
    ([0, 1, 2, 3], [0, 1, 2, 3])
    >>> [number // 100 for number in chosen(300, 3, 0)]
    [0, 1, 2]
    """
    if count is None or count >= total:
        return list(range(total))
    starts = [part * total // count for part in range(count + 1)]
    drawn: list[int] = np.random.default_rng(seed).integers(starts[:-1], starts[1:]).tolist()
    return drawn


def compare_folder(
    stock: Any,
    chain: Chain,
    count: int | None,
    seed: int,
    on_image: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Compare ``FastImageFolder`` with torchvision's ``ImageFolder``.

    Args:
        stock: torchvision's dataset, without a transform.
        chain: the transform.
        count: how many images, spread evenly over the folder; ``None`` takes all.
        seed: which images, and what random transforms draw; from 0.
        on_image: called after each image.

    Raises:
        OptionError: the user's transform is random, or none of the images could be compared.
    """
    fast = fastpipe.FastImageFolder(stock.root, chain.transform)
    indices = chosen(len(stock), count, seed)
    outcome = Outcome(
        len(stock), len(stock.classes), len(indices), index_problems(stock, fast), plan=str(fast.plan)
    )
    if outcome.index_problems:  # an index would not mean the same file in both
        return outcome
    if not fast.plan.draws:
        stock.transform = chain.transform
    for index, made, draws in _made(fast, indices, chain.batch, seed):
        expected = _expected(stock, fast, index, draws)
        if chain.is_own and outcome.seen < TRIED_TWICE:
            _check_repeats(chain, expected, _expected(stock, fast, index, draws))
        _add(outcome, stock.samples[index][0], index, expected, made)
        on_image(outcome)
    if not outcome.check.photos and not outcome.one_sided.count:
        first = outcome.unreadable.first[0]
        raise OptionError(
            f"none of the {outcome.chosen:,} images can be read, or the transform fails on all: "
            f"{first.path!r}: {first.stock}"
        )
    return outcome


def _add(outcome: Outcome, path: str, index: int, expected: _Try, made: _Try) -> None:
    """Take one sample into account."""
    if expected.error is not None or made.error is not None:
        failed_alike = expected.error is not None and made.error is not None
        failures = outcome.unreadable if failed_alike else outcome.one_sided
        failures.add(Failure(index, path, expected.error, made.error))
        return
    (value, target), (other, other_target) = expected.sample, made.sample
    try:
        if (type(target), target) != (type(other_target), other_target):
            raise UnlikeError(f"label {other_target!r} instead of {target!r}")
        outcome.check.add(list(array_pairs(value, other)), index, path)
    except UnlikeError as unlike:
        outcome.check.add_unlike(str(unlike), index, path)


def _expected(stock: Any, fast: Any, index: int, draws: Any) -> _Try:
    """torchvision's sample: its dataset's own, or with the parameters that fastpipe drew."""
    path = stock.samples[index][0]
    try:
        require_regular(path, os.stat(path))  # torchvision would wait for who writes to a fifo
        value, target = stock[index]
        return _Try((fast.plan.reference(value, draws) if fast.plan.draws else value, target))
    except (MemoryError, ImportError):  # the machine's trouble, not the file's
        raise
    except Exception as error:  # whatever Pillow or the user's code raises
        return _Try.failed(error)


def _made(fast: Any, indices: Sequence[int], size: int, seed: int) -> Iterator[tuple[int, _Try, Any]]:
    """fastpipe's samples in batches, as training asks for them.

    Args:
        fast: the dataset.
        indices: which samples.
        size: samples in a batch.
        seed: of what random transforms draw.

    Yields:
        Index, sample, and what its random transforms drew.
    """
    chunks = [indices[first : first + size] for first in range(0, len(indices), size)]
    batches = _batches(fast, chunks, seed)
    position = 0
    for chunk in chunks:
        places = np.arange(position, position + len(chunk))
        position += len(chunk)
        try:
            samples = next(batches)
        except (MemoryError, ImportError, StopIteration):  # the machine's trouble, or a defect
            raise
        except Exception:  # one of them failed: which one is found by asking for each alone
            yield from (_made_alone(fast, index, seed + 1 + index) for index in chunk)
        else:
            drawn = fast.plan.draw(Key(seed, 0, places)).tolist()
            yield from zip(chunk, map(_Try, samples), drawn, strict=True)


def _made_alone(fast: Any, index: int, seed: int) -> tuple[int, _Try, Any]:
    """One sample in a batch of its own."""
    drawn = fast.plan.draw(Key(seed, 0, np.arange(1))).tolist()[0]
    try:
        return index, _Try(next(_batches(fast, [[index]], seed))[0]), drawn
    except (MemoryError, ImportError, StopIteration):
        raise
    except Exception as error:
        return index, _Try.failed(error), drawn


def _batches(fast: Any, chunks: Sequence[Sequence[int]], seed: int) -> Iterator[list[Any]]:
    """Lists of samples; goes on after an error.  Few are made ahead, as they may be large."""
    batches: Iterator[list[Any]] = iter(
        fastpipe.FastLoader(fast, batch_sampler=chunks, collate_fn=list, seed=seed, prefetch_batches=1)
    )
    return batches


def _check_repeats(chain: Chain, first: _Try, second: _Try) -> None:
    """The user's transform must give the same twice."""
    if first.error is not None or second.error is not None:
        return
    again = Check()
    try:
        again.add(list(array_pairs(first.sample, second.sample)), 0, "")
    except UnlikeError as unlike:
        again.add_unlike(str(unlike), 0, "")
    if again.photos_differing:
        raise OptionError(
            f"--transform {chain.name} gives another result when it is called again with the same image, so "
            "nothing can be compared; leave its random steps out, or take --transform train"
        )
