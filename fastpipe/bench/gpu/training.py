"""Training steps on the device, and the rows that make them of a loader's batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastpipe.bench.gpu.device import DeviceUse, wait_for
from fastpipe.bench.gpu.sizes import Sizes
from fastpipe.bench.runner import Sample, ratios, summarise
from fastpipe.core.extras import require

__all__ = ["Feed", "SameBatch", "TrainRow", "Trainer", "figures_of", "fitting_batch", "image_model"]

CLASSES = 1000
LEAST_BATCH = 8
# Batches that a loader keeps on the device beside the one of the step.
_AHEAD = 3
# Steps before the clock starts, so that what it sees is not a pipeline that fills.
_LEAD = 2
_SHORTAGES = ("out of memory", "alloc_failed")


class Feed(Protocol):
    """What gives batches; a `LoaderRow` is one.

    Attributes:
        workers: processes that make them, each a batch at a time.
    """

    workers: int

    def batches(self, count: int) -> Iterable[Any]:
        """An epoch of so many samples."""

    def close(self) -> None:
        """End every thread and process."""


class SameBatch:
    """A `Feed` of one batch that is always there: nothing that loads can be faster.

    Args:
        batch: on the device.
    """

    workers = 0

    def __init__(self, batch: Sequence[Any]) -> None:
        self._batch = batch

    def batches(self, count: int) -> Iterator[Any]:
        """The batch, as often as it takes."""
        for _ in range(count // len(self._batch[0])):
            yield self._batch

    def close(self) -> None:
        """Let go of it."""
        self._batch = ()


class Trainer:
    """A step: forward, loss, backward, SGD; in bfloat16 on a GPU.

    Args:
        model: of inputs the scores of classes, along the second dimension.
        device: ``"cuda"`` or ``"cpu"``.
        prepare: makes a model's input of a batch's first tensor.
    """

    def __init__(self, model: Any, device: str, prepare: Callable[[Any], Any]) -> None:
        self._torch = torch = require("torch", extra="torch")
        self._model, self._device, self._prepare = model.to(device).train(), device, prepare
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)

    def __call__(self, inputs: Any, labels: Any) -> None:
        """Train on a batch that is on the device; nobody waits for it."""
        torch = self._torch
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            scores = self._model(self._prepare(inputs))
            loss = torch.nn.functional.cross_entropy(scores, labels.long())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()


def image_model(sizes: Sizes, device: str) -> Trainer:
    """A step of the model for images, channels last, of random weights."""
    torch, models = require("torch", extra="torch"), require("torchvision.models", extra="torch")
    if sizes.blocks is None:
        model = models.resnet50(weights=None, num_classes=CLASSES)
    else:
        resnet = models.resnet
        model = resnet.ResNet(resnet.BasicBlock, list(sizes.blocks), num_classes=CLASSES)
    last = torch.channels_last
    return Trainer(model.to(memory_format=last), device, lambda images: images.contiguous(memory_format=last))


class TrainRow:
    """A `Contender` that trains on the batches of a feed.

    The clock starts after a few steps, as many as there are workers, so that it sees a pipeline at work; it
    is read when the device has done everything.

    Args:
        key: its name.
        feed: gives batches.
        step: a `Trainer`'s.
        batch_size: samples in a batch.
        device: ``"cuda"`` or ``"cpu"``.

    Attributes:
        busy: of each measurement the part in which the device computed steps, as `DeviceUse` tells.
    """

    def __init__(
        self, key: str, feed: Feed, step: Callable[[Any, Any], None], batch_size: int, device: str
    ) -> None:
        self.key, self.workers = key, feed.workers
        self.chunk = batch_size * max(1, feed.workers)
        self.busy: list[float | None] = []
        self._feed, self._step, self._device = feed, step, device
        self._lead, self._batch_size = max(_LEAD, feed.workers), batch_size

    def measure(self, count: int) -> float:
        """Train on so many samples; return the seconds it took."""
        use, seen = DeviceUse(self._device), 0
        batches = iter(self._feed.batches(count + self._lead * self._batch_size))
        for _ in range(self._lead):
            self._train(next(batches), use)
        wait_for(self._device)
        start = time.perf_counter()
        use.begin()
        for batch in batches:
            seen += self._train(batch, use)
        wait_for(self._device)
        seconds = time.perf_counter() - start
        if seen != count:
            raise RuntimeError(f"{self.key} gave {seen} samples of {count}")
        self.busy.append(use.share())
        return seconds

    def first(self) -> list[Any]:
        """A batch on the device."""
        return self._there(next(iter(self._feed.batches(self._batch_size))))

    def close(self) -> None:
        """Let go of the loader and the model."""
        self._feed.close()
        self._step = _nothing

    def _train(self, batch: Sequence[Any], use: DeviceUse) -> int:
        inputs, labels = self._there(batch)
        use.mark()
        self._step(inputs, labels)
        use.mark()
        return len(inputs)

    def _there(self, batch: Sequence[Any]) -> list[Any]:
        return [tensor.to(self._device, non_blocking=True) for tensor in batch]


def fitting_batch(step: Callable[[Any, Any], None], batch_of: Callable[[int], list[Any]], size: int) -> int:
    """The size of batches with which a step has room: that asked for, or half of it, and so on.

    Args:
        step: a `Trainer`'s.
        batch_of: makes a batch of a size, on the device.
        size: asked for.

    Raises:
        RuntimeError: torch's, where a batch of a few samples has no room.
    """
    torch = require("torch", extra="torch")
    while not _has_room(step, batch_of, size, must=size <= LEAST_BATCH):
        size = max(LEAST_BATCH, size // 2)
        gc.collect()
        torch.cuda.empty_cache()  # which does nothing where CUDA is not in use
    return size


def figures_of(
    rows: Sequence[TrainRow], samples: Mapping[str, Sequence[Sample]], ceiling: str
) -> list[dict[str, Any]]:
    """What steps lost, and how busy the device was.

    A step's loss is the share of its time that it would not take if its batch were always there: one less the
    ratio to the ceiling of the same round.  It is below zero where that was slower, which is noise.  Of the
    device, what was measured while rows were warmed up is left out.

    Args:
        rows: the rows.
        samples: of a finished run, by row.
        ceiling: the row whose batch is always there.

    Returns:
        For each that was measured ``key``, ``stall`` and ``busy``: ``median``, ``low``, ``high`` and ``raw``,
        or None where it was not.
    """
    told = []
    for row in rows:
        if not (measured := samples.get(row.key)):
            continue
        has_ceiling = bool(samples.get(ceiling)) and row.key != ceiling
        stalls = [1 - ratio for ratio in ratios(samples, row.key, [ceiling])] if has_ceiling else []
        busy = [share for share in row.busy[-len(measured) :] if share is not None]
        told.append({"key": row.key, "stall": _summary(stalls), "busy": _summary(busy)})
    return told


def _summary(shares: Sequence[float]) -> dict[str, Any] | None:
    if not shares:
        return None
    rounded = {name: round(value, 4) for name, value in summarise(shares)._asdict().items()}
    return {**rounded, "raw": [round(share, 4) for share in shares]}


def _has_room(
    step: Callable[[Any, Any], None], batch_of: Callable[[int], list[Any]], size: int, *, must: bool
) -> bool:
    """Whether two steps and the batches beside them have room; what they took is let go of on return."""
    try:
        batches = [batch_of(size) for _ in range(1 + _AHEAD)]
        for batch in batches[:2]:  # the optimiser's memory is there from the second on
            step(*batch)
        wait_for(str(batches[0][0].device.type))
    except RuntimeError as error:  # torch's OutOfMemoryError is one; those of its libraries are only that
        if must or not any(words in str(error).lower() for words in _SHORTAGES):
            raise
        return False
    return True


def _nothing(inputs: Any, labels: Any) -> None:
    return
