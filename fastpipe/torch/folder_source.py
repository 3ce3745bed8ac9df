"""The ``Source`` that makes a loader's batches from image folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile
from torchvision.datasets import ImageFolder

from fastpipe.core.types import Key
from fastpipe.images.batch import RowsOf
from fastpipe.images.plan import plan_state
from fastpipe.options import Cache
from fastpipe.torch.batches import LAYOUTS, BatchRequest, batch_memory, batch_memory_like, chosen_there
from fastpipe.torch.image_folder import AdaptedImageFolder, FastImageFolder
from fastpipe.torch.samples import BatchSamples, entry
from fastpipe.torch.source import MixedBatch, Source, SplitError, StartedBatch
from fastpipe.torch.split import Split, split_of
from fastpipe.torch.upcoming import Prefetcher, UpcomingIndices
from fastpipe.torch.wrappers import Located, indices_in

if TYPE_CHECKING:
    from fastpipe.images.gpu_batches import DeviceMaker
    from fastpipe.stores.fetching import ObjectReader

_ON_DEVICES = ("nvimgcodec", "dali")


class FolderSource(Source):
    """Makes a loader's batches from image folders.  Such a folder is the user's dataset itself, or is inside
    the user's ``Subset`` or ``ConcatDataset``."""

    bases: list[FastImageFolder]
    by_split: Split | None = None

    def __init__(
        self, dataset: Any, ends: Sequence[ImageFolder], adapted: dict[int, FastImageFolder], cache: Cache
    ) -> None:
        folders = [_folder_of(end, adapted, cache) for end in ends]
        super().__init__(dataset, folders)
        self._pairs = list(zip(ends, folders, strict=True))
        self._request = BatchRequest()  # the settings of batches, without the split
        self._split_at: object = None  # the ``transform_state()`` to which ``by_split`` belongs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_split_at": None}

    def ask(self, **changes: Any) -> None:
        self._request = replace(self._request, **changes)

    def make_on(self, device: torch.device) -> bool:
        is_possible = len(self._makers_there(device)) == len(self.bases)
        self.ask(device=device if is_possible else None)
        return is_possible

    def _makers_there(self, device: torch.device | None) -> list[DeviceMaker]:
        makers = [] if device is None else [base._running().maker_on(device) for base in self.bases]
        return [maker for maker in makers if maker is not None]

    def waited(self, nanoseconds: int) -> None:
        super().waited(nanoseconds)
        for maker in self._makers_there(self._request.device):
            maker.waited(nanoseconds / 1e9)

    def split(self) -> Split:
        first = self.bases[0]
        if len(set(self._states())) > 1:
            raise SplitError(f"its {len(self.bases)} datasets have transforms of their own: give them one")
        return split_of(first.transform, LAYOUTS[first.memory_format], first._running().decoders)

    def transform_state(self) -> object:
        return (*self._states(), torch.get_default_dtype())

    def made_by(self) -> object:
        return super().made_by(), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES

    def _states(self) -> list[object]:
        return [(plan_state(base.transform), str(base.memory_format)) for base in self.bases]

    def _request_now(self) -> BatchRequest:
        """Return the current settings for batches.  They contain the split transform, until the user changes
        the transform."""
        if self.by_split is None:
            return self._request
        state = self.transform_state()
        self._split_at = self._split_at or state
        if self._split_at != state:
            self.by_split = None
        return replace(self._request, split=self.by_split)

    def prefetchers(self, *, is_here: bool) -> Sequence[Prefetcher]:
        bases = [
            base for base in self.bases if base._remote is not None and (is_here or base._remote.is_shared)
        ]
        return [_FolderPrefetcher(self._dataset, base, is_here) for base in bases]

    def _start_one(self, end: Any, local: npt.NDArray[np.int64], key: Key) -> StartedBatch:
        base = next((folder for one, folder in self._pairs if one is end), self.bases[0])
        return base._start_batch(local, key, self._request_now())

    def _start_mixed(self, parts: Sequence[Located], key: Key) -> StartedBatch:
        folders = {id(end): folder for end, folder in self._pairs}  # a dict, because folders may be many
        own = [(folders[id(end)], numbers, local) for end, numbers, local in parts]
        return _Mixed(own, key, self._request_now())

    def tensors(self, batch_size: int) -> int:
        return 1

    @property
    def runs_user_code(self) -> bool:
        return any(
            base.target_transform is not None or not base._stock_threads(base.plan) for base in self.bases
        )

    def is_best_here(self, device: torch.device | None) -> bool:
        decodes_there = device is not None and device.type != "cpu"
        decodes_there = decodes_there and any(base.decode.backend in _ON_DEVICES for base in self.bases)
        return decodes_there or super().is_best_here(device)

    @property
    def runs_python(self) -> bool:
        return not all(base._running().is_native for base in self.bases)

    @property
    def leaves_images(self) -> bool:
        return all(base.plan.leaves_images for base in self.bases)

    @property
    def is_torchvisions(self) -> bool:
        return all(isinstance(base, AdaptedImageFolder) for base in self.bases)

    @property
    def runs_torchvision(self) -> bool:
        return self.by_split is None and any(base.plan.stock for base in self.bases)

    def describe(self) -> list[str]:
        caches = dict.fromkeys(base._running().describe_cache() for base in self.bases)
        return [*self._describe_steps(), *filter(None, caches)]

    def _describe_steps(self) -> list[str]:
        if self.by_split is not None:
            where = "on the device" if self._request.sends_bytes else "in the decoding threads"
            return self.by_split.describe(where)
        plans = dict.fromkeys(repr(base.plan) for base in self.bases)
        lines = [line.strip() for plan in plans for line in plan.splitlines()[1:-1]]
        device = self._request.device
        makers = dict.fromkeys(maker.describe() for maker in self._makers_there(device))
        return [*lines, *(f"on {device}  →  JPEGs by {maker}; others as above" for maker in makers)]


