"""``FastLoader``: torch's ``DataLoader``, with the next batches made in threads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from torch.utils.data import DataLoader, RandomSampler, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastpipe.engine.clock import StageClock
from fastpipe.errors import BadSampleError, OptionError
from fastpipe.index.order import epoch_order
from fastpipe.torch._torch_loader import LoaderView, ThreadedIterator, is_map_style, stock_iterator
from fastpipe.torch.image_folder import FastImageFolder
from fastpipe.types import Key

__all__ = ["FastLoader"]


class FastLoader(DataLoader[Any]):
    """``torch.utils.data.DataLoader`` with the same arguments, attributes and batches.

    Over a :class:`fastpipe.FastImageFolder`, or a ``Subset`` of one, ``num_workers=0`` means
    threads in this process: the next batches are made while the current one is used, without
    worker processes.  Over any other dataset it does what ``DataLoader`` does.

    Args:
        dataset … in_order: as in ``DataLoader``.
        seed: makes the order (with ``shuffle=True``) and the augmentation a pure function of
            (seed, epoch), the same for any number of threads or workers.  Default: the
            dataset's ``seed``.  Without one, order and augmentation come from ``generator``
            or torch's global generator, with the draws that ``DataLoader`` makes.
        prefetch_batches: batches made ahead with ``num_workers=0``; ``"auto"`` is two, or
            more where batches are so small that the threads would run dry.

    A batch is yours for as long as you keep it: its memory is used again only when no tensor
    refers to it any more.

    >>> import torch
    >>> loader = FastLoader(list(range(6)), batch_size=3)
    >>> list(loader)
    [tensor([0, 1, 2]), tensor([3, 4, 5])]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        prefetch_batches: int | Literal["auto"] = "auto",
    ) -> None:
        if prefetch_batches != "auto" and (not isinstance(prefetch_batches, int) or prefetch_batches < 0):
            raise OptionError(f"prefetch_batches must be 'auto' or a number from 0, got {prefetch_batches!r}")
        self.seed = seed if seed is None else operator.index(seed)
        self.prefetch_batches = prefetch_batches
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory,
            drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self._order = _Order(self, bool(shuffle) and sampler is None and batch_sampler is None)

    @property
    def clock(self) -> StageClock:
        """Time spent in this process, by stage, summed over the threads of the dataset.

        Raises:
            AttributeError: the dataset is none that fastpipe makes batches of.
        """
        source = _source_of(self.dataset)
        if source is None:
            raise AttributeError(f"no stages are timed for a {type(self.dataset).__name__}")
        return source.base.clock

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which (with a seed) fixes order and augmentation.

        Without this call epochs are counted from 0, one for each iteration begun.

        Args:
            epoch: from 0.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise OptionError(f"set_epoch(epoch) must be from 0, got {epoch}")
        self._order.next_epoch = epoch

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not is_map_style(self):
            return super()._get_iterator()
        source, seed = _source_of(self.dataset), self._effective_seed()
        if source is None and seed is None:
            return super()._get_iterator()
        view = LoaderView(self, self._order, seed)
        if source is None or self.num_workers > 0 or not self._auto_collation:
            return stock_iterator(view)
        refill = self.batch_size if source.base.bad_samples.policy == "skip" else None
        depth = self._depth(source)
        source.base._expect_ahead(depth)
        return ThreadedIterator(view, source, depth, refill)

    def _effective_seed(self) -> int | None:
        if self.seed is not None:
            return self.seed
        dataset = self.dataset
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        return dataset.seed if isinstance(dataset, FastImageFolder) else None

    def _depth(self, source: _Source) -> int:
        if self.prefetch_batches != "auto":
            return self.prefetch_batches
        size = self.batch_size or 1
        return 1 + max(1, math.ceil(2 * source.base._thread_count() / size))


class _Order:
    """The index batches of each epoch: torch's samplers', or with a seed a function of the epoch.

    Args:
        loader: whose samplers are used; not kept.
        is_ours: whether the order is a shuffle that no sampler of the user's decides.
    """

    def __init__(self, loader: DataLoader[Any], is_ours: bool) -> None:
        self.next_epoch = 0
        self.is_batched = bool(loader._auto_collation)
        self._sampler, self._index_sampler = loader.sampler, loader._index_sampler
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self._is_ours = is_ours

    def __len__(self) -> int:
        return len(self._index_sampler)

    def begin(self) -> int:
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        return epoch

    def shard(self) -> tuple[int, int]:
        """What a ``DistributedSampler``, or one like it, says of its rank."""
        batches = getattr(self._index_sampler, "sampler", None)
        for sampler in (self._sampler, self._index_sampler, batches):
            rank, ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
            if isinstance(rank, int) and isinstance(ranks, int):
                return rank, ranks
        return 0, 1

    def batches(self, seed: int | None) -> Iterator[Any]:
        if seed is None or not self._is_ours or not isinstance(self._sampler, RandomSampler):
            return iter(self._index_sampler)
        return self._shuffled(seed)

    def _shuffled(self, seed: int) -> Iterator[Any]:
        count = len(self._sampler)  # type: ignore[arg-type]
        # This runs with the first batch, after ``begin``.
        order = epoch_order(count, seed=seed, epoch=self.next_epoch - 1).tolist()
        if self._batch_size is None:
            yield from order
            return
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            if len(batch) == self._batch_size or not self._drop_last:
                yield batch


class _Source:
    """A ``FastImageFolder``, perhaps through subsets, that makes batches ahead."""

    def __init__(self, base: FastImageFolder, subsets: Sequence[Subset[Any]]) -> None:
        self.base = base
        self._subsets = subsets  # from the outermost to the one around the base

    def start(self, indices: Sequence[int], key: Key) -> Any:
        for subset in self._subsets:
            indices = [subset.indices[index] for index in indices]
        return self.base._start_batch(indices, key)

    def finish(self, batch: Any) -> list[Any]:
        return self.base._finish_batch(batch)

    def why_empty(self, batch: Any) -> BadSampleError | None:
        return self.base._why_empty(batch)

    def cancel(self, batch: Any) -> None:
        batch.pending.cancel()

    def waited(self, nanoseconds: int) -> None:
        self.base.clock.add("wait", nanoseconds)


def _source_of(dataset: Any) -> _Source | None:
    """The source behind a dataset, if every object on the way is one whose code is known."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    if (
        isinstance(dataset, FastImageFolder)
        and type(dataset).__getitems__ is FastImageFolder.__getitems__
        and dataset._answers_for_batches()
    ):
        return _Source(dataset, subsets)
    return None
