"""The case ``augment``: batches augmented sample by sample by many scripts, against ``fastpipe.augment``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from rich.console import Console

from fastpipe import augment
from fastpipe.bench import machine, scripts
from fastpipe.bench.data import Photos, folder_to_use, listed, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.loaders import (
    MEAN,
    SIDE,
    STD,
    check_transform,
    touch,
)
from fastpipe.bench.results import RowInfo, best_by_section, entries, verdict
from fastpipe.bench.runner import Contender
from fastpipe.bench.synthetic import mel_rows
from fastpipe.console import Progress, positive
from fastpipe.core.extras import require

__all__ = [
    "BANDS",
    "CLASSES",
    "FRAMES",
    "PAIRS",
    "POLICIES",
    "RECIPES",
    "SIZE",
    "VOLUMES",
    "WAYS",
    "WHOSE",
    "AugmentRow",
    "Batches",
    "Bench",
    "ChainCheck",
    "Place",
    "Recipe",
    "Way",
    "add_arguments",
    "chain_of",
    "check_chains",
    "made_batches",
    "made_motion",
    "made_volumes",
    "own_rows",
    "run",
    "sampled",
    "ways_of",
]


# ---- Batches ---------------------------------------------------------------------------------------

BANDS, FRAMES = 80, 400
CLASSES = 1000
VOLUMES, SIZE = 2, (72, 136, 136)  # of a batch, as large as patches are
SEQUENCES, MOTION = 64, (250, 25, 3)  # frames, joints and coordinates: ten seconds


@dataclass(frozen=True)
class Batches:
    """A batch of photos, one of spectrograms, one of volumes and one of motion.

    Attributes:
        name: what the report calls the photos.
        photos: uint8 (N, 3, 224, 224).
        spectrograms: float32 (N, 80, 400).
        volumes, labels_of_volumes: float32 (M, 1, D, H, W), and uint8 (M, D, H, W) of a few classes.
        motion, lengths: float32 (K, T, J, C), and int64 (K,).
    """

    name: str
    photos: npt.NDArray[np.uint8]
    spectrograms: npt.NDArray[np.float32]
    volumes: npt.NDArray[np.float32]
    labels_of_volumes: npt.NDArray[np.uint8]
    motion: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def text(self) -> str:
        """The data in one line."""
        count = len(self)
        return (
            f"a batch of {count} photos of {SIDE}×{SIDE} ({self.name}), again and again,"
            f" one of {count} made-up spectrograms of {BANDS}×{FRAMES},"
            f" one of {len(self.volumes)} made-up volumes of {_times(self.volumes.shape[2:])} with labels,"
            f" and one of {len(self.motion)} made-up sequences of {_times(self.motion.shape[1:])}"
        )

    def count(self, unit: str) -> int:
        """Samples in a batch."""
        return {"volumes": len(self.volumes), "sequences": len(self.motion)}.get(unit, len(self))

    def tensor(self, unit: str, dtype: str, device: str) -> Any:
        """A batch."""
        torch = require("torch", extra="torch")
        arrays = {"spectrograms": self.spectrograms, "volumes": self.volumes, "sequences": self.motion}
        if unit in arrays:
            return torch.from_numpy(arrays[unit]).to(device)
        photos = torch.from_numpy(self.photos)
        return (photos / 255 if dtype == "float32" else photos).to(device)

    def more(self, unit: str, device: str) -> Any:
        """What is given beside a batch: labels of volumes, lengths of sequences."""
        torch = require("torch", extra="torch")
        found = self.labels_of_volumes if unit == "volumes" else self.lengths
        return torch.from_numpy(found).to(device)

    def labels(self, device: str) -> Any:
        """Numbers of classes, one for each sample."""
        return require("torch", extra="torch").arange(len(self), device=device) % CLASSES

    def save(self, folder: Path) -> dict[str, str]:
        """Write what other processes need as NumPy's files; return their paths by name."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "photos": self.photos, "spectrograms": self.spectrograms, "volumes": self.volumes,
            "labels_of_volumes": self.labels_of_volumes,
        }  # fmt: skip
        paths = {name: str(folder / f"{name}.npy") for name in arrays}
        for name, array in arrays.items():
            np.save(paths[name], array)
        return paths


