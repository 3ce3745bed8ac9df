"""``FastLoader`` is a ``DataLoader`` that makes the next batches in threads.  ``accelerate`` makes a
``FastLoader`` from a ``DataLoader``."""

from __future__ import annotations

import copy
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data._utils.collate import default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastpipe.core.clock import StageClock
from fastpipe.core.machine import default_threads, free_memory
from fastpipe.core.transfer import Transfer, checked_device
from fastpipe.errors import OptionError
from fastpipe.options import Cache, Shard, Shuffle
from fastpipe.torch.delivery import Delivery
from fastpipe.torch.describe import Advice, LoaderPlan, stock_loader, why_no_source
from fastpipe.torch.fetching import KeyedDataset, SourceDataset, UsersDataset
from fastpipe.torch.indices import IndexBatches
from fastpipe.torch.iterators import (
    LoaderView,
    ThreadedIterator,
    forget_iterator,
    is_map_style,
    stock_iterator,
    stream_iterator,
)
from fastpipe.torch.order import WORKER_OPTIONS, EpochOrder, batching_of, is_default, mark_default, options_of
from fastpipe.torch.samplers import (
    GroupSampler,
    RankCheck,
    ShardSampler,
    ShuffleSampler,
    arrangement_for,
    effective_seed,
    set_sampler_state,
    shard_sampler,
)
from fastpipe.torch.source import Source
from fastpipe.torch.split import SplitChoice
from fastpipe.torch.state import check_stateful, is_unsaved, point_of, state_of, unsaved_state
from fastpipe.torch.workers import WorkerInit, choose_workers, lanes_for, opens_lazily, segments_for
from fastpipe.torch.wrappers import ends_of, is_rows

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastpipe.torch.image_folder import FastImageFolder
    from fastpipe.torch.split import Split


# If Python runs for each sample, the GIL limits the threads of one process to the work of about this many
# worker processes.  The GIL is held for 0.25 ms for each image, and for most of the time that torchvision's
# transforms take.
_MOST_BY_THREADS, _MOST_WITH_TORCHVISION = 8, 2
# Number of batches that a GPU makes ahead, in addition to the next batch.  The GPU decodes two batches at the
# same time, while the files of a third batch are being opened.
_AHEAD_THERE = 3

_T_co = TypeVar("_T_co", covariant=True)


