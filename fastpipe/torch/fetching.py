"""Wrappers around the user's dataset and collate function, for torch's iterators.

Each batch of indices has a key (seed, epoch, positions), from which the random numbers of its samples are
made.  The dataset's wrapper stores the key in the module ``randomness``, because a ``Subset`` passes only
plain indices to its inner dataset.  The wrapper also adds the sample's index and path to errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data import Subset, get_worker_info

from fastpipe.core.keys import sample_seed
from fastpipe.torch.indices import KeyedIndices
from fastpipe.torch.randomness import key_for, keyed, preserved_generators, seed_generators
from fastpipe.torch.source import Source, StartedBatch
from fastpipe.torch.threads import note
from fastpipe.torch.transport import peek_requests
from fastpipe.torch.wrappers import integers, located

_COLLATE = 1 << 40  # added to a batch's first position to seed its collation; samples' positions are smaller


class UsersDataset:
    """A wrapper around the user's dataset.  It adds the index and the path of a sample to errors."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        inner = dataset
        while type(inner) is Subset:  # the ``__getitems__`` of a Subset only calls the inner dataset
            inner = inner.dataset
        self._answers_for_batches = bool(getattr(inner, "__getitems__", None))

    def __getitems__(self, indices: Any) -> Any:
        dataset = self.dataset
        if self._answers_for_batches:
            return dataset.__getitems__(indices)
        samples: list[Any] = []
        index = None
        try:
            for index in indices:
                note(index)
                samples.append(dataset[index])
        except Exception as error:
            _say_which(error, dataset, index)
            raise
        return samples

    def __getitem__(self, index: Any) -> Any:
        note(index)
        try:
            return self.dataset[index]
        except Exception as error:
            _say_which(error, self.dataset, index)
            raise

    def __len__(self) -> int:
        return len(self.dataset)


class KeyedDataset(UsersDataset):
    """A wrapper around the user's dataset.  Before each call of the dataset, the wrapper sets the key (seed,
    epoch, position) from which the random numbers of the samples are made.

    If the loader has a seed, all random numbers of the dataset come from this seed.  The generators are
    seeded for each sample, or once for a batch if the dataset makes whole batches.
    """

    def __getitems__(self, asked: KeyedIndices) -> Any:
        fetched.last = asked
        base = _base_seed()
        if asked.seed is None or self._answers_for_batches:
            with keyed(asked.key(base)), _seeded(asked, base):
                return super().__getitems__(asked.indices)
        samples = []
        with preserved_generators():
            for number, index in enumerate(asked.indices):
                key = key_for(asked.seed, asked.epoch, asked.first + number * asked.step, 1)
                seed_generators(sample_seed(key.seed, key.epoch, int(key.draws[0])))
                with keyed(key):
                    samples.append(super().__getitem__(index))
        return samples

    def __getitem__(self, asked: KeyedIndices) -> Any:
        fetched.last = asked
        base = _base_seed()
        with keyed(asked.key(base)), _seeded(asked, base):
            return super().__getitem__(asked.indices)


class SourceDataset(KeyedDataset):
    """A wrapper around the user's dataset.  Batches come from a fastpipe ``Source``, and single samples come
    from the dataset itself."""

    def __init__(self, dataset: Any, source: Source) -> None:
        super().__init__(dataset)
        self._source = source

    def __getitems__(self, asked: KeyedIndices) -> Any:
        fetched.last = asked
        base = _base_seed()
        with _seeded(asked, base):
            batch, asked.begun = asked.begun or self._source.start(asked.indices, asked.key(base)), None
            self._begin_what_follows(batch, base)
            samples = batch.finish()
        error = None if len(samples) else batch.why_empty()
        if error is not None:  # an empty batch cannot be collated
            raise error
        return samples

    def _begin_what_follows(self, batch: StartedBatch, base: int) -> None:
        """In a worker process with several threads, begin the next batch as soon as the parent process
        requests it, even while ``batch`` is still being made."""
        if self._source.threads == 1:
            return  # without other threads, this thread would make the whole next batch first
        for message in peek_requests(lambda: self._source.is_done(batch)):
            asked = message[1] if isinstance(message, tuple) else None
            if isinstance(asked, KeyedIndices) and asked.begun is None:
                with suppress(Exception):  # the error is raised again when this batch is requested
                    asked.begun = self._source.start(asked.indices, asked.key(base))


class KeyedCollate:
    """A wrapper around the user's collate function.  Before each call, it seeds the global generators from
    the batch's key (seed, epoch, position)."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, samples: list[Any]) -> Any:
        asked = fetched.last
        if asked is None:
            return self._function(samples)
        with preserved_generators():
            seed_generators(sample_seed(asked.key(0).seed, asked.epoch, _COLLATE + asked.first))
            return self._function(samples)


class _Fetched(threading.local):
    """The state of a thread that fetches batches.  ``last`` contains the indices of the last requested batch.
    ``base_seed`` is the base seed of torch's iterator.  It is not set in workers."""

    last: KeyedIndices | None = None
    base_seed = 0


fetched = _Fetched()


@contextmanager
def _seeded(asked: KeyedIndices, base: int) -> Iterator[None]:
    """If ``asked`` has a seed, seed the global generators for the ``with`` block, then restore them."""
    if asked.seed is None:
        yield
        return
    with preserved_generators():
        seed_generators(sample_seed(asked.key(base).seed, asked.epoch, asked.first))
        yield


def _base_seed() -> int:
    worker = get_worker_info()
    return worker.seed - worker.id if worker else fetched.base_seed


def _say_which(error: BaseException, dataset: Any, index: Any) -> None:
    """Add a note with the sample's index to an error.  If the dataset consists of files, the note also
    contains the path.  Python 3.11 and later show such notes."""
    if not hasattr(error, "add_note") or any("sample " in note for note in getattr(error, "__notes__", ())):
        return
    path = None
    with suppress(Exception):  # an error raised here must not hide the original error
        ((end, _, (local,)),) = located(dataset, integers([index]))
        path = end.samples[local][0]
    error.add_note(f"while loading sample {index!r}" + (f" from {path!r}" if isinstance(path, str) else ""))
