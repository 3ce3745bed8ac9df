"""Batches of image folders, also behind torch's wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile
from torchvision.datasets import ImageFolder

from fastpipe.core.pool import Job
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.images.batch import RowsOf
from fastpipe.images.plan import plan_state
from fastpipe.options import Cache
from fastpipe.torch.ahead import Ahead, Lookout
from fastpipe.torch.batches import LAYOUTS, Batch, Making, batch_memory, batch_memory_like
from fastpipe.torch.image_folder import FastImageFolder
from fastpipe.torch.samples import entry, samples_of
from fastpipe.torch.source import MixedBatch, Source, SplitError
from fastpipe.torch.split import Split, split_of
from fastpipe.torch.twin import ImageFolderTwin, why_no_twin
from fastpipe.torch.views import integers, located

if TYPE_CHECKING:
    from fastpipe.images.gpu_batches import DeviceMaker
    from fastpipe.stage.reading import ObjectReader

__all__ = ["FolderSource", "folder_source_of", "why_not_fast"]

_ON_DEVICES = ("nvimgcodec", "dali")

_Part = tuple[FastImageFolder, npt.NDArray[np.int64], npt.NDArray[np.int64]]


class FolderSource(Source):
    """Makes batches of the image folders behind a dataset of the user's.

    Args:
        dataset: the user's.
        ends: the folders behind it.
        folders: what makes batches of each.
    """

    def __init__(self, dataset: Any, ends: Sequence[Any], folders: Sequence[FastImageFolder]) -> None:
        self._dataset = dataset
        self._pairs = list(zip(ends, folders, strict=True))
        self.bases: list[FastImageFolder] = list(dict.fromkeys(folders))
        self._making = Making()  # without the split
        self._split_at: object = None  # the state of the transform in this process, while it is split

    @cached_property
    def _folders(self) -> dict[int, FastImageFolder]:
        """What makes batches of each dataset at the end, by its ``id`` in this process."""
        return {id(end): folder for end, folder in self._pairs}

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_folders"}
        return {**state, "_split_at": None}

    def send_bytes(self) -> None:
        """Leave out the end of a transform, where it only computes floats from bytes: ``Whole.end`` says
        what is still to be done to such a batch."""
        self._making = self._making._replace(sends_bytes=True)

    def make_dtype(self, dtype: str) -> None:
        """Make float32 samples of another type, where the kernels can: ``"float16"`` or ``"bfloat16"``."""
        self._making = self._making._replace(dtype=dtype)

    def pin(self) -> None:
        """Make batches in page-locked memory: they are copied from it to a GPU."""
        self._making = self._making._replace(is_pinned=True)

    def make_on(self, device: torch.device) -> bool:
        """Make batches of bytes on a device, where that is possible; whether it is."""
        is_possible = len(self._makers_there(device)) == len(self.bases)
        self._making = self._making._replace(device=device if is_possible else None)
        return is_possible

    def _makers_there(self, device: torch.device | None) -> list[DeviceMaker]:
        """What makes the bases' batches on a device."""
        makers = [] if device is None else [base._running().maker_on(device) for base in self.bases]
        return [maker for maker in makers if maker is not None]

    def waited(self, nanoseconds: int) -> None:
        """Hear how long the consumer waited for a batch."""
        super().waited(nanoseconds)
        for maker in self._makers_there(self._making.device):
            maker.waited(nanoseconds / 1e9)

    def split(self) -> Split:
        """The transform of all folders in two."""
        first = self.bases[0]
        if len(set(self._states())) > 1:
            raise SplitError(f"its {len(self.bases)} datasets have transforms of their own: give them one")
        return split_of(first.transform, LAYOUTS[first.memory_format], first._running().decoders)

    def transform_state(self) -> object:
        """What differs when the transform, or what it would make, does."""
        return (*self._states(), torch.get_default_dtype())

    def made_by(self) -> object:
        """Return what a batch is made by, Pillow's settings among it."""
        return super().made_by(), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES

    def is_current(self, batch: Any) -> bool:
        """Return whether the samples that a batch was begun with are those that the dataset has now."""
        parts = [(base, made) for base, _, made in batch.parts] if isinstance(batch, _Mixed) else [batch.part]
        return all(made.pending.items.are_still_in(base.samples) for base, made in parts)

    def _states(self) -> list[object]:
        return [(plan_state(base.transform), str(base.memory_format)) for base in self.bases]

    def _split_now(self) -> Split | None:
        """The split, until the transform changes."""
        if self.by_split is not None:
            state = self.transform_state()
            self._split_at = self._split_at or state
            if self._split_at != state:
                self.by_split = None
        return self.by_split

    def lookout(self, *, is_here: bool) -> Lookout | None:
        """Who has remote images fetched before they are asked for."""
        bases = [
            base for base in self.bases if base._remote is not None and (is_here or base._remote.is_shared)
        ]
        return _FolderLookout(self._dataset, bases, is_here) if bases else None

    def start(self, indices: Sequence[int], key: Key) -> _Mixed | _Simple:
        """Begin a batch."""
        parts = [
            (self._folders[id(end)], rows, local)
            for end, rows, local in located(self._dataset, integers(indices))
        ]
        making = self._making._replace(split=self._split_now())
        if len(parts) > 1:
            return _Mixed(parts, key, making)
        base, local = (parts[0][0], parts[0][2]) if parts else (self.bases[0], np.empty(0, np.int64))
        return _Simple(base, local, key, making)

    def tensors(self, batch_size: int) -> int:
        """Large tensors in a batch."""
        return 1

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the script's are called on the way, other than in threads."""
        return any(
            base.target_transform is not None or not base._stock_threads(base.plan) for base in self.bases
        )

    def is_best_here(self, device: torch.device | None) -> bool:
        """Return whether this process alone can fetch what comes next, or decode on the device."""
        decodes_there = device is not None and device.type != "cpu"
        decodes_there = decodes_there and any(base.decode.backend in _ON_DEVICES for base in self.bases)
        return decodes_there or super().is_best_here(device)

    @property
    def runs_python(self) -> bool:
        """Whether Python runs for each sample, rather than once for a batch."""
        return not all(base._running().is_native for base in self.bases)

    @property
    def runs_torchvision(self) -> bool:
        """Whether torchvision's own transforms run in threads, which hold Python's lock for most of it."""
        return self.by_split is None and any(base.plan.stock for base in self.bases)

    def describe(self) -> list[str]:
        """The folders' plans."""
        if self.by_split is not None:
            where = "on the device" if self._making.sends_bytes else "in the decoding threads"
            return self.by_split.describe(where)
        plans = dict.fromkeys(repr(base.plan) for base in self.bases)
        lines = [line.strip() for plan in plans for line in plan.splitlines()[1:-1]]
        device = self._making.device
        makers = dict.fromkeys(maker.describe() for maker in self._makers_there(device))
        return [*lines, *(f"on {device}  →  JPEGs by {maker}; others as above" for maker in makers)]