def made_batches(folder: Path, name: str, count: int) -> Batches:
    """Photos of a folder, spread evenly over it, scaled and cut to one size; spectrograms are made up.

    Raises:
        OptionError: the folder cannot be used.
    """
    chosen = scan(folder, name, count).indices
    dataset = listed(folder, check_transform())
    images = [dataset[index][0].numpy() for index in chosen]
    # NumPy would stack them in the layout of the decoded images, which is not that of a loader's batch.
    photos = np.ascontiguousarray(np.stack([images[at % len(images)] for at in range(count)]))
    rng = np.random.default_rng(0)
    return Batches(
        name, photos, mel_rows(rng, count, (BANDS, FRAMES)), *made_volumes(rng, VOLUMES, SIZE),
        *made_motion(rng, SEQUENCES, MOTION),
    )  # fmt: skip


def made_volumes(
    rng: np.random.Generator, count: int, size: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Smooth volumes with some noise, of mean 0 and standard deviation 1; labels are four levels of them."""
    torch = require("torch", extra="torch")
    small = torch.from_numpy(rng.standard_normal((count, 1, 6, 9, 9), np.float32))
    smooth = torch.nn.functional.interpolate(small, size, mode="trilinear").numpy()
    values = smooth + 0.1 * rng.standard_normal(smooth.shape, np.float32)
    values = (values - values.mean()) / values.std()
    levels = np.quantile(smooth, [0.5, 0.8, 0.95])
    return values.astype(np.float32), np.digitize(smooth[:, 0], levels).astype(np.uint8)


def made_motion(
    rng: np.random.Generator, count: int, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Joints that wander, each sequence for at least half of the frames."""
    steps = rng.standard_normal((count, *shape), np.float32)
    lengths = rng.integers(shape[0] // 2, shape[0] + 1, count)
    motion: npt.NDArray[np.float32] = np.cumsum(steps, axis=1, dtype=np.float32) / np.float32(10)
    motion[np.arange(shape[0]) >= lengths[:, None]] = 0
    return motion, lengths


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


# ---- Recipes of papers -----------------------------------------------------------------------------
#
# Arguments of ``fastpipe.augment`` are torchvision's, so one text makes both: it is given a *kit*, the
# module that has the classes.

Kit = Any
BOTH = ("float32", "uint8")
# What scripts have of what torchvision has not.
_SCRIPTS = dict.fromkeys(("spectrograms", "volumes", "sequences"), scripts)
# Joints that change places in a mirror: of 25 those of left and right.
PAIRS = tuple((joint, joint + 1) for joint in range(1, 25, 2))
# Augmentations that draw from a list of changes.
POLICIES = ("RandAugment", "TrivialAugmentWide")


def _none(kit: Kit) -> list[Any]:
    return []


@dataclass(frozen=True)
class Recipe:
    """Something done to a batch.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables.
        ops: the operations on each sample, of a kit, for a dtype.
        mixes: those that mix the batch.
        dtypes: what it is measured with.
        unit: ``"images"``, ``"spectrograms"``, ``"volumes"`` or ``"sequences"`` of motion.
        takes_more: whether labels of volumes, or lengths of sequences, are given beside them.
        has_policy: whether changes are drawn from a list, some of which make bytes of floats and count them.
    """

    key: str
    label: str
    ops: Callable[[Kit, str], list[Any]]
    mixes: Callable[[Kit], list[Any]] = _none
    dtypes: Sequence[str] = BOTH
    unit: str = "images"
    has_policy: bool = False
    takes_more: bool = False

    @property
    def takes_labels(self) -> bool:
        """Whether it mixes the batch, with its labels."""
        return self.mixes is not _none


def floats(kit: Kit) -> Any:
    """Bytes to numbers of 0 to 1."""
    float32 = require("torch", extra="torch").float32
    return kit.ToDtype(float32) if kit is augment else kit.ToDtype(float32, scale=True)


def _ended(kit: Kit, dtype: str) -> list[Any]:
    """How images become a model's input."""
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
    """A policy with torchvision's defaults, as what follows the crop in a script."""
    return lambda kit, dtype: [kit.RandomHorizontalFlip(), getattr(kit, name)(), *_ended(kit, dtype)]


def mixed_up(kit: Kit) -> list[Any]:
    return [kit.MixUp(num_classes=CLASSES)]


def _volume(kit: Kit, dtype: str) -> list[Any]:
    """``augment.nnunet_default``, whose list it is."""
    return [
        kit.RandomAffine3D(30, (0.7, 1.4), p_rotation=0.2, p_scale=0.2),
        kit.RandomApply(kit.GaussianNoise3D((0.0, 0.1)), 0.1),
        kit.RandomApply(kit.GaussianBlur3D((0.5, 1.0), p_channel=0.5), 0.2),
        kit.RandomApply(kit.Brightness3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.Contrast3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.LowResolution3D((0.5, 1.0), p_channel=0.5), 0.25),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5), inverted=True), 0.1),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5)), 0.3),
        kit.RandomFlip3D(),
    ]


