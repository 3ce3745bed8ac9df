"""Training steps on the device, and the rows that make them of a loader's batches."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cases.augment_recipes import SIZE
from fastpipe.bench.runner import Contender, Sample, ratios, summarise
from fastpipe.bench.volume import Sizes as ScrollSizes
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

# ---- The device: is it there, what it is, and the part of a window in which it computes -------------
#
# The part is measured by CUDA events on the stream of the steps, so it needs nothing beside torch. It was
# written after torch's documentation, and is tested with events that imitate torch's; on a GPU it has not
# measured steps yet.

_DRIVER = Path("/proc/driver/nvidia/version")


def check_device(device: str) -> None:
    """Refuse at the beginning what cannot run.

    Raises:
        OptionError: the device is ``"cuda"``, and torch finds none.
    """
    torch = require("torch", extra="torch")
    if device != "cuda" or torch.cuda.is_available():
        return
    why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    raise OptionError(
        f"this case measures a GPU, and {why}: run it on a machine with one, or with --device cpu, which"
        " shows on little data that the command runs"
    )


def described(device: str) -> dict[str, Any] | None:
    """The GPU for the JSON file: its name, memory and driver, the CUDA of torch's build; None for the CPU."""
    if device != "cuda":
        return None
    torch = require("torch", extra="torch")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def wait_for(device: str) -> None:
    """Wait until the device has done what it was asked for."""
    if device == "cuda":
        require("torch", extra="torch").cuda.synchronize()


class DeviceUse:
    """The part of a window in which a CUDA device computes steps; nobody waits for it.

    A step's two events are noted by the device, before its first kernel and after its last, once all that was
    asked before them is done.  The window lasts from the first event to the last.  What is decoded or
    augmented on other streams meanwhile does not count: it is not what the device is there for.

    Args:
        device: ``"cuda"``; any other has no events, and then there is no such part.
    """

    def __init__(self, device: str) -> None:
        self._cuda = require("torch", extra="torch").cuda if device == "cuda" else None
        self._events: list[Any] = []

    def begin(self) -> None:
        """A window begins."""
        self._events = []
        self.mark()

    def mark(self) -> None:
        """A step begins, or ends."""
        if self._cuda is not None:
            event = self._cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def share(self) -> float | None:
        """The part, 0 to 1, of a window whose work is done; None where there is none."""
        if len(self._events) < 3:
            return None
        first, *steps = self._events
        total = first.elapsed_time(steps[-1])
        busy = sum(begun.elapsed_time(ended) for begun, ended in zip(steps[::2], steps[1::2], strict=True))
        return float(busy / total) if total > 0 else None


def _driver() -> str:
    """The driver's version, which torch does not tell; "unknown" where nobody does."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


# ----------------------------------------------------------------------------------------------------
# How much there is of everything: on a GPU, and for a look on the processor whether the command runs.


@dataclass(frozen=True)
class Sizes:
    """The measurements of a run.

    Attributes:
        side: height and width of images.
        batch: images of a batch, where the device's memory has room for a step on it.
        model: in words.
        blocks: residual blocks of each of the model's four stages; None for ResNet-50.
        checked: photos whose pixels are compared.
        augmented: images of a batch that is augmented.
        volume: voxels of a volume that is augmented.
        scroll: of the volume that patches are of.
        patches: of a batch.
        window_s: seconds of a measurement, at most.
        rounds: at most.
    """

    side: int
    batch: int
    model: str
    blocks: tuple[int, ...] | None
    checked: int
    augmented: int
    volume: tuple[int, int, int]
    scroll: ScrollSizes
    patches: int
    window_s: float
    rounds: int


FULL = Sizes(
    side=224, batch=256, model="ResNet-50", blocks=None, checked=64, augmented=64, volume=SIZE,
    scroll=ScrollSizes((192, 384, 384), (64, 128, 128), SIZE), patches=2, window_s=2.5,
    rounds=7,
)  # fmt: skip
TINY = Sizes(
    side=64, batch=8, model="a ResNet of four blocks", blocks=(1, 1, 1, 1), checked=16, augmented=4,
    volume=(16, 32, 32), scroll=ScrollSizes((32, 64, 64), (16, 32, 32), (16, 32, 32)), patches=2,
    window_s=0.1, rounds=2,
)  # fmt: skip


def sizes_for(device: str) -> Sizes:
    """The sizes of a run on ``"cuda"``, or of one on ``"cpu"``.

    >>> sizes_for("cpu").batch
    8
    """
    return FULL if device == "cuda" else TINY


# ---- Training steps on the device, and the rows that make them of a loader's batches ----------------

CLASSES = 1000
LEAST_BATCH = 8
# Batches that a loader keeps on the device beside the one of the step.
_AHEAD = 3
# Steps before the clock starts, so that what it sees is not a pipeline that fills.
_LEAD = 2
_SHORTAGES = ("out of memory", "alloc_failed")


class Feed(Protocol):
    """A source of batches, such as a `LoaderRow`.

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


class TrainRow(Contender):
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
    """The time that steps lost, and how busy the device was.

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
    """Return True if two steps and their batches fit into memory, and release that memory."""
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
