"""Samples that are parts of arrays: their form, and how a batch of them is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.core.reads import Reading
from fastpipe.core.types import Key
from fastpipe.errors import OptionError

EpochOrder = Callable[[int], npt.NDArray[np.int64]]  # an epoch's indices, (N,), in order


class Form(NamedTuple):
    """The structure of a sample: a ``"value"``, ``"tuple"`` or ``"dict"`` (with its keys) of named
    datasets."""

    kind: str
    fields: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, keys: Any) -> Form:
        """Return the form for an option ``keys=``."""
        if isinstance(keys, str):
            return cls("value", (), (keys,))
        if isinstance(keys, Mapping):
            form = cls("dict", tuple(keys), tuple(keys.values()))
        elif isinstance(keys, Sequence) and not isinstance(keys, bytes):
            form = cls("tuple", (), tuple(keys))
        else:
            raise OptionError(
                f"keys must be a dataset's path, or a sequence or mapping of some, got {keys!r}"
            )
        wrong = [name for name in form.names if not isinstance(name, str)]
        if wrong or not form.names:
            raise OptionError(f"keys must name datasets by their paths, got {keys!r}")
        return form

    def sample(self, values: Sequence[Any]) -> Any:
        if self.kind == "value":
            return values[0]
        return tuple(values) if self.kind == "tuple" else dict(zip(self.fields, values, strict=True))


# Samples that are tried as replacements of a bad one.
_MOST_REPLACEMENTS = 100


class BatchReader(Protocol):
    """A reader of batches of a dataset of arrays."""

    @property
    def plan(self) -> Any:
        """The plan of how data are read; its ``lines`` describe it in words."""

    def follow(self, batches: Callable[[], Iterator[npt.NDArray[np.int64]]], seed: int, epoch: int) -> None:
        """Prefetch the data that an epoch needs from arrays in stores; ``batches`` yields samples,
        int64 (N,)."""

    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]], order: EpochOrder | None = None,
    ) -> Reading:  # fmt: skip
        """Return how a batch is read into arrays.

        Args:
            samples: int64 (N,): positions in the dataset, in the order of the requested indices.
            key: the key of the samples' draws; ``is_keyed``: whether a loader has set it.
            order: the order of the key's epoch, if it is known.
        """

    def _running(self) -> Any:
        """Return this process's runtime, created at its first use."""


def checked_threads(threads: Any) -> Any:
    if threads != "auto" and (not isinstance(threads, int) or threads < 1):
        raise OptionError(f"threads must be 'auto' or a number from 1, got {threads!r}")
    return threads


def drawn_substitute(
    count: int, samples: npt.NDArray[np.int64], key: Key, row: int, attempt: int
) -> int | None:
    """Return another of ``count`` samples: the ``attempt``-th, from 1, in a sequence drawn with the key of
    the sample in ``row``; None after enough attempts."""
    if attempt > min(count - 1, _MOST_REPLACEMENTS):
        return None
    seed = sample_seed(key.seed, key.epoch, int(key.draws[row]))
    drawn = uniforms(seed, 0, np.array([0]), _MOST_REPLACEMENTS)[0]
    others = count - 1
    # If all others may be tried, each is tried once.
    few = np.argsort(drawn[:others], kind="stable") if others <= _MOST_REPLACEMENTS else None
    step = int(drawn[attempt - 1] * others) if few is None else int(few[attempt - 1])
    return (int(samples[row]) + 1 + step) % count