def _motion(kit: Kit, dtype: str) -> list[Any]:
    return [
        kit.MotionSpeed((0.8, 1.25)),
        kit.MotionTranslation(0.1),
        kit.MotionScale((0.9, 1.1)),
        kit.MotionMirror(PAIRS),
    ]


RECIPES = (
    Recipe("simclr", "SimCLR", _simclr),
    Recipe("deit", "DeiT", _deit, mixed_up, has_policy=True),
    Recipe(
        "specaugment", "SpecAugment", lambda kit, dtype: [kit.SpecAugment(2, 30, 2, 20)],
        dtypes=("float32",), unit="spectrograms",
    ),
    Recipe(
        "volume", "nnU-Net's default", _volume, dtypes=("float32",), unit="volumes", takes_more=True,
    ),
    Recipe(
        "motion", "motion: speed, translation, scale, mirror", _motion, dtypes=("float32",), unit="sequences",
        takes_more=True,
    ),
    *(
        Recipe(name.lower(), f"{name} after the crop", _after_the_crop(name), has_policy=True)
        for name in POLICIES
    ),
)  # fmt: skip


def chain_of(recipe: Recipe, dtype: str, **options: Any) -> Any:
    """A recipe as ``augment.Compose``."""
    if recipe.unit == "sequences" and recipe.takes_more:
        options["lengths"] = 1
    return augment.Compose([*recipe.ops(augment, dtype), *recipe.mixes(augment)], **options)


def sampled(recipe: Recipe, dtype: str) -> Callable[..., Any]:
    """A recipe sample by sample, as a dataset and a collate function do it.

    Returns:
        A function of a batch, and labels where the recipe mixes.
    """
    torch = require("torch", extra="torch")
    torchvision = require("torchvision.transforms.v2", extra="torch")
    ops = recipe.ops(_SCRIPTS.get(recipe.unit, torchvision), dtype)
    mixes = recipe.mixes(torchvision)
    if recipe.takes_more:
        return _with_more(ops)

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


def _with_more(ops: Sequence[Any]) -> Callable[..., Any]:
    """Operations on each sample and what is given beside it."""
    torch = require("torch", extra="torch")

    def change(*batch: Any) -> Any:
        rows = []
        for sample in zip(*batch, strict=True):
            for op in ops:
                sample = op(*sample)
            rows.append(sample)
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    return change


