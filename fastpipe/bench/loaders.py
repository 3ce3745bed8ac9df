"""The rows of image folders: loaders in this process."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import fastpipe
from fastpipe.bench.check import Check, compare, index_problems
from fastpipe.bench.data import Photos
from fastpipe.bench.runner import Draws, touch
from fastpipe.core.extras import require

__all__ = [
    "LoaderRow",
    "LoaderSpec",
    "build",
    "check_transform",
    "make_dataset",
    "train_transform",
    "why_not_installed",
]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224


@dataclass(frozen=True)
class LoaderSpec:
    """One loader to measure.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables.
        group: ``"replaced"`` is torchvision's dataset in torch's loader, ``"stock"``
            fastpipe's dataset in torch's loader, ``"fastpipe"`` both from fastpipe.
        num_workers: as for ``DataLoader``.
        output: what the batches hold.
        note: what a reader should know about the row.
        is_accelerated: it is the replaced loader, handed to ``accelerate``.
        cache: where fastpipe keeps decoded images; they are all there before the clock starts.
        short_side, scaled, backend, gpu_share: as of ``fastpipe.Decode``.
        augment: as of ``fastpipe.FastLoader``.
        device: where its batches are to be: fastpipe's loader hands them out there, torch's pins their memory
            for a GPU.
        threads: of ``fastpipe.FastImageFolder``, if not as many as cores.
    """

    key: str
    label: str
    group: Literal["replaced", "stock", "fastpipe"]
    num_workers: int = 0
    output: Literal["float32", "uint8"] = "float32"
    note: str = ""
    is_accelerated: bool = False
    cache: Literal["off", "ram", "disk"] = "off"
    short_side: int | None = None
    scaled: bool = False
    backend: Literal["auto", "dali", "nvimgcodec"] = "auto"
    gpu_share: Literal["auto"] | None = None
    augment: Literal["auto", "split"] | None = None
    device: str | None = None
    threads: int | None = None


# Of a back end: its name, its module, and fastpipe's extra that installs it.
_PACKAGES = {
    "nvimgcodec": ("nvImageCodec", "nvidia.nvimgcodec", "image"),
    "dali": ("DALI", "nvidia.dali", "dali"),
}


def why_not_installed(spec: LoaderSpec) -> str:
    """What the row's back end lacks, with the remedy; empty where nothing. Nothing is imported."""
    if spec.backend == "auto":
        return ""
    name, module, extra = _PACKAGES[spec.backend]
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        is_there = False
    return "" if is_there else f"{name} is not installed; pip install 'fastpipe[{extra}]'"


def train_transform(output: Literal["float32", "uint8"], side: int = SIDE) -> Any:
    """The job: crop to a square as for training on ImageNet, mirror, and to a tensor."""
    transforms = require("torchvision", extra="torch").transforms
    crop = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
    if output == "uint8":
        return transforms.Compose([*crop, transforms.PILToTensor()])
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def check_transform() -> Any:
    """A transform without randomness that needs every step of the job."""
    transforms = require("torchvision", extra="torch").transforms
    steps = [transforms.Resize(256), transforms.CenterCrop(SIDE), transforms.PILToTensor()]
    return transforms.Compose(steps)


def make_dataset(spec: LoaderSpec, folder: Path, transform: Any, kept: Path | None = None) -> Any:
    """torchvision's dataset for the group ``"replaced"``, fastpipe's for the others."""
    if spec.group == "replaced" or spec.is_accelerated:
        return require("torchvision", extra="torch").datasets.ImageFolder(str(folder), transform)
    return fastpipe.FastImageFolder(
        str(folder), transform, cache=fastpipe.Cache(spec.cache, dir=kept if spec.cache == "disk" else None),
        decode=fastpipe.Decode(
            spec.backend, short_side=spec.short_side, scaled=spec.scaled, gpu_share=spec.gpu_share
        ),
        threads=spec.threads or "auto",
    )  # fmt: skip


def build(spec: LoaderSpec, dataset: Any, batch_size: int, sampler: Any) -> Any:
    """The loader of a row; workers, where there are any, outlive the epoch."""
    stock = require("torch.utils.data", extra="torch").DataLoader
    kind = fastpipe.FastLoader if spec.group == "fastpipe" and not spec.is_accelerated else stock
    own: dict[str, Any] = {} if spec.augment is None else {"augment": spec.augment}
    is_own = kind is fastpipe.FastLoader
    if is_own and spec.num_workers:
        own["workers"] = "processes"
    if spec.device is not None:
        own |= {"device": spec.device} if is_own else {"pin_memory": spec.device != "cpu"}
    loader: Any = kind(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=spec.num_workers,
        persistent_workers=spec.num_workers > 0,
        **own,
    )
    return fastpipe.accelerate(loader, cache=spec.cache) if spec.is_accelerated else loader


class LoaderRow:
    """A `Contender` that goes through one epoch of a loader.

    The clock runs from asking for an iterator to the end of the iteration: nothing is
    prefetched before it starts and nothing is left when it stops.
    """

    def __init__(
        self, spec: LoaderSpec, folder: Path, indices: Sequence[int], batch_size: int, transform: Any = None
    ) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        self.chunk = batch_size * max(1, spec.num_workers)
        self._draws = Draws(indices, self.chunk)
        self._to_fill = 0 if spec.cache == "off" else len(indices)
        self._kept = tempfile.TemporaryDirectory(prefix="fastpipe-bench-") if spec.cache == "disk" else None
        kept = None if self._kept is None else Path(self._kept.name)
        self.dataset = make_dataset(spec, folder, transform or train_transform(spec.output), kept)
        self.loader = build(spec, self.dataset, batch_size, self._draws)

    def measure(self, images: int) -> float:
        """Consume an epoch of so many images; return its seconds."""
        if self._to_fill:  # not before others have started their workers
            to_fill, self._to_fill = self._to_fill, 0
            self.measure(to_fill)
        batches, seen = self.batches(images), 0
        start = time.perf_counter()
        for batch in batches:
            seen += touch(batch)
        seconds = time.perf_counter() - start
        if seen != images:
            raise RuntimeError(f"{self.spec.label} gave {seen} images of {images}")
        return seconds

    def batches(self, images: int) -> Any:
        """An epoch of so many images."""
        self._draws.length = images
        return self.loader

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage that the loader's clock has counted so far."""
        return dict(self.loader.clock.totals())

    def close(self) -> None:
        """Let go of the loader, which ends its workers and threads."""
        self.loader = self.dataset = None
        gc.collect()
        if self._kept is not None:
            self._kept.cleanup()


def run_check(photos: Photos, workers: int, on_batch: Callable[[int], None]) -> Check:
    """Compare ``FastImageFolder`` + ``FastLoader`` with torchvision's and torch's."""
    loaders = []
    datasets = []
    for group, count in (("replaced", workers), ("fastpipe", 0)):
        spec = LoaderSpec("check", "check", group, count)  # type: ignore[arg-type]
        dataset = make_dataset(spec, photos.folder, check_transform())
        datasets.append(dataset)
        loaders.append(build(spec, dataset, 32, list(photos.indices)))
    problems = index_problems(*datasets)
    if problems:
        return Check(problems=tuple(problems.values()))
    torch = require("torch", extra="torch")
    with torch.no_grad():
        return compare(loaders[0], loaders[1], on_batch, list(zip(photos.indices, photos.files, strict=True)))