class FastLoader(DataLoader[_T_co]):
    """A ``torch.utils.data.DataLoader`` that is faster, with the same arguments, attributes and batches.

    If the dataset is a :class:`fastpipe.FastImageFolder`, torchvision's ``ImageFolder`` or another dataset of
    fastpipe, threads make the next batches while the current batch is used.  The dataset may be inside
    ``Subset`` and ``ConcatDataset``.  For any other dataset, torch's own machinery runs the dataset's code.
    ``print(loader.plan)`` shows which part of the pipeline runs where, and why.

    ``num_workers`` means the same amount of parallel work as in ``DataLoader``.  If the script has no code of
    its own in the pipeline, threads of this process do the work of this many workers.  If the script's own
    ``Dataset``, transform, ``collate_fn`` or ``worker_init_fn`` runs, this many worker processes are started,
    with fastpipe's threads in each process.  Processes are also started if Python runs for each sample and
    the GIL would limit a single process.  With torchvision's own transforms after the crop, this is the case
    for more than 2 workers.  With HDF5 files, volumes or images that Pillow decodes, this is the case for
    more than 8 workers.  For these limits, at most as many workers are counted as this process may use cores.
    Without ``num_workers``, no process is started.

    Args:
        dataset … in_order: as in ``DataLoader``; ``shuffle`` may also be a :class:`fastpipe.Shuffle`.  If
            threads do the work, the options of worker processes (``timeout``, ``multiprocessing_context``,
            ``persistent_workers``) have no effect.
        seed: with a seed, the order (with ``shuffle=True``) and the augmentation depend only on the seed and
            the epoch, not on the number of threads, workers or ranks.  Default: the dataset's ``seed``.
            Without a seed, order and augmentation use the same random numbers as in ``DataLoader``, from
            ``generator`` or torch's global generator.  An ``IterableDataset`` is loaded by torch alone and
            defines its own order.
        shard: a :class:`fastpipe.Shard`, which selects this rank's part of each epoch, in place of a sampler.
        device: device of the returned batches, such as ``"cuda"``.  Each batch is copied from page-locked
            memory on a separate stream, during the training step with the previous batch.  If the transform
            ends in ``ToTensor`` and ``Normalize``, bytes are copied, and the device normalises them to the
            same values.
        dtype: ``torch.float16`` or ``torch.bfloat16``: the first part of each batch is rounded to this type
            if it is float32.  Decoding kernels write this type directly, or the device converts the batch.
            This happens after the steps of ``augment="auto"`` and ``augment="split"``, and before an
            ``augment`` function is called.
        augment: a function such as ``v2.MixUp`` or ``v2.CutMix`` that is called on the device with the parts
            of each batch, ``augment(images, labels)``, and returns the new batch.  With a seed, its random
            numbers depend only on seed, epoch, batch and rank.  With ``augment="split"``,
            ``fastpipe.augment`` does those steps of the dataset's transform that come after all images have
            one size.  These steps run on ``device``, or in the decoding threads if no device is given.
            Random numbers differ from torchvision's, but have the same distribution.  The results equal
            torchvision's results for tensors, which differ in some bits from its results for PIL images.
            ``"auto"`` measures for about half a second whether ``"split"`` is faster.  ``plan`` shows the
            result.
        cache: where to keep decoded images of torchvision's ``ImageFolder``, a :class:`fastpipe.Cache`
            or its ``where``.  A ``FastImageFolder`` has its own ``cache`` option.
        num_workers: may also be ``"auto"``, which measures for less than a second, in a forked process,
            whether threads of this process or worker processes are faster.  ``plan`` shows the result.
        workers: how to do the work of ``num_workers``.  ``"auto"`` follows the rule above, ``"threads"``
            starts no process, and ``"processes"`` starts ``num_workers`` processes.
        prefetch_batches: number of batches that threads make ahead.  ``"auto"`` means two batches, or four if
            a GPU decodes the images.  The number is larger if batches are so small that threads would be
            idle, and while one slow image delays a batch.  The script's own sampler is read ahead by a fixed
            number of batches, as in ``DataLoader``: ``num_workers`` × ``prefetch_factor``.  Without workers,
            this number is ``prefetch_batches``.  With ``"auto"`` it is the number of batches that contain 64
            samples, but at least two.

    You may keep a batch for as long as you want: its memory is reused only after no tensor refers to it.

    >>> import torch
    >>> loader = FastLoader(list(range(6)), batch_size=3)
    >>> list(loader)
    [tensor([0, 1, 2]), tensor([3, 4, 5])]
    """

    def __init__(
        self,
        dataset: Dataset[_T_co] | Sequence[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | Shuffle | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
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
        shard: Shard | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        augment: Callable[..., Any] | Literal["auto", "split"] | None = None,
        cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
        workers: Literal["auto", "threads", "processes"] = "auto",
        prefetch_batches: int | Literal["auto"] = "auto",
    ) -> None:
        _check_options(num_workers, workers, prefetch_batches, dtype)
        _check_dataset(dataset)
        if isinstance(dataset, IterableDataset):
            given = {"device": device, "dtype": dtype, "augment": augment}
            useless = [name for name, value in given.items() if value is not None]
            if useless:
                raise OptionError(
                    f"{', '.join(useless)}= has no effect on an IterableDataset, which torch loads: move "
                    "and augment in the dataset or in the loop"
                )
        self.seed = seed if seed is None else operator.index(seed)
        self.shard = shard
        self.device, self.dtype = device, dtype
        self._device = None if device is None else checked_device(device)
        self.augment = augment
        self._splitting = SplitChoice(augment, self._device)
        self.cache, self._cache = cache, Cache.of(cache)
        self.prefetch_batches = prefetch_batches
        self._adapted: dict[int, FastImageFolder] = {}
        self.workers, self._why_workers = workers, ""
        if num_workers == "auto":
            source = self._source_of(dataset)
            if source is not None and collate_fn is None and batch_size is not None:
                self._splitting.use(source, batch_size, True)
            num_workers, self._why_workers = choose_workers(
                dataset, source, batch_size or 1, multiprocessing_context, (collate_fn, worker_init_fn)
            )
            if num_workers == 0:  # drop the options that apply only to workers
                prefetch_factor, persistent_workers, timeout, multiprocessing_context = None, False, 0, None
        self._ranks = None if shard is None else RankCheck()
        seed_of = partial(effective_seed, self.seed, dataset)  # does not refer to this loader
        is_plain = sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset)
        arrangement = None
        if isinstance(shuffle, Shuffle):
            arrangement, shuffle = arrangement_for(dataset, shuffle, sampler, batch_sampler), True
        if shard is not None and not isinstance(getattr(batch_sampler, "sampler", None), ShardSampler):
            sampler = shard_sampler(
                dataset, shard, shuffle, sampler, batch_sampler, batch_size, arrangement,
                seed_of(), bool((source := self._source_of(dataset)) and source.skips),
            )  # fmt: skip
            shuffle = False
        elif arrangement is not None:
            sampler, shuffle = GroupSampler(dataset, arrangement, generator), False
            mark_default(sampler)
        elif shuffle and is_plain and seed_of() is not None:
            sampler, shuffle = ShuffleSampler(dataset, generator, seed_of), False
            mark_default(sampler)
        super().__init__(
            cast("Dataset[_T_co]", dataset), batch_size, shuffle, sampler, batch_sampler, num_workers,
            collate_fn, pin_memory,
            drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        if sampler is None and batch_sampler is None:
            mark_default(self.sampler)
        self._check_cache()
        if augment == "split":  # raises an error now if that is impossible
            self._split(self._source())
        self._order = EpochOrder(self, shard, seed_of)
        self._persistent_batches: IndexBatches | None = None
        self._advice = Advice()
        if workers == "threads":
            self._check_threads()

    @property
    def clock(self) -> StageClock:
        """Time spent in each stage of making batches in this process, summed over the dataset's threads.

        Raises:
            AttributeError: fastpipe does not make the batches of this dataset.
        """
        source = self._source()
        if source is None:
            raise AttributeError(f"no stages are timed for a {type(self.dataset).__name__}")
        return source.clock

    @property
    def num_processes(self) -> int:
        """Number of worker processes that make batches: ``num_workers``, or 0 if threads do their work."""
        return self.num_workers if self._why_processes(self._source()) else 0

    @property
    def plan(self) -> LoaderPlan:
        """A printable description of which part of the pipeline runs where, and why."""
        source = self._source()
        self._order.look_at(self)
        delivery = self._delivery(source, None)  # decides which part runs where
        depth = 0 if source is None else self._depth(source, delivery)
        return LoaderPlan(self, source, depth, self._why_processes(source))

    def reference(self) -> DataLoader[Any]:
        """Return an equivalent ``DataLoader`` that does not use fastpipe, with the same samples and order.

        It uses torchvision's dataset, or reads samples with the format's own library such as h5py.  Use it to
        compare results, or to stop using fastpipe.  Random augmentation has the same distribution, but other
        random numbers.
        """
        self._order.look_at(self)
        return stock_loader(self)

    def _why_processes(self, source: Source | None) -> str:
        """Return the reason why worker processes, or torch, make the batches.  It is empty if threads of this
        process make them."""
        if not self._auto_collation or source is None:
            return "samples are made by the dataset's own code" if source is None else "batch_size=None"
        if not self.num_workers or self.workers == "threads":
            return ""
        if self.workers == "processes":
            return "workers='processes'"
        if self._why_workers:
            return "num_workers='auto'"
        if self.worker_init_fn is not None:
            return "the script's worker_init_fn runs in each"
        if self.collate_fn is not default_collate:
            return "the script's collate_fn runs in them"
        if source.runs_user_code:
            return "a transform of the script's runs in them"
        number = min(self.num_workers, default_threads())
        if number <= _MOST_WITH_TORCHVISION or source.is_best_here(self._device):
            return ""
        self._split(source)  # after a split, torchvision's transforms may not have to run
        most = _MOST_WITH_TORCHVISION if source.runs_torchvision else _MOST_BY_THREADS
        if number > most and (source.runs_python or source.runs_torchvision):
            by = ", with torchvision's transforms" if source.runs_torchvision else ""
            return f"threads of one process do the work of up to {most} workers{by}"
        return ""

    def _check_threads(self) -> None:
        if self._source() is None:
            raise OptionError(
                f"workers='threads': fastpipe makes no batches of this {type(self.dataset).__name__} "
                f"({why_no_source(self.dataset)}): leave workers= out"
            )
        if self.num_workers and not self._auto_collation:
            raise OptionError("workers='threads' is for batches: give the loader a batch_size")
        if self.worker_init_fn is not None:
            raise OptionError("workers='threads' starts no worker, and would never call worker_init_fn")

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch.  With a seed, this number determines order and augmentation.

        If you never call this method, the loader counts its iterations from 0.  A sampler with a
        ``set_epoch`` method, such as ``DistributedSampler``, receives the number as well.

        Args:
            epoch: the epoch's number, from 0.  A negative number raises an ``OptionError``.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise OptionError(f"set_epoch(epoch) must be from 0, got {epoch}")
        self._order.set_epoch(epoch)
        samplers: list[Any] = [self.sampler, self.batch_sampler]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the batches received so far, as a dict that JSON can store.

        With a seed (or without shuffling) resuming is immediate, with any number of workers and ranks.
        Otherwise the dict contains two states of the sampler's generator.  The state at the epoch's start is
        needed to draw this epoch's indices again.  The current state is needed for the next epochs.  Drawing
        indices again reads no data.

        Raises:
            OptionError: the position cannot be saved.  The order comes from a sampler without ``state_dict``
                or from an ``IterableDataset``.  Or workers deliver batches out of order (``in_order=False``).
                Or a sampler that draws an epoch in several steps uses a generator that other code also uses.
                If Lightning or Accelerate requests the state, a warning replaces this error.

        >>> loader = FastLoader(list(range(6)), batch_size=2, shuffle=True, seed=0)
        >>> for batch in loader:
        ...     state = loader.state_dict()
        ...     break
        >>> loader.load_state_dict(state)
        >>> len(list(loader))
        2
        """
        try:
            self._check_stateful("state_dict")
            kept = self._persistent_batches
            if self.persistent_workers and self._iterator is not None:
                kept = self._iterator._index_sampler
            return state_of(self._order, self._samples(), self._effective_seed(), kept)
        except OptionError as error:
            return unsaved_state(error, self._order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position: the next iteration yields the rest of the saved epoch.

        If you then call ``set_epoch`` with another number, that epoch starts from its beginning.  The
        generator from which the order is drawn is also set to its saved state.  With ``shuffle=True`` and
        neither a seed nor ``generator=``, this is torch's global generator.

        Args:
            state: a result of ``state_dict``.

        Raises:
            OptionError: the state is from another kind of loader, dataset or seed.
        """
        if is_unsaved(state, self._order):
            return
        self._check_stateful("load_state_dict")
        point = point_of(state, self._order, self._samples(), self._effective_seed())
        set_sampler_state(self._order.index_sampler, state.get("sampler"))
        self._order.resume_at(point)
        self._persistent_batches = None
        forget_iterator(self)

    def check_worker_number_rationality(self) -> None:
        """Do nothing.  torch calls this method when a loader is created.  fastpipe runs torch's check later,
        when worker processes are started."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank."""
        return len(self._order) if self.shard is not None else super().__len__()

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets neither the workers nor the adapters of datasets; it makes its own when needed.
        return {**self.__dict__, "_iterator": None, "_persistent_batches": None, "_adapted": {}}

    def __copy__(self) -> Self:
        # A copy counts epochs separately.  It gets its own samplers if this class made the loader's samplers.
        parts = vars(self).items()
        own = {"_order"} | ({"sampler", "batch_sampler"} if is_default(self.sampler) else set())
        shared = {id(part): part for name, part in parts if name not in own}
        return copy.deepcopy(self, shared)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not is_map_style(self):
            return stream_iterator(self, self._advice.begin_epoch(self, None, self.num_workers > 0))
        self._order.look_at(self)
        source, seed = self._source(), self._effective_seed()
        if self.shard is not None and self._ranks is not None:
            values = {"seed": seed, "samples": self._samples(), "batches": len(self)}
            self._ranks.warn_if_ranks_disagree(self.shard, values)
        is_keyed = source is not None or seed is not None
        why_processes = self._why_processes(source)
        in_threads = source is not None and not why_processes
        number = 0 if in_threads else self.num_workers
        batches = self._index_batches(seed, is_keyed, in_threads)
        batches.prefetchers = () if source is None else source.prefetchers(is_here=number == 0)
        if source is not None:
            dataset: UsersDataset = SourceDataset(self.dataset, source)
        else:
            dataset = KeyedDataset(self.dataset) if is_keyed else UsersDataset(self.dataset)
        lanes = lanes_for(number, segments_for(source, self.batch_size, self.prefetch_factor, number))
        init = WorkerInit(self.worker_init_fn, lanes, opens_lazily(source, number))
        advice = self._advice.begin_epoch(self, source, number > 0)
        view = LoaderView(self, dataset, batches, seed, init, self._delivery(source, seed), advice)
        if source is None or not in_threads:
            return stock_iterator(view)
        depth = self._depth(source, view.delivery)
        source.expect_batches(depth)
        source.follow_order(self._order.ours())
        is_bounded = self.prefetch_batches != "auto" or (view.delivery and view.delivery.is_made_there)

        def spare() -> int:  # bytes of this machine's memory, not of a device's
            return 0 if is_bounded else min(source.spare_nbytes, (free_memory() or 0) // 8)

        refill = self.batch_size if source.skips else None
        return ThreadedIterator(view, source, depth, spare, refill, self._early(), self.num_workers > 0)

    def _early(self) -> int:
        """Return how many batches of indices are requested ahead from the script's own sampler."""
        if self.num_workers:
            return self.num_workers * (self.prefetch_factor or 2)
        if self.prefetch_batches != "auto":
            return self.prefetch_batches
        return max(2, math.ceil(64 / (self._size_of_batches or 64)))

    @property
    def _size_of_batches(self) -> int | None:
        """Number of samples in a batch; None if the script's own batch sampler has no ``batch_size``."""
        size: Any = getattr(self.batch_sampler, "batch_size", self.batch_size)
        return size if isinstance(size, int) else None

    def __iter__(self) -> Any:
        if not self.persistent_workers or not is_map_style(self) or self.num_processes:
            return super().__iter__()
        forget_iterator(self)  # torch keeps an iterator for persistent workers, but threads do the work here
        iterator = super().__iter__()
        forget_iterator(self)
        return iterator

    def _index_batches(self, seed: int | None, is_keyed: bool, in_threads: bool) -> IndexBatches:
        """Return the object that yields the next epoch's batches of indices.  If threads replace persistent
        workers, all epochs use the same object, because persistent workers get their base seed only once."""
        kept = self._persistent_batches
        if kept is not None and (kept.seed, kept.is_keyed) == (seed, is_keyed) and not self._order.pending:
            return kept
        batches = IndexBatches(self._order, seed, is_keyed)
        if in_threads and self.persistent_workers:
            self._persistent_batches = batches
        return batches

    def _delivery(self, source: Source | None, seed: int | None) -> Delivery | None:
        split, is_there = self._split(source)
        augment = None if isinstance(self.augment, str) else self.augment
        if self._device is None and augment is None and self.dtype is None and not is_there:
            return None
        if source is not None and self.dtype is not None and self._is_plain:
            source.ask(dtype=str(self.dtype).removeprefix("torch."))
        transfer, finishes, is_made_there = None, False, False
        if self._device is not None:
            transfer = Transfer(self._device)
            # Batches that threads have augmented need no further steps on the device.
            finishes = source is not None and self._is_plain
            finishes = finishes and (transfer.is_elsewhere if split is None else is_there)
            if source is not None and finishes:
                source.ask(sends_bytes=True)
                is_made_there = not self._why_processes(source) and source.make_on(self._device)
        rest = split.chain if split is not None and is_there else None
        # Persistent workers keep their first setting.
        on_epoch = None if self.persistent_workers else self._splitting.seen
        return Delivery(
            transfer, finishes, augment, seed, self._order.shard(), rest, on_epoch, is_made_there, self.dtype
        )

    @property
    def _is_plain(self) -> bool:
        return self._auto_collation and self.collate_fn is default_collate

    def _split(self, source: Source | None) -> tuple[Split | None, bool]:
        return self._splitting.use(source, self.batch_size or 1, self._is_plain)

    def _source(self) -> Source | None:
        source = self._source_of(self.dataset)
        is_adapted = source is not None and source.leaves_images and source.is_torchvisions
        if not is_adapted or self._cache != Cache():
            return source
        # In a worker, torchvision's own dataset is faster, as its images are decoded lazily.  With a seed,
        # samples must not depend on who makes them.
        is_left = self.workers != "threads" and self._effective_seed() is None
        return None if is_left and opens_lazily(None, self.num_workers) else source

    def _source_of(self, dataset: Any) -> Source | None:
        return source_of(dataset, self._adapted, self._cache)

    def _samples(self) -> int | None:
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError:  # the dataset has no length: only its sampler has one
            return None

    def _effective_seed(self) -> int | None:
        return effective_seed(self.seed, self.dataset)

    def _depth(self, source: Source, delivery: Delivery | None) -> int:
        if self.prefetch_batches != "auto":
            return self.prefetch_batches
        size = self._size_of_batches or 2 * source.threads
        least = _AHEAD_THERE if delivery is not None and delivery.is_made_there else 1
        return 1 + max(least, math.ceil(2 * source.threads / size))

    def _check_cache(self) -> None:
        if self._cache != Cache() and not (self._source() is not None and self._adapted):
            raise OptionError(
                "cache= is where fastpipe keeps the images of a torchvision ImageFolder; it has no effect on "
                f"this {type(self.dataset).__name__}. A FastImageFolder takes a cache= of its own"
            )

    def _check_stateful(self, method: str) -> None:
        check_stateful(method, self._order, is_map_style(self), self.in_order or self.num_processes <= 1)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise OptionError(
            f"FastLoader takes a dataset, got a {type(dataset).__name__}: write accelerate(loader), or "
            "FastLoader(loader.dataset, …) with the loader's arguments"
        )
    if isinstance(dataset, (str, bytes, os.PathLike)):
        raise OptionError(
            f"FastLoader takes a dataset, got the path {os.fsdecode(dataset)!r}: for a folder of images, "
            "write FastLoader(FastImageFolder(path, transform), …)"
        )


def _check_options(num_workers: Any, workers: Any, prefetch_batches: Any, dtype: Any) -> None:
    if num_workers != "auto" and not hasattr(num_workers, "__index__"):
        raise OptionError(f"num_workers must be a number from 0, or 'auto', got {num_workers!r}")
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise OptionError(
            f"dtype must be torch.float16, torch.bfloat16 or None, got {dtype!r}. For bytes end the "
            "transform in PILToTensor(), and normalise on the GPU"
        )
    if prefetch_batches != "auto" and (not isinstance(prefetch_batches, int) or prefetch_batches < 0):
        raise OptionError(f"prefetch_batches must be 'auto' or a number from 0, got {prefetch_batches!r}")
    if workers not in ("auto", "threads", "processes"):
        raise OptionError(f"workers must be 'auto', 'threads' or 'processes', got {workers!r}")
    if num_workers == "auto" and workers != "auto":
        raise OptionError(f"num_workers='auto' chooses by measuring: leave workers={workers!r} out")


def source_of(dataset: Any, adapted: dict[int, FastImageFolder], cache: Cache) -> Source | None:
    """Return the ``Source`` that makes a dataset's batches.  Return None if fastpipe does not know the
    dataset's code."""
    if why_no_source(dataset):
        return None
    ends = ends_of(dataset)
    if is_rows(ends[0]):
        from fastpipe.torch.array_dataset import RowsSource

        return RowsSource(dataset, ends)
    from fastpipe.torch.folder_source import FolderSource

    return FolderSource(dataset, ends, adapted, cache)


# ---- accelerate --------------------------------------------------------------------------------------

_ONLY_WORKERS = {*WORKER_OPTIONS} - {"worker_init_fn"}
_OWN = ("prefetch_batches", "seed", "shard", "device", "dtype", "augment", "cache", "workers")


def accelerate(
    loader: DataLoader[_T_co],
    *,
    seed: int | None = None,
    shard: Shard | None = None,
    device: Any = None,
    dtype: Any = None,
    augment: Callable[..., Any] | None = None,
    cache: Cache | Literal["auto", "ram", "disk", "off"] | None = None,
    num_workers: int | None = None,
    workers: Literal["auto", "threads", "processes"] | None = None,
    prefetch_factor: int | None = None,
    prefetch_batches: int | Literal["auto"] | None = None,
) -> FastLoader[_T_co]:
    """Make a :class:`fastpipe.FastLoader` from a ``DataLoader``, with the same batches.

    The result uses the loader's own dataset, sampler, ``collate_fn``, generator and other objects.  If
    fastpipe makes the batches and the script has no code of its own in the pipeline, threads of this
    process do the work of the loader's worker processes, as in ``FastLoader``.  ``print(result.plan)`` shows
    which part runs where, and ``result.reference()`` returns a plain ``DataLoader`` again.

    Args:
        loader: a ``DataLoader``.  It is not changed, and remains usable.
        seed, shard, device, dtype, augment, cache: as in ``FastLoader``.  With a seed or a shard, a loader
            that was made with ``shuffle=True`` shuffles by the seed.  Any other sampler stays in use.
        num_workers, workers: as in ``FastLoader``.  Default: the values of ``loader``.
        prefetch_factor, prefetch_batches: number of batches to make ahead, as in ``FastLoader``:
            ``prefetch_factor`` for each worker, ``prefetch_batches`` without workers.

    Raises:
        OptionError: ``loader`` is not a ``DataLoader``, its class overrides methods, or an option has a
            value that cannot work.

    >>> from torch.utils.data import DataLoader
    >>> loader = accelerate(DataLoader(range(6), batch_size=3))
    >>> list(loader)
    [tensor([0, 1, 2]), tensor([3, 4, 5])]
    """
    _check(loader)
    options = options_of(loader) | {name: getattr(loader, name) for name in _OWN if hasattr(loader, name)}
    given = {
        "seed": seed, "shard": shard, "device": device, "dtype": dtype, "augment": augment,
        "cache": cache, "workers": workers, "prefetch_batches": prefetch_batches,
    }  # fmt: skip
    options |= {name: value for name, value in given.items() if value is not None}
    options |= sampling_of(loader, (options.get("seed"), options.get("shard")) != (None, None))
    if num_workers is not None:
        if not num_workers:  # drop the options that apply only to workers
            options = {name: value for name, value in options.items() if name not in _ONLY_WORKERS}
        options["num_workers"] = num_workers
    if prefetch_factor is not None:
        options["prefetch_factor"] = prefetch_factor
    return FastLoader(**options)


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise OptionError(
            f"accelerate() takes a torch.utils.data.DataLoader, got a {type(loader).__name__}: for a "
            "dataset, use FastLoader(dataset, …)"
        )
    if type(loader).__module__.partition(".")[0] == "accelerate":
        raise OptionError(
            f"this {type(loader).__name__} comes from accelerator.prepare(): write "
            "fastpipe.torch.prepare(accelerator, loader) with the loader from before, or, for Hugging Face's "
            "Trainer, fastpipe.torch.accelerate_trainer(trainer)"
        )
    known = FastLoader if isinstance(loader, FastLoader) else DataLoader
    kinds = type(loader).__mro__[: type(loader).__mro__.index(known)]
    own = sorted({name for kind in kinds for name in vars(kind)} - _HARMLESS)
    if own:
        raise OptionError(
            f"{type(loader).__name__} has its own {', '.join(own)}, which a FastLoader in its place would "
            "not have: derive it from fastpipe.FastLoader, and make one of those instead"
        )


# A class may define these names: every class has them, or, like ``__init__``, they have already been used.
_HARMLESS = {
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__parameters__", "__orig_bases__",
    "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip


def sampling_of(loader: DataLoader[Any], is_keyed: bool) -> dict[str, Any]:
    """Return the arguments of a new loader that define which samples form which batch.

    If ``loader`` made its sampler from ``shuffle=``, the arguments contain ``shuffle`` in place of this
    sampler.  For a random sampler, this is only done if ``is_keyed`` is true, that is, if the new loader has
    a seed or a shard.
    """
    batching = batching_of(loader)
    sampler, shuffle = batching.get("sampler"), None
    if isinstance(sampler, ShardSampler) and getattr(loader, "shard", None) is not None:
        shuffle = sampler.arrangement.option if sampler.arrangement else sampler.shuffle
    elif type(sampler) is GroupSampler and sampler.data_source is loader.dataset:
        shuffle = sampler.arrangement.option
    elif sampler is not None and _is_plain(loader, SequentialSampler):
        shuffle = False
    elif sampler is not None and is_keyed and _is_plain(loader, RandomSampler):
        shuffle = True
    else:
        return batching
    del batching["sampler"]
    return batching | {"shuffle": shuffle}


def _is_plain(loader: DataLoader[Any], kind: type[Any]) -> bool:
    sampler: Any = loader.sampler
    is_torchs = type(sampler) is kind or (kind is RandomSampler and type(sampler) is ShuffleSampler)
    if not is_torchs or sampler.data_source is not loader.dataset:
        return False
    if kind is SequentialSampler:
        return True
    return (
        not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
        and sampler.generator is loader.generator
    )
