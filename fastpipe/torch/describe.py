"""What a loader says of itself: its plan, its stock equivalent, and advice if its batches are late."""

from __future__ import annotations

import dis
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter, thread_time
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data._utils.collate import default_collate, default_convert

from fastpipe.core.machine import default_threads
from fastpipe.core.processes import why_no_processes
from fastpipe.core.text import printable_lines
from fastpipe.errors import MissingDependencyError
from fastpipe.options import Shard
from fastpipe.torch.order import EpochOrder, batching_of, options_of
from fastpipe.torch.randomness import key_for, keyed
from fastpipe.torch.samplers import EpochBatches
from fastpipe.torch.source import Source, SplitError
from fastpipe.torch.wrappers import ends_of, is_folder, is_rows

if TYPE_CHECKING:
    from fastpipe.volumes.places import KeyedIndex


class LoaderPlan:
    """What a loader does where, and why.  ``print`` it.

    Attributes:
        is_fast: whether fastpipe makes the batches.
        why_not: what keeps the dataset from that; empty if nothing does.

    Args:
        loader: a ``FastLoader``.
        source: what makes its batches; None for the dataset's own code.
        notes: lines about the rest.
    """

    def __init__(self, loader: DataLoader[Any], source: Source | None, *notes: str) -> None:
        self.is_fast = source is not None
        self.why_not = "" if self.is_fast else why_no_source(loader.dataset)
        dataset = _name_of(loader.dataset)
        if source is None:
            self._lines = [f"{dataset}  →  its own code, behind torch's machinery: {self.why_not}"]
        else:
            several = f" of {len(source.bases)} datasets" if len(source.bases) > 1 else ""
            self._lines = [f"{dataset}  →  fastpipe's batches{several}"]
            self._lines += [f"  {line}" for line in source.describe()]
        self._lines += notes

    def __repr__(self) -> str:
        return printable_lines("LoaderPlan(\n" + "".join(f"  {line}\n" for line in self._lines) + ")")


def why_no_source(dataset: Any) -> str:
    """Return why ``source_of`` gives None, in words; empty where it does not."""
    ends = ends_of(dataset)
    reasons = [_why_not_alone(end) for end in ends]
    if not any(reasons) and len(set(map(is_rows, ends))) > 1:
        return "image folders and arrays make no batches together"
    return next(filter(None, reasons), "")


def _why_not_alone(dataset: Any) -> str:
    if is_rows(dataset):
        from fastpipe.torch.array_dataset import is_fast_rows

        return "" if is_fast_rows(dataset) else f"{type(dataset).__name__} makes its samples in its own way"
    if is_folder(dataset):
        from fastpipe.torch.folder_source import why_not_fast

        return why_not_fast(dataset)
    return f"{type(dataset).__name__} is no ImageFolder"


def order_note(order: EpochOrder, seed: int | None, shard: Shard | None) -> str:
    ours = order.ours()
    if ours is None:
        sampler: Any = order.index_sampler
        name = type(getattr(sampler, "sampler", sampler)).__name__
        keyed = "" if seed is None else f", augmentation by seed={seed}"
        return f"order: {name}'s{keyed}"
    note = "order: the dataset's" if ours.seed is None else f"order: shuffled by seed={ours.seed}"
    if ours.arrangement is not None:
        note += f", by {ours.arrangement.describe()}"
    return note if shard is None else f"{note}, of which {shard}"


def work_note(loader: Any, source: Source | None, depth: int, why_processes: str) -> str:
    """Return where the samples are made, in words."""
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


def stock_loader(loader: Any, order: EpochOrder) -> DataLoader[Any]:
    """Return torch's loader over torchvision's dataset, with the same batches in the same order."""
    options = options_of(loader) | {"dataset": stock_dataset(loader.dataset)}
    ours, seed = order.ours(), loader._effective_seed()
    batching = batching_of(loader)
    if ours is not None and (ours.seed is not None or ours.shard.world > 1):
        ours.epoch = order.next_epoch
        batching = (
            {"batch_sampler": ours} if order.is_batched else {"batch_size": None, "sampler": _Singles(ours)}
        )
    if seed is not None and any(map(_draws_samples, ends_of(loader.dataset))):
        options["dataset"] = _SamplesOfEpochs(options["dataset"])
        name = "batch_sampler" if "batch_sampler" in batching else "sampler"
        batching[name] = _IndicesOfEpochs(batching[name], seed, order.next_epoch)
    return DataLoader(**batching, **options)