class _FolderPrefetcher:
    """Fetches a folder's remote images before they are needed."""

    def __init__(self, dataset: Any, base: FastImageFolder, is_here: bool) -> None:
        self._dataset, self._base, self._is_here = dataset, base, is_here

    def begin_epoch(self, upcoming: UpcomingIndices) -> None:
        from fastpipe.torch.staging import UpcomingRows

        rows = UpcomingRows(upcoming, self._dataset, self._base._rows)
        self._reader().follow(rows.order(), None if upcoming.ours is None else rows, is_here=self._is_here)

    def requested(self, indices: Sequence[int]) -> None:
        if self._is_here:
            return  # the batch itself requests its images, and raises their errors
        local = indices_in(self._dataset, self._base, indices)[1]
        if len(local):
            self._reader().need(self._base._rows(local))

    def _reader(self) -> ObjectReader:
        assert self._base._remote is not None
        return self._base._remote.reader()


class _Mixed(MixedBatch):
    """A batch with images of several folders.  If all images have the same class, shape and dtype, all
    folders write to one tensor."""

    def __init__(self, parts: Sequence[Located], key: Key, request: BatchRequest) -> None:
        count = sum(len(numbers) for _, numbers, _ in parts)
        self._key = key if request.split is not None and request.sends_bytes else None
        ends = [base.plan.as_bytes().end for base, _, _ in parts]
        if request.split is None and len({end and end.affine for end in ends}) > 1:  # remaining steps differ
            request = replace(request, sends_bytes=False)
        plans = [request.plan_of(base.plan) for base, _, _ in parts]
        runtime, first, split = parts[0][0]._running(), plans[0], request.split
        memory = runtime.pinned_memory if request.is_pinned else runtime.memory
        self._end, self._kind = first.end, first.kind
        whole: Any = None
        self._tensor: torch.Tensor | None = None
        if split is not None and request.augments_here:
            whole = self._tensor = batch_memory_like(split.like, count, memory)
            self._kind = split.like.kind
        elif all(plan.output == first.output and plan.kind is first.kind for plan in plans):
            whole, self._tensor = batch_memory(first, count, memory)
        request = replace(request, is_pinned=False, device=None if whole is None else request.device)
        begun = []
        for base, numbers, local in parts:
            rows = None if whole is None else RowsOf(whole, numbers)
            part = Key(key.seed, key.epoch, key.draws[numbers])
            begun.append((numbers, base._start_batch(local, part, replace(request, rows=rows))))
        super().__init__(begun)
        self.nbytes = 0 if self._tensor is None else self._tensor.nbytes

    def finish(self) -> Sequence[Any]:
        found: dict[int, tuple[Any, Any]] = {}
        for numbers, batch in self.parts:
            made = batch.make()  # if there is a common memory, these samples contain no images
            found.update(zip(numbers[list(batch.kept)].tolist(), made, strict=True))
        turns = [batch.turn for _, batch in self.parts if batch.turn is not None]
        for turn in {turn.maker: turn for turn in turns}.values():
            turn.given()
        self.kept = sorted(found)
        samples = [found[number] for number in self.kept]
        if self._tensor is None:
            return samples
        tensor = self._together(self._tensor)
        if len(samples) < self.count:
            tensor = chosen_there(tensor, self.kept)
        key = None if self._key is None else self._key._replace(draws=self._key.draws[self.kept])
        return BatchSamples(tensor, self._kind, [entry(sample, 1) for sample in samples], self._end, key)

    def _together(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the whole batch.  If a device decoded some of the images, copy the other
        images to this device."""
        made = [(numbers, batch.there()) for numbers, batch in self.parts]
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


def _folder_of(folder: ImageFolder, adapted: dict[int, FastImageFolder], cache: Cache) -> FastImageFolder:
    if isinstance(folder, FastImageFolder):
        return folder
    # One adapter for each folder, so that all subsets of the folder share threads and memory.
    made = adapted.get(id(folder))
    if not isinstance(made, AdaptedImageFolder) or made.original is not folder:
        made = adapted[id(folder)] = AdaptedImageFolder(folder, cache)
    return made
