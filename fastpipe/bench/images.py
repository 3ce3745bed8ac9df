"""The case ``images``: an image folder, augmented and batched as for training on ImageNet."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console

import fastpipe
from fastpipe.bench.check import Check, compare, index_problems
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.results import MAIN_ROW, RowInfo
from fastpipe.bench.runner import Contender, Draws, consume
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus

# ---- The rows of image folders: loaders in this process ---------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224


@dataclass(frozen=True)
class LoaderSpec:
    """One loader to measure.

    Attributes:
        group: ``"replaced"`` is torchvision's dataset in torch's loader, ``"stock"``
            fastpipe's dataset in torch's loader, ``"fastpipe"`` both from fastpipe.
        output: what the batches hold.
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
        return consume(self.batches(images), images, self.spec.label)

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


SHORT_SIDE = 256
_SMALL: tuple[tuple[Literal["ram", "disk"], Literal["float32", "uint8"]], ...] = (
    ("ram", "float32"), ("ram", "uint8"), ("disk", "float32"),
)  # fmt: skip
# Pixels of a photo from which half of it in each direction is still more than the job makes of it.
LARGE = 2_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder, one sub-folder per class (default: $FASTPIPE_PHOTOS, "
        "else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--large", action="store_true", help="without --data: made-up photos of 12 megapixels")
    add("--batch-size", type=positive(int), default=64, metavar="N", help="images in a batch (default: 64)")
    add_run_arguments(parser)


def worker_counts(cores: int, quick: bool = False) -> tuple[int, ...]:
    """Values of ``num_workers`` that a careful user would try.

    >>> worker_counts(2), worker_counts(32)
    ((0, 1, 2), (0, 8, 16, 32))
    """
    if quick:
        return (0, min(2, cores))
    if cores <= 4:
        return tuple(range(cores + 1))
    return (0, cores // 4, cores // 2, cores)


def loader_specs(cores: int, quick: bool = False, is_large: bool = False) -> list[LoaderSpec]:
    """The rows that are loaders: replaced, stock loader with the fast dataset, fastpipe."""
    specs = []
    groups: list[tuple[Literal["replaced", "stock"], str]] = [
        ("replaced", "ImageFolder"),
        ("stock", "FastImageFolder"),
    ]
    for group, dataset in groups:
        for count in worker_counts(cores, quick):
            key, label = f"{group}-workers{count}", f"{dataset} + DataLoader(num_workers={count})"
            specs.append(LoaderSpec(key, label, group, count))
    label = "FastImageFolder + FastLoader"
    specs.append(LoaderSpec(MAIN_ROW, label, "fastpipe", note="decode threads in this process"))
    specs.append(
        LoaderSpec("fastloader-uint8", f"{label}, uint8", "fastpipe", 0, "uint8", "normalise on the device")
    )
    specs.append(
        LoaderSpec("fastloader-workers1", f'{label}(num_workers=1, workers="processes")', "fastpipe", 1)
    )
    note = "a pipeline of DALI's decodes, threads do the rest"
    specs.append(
        LoaderSpec("fastloader-dali", f'{label}, Decode("dali")', "fastpipe", note=note, backend="dali")
    )
    workers = worker_counts(cores, quick)[-1]
    given = f"accelerate(ImageFolder + DataLoader(num_workers={workers}))"
    note = "a script's own loader"
    specs.append(LoaderSpec("accelerated", given, "fastpipe", workers, note=note, is_accelerated=True))
    if is_large:
        note = "changes pixels"
        name = f"{label}, Decode(scaled=True)"
        specs.append(LoaderSpec("fastloader-scaled", name, "fastpipe", note=note, scaled=True))
    return specs + cached_specs(label)


def cached_specs(label: str) -> list[LoaderSpec]:
    """The rows in which every image has been decoded before."""
    note = "from the second epoch on"
    specs = [LoaderSpec("cached-ram", f'{label}, cache="ram"', "fastpipe", note=note, cache="ram")]
    note += f"; short side {SHORT_SIDE}, which changes pixels"
    for cache, output in _SMALL:
        name = f'{label}, cache="{cache}", short_side={SHORT_SIDE}'
        name += "" if output == "float32" else f", {output}"
        key = f"cached-{cache}-{SHORT_SIDE}" + ("" if output == "float32" else f"-{output}")
        specs.append(LoaderSpec(key, name, "fastpipe", 0, output, note, cache=cache, short_side=SHORT_SIDE))
    return specs


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when the outputs do not agree with the replaced loader's.

    Raises:
        OptionError: there is nothing to measure.
    """
    folder, name, generated = folder_to_use(args.data, progress.done, large=args.large)
    photos = scan(folder, name)
    bench = (kind or Bench)(args, available_cpus(), progress, photos=photos)
    if generated:
        bench.warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
        progress.done(f"photos: made up, kept in {folder}")
    return bench.run(console)


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "images"
    photos: Photos = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        self.begin()
        self.photos.warm()
        if not self.passed(check := self._check()):
            return None
        with ExitStack() as stack:
            contenders = self._open(stack)
            main = next(c for c in contenders if isinstance(c, LoaderRow) and c.key == MAIN_ROW)
            plan = str(main.dataset.plan).replace(str(self.photos.folder), self.photos.name)
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            stages = self.stages(before, main.stage_seconds(), session.samples[MAIN_ROW])
        args, size = self.args, self.args.batch_size
        words = [f"--data {self.photos.name}"] if args.data else []
        words += ["--large"] if args.large else []
        words += [f"--batch-size {size}"] if size != 64 else []
        return self.content(session, check, words, stages=stages, plan=plan, **facts_of(self.photos, size))

    def _check(self) -> Check:
        """Compare outputs, and say how far it is."""
        seen = 0

        def on_batch(images: int) -> None:
            nonlocal seen
            seen += images
            self.progress.now(f"comparing outputs: {seen:,} of {len(self.photos.files):,} photos")

        return run_check(self.photos, 0 if self.args.quick else min(self.cores, 8), on_batch)

    def _open(self, stack: ExitStack) -> list[Contender]:
        """Build every row."""
        size, photos = self.args.batch_size, self.photos
        contenders: list[Contender | None] = []
        for spec in self.specs():
            if why := why_not_installed(spec):
                self.miss(spec.key, spec.label, why)
                continue
            info = RowInfo(spec.key, spec.label, spec.group, spec.num_workers, spec.output, spec.note)
            make = partial(LoaderRow, spec, photos.folder, photos.indices, size)
            contenders.append(self.open(stack, info, make))
        contenders += self.all_others(stack)
        return [one for one in contenders if one is not None]

    def specs(self) -> list[LoaderSpec]:
        """Return the loaders that are measured."""
        return loader_specs(self.cores, self.args.quick, self.photos.pixels >= LARGE)


def facts_of(photos: Photos, batch_size: int) -> dict[str, Any]:
    """Return ``data`` and ``job`` of a result."""
    return {
        "data": {
            "name": photos.name, "classes": photos.classes, "total": photos.total,
            "photos": len(photos.files), "bytes": photos.bytes,
        },
        "job": {
            "text": "RandomResizedCrop(224), RandomHorizontalFlip, ToTensor, Normalize;"
            f" batches of {batch_size}, shuffled",
            "short": f"RandomResizedCrop(224) + flip + normalise, batch {batch_size}",
            "batch_size": batch_size,
        },
    }  # fmt: skip
