"""The case ``images``: images of a folder, augmented and batched as for training on ImageNet."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import fastpipe
from fastpipe.bench.check import Check, Outcome, compare, index_problems
from fastpipe.bench.data import Photos, Say, folder_to_use, scan, unheard
from fastpipe.bench.driver import DATA_HELP, Case, Driver, add_run_arguments
from fastpipe.bench.results import MAIN_ROW, RowInfo
from fastpipe.bench.runner import Contender, DrawnRow, Draws, Session
from fastpipe.console import positive
from fastpipe.core.extras import distribution_of, require

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224
_AS_USUAL = fastpipe.Decode()


@dataclass(frozen=True)
class LoaderSpec(RowInfo):
    """Describes one loader to measure.

    In the group ``"replaced"``, torch's loader reads torchvision's dataset.  In the group ``"stock"``,
    torch's loader reads fastpipe's dataset.  In the group ``"fastpipe"``, loader and dataset are fastpipe's,
    or ``fastpipe.accelerate`` gets a replaced loader.
    """

    num_workers: int = 0
    is_accelerated: bool = False  # True if the replaced loader is passed to ``accelerate``
    cache: Literal["off", "ram", "disk"] = "off"  # cached images are decoded before the clock starts
    form: Literal["pixels", "coefficients", "index"] = "pixels"  # what the cache keeps
    decode: fastpipe.Decode = _AS_USUAL
    augment: Literal["auto", "split"] | None = None  # the argument of ``fastpipe.FastLoader``
    device: str | None = None  # device of the batches; torch's loader pins memory for a GPU
    threads: int | Literal["auto"] = "auto"  # the argument of ``fastpipe.FastImageFolder``


# For each back end of ``Decode``: its name and its module.
_PACKAGES = {
    "nvimgcodec": ("nvImageCodec", "nvidia.nvimgcodec"),
    "dali": ("DALI", "nvidia.dali"),
}


def why_not_installed(spec: LoaderSpec) -> str:
    """Return a text that names the missing package of a loader's back end, and how to install it.

    The text is empty if no package is missing.  The package is not imported.
    """
    if spec.decode.backend not in _PACKAGES:
        return ""
    name, module = _PACKAGES[spec.decode.backend]
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        is_there = False
    return "" if is_there else f"{name} is not installed; pip install {distribution_of(module)}"


def train_transform(output: str, side: int = SIDE) -> Any:
    """Return the transform to measure: a random square crop, a random flip, and the conversion to a tensor.

    With ``output="uint8"`` the tensor is not normalised.
    """
    transforms = require("torchvision", extra="torch").transforms
    crop = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
    if output == "uint8":
        return transforms.Compose([*crop, transforms.PILToTensor()])
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def check_transform() -> Any:
    """Return a transform like that of ``train_transform``, but without random numbers and normalisation."""
    transforms = require("torchvision", extra="torch").transforms
    steps = [transforms.Resize(256), transforms.CenterCrop(SIDE), transforms.PILToTensor()]
    return transforms.Compose(steps)


def make_dataset(spec: LoaderSpec, folder: Path, transform: Any, kept: Path | None = None) -> Any:
    """Return torchvision's dataset for replaced and accelerated loaders, and fastpipe's for all others."""
    if spec.group == "replaced" or spec.is_accelerated:
        return require("torchvision", extra="torch").datasets.ImageFolder(str(folder), transform)
    cache = fastpipe.Cache(spec.cache, dir=kept if spec.cache == "disk" else None, form=spec.form)
    return fastpipe.FastImageFolder(
        str(folder), transform, cache=cache, decode=spec.decode, threads=spec.threads
    )


def build(spec: LoaderSpec, dataset: Any, batch_size: int, sampler: Any) -> Any:
    """Build the loader that ``spec`` describes; its worker processes stay for all epochs."""
    workers = spec.num_workers
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if spec.group == "fastpipe" and not spec.is_accelerated:
        options |= {"workers": "processes"} if workers else {}
        options |= {"augment": spec.augment} if spec.augment else {}
        options |= {"device": spec.device} if spec.device else {}
        return fastpipe.FastLoader(dataset, batch_size, sampler=sampler, **options)
    stock = require("torch.utils.data", extra="torch").DataLoader
    pins = spec.device not in (None, "cpu")
    loader = stock(dataset, batch_size, sampler=sampler, pin_memory=pins, **options)
    return fastpipe.accelerate(loader, cache=spec.cache) if spec.is_accelerated else loader


class LoaderRow(DrawnRow):
    """Measures epochs of a loader of images (a `Contender`)."""

    def __init__(
        self, spec: LoaderSpec, folder: Path, indices: Sequence[int], batch_size: int, transform: Any = None
    ) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        self.chunk = batch_size * max(1, spec.num_workers)
        self.draws = Draws(indices, self.chunk)
        self._to_fill = 0 if spec.cache == "off" else len(indices)
        self._kept = tempfile.TemporaryDirectory(prefix="fastpipe-bench-") if spec.cache == "disk" else None
        kept = None if self._kept is None else Path(self._kept.name)
        self.dataset = make_dataset(spec, folder, transform or train_transform(spec.output), kept)
        self.loader = build(spec, self.dataset, batch_size, self.draws)

    def measure(self, count: int) -> float:
        if self._to_fill:  # fill the cache now, after other rows have started their worker processes
            to_fill, self._to_fill = self._to_fill, 0
            self.measure(to_fill)
        return super().measure(count)

    def close(self) -> None:
        self.dataset = None
        super().close()
        if self._kept is not None:
            self._kept.cleanup()


def run_check(photos: Photos, workers: int, say: Say = unheard) -> Check:
    """Compare ``FastImageFolder`` + ``FastLoader`` with torchvision's dataset and torch's loader."""
    specs = [LoaderSpec("check", "check", "replaced", workers), LoaderSpec("check", "check", "fastpipe")]
    datasets = [make_dataset(spec, photos.folder, check_transform()) for spec in specs]
    if problems := index_problems(*datasets):
        return Check(problems=tuple(problems.values()))
    expected, got = (
        build(spec, dataset, 32, list(photos.indices)) for spec, dataset in zip(specs, datasets, strict=True)
    )
    photo_of = list(zip(photos.indices, photos.files, strict=True))

    def on_batch(seen: int) -> None:
        say(f"comparing outputs: {seen:,} of {len(photo_of):,} photos")

    with require("torch", extra="torch").no_grad():
        return compare(expected, got, on_batch, photo_of)


SHORT_SIDE = 256
# A photo with this number of pixels is larger than the output even at half its width and height.
LARGE = 2_000_000


def worker_counts(cores: int, quick: bool = False) -> tuple[int, ...]:
    """Return values of ``num_workers`` that a careful user would try.

    >>> worker_counts(2), worker_counts(32)
    ((0, 1, 2), (0, 8, 16, 32))
    """
    if quick:
        return (0, min(2, cores))
    if cores <= 4:
        return tuple(range(cores + 1))
    return (0, cores // 4, cores // 2, cores)


def loader_specs(cores: int, quick: bool = False, is_large: bool = False) -> list[LoaderSpec]:
    counts, fast = worker_counts(cores, quick), "FastImageFolder + FastLoader"

    def own(key: str, words: str, note: str, output: str = "float32", **options: Any) -> LoaderSpec:
        return LoaderSpec(key, fast + words, "fastpipe", output=output, note=note, **options)

    most, small = counts[-1], fastpipe.Decode(short_side=SHORT_SIDE)
    second = "from the second epoch on"
    smaller = f"{second}; short side {SHORT_SIDE}, which changes pixels"
    scaled = own(
        "fastloader-scaled", ", Decode(scaled=True)", "changes pixels", decode=fastpipe.Decode(scaled=True)
    )
    return [
        *(
            LoaderSpec(f"{group}-workers{n}", f"{dataset} + DataLoader(num_workers={n})", group, n)
            for group, dataset in (("replaced", "ImageFolder"), ("stock", "FastImageFolder"))
            for n in counts
        ),
        own(MAIN_ROW, "", "decode threads in this process"),
        own("fastloader-uint8", ", uint8", "normalise on the device", "uint8"),
        own("fastloader-workers1", '(num_workers=1, workers="processes")', "", num_workers=1),
        own("fastloader-dali", ', Decode("dali")', "a pipeline of DALI's decodes, threads do the rest",
            decode=fastpipe.Decode("dali")),
        LoaderSpec("accelerated", f"accelerate(ImageFolder + DataLoader(num_workers={most}))", "fastpipe",
                   most, note="a script's own loader", is_accelerated=True),
        *([scaled] if is_large else []),
        # With a cache, every image has been decoded before the measurement.
        own("cached-ram", ', cache="ram"', second, cache="ram"),
        own("cached-ram-coefficients", ', cache="ram", form="coefficients"', second, cache="ram",
            form="coefficients"),
        own("cached-ram-coefficients-uint8", ', cache="ram", form="coefficients", uint8', second, "uint8",
            cache="ram", form="coefficients"),
        own("cached-ram-index-uint8", ', cache="ram", form="index", uint8', second, "uint8", cache="ram",
            form="index"),
        own("cached-disk-coefficients", ', cache="disk", form="coefficients"', second, cache="disk",
            form="coefficients"),
        own("cached-ram-256", ', cache="ram", short_side=256', smaller, cache="ram", decode=small),
        own("cached-ram-256-uint8", ', cache="ram", short_side=256, uint8', smaller, "uint8", cache="ram",
            decode=small),
        own("cached-disk-256", ', cache="disk", short_side=256', smaller, cache="disk", decode=small),
    ]  # fmt: skip


class Bench(Case):
    case = "images"
    about = "ImageFolder + DataLoader against FastImageFolder + FastLoader"
    main = MAIN_ROW
    photos: Photos

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--data", metavar="FOLDER", type=Path, help=f"image folder, one sub-folder per class{DATA_HELP}")
        add("--large", action="store_true", help="without --data: made-up photos of 12 megapixels")
        add("--batch-size", type=positive(int), default=64, metavar="N",
            help="images in a batch (default: 64)")  # fmt: skip
        add_run_arguments(parser)

    def prepare(self) -> None:
        self.photos = photos_to_use(self, large=self.args.large)

    def rows(self) -> Sequence[Contender]:
        found: list[Contender] = []
        for spec in self.specs():
            if why := why_not_installed(spec):
                self.miss(spec.key, spec.label, why)
                continue
            make = partial(LoaderRow, spec, self.photos.folder, self.photos.indices, self.args.batch_size)
            found += self.opened([(spec, make)])
        return found

    def specs(self) -> list[LoaderSpec]:
        return loader_specs(self.cores, self.args.quick, self.photos.pixels >= LARGE)

    def compared(self, rows: Sequence[Any]) -> Outcome:
        return run_check(self.photos, 0 if self.args.quick else min(self.cores, 8), self.progress.now)

    def described(self, session: Session) -> dict[str, Any]:
        dataset = make_dataset(LoaderSpec("", "", "fastpipe"), self.photos.folder, train_transform("float32"))
        plan = str(dataset.plan).replace(str(self.photos.folder), self.photos.name)
        return {"plan": plan, **facts_of(self.photos, self.args.batch_size)}


def photos_to_use(driver: Driver, *, large: bool = False) -> Photos:
    """Return the photos of a run, and read them once; add a warning if they are generated."""
    folder, name, is_made_up = folder_to_use(driver.args.data, driver.progress.done, large=large)
    photos = scan(folder, name)
    photos.warm()
    if is_made_up:
        driver.warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
        driver.progress.done(f"photos: made up, kept in {folder}")
    return photos


def facts_of(photos: Photos, batch_size: int) -> dict[str, Any]:
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