class _FolderLookout:
    """Has images fetched before they are asked for.

    Args:
        dataset: the loader's.
        bases: the folders with remote images behind it.
        is_here: whether batches are made in this process; else images are only staged, for workers.
    """

    def __init__(self, dataset: Any, bases: Sequence[FastImageFolder], is_here: bool) -> None:
        self._dataset, self._bases, self._is_here = dataset, bases, is_here

    def follow(self, ahead: Ahead) -> None:
        from fastpipe.torch.staging import RowsAhead

        for base in self._bases:
            rows = RowsAhead(ahead, self._dataset, base, base._rows)
            uses = rows if ahead.is_known else None
            self._reader(base).follow(rows.order(), uses, is_here=self._is_here)

    def asked(self, indices: Sequence[int]) -> None:
        if self._is_here:
            return  # a batch says so itself
        for end, _, local in located(self._dataset, integers(indices)):
            if any(end is base for base in self._bases):
                self._reader(end).need(end._rows(np.where(local < 0, local + len(end), local)))

    def _reader(self, base: FastImageFolder) -> ObjectReader:
        assert base._remote is not None
        return base._remote.reader()


class _Simple:
    """A batch of one folder."""

    def __init__(
        self, base: FastImageFolder, indices: npt.NDArray[np.int64], key: Key, making: Making
    ) -> None:
        self._base = base
        self._batch = base._start_batch(indices, key, making=making)
        self.nbytes = self._batch.nbytes
        self.kept: Sequence[int] = ()

    @property
    def part(self) -> tuple[FastImageFolder, Batch]:
        """The folder, and its batch."""
        return self._base, self._batch

    def jobs(self) -> list[Job]:
        return self._batch.pending.jobs

    def finish(self) -> Sequence[Any]:
        samples = self._base._finish_batch(self._batch)
        _say_given([self._batch])
        self.kept = self._batch.kept
        return samples

    def why_empty(self) -> BadSampleError | None:
        return self._base._why_empty(self._batch)

    def cancel(self) -> None:
        self._batch.pending.cancel()


