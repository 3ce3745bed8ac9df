"""Samples that are parts of arrays: the structure of a sample, and the interface of readers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.core.reads import Reading
from fastpipe.core.types import Key
from fastpipe.errors import OptionError

EpochOrder = Callable[[int], npt.NDArray[np.int64]]  # returns the ordered indices of an epoch, (N,)


class Form(NamedTuple):
    """The structure of a sample.  ``kind`` says what a sample is: ``"value"``, ``"tuple"`` or ``"dict"``.
    ``fields`` are the keys of a dict.  ``names`` are the datasets in the file that contain the values."""

    kind: str
    fields: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, keys: Any) -> Form:
        """Return the structure that the user's option ``keys=`` describes."""
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


# The most samples that are tried as replacements of a bad sample.
_MOST_REPLACEMENTS = 100


class BatchReader(Protocol):
    """Reads batches of samples that are parts of arrays."""

    @property
    def plan(self) -> Any:
        """An object that says how data are read.  Its attribute ``lines`` says this in words."""

    def follow(self, batches: Callable[[], Iterator[npt.NDArray[np.int64]]], seed: int, epoch: int) -> None:
        """Prefetch the data of an epoch from arrays in stores.  For each batch, ``batches`` yields the
        samples' positions in the dataset, int64 (N,)."""

    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]], order: EpochOrder | None = None,
    ) -> Reading:  # fmt: skip
        """Return the ``Reading`` object that describes how to read a batch into ``arrays``.

        Args:
            samples: positions in the dataset, int64 (N,), in the order of the requested indices.
            key: the seed, epoch and positions from which the samples' random numbers are computed.
            is_keyed: whether a loader has set the key.
            order: the function that returns the order of an epoch; None if the order is not known.
        """

    def _running(self) -> Any:
        """Return the state of the dataset in this process.  The state is created at the first use."""


def checked_threads(threads: Any) -> Any:
    if threads != "auto" and (not isinstance(threads, int) or threads < 1):
        raise OptionError(f"threads must be 'auto' or a number from 1, got {threads!r}")
    return threads


def drawn_substitute(
    count: int, samples: npt.NDArray[np.int64], key: Key, row: int, attempt: int
) -> int | None:
    """Return another of a dataset's ``count`` samples, to replace sample number ``row`` of a batch.  Return
    None if ``attempt`` is too large.  ``attempt``, from 1, selects a sample from a random sequence, which
    depends on the key (seed, epoch, position in the epoch) of the replaced sample."""
    if attempt > min(count - 1, _MOST_REPLACEMENTS):
        return None
    seed = sample_seed(key.seed, key.epoch, int(key.draws[row]))
    drawn = uniforms(seed, 0, np.array([0]), _MOST_REPLACEMENTS)[0]
    others = count - 1
    # If there are few enough samples to try all of them, try each sample once.
    few = np.argsort(drawn[:others], kind="stable") if others <= _MOST_REPLACEMENTS else None
    step = int(drawn[attempt - 1] * others) if few is None else int(few[attempt - 1])
    return (int(samples[row]) + 1 + step) % count
