"""The case ``augment`` compares ``fastpipe.augment`` with users' scripts, which augment sample by sample."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fastpipe import augment
from fastpipe.bench.check import Outcome
from fastpipe.bench.data import Photos, Say, folder_to_use, listed, scan, unheard
from fastpipe.bench.driver import DATA_HELP, Case, add_run_arguments
from fastpipe.bench.images import MEAN, SIDE, STD, check_transform
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Session, touch
from fastpipe.bench.synthetic import mel_rows
from fastpipe.console import positive
from fastpipe.core.extras import require
from fastpipe.core.text import counted

# ---- Batches ---------------------------------------------------------------------------------------

BANDS, FRAMES = 80, 400
CLASSES = 1000


@dataclass(frozen=True)
class Batches:
    """A batch of photos, uint8 (N, 3, 224, 224), and a batch of spectrograms, float32 (N, 80, 400).

    ``name`` is the name of the photos in the report.
    """

    name: str
    photos: npt.NDArray[np.uint8]
    spectrograms: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def text(self) -> str:
        count = len(self)
        return (
            f"a batch of {count} photos of {SIDE}×{SIDE} ({self.name}), again and again,"
            f" one of {count} made-up spectrograms of {BANDS}×{FRAMES}"
        )

    def count(self, unit: str) -> int:
        return len(self)

    def tensor(self, unit: str, dtype: str, device: str) -> Any:
        torch = require("torch", extra="torch")
        if unit == "spectrograms":
            return torch.from_numpy(self.spectrograms).to(device)
        photos = torch.from_numpy(self.photos)
        return (photos / 255 if dtype == "float32" else photos).to(device)

    def labels(self, device: str) -> Any:
        """Return a class number for each sample, int64 (N,)."""
        return require("torch", extra="torch").arange(len(self), device=device) % CLASSES


def made_batches(folder: Path, name: str, count: int) -> Batches:
    """Return a batch of ``count`` photos, and a batch of as many spectrograms.

    The photos are spread evenly over the folder and cropped to one size.
    """
    chosen = scan(folder, name, count).indices
    dataset = listed(folder, check_transform())
    images = [dataset[index][0].numpy() for index in chosen]
    # Without this copy, the stack would have the memory layout of decoded images instead of a loader's batch.
    photos = np.ascontiguousarray(np.stack([images[at % len(images)] for at in range(count)]))
    return Batches(name, photos, mel_rows(np.random.default_rng(0), count, (BANDS, FRAMES)))


# ---- Recipes of papers -----------------------------------------------------------------------------
#
# The classes of ``fastpipe.augment`` and of torchvision have the same arguments.  So one function makes the
# augmentation of both from a *kit*, the module with the classes.

Kit = Any
BOTH = ("float32", "uint8")
# The augmentations that choose randomly from a list of changes.
POLICIES = ("RandAugment", "TrivialAugmentWide")


class SpecAugment:
    """Fills random ranges of times and frequencies of a spectrogram with its mean, as users' scripts do.

    torchvision has no such transform.
    """

    def __init__(
        self, n_time_masks: int, time_mask_param: int, n_freq_masks: int, freq_mask_param: int
    ) -> None:
        self._masks = ((1, n_time_masks, time_mask_param), (0, n_freq_masks, freq_mask_param))

    def __call__(self, spectrogram: Any) -> Any:
        found, value = spectrogram.clone(), spectrogram.mean()
        for dim, count, most in self._masks:
            for _ in range(count):
                width = int(random.random() * most)
                begin = int(random.random() * (found.shape[dim] - width))
                found.narrow(dim, begin, width).fill_(value)
        return found


@dataclass(frozen=True)
class Recipe:
    """An augmentation of batches to measure, such as that of SimCLR."""

    key: str
    label: str
    ops: Callable[[Kit, str], list[Any]]  # makes the operations on each sample, from a kit and a dtype
    mixes: Callable[[Kit], list[Any]] | None = None  # makes the operations that mix samples and labels
    dtypes: Sequence[str] = BOTH  # dtypes of the input to measure
    unit: str = "images"
    has_policy: bool = False  # True for a policy of `POLICIES`, which may count floats as bytes
    whose: str = "torchvision v2"  # library that scripts use

    @property
    def is_on_host(self) -> bool:
        """True if users' scripts augment such data only on the CPU."""
        return self.unit not in ("images", "spectrograms")

    def chain(self, dtype: str, **options: Any) -> Any:
        mixes = self.mixes(augment) if self.mixes else []
        return augment.Compose([*self.ops(augment, dtype), *mixes], **options)

    def sampled(self, dtype: str) -> Callable[..., Any]:
        """Return a function that applies the recipe to a batch sample by sample, as users' scripts do."""
        torch, v2 = require("torch", extra="torch"), require("torchvision.transforms.v2", extra="torch")
        ops, mixes = self.ops(self.scripts(v2), dtype), self.mixes(v2) if self.mixes else []

        def each(image: Any) -> Any:
            for op in ops:
                image = op(image)
            return image

        def change(images: Any, *labels: Any) -> Any:
            batch = torch.stack([each(image) for image in images]) if ops else images
            for mix in mixes:
                batch, *labels = mix(batch, *labels)
            return (batch, *labels) if mixes else batch

        return change

    def scripts(self, v2: Any) -> Kit:
        """Return a module with the classes that users' scripts use: torchvision's ``v2``, or their own."""
        return v2

    def given(self, batches: Any, dtype: str, device: str) -> tuple[Any, ...]:
        images = batches.tensor(self.unit, dtype, device)
        return (images, batches.labels(device)) if self.mixes else (images,)


