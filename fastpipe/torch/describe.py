"""A loader's printable plan, its equivalent without fastpipe, and advice if its batches are late."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data._utils.collate import default_collate, default_convert

from fastpipe.core.archive_paths import find_member
from fastpipe.core.files import read_file
from fastpipe.core.machine import default_threads
from fastpipe.core.processes import why_no_processes
from fastpipe.core.text import printable_lines
from fastpipe.errors import MissingDependencyError
from fastpipe.images.reader import load_image
from fastpipe.torch.order import batching_of, options_of
from fastpipe.torch.randomness import key_for, keyed
from fastpipe.torch.samplers import EpochBatches
from fastpipe.torch.source import BatchedDataset, Source, SplitError
from fastpipe.torch.workers import opens_lazily
from fastpipe.torch.wrappers import ends_of, is_folder, is_rows

if TYPE_CHECKING:
    from fastpipe.volumes.places import KeyedIndex


class LoaderPlan:
    """A printable description of the steps of a loader: where each step runs, and why.

    Attributes:
        is_fast: whether fastpipe makes the batches.
        why_not: the reason why fastpipe does not make the batches.  Empty if fastpipe makes them.
    """

    def __init__(self, loader: Any, source: Source | None, depth: int, why_processes: str) -> None:
        self.is_fast = source is not None
        why_not = why_no_source(loader.dataset) or "its transform is the script's own"
        self.why_not = "" if self.is_fast else why_not
        dataset = _name_of(loader.dataset)
        if source is None:
            self._lines = [f"{dataset}  →  its own code makes the samples: {self.why_not}"]
            if opens_lazily(source, loader.num_workers):
                self._lines.append("  JPEGs opened with Pillow  →  only the needed region (fastpipe.pillow)")
        else:
            several = f" of {len(source.bases)} datasets" if len(source.bases) > 1 else ""
            self._lines = [f"{dataset}  →  fastpipe's batches{several}"]
            self._lines += [f"  {line}" for line in source.describe()]
        self._lines.append(_order_note(loader))
        self._lines.append(_work_note(loader, source, depth, why_processes))
        if loader._why_workers:
            self._lines[-1] += f" (num_workers='auto': {loader._why_workers})"
        self._lines += loader._splitting.note()

    def __repr__(self) -> str:
        return printable_lines("LoaderPlan(\n" + "".join(f"  {line}\n" for line in self._lines) + ")")


def why_no_source(dataset: Any) -> str:
    """Return the reason why fastpipe does not make a dataset's batches.  It is empty if fastpipe makes
    them."""
    ends = ends_of(dataset)
    reasons = [_why_not_alone(end) for end in ends]
    if not any(reasons) and len(set(map(is_rows, ends))) > 1:
        return "image folders and arrays make no batches together"
    return next(filter(None, reasons), "")


def _why_not_alone(dataset: Any) -> str:
    name = type(dataset).__name__
    if isinstance(dataset, BatchedDataset):
        its: Any = dataset  # a subclass or an option may cause samples to be made one by one
        is_fast = type(its).__getitems__ is BatchedDataset.__getitems__ and its._answers_for_batches()
        return "" if is_fast else f"{name} makes its samples in its own way"
    if is_folder(dataset):
        from fastpipe.torch.image_folder import why_not_adapted

        return why_not_adapted(dataset)
    return f"{name} is neither a dataset of fastpipe's nor an ImageFolder"


def _order_note(loader: Any) -> str:
    order, seed, shard = loader._order, loader._effective_seed(), loader.shard
    ours = order.ours()
    if ours is None:
        sampler: Any = order.index_sampler
        name = type(getattr(sampler, "sampler", sampler)).__name__
        return f"order: {name}'s" + ("" if seed is None else f", augmentation by seed={seed}")
    note = "order: the dataset's" if ours.seed is None else f"order: shuffled by seed={ours.seed}"
    if ours.arrangement is not None:
        note += f", by {ours.arrangement.describe()}"
    return note if shard is None else f"{note}, of which {shard}"


def _work_note(loader: Any, source: Source | None, depth: int, why_processes: str) -> str:
    workers = loader.num_workers
    if source is None or not loader._auto_collation:
        where = f"in {workers} worker processes" if workers else "in this process"
        return f"work: one sample after the other, {where}"
    if why_processes and workers:
        return f"work: {workers} worker processes, with threads in each: {why_processes}"
    note = f"work: {source.threads} threads in this process, {depth} batches ahead"
    if not workers:
        return note
    why = "workers='threads'" if loader.workers == "threads" else "no code of the script's runs on the way"
    return f"{note}, for num_workers={workers}: {why}"


def stock_loader(loader: Any) -> DataLoader[Any]:
    """Return a plain ``DataLoader`` that does not use fastpipe.  It yields the same batches as ``loader``, in
    the same order."""
    options = options_of(loader) | {"dataset": stock_dataset(loader.dataset)}
    order, seed = loader._order, loader._effective_seed()
    ours = order.ours()
    batching = batching_of(loader)
    if ours is not None and (ours.seed is not None or ours.shard.world > 1):
        ours.epoch = order.next_epoch
        batching = (
            {"batch_sampler": ours} if order.is_batched else {"batch_size": None, "sampler": _Singles(ours)}
        )
    if seed is not None and any(is_rows(end) and end._draws_samples for end in ends_of(loader.dataset)):
        options["dataset"] = _SamplesOfEpochs(options["dataset"])
        name = "batch_sampler" if "batch_sampler" in batching else "sampler"
        batching[name] = _IndicesOfEpochs(batching[name], seed, order.next_epoch)
    return DataLoader(**batching, **options)


def stock_dataset(dataset: Any) -> Any:
    """Return a dataset like ``dataset``, but without fastpipe.  Image folders are torchvision's own.  Other
    data are read with the format's own library."""
    if type(dataset) is Subset:
        return Subset(stock_dataset(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([stock_dataset(item) for item in dataset.datasets])
    if is_rows(dataset) and type(dataset).__module__.startswith("fastpipe."):
        return dataset._stock()
    if not is_folder(dataset):
        return dataset
    from torchvision.datasets import ImageFolder, VisionDataset

    from fastpipe.torch.image_folder import FastImageFolder

    if type(dataset) is not FastImageFolder:  # a subclass may change the behaviour
        return dataset
    folder = ImageFolder.__new__(ImageFolder)
    VisionDataset.__init__(
        folder, dataset.root, transform=dataset.transform, target_transform=dataset.target_transform
    )
    for name in ("loader", "extensions", "classes", "class_to_idx"):
        setattr(folder, name, getattr(dataset, name))
    folder.samples = list(dataset.samples)
    if dataset._remote is not None:
        folder.loader = dataset._remote.load
    elif any(find_member(os.fspath(path)) for path, _ in folder.samples):
        folder.loader = _load_member  # torchvision's loader does not read members of archives
    folder.targets = [target for _, target in folder.samples]
    folder.imgs = folder.samples
    return folder


def _load_member(path: str) -> Any:
    return load_image(read_file(path))


class _Singles:
    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return (index for (index,) in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _IndicesOfEpochs:
    """Wraps a sampler, and adds the seed and the epoch's number to each index."""

    def __init__(self, sampler: Any, seed: int, epoch: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, epoch

    def __iter__(self) -> Iterator[Any]:
        from fastpipe.volumes.places import KeyedIndex

        epoch, self._epoch = self._epoch, self._epoch + 1
        for asked in self._sampler:
            if hasattr(asked, "__len__"):
                yield [KeyedIndex(index, self._seed, epoch) for index in asked]
            else:
                yield KeyedIndex(asked, self._seed, epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


class _SamplesOfEpochs(Dataset[Any]):
    """Wraps a dataset without fastpipe whose samples are random and new in each epoch.  The samples' random
    numbers follow from the seed and the epoch in the index, also inside ``Subset`` and ``ConcatDataset``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: KeyedIndex) -> Any:
        # The key is set separately from the index, because wrappers convert indices to plain numbers.
        with keyed(key_for(index.seed, index.epoch, 0, 1)):
            return self.dataset[int(index)]


def _name_of(dataset: Any) -> str:
    name = type(dataset).__name__
    if type(dataset) is Subset:
        name = f"Subset of {_name_of(dataset.dataset)}"
    elif type(dataset) is ConcatDataset:
        inner = ", ".join(dict.fromkeys(map(_name_of, dataset.datasets)))
        name = f"ConcatDataset of {inner}"
    return name


# ---- advice ------------------------------------------------------------------------------------------

_log = logging.getLogger("fastpipe")

# Advice is logged when the loop has waited for this many seconds in total, for this share of its time, and
# for this many seconds for each batch.  Workers would not reduce a shorter wait, because sending a batch from
# another process takes about as long.
_WAITED_S = 0.5
_WAITED_SHARE = 0.2
_EACH_S = 0.005
# If torchvision's transforms take more than this share of the threads' time, an alternative is suggested.
_TRANSFORM_SHARE = 0.3


class Advice:
    """Measures how long the user's loop waits for a loader's batches.  If the loop waits too long, a log
    message says once how to make the batches faster."""

    def __init__(self) -> None:
        self._batches, self._waited, self._elapsed = 0, 0.0, 0.0  # totals of all epochs; times in seconds
        self._has_advised = False
        self._remedy: Callable[[], str] | None = None
        self._clock: Callable[[], float] = perf_counter
        self._last: float | None = None

    def begin_epoch(self, loader: Any, source: Source | None, in_processes: bool) -> Advice:
        self._last, self._remedy = None, None
        if not (self._has_advised or in_processes or loader._why_workers):  # num_workers="auto"
            self._remedy, self._clock = _remedy_for(loader, source)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remedy": None}

    @property
    def is_silent(self) -> bool:
        return self._remedy is None or self._has_advised

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the time of the ``with`` block, which requests a batch, and log the advice if it is due."""
        if self._remedy is None or self._has_advised:
            yield
            return
        begun, asked = perf_counter(), self._clock()
        yield  # an error, or the end of the epoch, does not count as waiting
        now = perf_counter()
        self._batches += 1
        self._waited += self._clock() - asked
        self._elapsed += now - (begun if self._last is None else self._last)
        self._last = now
        if self._waited >= max(_WAITED_S, _WAITED_SHARE * self._elapsed, _EACH_S * self._batches):
            self._has_advised = True
            if text := self._remedy():
                _log.warning("%s", text)


def _remedy_for(loader: Any, source: Source | None) -> tuple[Callable[[], str] | None, Callable[[], float]]:
    """Return a function that returns the advice as text, and a clock to measure waiting.  The function is
    None if there is no advice for this loader."""
    has_own_collate = loader.collate_fn not in (default_collate, default_convert, list, tuple)
    if source is None:
        kinds = map(type, ends_of(loader.dataset))
        # Datasets of Python, NumPy and torch take so little time that workers do not help.
        own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIGHT]
        if not own and not has_own_collate:
            return None, perf_counter
        what, more = "the script's collate_fn", ""
        if own:
            what, more = f"{own[0].__name__}'s code", _OF_FILES
        if isinstance(loader.dataset, IterableDataset):
            more = _OF_STREAMS
        return partial(_about_workers, what, more), perf_counter
    if source.runs_user_code or has_own_collate:
        what = "a transform of the script's" if source.runs_user_code else "the script's collate_fn"
        return None if loader.num_workers else partial(_about_workers, what), thread_time
    return None if loader.augment is not None else partial(_about_augment, source), perf_counter


_LIGHT = {"builtins", "numpy", "torch"}
_OF_STREAMS = ", each of which must give its own part of the samples (torch.utils.data.get_worker_info)"
_OF_FILES = (
    ". If its samples are images of files, transformed, and targets, FastImageFolder.from_samples([(file, "
    "target), …], transform) makes the same ones, usually much faster"
)


def _about_workers(what: str, more: str = "") -> str:
    cores = 1 if why_no_processes() else default_threads()
    if cores == 1:
        return ""
    return (
        f"batches wait for {what}, which runs in this process, one sample after the other: "
        f"num_workers={cores} runs it in worker processes, as with a DataLoader{more}"
    )


def _about_augment(source: Source) -> str:
    totals = source.clock.totals()
    spent = sum(seconds for stage, seconds in totals.items() if stage != "wait")
    if totals.get("transform", 0.0) < _TRANSFORM_SHARE * spent:
        return ""
    try:
        source.split()
    except (SplitError, MissingDependencyError):  # an error in giving advice must never end an epoch
        return ""
    return (
        "batches wait for torchvision's transforms after the crop: augment='auto', of FastLoader and "
        "accelerate, measures whether fastpipe's augmentation is faster, with the same distributions and "
        "other draws"
    )