# ---- Rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A row of fastpipe's in each section of a recipe.

    Attributes:
        kind: the end of its key.
        label: its name in tables.
        options: of ``augment.Compose``.
        apart: of one that does not compute what torchvision does, how far values may be apart on average.
        note: what a reader should know.
    """

    kind: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: float | None = None
    note: str = ""


# What scripts do where torchvision has nothing.
WHOSE = {"spectrograms": "slices in torch", "volumes": "NumPy and SciPy", "sequences": "NumPy"}
# Another way to apply a chain is another line here.
WAYS = (
    Way("batch", "augment.Compose"),
    Way("fused", "augment.Compose, fuse=True", {"fuse": True}, 0.3, "one resampling; changes pixels"),
)


_ON_HOST = ("volumes", "sequences")


@dataclass(frozen=True)
class Place:
    """A recipe with what it is applied to: a section of the result, or a single operation.

    Attributes:
        recipe: what is done.
        dtype: of the batch.
        device: where it is, ``"cpu"`` or ``"cuda"``.
    """

    recipe: Recipe
    dtype: str
    device: str = "cpu"

    @property
    def is_single(self) -> bool:
        """Whether it is a single operation."""
        return self.recipe.key.startswith("op-")

    @property
    def task(self) -> str:
        """Its name, whatever the device."""
        return f"{self.recipe.key}-{self.dtype}"

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return self.task if self.device == "cpu" else f"{self.task}-{self.device}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        where = "" if self.device == "cpu" else ", on CUDA"
        return f"{self.recipe.label}, {self.dtype}{where}"

    def info(self, kind: str, label: str, group: str, note: str = "") -> RowInfo:
        """What the report calls one of its rows."""
        return RowInfo(
            f"{self.key}-{kind}", label, group, None, "float32", note,
            section=self.key, unit=self.recipe.unit,
        )  # fmt: skip

    def given(self, batches: Batches) -> tuple[Any, ...]:
        """The batch, with labels where the recipe mixes, or what is given beside it."""
        images = batches.tensor(self.recipe.unit, self.dtype, self.device)
        if self.recipe.takes_more:
            return images, batches.more(self.recipe.unit, self.device)
        return (images, batches.labels(self.device)) if self.recipe.takes_labels else (images,)


class AugmentRow:
    """A `Contender` that augments one batch again and again."""

    workers = 0

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
        """Augment so many samples; return the seconds it took."""
        with _threads(self._threads):
            self._wait()
            start = time.perf_counter()
            for _ in range(count // self.chunk):
                found = self._work()
                # To look at a number is to wait for the device.
                if self._device == "cpu":
                    touch(found)
            self._wait()
            return time.perf_counter() - start

    def close(self) -> None:
        """Let go of the batch."""
        self._work = lambda: None

    def _wait(self) -> None:
        if self._device != "cpu":
            require("torch", extra="torch").cuda.synchronize()


def own_rows(place: Place, batches: Batches) -> Iterator[tuple[RowInfo, AugmentRow]]:
    """The rows of a recipe in this process; what scripts do comes first.  Single operations have fewer."""
    recipe, dtype, given = place.recipe, place.dtype, place.given(batches)

    def row(
        kind: str, label: str, group: str, change: Any, note: str = "", threads: int | None = None
    ) -> tuple[RowInfo, AugmentRow]:
        info = place.info(kind, label, group, note)
        return info, AugmentRow(info.key, lambda: change(*given), len(given[0]), place.device, threads)

    stock, each = sampled(recipe, dtype), f"{WHOSE.get(recipe.unit, 'torchvision v2')}, sample by sample"
    if place.recipe.unit in _ON_HOST and place.device != "cpu":
        pass  # NumPy has nothing there
    elif place.device == "cpu":
        count = require("torch", extra="torch").get_num_threads()
        note = f"torch's default, {count} thread{'s' if count != 1 else ''}"
        yield row("replaced", each, "replaced", stock, note)
        if not place.is_single:
            yield row("worker", f"{each}, one thread", "replaced", stock, "as in a worker process", 1)
    else:
        yield row("replaced", each, "replaced", stock)
    for way in ways_of(place):
        yield row(way.kind, way.label, "fastpipe", chain_of(recipe, dtype, **way.options), way.note)


def ways_of(place: Place) -> tuple[Way, ...]:
    """The ways that are measured: of a single operation, and of what are no images, nothing can be fused."""
    return WAYS[:1] if place.is_single or place.recipe.unit != "images" else WAYS


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads within an operation."""
    if count is None:
        yield
        return
    torch = require("torch", extra="torch")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- Are the images those of torchvision's functions? ----------------------------------------------