class _Mixed(MixedBatch):
    """A batch of several folders; in one memory, where they make the same tensors."""

    def __init__(self, parts: Sequence[_Part], key: Key, making: Making) -> None:
        super().__init__()
        sends_bytes, split, device, dtype, is_pinned = making
        self._count = sum(len(rows) for _, rows, _ in parts)
        self._tensor: torch.Tensor | None = None
        self._key = key if sends_bytes and split is not None else None
        memory: Any = None
        plans = [base.plan if split is None else split.head for base, _, _ in parts]
        ends = {None if plan.end is None else plan.end.affine for plan in (plan.as_bytes() for plan in plans)}
        sends_bytes = sends_bytes and len(ends) == 1
        plans = [plan.as_bytes() if sends_bytes else plan.of_dtype(dtype) for plan in plans]
        runtime, kind = parts[0][0]._running(), plans[0].kind
        kept = runtime.pinned_memory if is_pinned else runtime.memory
        if split is not None and not sends_bytes:
            memory = self._tensor = batch_memory_like(split.like, self._count, kept)
            kind = split.like.kind
        elif all(plan.output == plans[0].output and plan.kind is kind for plan in plans):
            memory, self._tensor = batch_memory(plans[0], self._count, kept)
        self.nbytes = 0 if self._tensor is None else self._tensor.nbytes
        self._end, self._kind = plans[0].end, kind
        of_part = Making(sends_bytes, split, None if memory is None else device, dtype)
        for base, numbers, local in parts:
            part = Key(key.seed, key.epoch, key.draws[numbers])
            rows = None if memory is None else RowsOf(memory, numbers)
            self.parts.append((base, numbers, base._start_batch(local, part, rows=rows, making=of_part)))

    def finish(self) -> Sequence[Any]:
        found: dict[int, tuple[Any, Any]] = {}
        for base, numbers, batch in self.parts:
            made = base._finish_batch(batch)  # without images, if they are in the common memory
            found.update(zip(numbers[list(batch.kept)].tolist(), made, strict=True))
        _say_given([batch for _, _, batch in self.parts])
        self.kept = sorted(found)
        samples = [found[number] for number in self.kept]
        if self._tensor is None:
            return samples
        tensor = self._together(self._tensor)
        if len(samples) < self._count:
            from fastpipe.core.transfer import uploaded

            tensor = tensor[uploaded(torch.tensor(self.kept, dtype=torch.int64, device="cpu"), tensor.device)]
        targets, key = [entry(sample, 1) for sample in samples], self._key
        if key is not None:
            key = key._replace(draws=key.draws[self.kept])
        return samples_of(tensor, self._kind, targets, self._end, key)

    def _together(self, tensor: torch.Tensor) -> torch.Tensor:
        """The batch: where the common memory has it, or on the device on which parts of it were made."""
        made = [(numbers, batch.there()) for _, numbers, batch in self.parts]
        device = next((there.device for _, there in made if there is not None), None)
        if device is None:
            return tensor
        from fastpipe.core.transfer import uploaded

        whole = torch.empty_like(tensor, device=device)
        for numbers, there in made:
            rows = torch.from_numpy(numbers)
            part = uploaded(tensor[rows], device) if there is None else there
            whole[uploaded(rows, device)] = part
        return whole


def _say_given(batches: Sequence[Batch]) -> None:
    """Tell each device on which parts of a batch were made that it is handed out."""
    for turn in {batch.turn.maker: batch.turn for batch in batches if batch.turn is not None}.values():
        turn.given()


def folder_source_of(
    dataset: Any, ends: Sequence[ImageFolder], twins: dict[int, FastImageFolder], cache: Cache
) -> FolderSource | None:
    """Return the source behind image folders; None if one of them makes its samples in its own way.

    Args:
        dataset: the user's dataset.
        ends: the folders behind it.
        twins: by the ``id`` of a plain ``ImageFolder``, what makes batches of it; more are added.
        cache: where these keep decoded images.
    """
    folders = []
    for end in ends:
        folder = _folder_of(end, twins, cache)
        if folder is None:
            return None
        folders.append(folder)
    return FolderSource(dataset, ends, folders)


def why_not_fast(folder: ImageFolder) -> str:
    """Return why fastpipe does not make the batches of an image folder; empty where it does."""
    if isinstance(folder, FastImageFolder):
        return "" if _is_fast_folder(folder) else f"{type(folder).__name__} makes its samples in its own way"
    return why_no_twin(folder)


def _folder_of(
    folder: ImageFolder, twins: dict[int, FastImageFolder], cache: Cache
) -> FastImageFolder | None:
    """What makes batches of a folder; None where that is the folder itself, in its own way."""
    if isinstance(folder, FastImageFolder):
        return folder if _is_fast_folder(folder) else None
    if why_no_twin(folder):
        return None
    # One twin for each folder, so that its subsets share threads and memory.
    twin = twins.get(id(folder))
    if not isinstance(twin, ImageFolderTwin) or twin.original is not folder:
        twin = twins[id(folder)] = ImageFolderTwin(folder, cache)
    return twin


def _is_fast_folder(folder: FastImageFolder) -> bool:
    return type(folder).__getitems__ is FastImageFolder.__getitems__ and folder._answers_for_batches()