def _draws_samples(dataset: Any) -> bool:
    return is_rows(dataset) and bool(dataset._draws_samples)


def stock_dataset(dataset: Any) -> Any:
    """Return a dataset with torchvision's, or the formats' own, datasets instead of fastpipe's."""
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

    if type(dataset) is not FastImageFolder:  # what a subclass does is unknown
        return dataset
    folder = ImageFolder.__new__(ImageFolder)
    VisionDataset.__init__(
        folder, dataset.root, transform=dataset.transform, target_transform=dataset.target_transform
    )
    for name in ("loader", "extensions", "classes", "class_to_idx"):
        setattr(folder, name, getattr(dataset, name))
    if dataset._remote is not None:
        folder.loader = dataset._remote.load
    folder.samples = list(dataset.samples)
    folder.targets = [target for _, target in folder.samples]
    folder.imgs = folder.samples
    return folder


class _Singles:
    """The indices of batches of one."""

    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return (index for (index,) in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _IndicesOfEpochs:
    """What a sampler gives, with the seed and the number of the epoch."""

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
    """A stock dataset, also behind torch's wrappers, whose samples are drawn for each epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: KeyedIndex) -> Any:
        # Out of band, as wrappers make plain numbers of indices.
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

# Advice is given when the loop has waited this long, this share of its time, and this long for each batch: a
# batch that takes less is made faster here than it is sent from another process.
_WAITED_S = 1.0
_WAITED_SHARE = 0.2
_EACH_S = 0.005
# The share of the threads' time that torchvision's transforms take before another way to do them is named.
_TRANSFORM_SHARE = 0.3


class Waits:
    """How long a loop has waited for a loader's batches, in all epochs so far, in seconds."""

    def __init__(self) -> None:
        self.batches, self.waited, self.elapsed = 0, 0.0, 0.0
        self.has_advised = False


class Advice:
    """Watches an iterator's batches, and names what would help if they are waited for."""

    def __init__(
        self, waits: Waits, remedy: Callable[[], str] | None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._waits, self._remedy, self._clock = waits, remedy, clock
        self._last: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing left to say."""
        return self._remedy is None or self._waits.has_advised

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the block as the request of a batch."""
        if self._remedy is None or self._waits.has_advised:
            yield
            return
        begun, asked = perf_counter(), self._clock()
        yield  # an error, or the end of the epoch, says nothing of waiting
        waits, now = self._waits, perf_counter()
        waits.batches += 1
        waits.waited += self._clock() - asked
        waits.elapsed += now - (begun if self._last is None else self._last)
        self._last = now
        if waits.waited >= max(_WAITED_S, _WAITED_SHARE * waits.elapsed, _EACH_S * waits.batches):
            waits.has_advised = True
            text = self._remedy()
            if text:
                _log.warning("%s", text)


def advice_for(loader: Any, source: Source | None, in_processes: bool, waits: Waits) -> Advice:
    """Return what watches a new iterator of a loader; warn at once about a dataset that opens images."""
    silent = Advice(waits, None)
    if waits.has_advised:
        return silent
    if source is None:
        opener = next(filter(opens_images, ends_of(loader.dataset)), None)
        if opener is not None:
            waits.has_advised = True
            if _is_new(opener):
                _log.warning("%s", _about_images(opener, loader.num_workers))
            return silent
    if in_processes or loader._why_workers:  # which were chosen by measuring
        return silent
    has_own_collate = loader.collate_fn not in (default_collate, default_convert)
    if source is None:
        own = next((kind for kind in map(type, ends_of(loader.dataset)) if not _is_torchs(kind)), None)
        if own is None and not has_own_collate:
            return silent
        what = "the script's collate_fn" if own is None else f"{own.__name__}'s code"
        is_stream = isinstance(loader.dataset, IterableDataset)
        return Advice(waits, lambda: _about_workers(what, is_stream))
    if source.runs_user_code or has_own_collate:
        what = "a transform of the script's" if source.runs_user_code else "the script's collate_fn"
        if loader.num_workers:  # workers="threads"
            return silent
        return Advice(waits, lambda: _about_workers(what), thread_time)
    return silent if loader.augment is not None else Advice(waits, lambda: _about_augment(source))


def _about_workers(what: str, is_stream: bool = False) -> str:
    cores = 1 if why_no_processes() else default_threads()
    if cores == 1:
        return ""
    text = (
        f"batches wait for {what}, which runs in this process, one sample after the other: "
        f"num_workers={cores} runs it in worker processes, as with a DataLoader"
    )
    part = ", each of which must give its own part of the samples (torch.utils.data.get_worker_info)"
    return text + part if is_stream else text


def _about_images(dataset: Any, num_workers: int) -> str:
    has_samples = inspect.getattr_static(dataset, "samples", None) is not None
    pairs = "dataset.samples" if has_samples else "zip(files, labels)"
    text = (
        f"{type(dataset).__name__} opens its images one by one in Python. If a sample is a file's image in "
        f"RGB, transformed, and its target: dataset = FastImageFolder.from_samples({pairs}, transform) makes "
        "the same samples, usually much faster"
    )
    cores = 1 if why_no_processes() else default_threads()
    return text if num_workers or cores == 1 else f"{text}. Or pass num_workers={cores}"


def _about_augment(source: Source) -> str:
    totals = source.clock.totals()
    spent = sum(seconds for stage, seconds in totals.items() if stage != "wait")
    if totals.get("transform", 0.0) < _TRANSFORM_SHARE * spent:
        return ""
    try:
        source.split()
    except (SplitError, MissingDependencyError):  # advice never ends an epoch
        return ""
    return (
        "batches wait for torchvision's transforms after the crop: augment='auto', of FastLoader and "
        "accelerate, measures whether fastpipe's augmentation is faster, with the same distributions and "
        "other draws"
    )


_told: weakref.WeakSet[Any] = weakref.WeakSet()  # datasets that were named, whatever loaders they have


def _is_new(dataset: Any) -> bool:
    try:
        is_new = dataset not in _told
        _told.add(dataset)
    except TypeError:  # it has no hash, or no weak references
        return True
    return is_new


def _is_torchs(kind: type) -> bool:
    """Whether a dataset costs so little that no worker helps."""
    return kind.__module__.partition(".")[0] in {"builtins", "numpy", "torch"}


_READERS = {"default_loader", "pil_loader", "imread", "read_image"}


def opens_images(dataset: Any) -> bool:
    """Return whether a dataset's own code opens image files, as far as the names in it tell.

    >>> from PIL import Image
    >>> class Own:
    ...     def __getitem__(self, index):
    ...         return Image.open(self.files[index])
    >>> opens_images(Own())
    True
    """
    folder: Any = sys.modules.get("torchvision.datasets.folder")  # else there is no dataset of its classes
    is_folder = folder is not None and isinstance(dataset, folder.DatasetFolder)
    if is_folder and dataset.loader not in (folder.default_loader, folder.pil_loader):
        return False
    kind: Any = type(dataset)
    return _kind_opens_images(kind)


@lru_cache(64)
def _kind_opens_images(kind: Any) -> bool:
    todo: list[Any] = [inspect.getattr_static(kind, name, None) for name in ("__getitem__", "__getitems__")]
    seen: list[Any] = []
    while todo and len(seen) < 50:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.append(function)
        names = function.__code__.co_names
        if "BytesIO" in names:  # what it opens is no file
            continue
        if _READERS.intersection(names) or _opens_with_pillow(function):
            return True
        for name in names:
            todo += [inspect.getattr_static(kind, name, None), function.__globals__.get(name)]
    return False


def _opens_with_pillow(function: FunctionType) -> bool:
    """Return whether a function names ``Image.open``, by whatever name it knows Pillow's module."""
    module, before = sys.modules.get("PIL.Image"), ""
    for instruction in dis.get_instructions(function):
        name = instruction.argval
        if name == "open" and (before == "Image" or function.__globals__.get(before) is module):
            return module is not None
        before = name if isinstance(name, str) else ""
    return False