# What rounding in another order may come to, of numbers of 0 to 1 and of what is normalised.
NEAR = 2e-4
# A policy equalises floats by their histogram as bytes: a value that falls on the other side of a step may
# move all others by a level, here of what is normalised.
LEVEL = 1.01 / 255 / min(STD)
# Bicubic crops of floats go beyond 0 and 1, where torchvision's conversion to bytes wraps around.
MOST_WRAPPED = 0.05
# A value beside a step (of bytes, of a policy's thresholds) may fall on the step's other side.  The processor
# rounds as torchvision does; on a device colours are computed in another order, and a policy may go on to
# invert one of two.
MOST_FAR = {"cpu": 0.01, "cuda": 0.1}
# Of a batch of a single operation, of which there are many: torchvision's functions take image by image.
SINGLE_SAMPLES = 16


@dataclass
class ChainCheck:
    """How batches compare with torchvision's functions, given the same parameters.

    Attributes:
        batches: how many were compared.
        alike: of these, those of which only the average was.
        values: how many numbers.
        far: how many of them differ by more than rounding, or than a level where bytes are counted.
        largest: the largest difference of the others.
        problems: what is wrong; empty when all is well.
        waiting: chains on CUDA whose call keeps the host waiting, where that was looked at.
    """

    batches: int = 0
    alike: int = 0
    values: int = 0
    far: int = 0
    largest: float = 0.0
    problems: tuple[str, ...] = ()
    waiting: Sequence[str] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, what: str, found: Any, wanted: Any, near: float, most_far: float) -> None:
        """Compare a batch."""
        if not self._is_of_form(what, found, wanted):
            return
        apart = (found.float() - wanted.float()).abs()
        # What is no number is far from everything.
        is_far = ~(apart <= near)
        far = int(is_far.sum())
        self.values, self.far = self.values + apart.numel(), self.far + far
        if far < apart.numel():
            self.largest = max(self.largest, float(apart[~is_far].max()))
        if far > most_far * apart.numel():
            self.problems += (f"{what}: {far / apart.numel():.2%} of the values differ",)

    def add_like(self, what: str, found: Any, wanted: Any, most_apart: float) -> None:
        """Compare a batch that is only like what it should be."""
        if not self._is_of_form(what, found, wanted):
            return
        self.alike += 1
        apart = float((found.float() - wanted.float()).abs().mean())
        if not apart <= most_apart:
            self.problems += (
                f"{what}: values are {apart:.2g} apart on average, at most {most_apart:g} asked",
            )

    def _is_of_form(self, what: str, found: Any, wanted: Any) -> bool:
        """Whether dtype and shape are the same; what is not is noted."""
        self.batches += 1
        is_same: bool = found.dtype == wanted.dtype and found.shape == wanted.shape
        if not is_same:
            seen, right = (f"{one.dtype} {tuple(one.shape)}" for one in (found, wanted))
            self.problems += (f"{what}: a batch is {seen}, expected {right}",)
        return is_same

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            return f"outputs differ from torchvision's functions: {'; '.join(self.problems)}"
        exact, equal = self.batches - self.alike, 1 - self.far / max(1, self.values)
        return (
            f"{exact} batches agree with torchvision's functions, or NumPy's and SciPy's, given the same"
            f" parameters: {equal:.4%} of {self.values:,} values differ by at most {self.largest:.1g}, the"
            " others are beside a step"
            + (f"; {self.alike} that are fused are like them" if self.alike else "")
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        names = ("batches", "alike", "values", "far", "largest", "waiting")
        told = {name: getattr(self, name) for name in names}
        return {**told, "problems": list(self.problems), "ok": self.ok, "text": self.sentence()}


def check_chains(
    places: Iterable[Place], batches: Batches, say: Callable[[str], None] = lambda text: None
) -> ChainCheck:
    """Compare each chain with its ``reference``, in each way that it is applied."""
    torch = require("torch", extra="torch")
    check = ChainCheck()
    for place in places:
        images = place.given(batches)[0]
        images = images[:SINGLE_SAMPLES] if place.is_single else images
        for way in ways_of(place):
            say(f"comparing: {place.label}: {way.label}")
            chain = chain_of(place.recipe, place.dtype, **way.options)
            parameters = chain.draw(images.shape, generator=torch.Generator().manual_seed(0))
            found, wanted = chain.apply(images, parameters), chain.reference(images, parameters)
            if way.apart is not None:
                check.add_like(f"{place.label}: {way.label}", found, wanted, way.apart)
                continue
            counts_bytes = place.recipe.has_policy and place.dtype == "float32"
            near, most_far = NEAR, MOST_FAR[place.device]
            if counts_bytes:
                near, most_far = LEVEL, max(MOST_WRAPPED, most_far)
            check.add(f"{place.label}: {way.label}", found, wanted, near, most_far)
    return check


# ---- The case: its options, its rows, its result ----------------------------------------------------

BATCH, QUICK_BATCH = 64, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder whose photos are augmented (default: "
        "$FASTPIPE_PHOTOS, else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), metavar="N",
        help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
    add("--recipe", action="append", choices=[one.key for one in RECIPES], metavar="NAME",
        help="only this: " + ", ".join(one.key for one in RECIPES)
        + "; may be given again (default: all)")  # fmt: skip
    add_run_arguments(parser)


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for; return 1 when images are not those of torchvision's
    functions.

    Raises:
        OptionError: the photos cannot be used.
    """
    folder, name, _ = folder_to_use(args.data, progress.done)
    photos = scan(folder, name)
    size = args.batch_size or (QUICK_BATCH if args.quick else BATCH)
    batches = made_batches(folder, name, size)
    devices = ["cpu"]
    if require("torch", extra="torch").cuda.is_available():
        devices.append("cuda")
    cores = machine.cores_allowed()
    bench = (kind or Bench)(args, cores, progress, batches=batches, photos=photos, devices=devices)
    return bench.run(console)


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "augment"
    batches: Batches = field(kw_only=True)
    photos: Photos = field(kw_only=True)
    devices: Sequence[str] = field(kw_only=True)

    def __post_init__(self) -> None:
        asked = self.args.recipe
        self.places = self.places_of([one for one in RECIPES if not asked or one.key in asked])

    def places_of(self, recipes: Iterable[Recipe]) -> list[Place]:
        """Return recipes with all that they are applied to."""
        return [
            Place(one, dtype, device) for device in self.devices for one in recipes for dtype in one.dtypes
        ]

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        check = self.compared()
        self.progress.done(f"check: {check.sentence()}")
        if not check.ok:
            return None
        if "cuda" not in self.devices:
            self.miss("cuda", "on CUDA", "torch finds no CUDA device")
        with ExitStack() as stack:
            contenders = [row for place in self.places for row in self.rows_of(place, stack)]
            session = self.measure([*contenders, *self.all_others(stack)])
        sections = self.sections()
        rows = entries([info for info in self.infos.values() if info.section in sections], session)
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": f"{self.places[0].key}-batch",
            "rows": rows,
            "best": best_by_section(rows),
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": str(chain_of(self.places[0].recipe, "float32")),
            **self.studies(session),
        }
        result["verdict"] = verdict(result)
        return result

    def compared(self) -> ChainCheck:
        """Compare all chains with torchvision's functions."""
        return check_chains(self.places, self.batches, self.progress.now)

    def sections(self) -> dict[str, Any]:
        """Return the sections of the result."""
        return {place.key: {"label": place.label} for place in self.places}

    def rows_of(self, place: Place, stack: ExitStack) -> list[Contender]:
        """Build the rows of a recipe."""
        found: list[Contender] = []
        for info, row in own_rows(place, self.batches):
            stack.callback(row.close)
            self.infos[info.key] = info
            found.append(row)
        return found

    def options(self) -> list[str]:
        """Return the case's own options, with names in place of paths."""
        args = self.args
        words = [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--batch-size {len(self.batches)}"] if args.batch_size else []
        return words + [f"--recipe {one}" for one in args.recipe or ()]

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        size = len(self.batches)
        counts = sorted({self.batches.count(place.recipe.unit) for place in self.places})
        of = " or ".join(map(str, counts))
        return self.facts(self.options(), busy) | {
            "data": {"text": self.batches.text, "name": self.batches.name, "samples": size},
            "sections": self.sections(),
            "job": {
                "text": f"augmentation of batches of {of}: recipes, from decoded samples to a model's input",
                "short": f"augmentation of batches of {of}",
                "batch_size": size,
                "replaces": "transform",
            },
        }
