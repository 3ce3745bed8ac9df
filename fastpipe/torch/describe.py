"""What a loader does where, in words; and the stock loader that would do the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from fastpipe.core.text import printable_lines
from fastpipe.options import Shard
from fastpipe.torch.keys import key_for, keyed
from fastpipe.torch.order import EpochBatches, EpochOrder, batching_of
from fastpipe.torch.source import Source
from fastpipe.torch.sources import why_no_source
from fastpipe.torch.views import ends_of, is_folder, is_rows

if TYPE_CHECKING:
    from fastpipe.volumes.places import KeyedIndex

__all__ = ["LoaderPlan", "order_note", "stock_loader", "work_note"]


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


def order_note(order: EpochOrder, seed: int | None, shard: Shard | None) -> str:
    """What gives the order of the samples.

    Args:
        order: the loader's order, by the samplers that it has now.
        seed: its seed.
        shard: its rank's part.
    """
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
    """Return where the samples are made, in words.

    Args:
        loader: a ``FastLoader``.
        source: what makes its batches; None for the dataset's own code.
        depth: batches that threads in this process make ahead.
        why_processes: why worker processes make them, if there are any; empty where threads do.
    """
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
    """torch's loader over torchvision's dataset, with the same batches in the same order.

    Args:
        loader: a ``FastLoader``.
        order: its order, by the samplers that it has now.
    """
    workers = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
            "persistent_workers",
        )
    }  # fmt: skip
    options: dict[str, Any] = {
        "dataset": stock_dataset(loader.dataset), "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory, "pin_memory_device": loader.pin_memory_device,
        "generator": loader.generator, "in_order": loader.in_order, **workers,
    }  # fmt: skip
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
    """A dataset with torchvision's ``ImageFolder`` in the place of each ``FastImageFolder``, and rows read by
    the formats' own libraries in the place of fastpipe's datasets of them."""
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
    """What a sampler gives, with the seed and the number of the epoch.

    Args:
        sampler: of indices or of batches of them.
        seed: of the epochs.
        epoch: the next one's number.
    """

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
        """Set the number of the next epoch."""
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