def floats(kit: Kit) -> Any:
    float32 = require("torch", extra="torch").float32
    return kit.ToDtype(float32) if kit is augment else kit.ToDtype(float32, scale=True)


def _ended(kit: Kit, dtype: str) -> list[Any]:
    return [*([floats(kit)] if dtype == "uint8" else []), kit.Normalize(MEAN, STD)]


def interpolation(name: str) -> Any:
    return require("torchvision.transforms", extra="torch").InterpolationMode(name)


def _simclr(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.RandomResizedCrop(SIDE),
        kit.RandomHorizontalFlip(),
        kit.RandomApply([kit.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
        kit.RandomGrayscale(0.2),
        kit.RandomApply([kit.GaussianBlur(23)], 0.5),
        *_ended(kit, dtype),
    ]


def _deit(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.RandomResizedCrop(SIDE, interpolation=interpolation("bicubic")),
        kit.RandomHorizontalFlip(),
        kit.RandAugment(2, 9),
        *_ended(kit, dtype),
        kit.RandomErasing(0.25, value="random"),
    ]


def _after_the_crop(name: str) -> Callable[[Kit, str], list[Any]]:
    """Return a function that makes the steps after the crop: a flip, the policy ``name``, normalisation."""
    return lambda kit, dtype: [kit.RandomHorizontalFlip(), getattr(kit, name)(), *_ended(kit, dtype)]


def mixed_up(kit: Kit) -> list[Any]:
    return [kit.MixUp(num_classes=CLASSES)]


class SpectrogramRecipe(Recipe):
    """A recipe for spectrograms.  Users' scripts fill slices of a tensor for it."""

    def scripts(self, v2: Any) -> Kit:
        return argparse.Namespace(SpecAugment=SpecAugment)


RECIPES = (
    Recipe("simclr", "SimCLR", _simclr),
    Recipe("deit", "DeiT", _deit, mixed_up, has_policy=True),
    SpectrogramRecipe(
        "specaugment", "SpecAugment", lambda kit, dtype: [kit.SpecAugment(2, 30, 2, 20)],
        dtypes=("float32",), unit="spectrograms", whose="slices in torch",
    ),
    *(
        Recipe(name.lower(), f"{name} after the crop", _after_the_crop(name), has_policy=True)
        for name in POLICIES
    ),
)  # fmt: skip


# ---- Rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way in which fastpipe applies a chain of augmentations; each section has a row for each way."""

    kind: str  # the end of the row's key
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)  # options of ``augment.Compose``
    apart: float | None = None  # largest allowed mean difference; None if values must be torchvision's
    note: str = ""


# Each line adds a row to all sections.
WAYS = (
    Way("batch", "augment.Compose"),
    Way("fused", "augment.Compose, fuse=True", {"fuse": True}, 0.3, "one resampling; changes pixels"),
)


@dataclass(frozen=True)
class Place:
    """A recipe with the dtype and the device (``"cpu"`` or ``"cuda"``) of its input.

    A place has its own section in the result, or its recipe is a single operation.
    """

    recipe: Recipe
    dtype: str
    device: str = "cpu"

    @property
    def is_single(self) -> bool:
        return self.recipe.key.startswith("op-")

    @property
    def task(self) -> str:
        return f"{self.recipe.key}-{self.dtype}"

    @property
    def key(self) -> str:
        return self.task if self.device == "cpu" else f"{self.task}-{self.device}"

    @property
    def label(self) -> str:
        where = "" if self.device == "cpu" else ", on CUDA"
        return f"{self.recipe.label}, {self.dtype}{where}"

    def info(self, kind: str, label: str, group: str, note: str = "") -> RowInfo:
        key, unit = f"{self.key}-{kind}", self.recipe.unit
        return RowInfo(key, label, group, note=note, section=self.key, unit=unit)

    def given(self, batches: Batches) -> tuple[Any, ...]:
        return self.recipe.given(batches, self.dtype, self.device)


class AugmentRow(Contender):
    """Measures how fast one batch is augmented again and again (a `Contender`).

    torch uses ``threads`` threads.  If this is None, torch's own number is used.
    """

    def __init__(
        self,
        key: str,
        work: Callable[[], Any],
        batch_size: int,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.key, self.chunk = key, batch_size
        self._work, self._device, self._threads = work, device, threads

    def measure(self, count: int) -> float:
        torch = require("torch", extra="torch")
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        wait = torch.cuda.synchronize if self._device != "cpu" else lambda: None
        try:
            wait()
            start = time.perf_counter()
            for _ in range(count // self.chunk):
                found = self._work()
                # Only on the CPU, because reading a number would wait for the device.
                if self._device == "cpu":
                    touch(found)
            wait()
            return time.perf_counter() - start
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        self._work = lambda: None  # releases the batch


def own_rows(place: Place, batches: Batches) -> Iterator[tuple[RowInfo, AugmentRow]]:
    """Yield the rows of a recipe that are measured in this process; rows of users' scripts come first.

    A single operation has fewer rows.
    """
    recipe, dtype, given = place.recipe, place.dtype, place.given(batches)

    def row(
        kind: str, label: str, group: str, change: Any, note: str = "", threads: int | None = None
    ) -> tuple[RowInfo, AugmentRow]:
        info = place.info(kind, label, group, note)
        return info, AugmentRow(info.key, lambda: change(*given), len(given[0]), place.device, threads)

    stock, each = recipe.sampled(dtype), f"{recipe.whose}, sample by sample"
    if place.device == "cpu":
        note = f"torch's default, {counted(require('torch', extra='torch').get_num_threads(), 'thread')}"
        yield row("replaced", each, "replaced", stock, note)
        if not place.is_single:
            yield row("worker", f"{each}, one thread", "replaced", stock, "as in a worker process", 1)
    elif not recipe.is_on_host:
        yield row("replaced", each, "replaced", stock)
    for way in ways_of(place):
        yield row(way.kind, way.label, "fastpipe", recipe.chain(dtype, **way.options), way.note)


def ways_of(place: Place) -> tuple[Way, ...]:
    """Return fastpipe's ways to measure; only chains of several operations on images can be fused."""
    return WAYS[:1] if place.is_single or place.recipe.unit != "images" else WAYS


# ---- Are the images equal to those of torchvision's functions? -------------------------------------

# The largest effect of rounding in another order, for numbers from 0 to 1 and for normalised numbers.
NEAR = 2e-4
# A policy equalises floats by the histogram of their bytes.  If rounding moves a value to another byte, all
# other values may change by a level.  This is a level after normalisation.
LEVEL = 1.01 / 255 / min(STD)
# Bicubic crops of floats have values below 0 and above 1.  torchvision's conversion to bytes wraps these
# values around; at most this fraction of the values may then differ.
MOST_WRAPPED = 0.05
# The largest fraction of values that may differ by more.  A value near a step (between two bytes, or at a
# threshold of a policy) may fall on the other side of the step.  On the CPU, rounding is that of torchvision.
# On a GPU, colours are computed in another order, and then a policy may invert only one of the two values.
MOST_FAR = {"cpu": 0.01, "cuda": 0.1}
# The number of samples for a single operation is small, because there are many operations, and torchvision's
# functions take one image at a time.
SINGLE_SAMPLES = 16


@dataclass
class ChainCheck(Outcome):
    """Compares augmented batches with the results of torchvision's functions for the same parameters."""

    whose = "torchvision's functions"
    told: ClassVar[tuple[str, ...]] = ("batches", "alike", "values", "far", "largest")

    batches: int = 0  # number of batches that were compared
    alike: int = 0  # number of batches whose mean difference was compared
    values: int = 0  # number of values that were compared one by one
    far: int = 0  # number of values that differ by more than rounding allows
    largest: float = 0.0  # largest difference of all other values
    problems: tuple[str, ...] = ()

    def add(self, what: str, found: Any, wanted: Any, near: float, most_far: float) -> None:
        """Compare a batch value by value.

        At most the fraction ``most_far`` of the values may differ by more than ``near``.
        """
        if not self._is_of_form(what, found, wanted):
            return
        apart = (found.float() - wanted.float()).abs()
        # The negation also counts NaN, which differs from every value.
        is_far = ~(apart <= near)
        far = int(is_far.sum())
        self.values, self.far = self.values + apart.numel(), self.far + far
        if far < apart.numel():
            self.largest = max(self.largest, float(apart[~is_far].max()))
        if far > most_far * apart.numel():
            self.problems += (f"{what}: {far / apart.numel():.2%} of the values differ",)

    def add_like(self, what: str, found: Any, wanted: Any, most_apart: float) -> None:
        """Compare a batch whose values may differ by ``most_apart`` on average."""
        if not self._is_of_form(what, found, wanted):
            return
        self.alike += 1
        apart = float((found.float() - wanted.float()).abs().mean())
        if not apart <= most_apart:
            self.problems += (
                f"{what}: values are {apart:.2g} apart on average, at most {most_apart:g} asked",
            )

    def _is_of_form(self, what: str, found: Any, wanted: Any) -> bool:
        """Return True if dtype and shape are equal; otherwise record a problem."""
        self.batches += 1
        is_same: bool = found.dtype == wanted.dtype and found.shape == wanted.shape
        if not is_same:
            seen, right = (f"{one.dtype} {tuple(one.shape)}" for one in (found, wanted))
            self.problems += (f"{what}: a batch is {seen}, expected {right}",)
        return is_same

    def agreement(self) -> str:
        exact, equal = self.batches - self.alike, 1 - self.far / max(1, self.values)
        return (
            f"{exact} batches agree with torchvision's functions, or NumPy's and SciPy's, given the same"
            f" parameters: {equal:.4%} of {self.values:,} values differ by at most {self.largest:.1g}, the"
            " others are beside a step"
            + (f"; {self.alike} that are fused are like them" if self.alike else "")
        )


def check_chains(places: Iterable[Place], batches: Batches, say: Say = unheard) -> ChainCheck:
    """Compare batches that each chain has augmented, in each way, with the chain's ``reference``."""
    torch = require("torch", extra="torch")
    check = ChainCheck()
    for place in places:
        images = place.given(batches)[0]
        images = images[:SINGLE_SAMPLES] if place.is_single else images
        for way in ways_of(place):
            say(f"comparing: {place.label}: {way.label}")
            chain = place.recipe.chain(place.dtype, **way.options)
            parameters = chain.draw(images.shape, generator=torch.Generator().manual_seed(0))
            found, wanted = chain.apply(images, parameters), chain.reference(images, parameters)
            if way.apart is not None:
                check.add_like(f"{place.label}: {way.label}", found, wanted, way.apart)
                continue
            near, most_far = NEAR, MOST_FAR[place.device]
            if place.recipe.has_policy and place.dtype == "float32":  # the policy counts floats as bytes
                near, most_far = LEVEL, max(MOST_WRAPPED, most_far)
            check.add(f"{place.label}: {way.label}", found, wanted, near, most_far)
    return check


# ---- The case: its options, its rows, its result ----------------------------------------------------

BATCH, QUICK_BATCH = 64, 4


class Bench(Case):
    case = "augment"
    about = "augmentation of batches: torchvision sample by sample, and others, against fastpipe.augment"
    recipes: ClassVar[Sequence[Recipe]] = RECIPES
    batches: Batches
    photos: Photos
    devices: Sequence[str]
    places: list[Place]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add, keys = parser.add_argument, [one.key for one in cls.recipes]
        add("--data", metavar="FOLDER", type=Path,
            help=f"image folder whose photos are augmented{DATA_HELP}")  # fmt: skip
        add("--batch-size", type=positive(int), metavar="N",
            help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
        add("--recipe", action="append", choices=keys, metavar="NAME",
            help=f"only this: {', '.join(keys)}; may be given again (default: all)")  # fmt: skip
        add_run_arguments(parser)

    def prepare(self) -> None:
        args = self.args
        folder, name, _ = folder_to_use(args.data, self.progress.done)
        self.photos = scan(folder, name)
        size = args.batch_size or (QUICK_BATCH if args.quick else BATCH)
        self.batches = made_batches(folder, name, size)
        has_cuda = require("torch", extra="torch").cuda.is_available()
        self.devices = ["cpu", *(["cuda"] if has_cuda else [])]
        self.places = self.places_of(one for one in self.recipes if not args.recipe or one.key in args.recipe)
        self.main = f"{self.places[0].key}-batch"

    def places_of(self, recipes: Iterable[Recipe]) -> list[Place]:
        every = list(recipes)
        return [Place(one, dtype, device) for device in self.devices for one in every for dtype in one.dtypes]

    def rows(self) -> list[Contender]:
        if "cuda" not in self.devices:
            self.miss("cuda", "on CUDA", "torch finds no CUDA device")
        return self.rows_of(self.places)

    def rows_of(self, places: Iterable[Place]) -> list[Contender]:
        return [self.added(*pair) for place in places for pair in own_rows(place, self.batches)]

    def compared(self, rows: Sequence[Any]) -> Outcome:
        return check_chains(self.places, self.batches, self.progress.now)

    def described(self, session: Session) -> dict[str, Any]:
        counts = sorted({self.batches.count(place.recipe.unit) for place in self.places})
        short, size = f"augmentation of batches of {' or '.join(map(str, counts))}", len(self.batches)
        text = f"{short}: recipes, from decoded samples to a model's input"
        return {
            "data": {"text": self.batches.text, "name": self.batches.name, "samples": size},
            "sections": {place.key: {"label": place.label} for place in self.places},
            "job": {"text": text, "short": short, "batch_size": size, "replaces": "transform"},
            "plan": str(self.places[0].recipe.chain("float32")),
        }
