"""The case ``augment``: batches augmented sample by sample by many scripts, against ``fastpipe.augment``."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.cases.augment import (
    AUGMENT_PEERS,
    AugmentChild,
    AugmentPeer,
    TaskRow,
    single_of,
    targets,
    wanted_of,
)
from benchmarks.peers.rows import interpreter
from fastpipe import augment
from fastpipe._extras import require
from fastpipe.bench import machine, scripts
from fastpipe.bench import scripts as motion_scripts
from fastpipe.bench import scripts as volume_scripts
from fastpipe.bench.data import Photos, folder_to_use, listed, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.loaders import (
    MEAN,
    SIDE,
    STD,
    LoaderRow,
    LoaderSpec,
    check_transform,
    touch,
    train_transform,
)
from fastpipe.bench.results import RowInfo, entries, rate_of, verdict
from fastpipe.bench.runner import Contender, ContenderError
from fastpipe.bench.synthetic import mel_rows
from fastpipe.console import Progress, positive

__all__ = [
    "BANDS",
    "CLASSES",
    "FRAMES",
    "LOADED",
    "PAIRS",
    "POLICIES",
    "RECIPES",
    "SINGLE",
    "SIZE",
    "VOLUMES",
    "WAYS",
    "WHOSE",
    "AugmentRow",
    "Batches",
    "ChainCheck",
    "Loaded",
    "Place",
    "Recipe",
    "Way",
    "add_arguments",
    "calls_that_wait",
    "chain_of",
    "check_chains",
    "loader_rows",
    "made_batches",
    "made_motion",
    "made_volumes",
    "own_rows",
    "run",
    "sampled",
    "ways_of",
]


# ----------------------------------------------------------------------------------------------------
# The case ``augment``: batches augmented sample by sample by many scripts, against ``fastpipe.augment``.
#
# ============ ==================================================================== ``case`` its options,
# its rows, its result ``data`` which batches are augmented ``recipes`` what is done to them: recipes of
# papers, and single operations ``scripts`` the same for spectrograms, as a script writes it ``rows`` the
# rows: what augments in this process ``peers`` the rows: other libraries, each in its own process
# ``loading`` the rows: loaders, from files ``check`` are the images those of torchvision's functions?
# Does a call wait? ``single`` figures of single operations ``targets`` what was asked for ============
# ====================================================================

__all__: list[str] = []


# ---- Which batches are augmented --------------------------------------------------------------------

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
        """A batch.

        Args:
            unit: ``"images"``, ``"spectrograms"``, ``"volumes"`` or ``"sequences"``.
            dtype: ``"float32"`` or ``"uint8"``.
            device: where it is.
        """
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

    Args:
        folder: an image folder.
        name: what the report calls it.
        count: samples in a batch; photos are taken again where there are fewer.

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


# ---- What is done to a batch: recipes of papers, and single operations ------------------------------
#
# Arguments of ``fastpipe.augment`` are torchvision's, so one text makes both: it is given a *kit*, the
# module that has the classes.

Kit = Any
_BOTH = ("float32", "uint8")
# What scripts have of what torchvision has not.
_SCRIPTS = {"spectrograms": scripts, "volumes": volume_scripts, "sequences": motion_scripts}
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
    dtypes: Sequence[str] = _BOTH
    unit: str = "images"
    has_policy: bool = False
    takes_more: bool = False

    @property
    def takes_labels(self) -> bool:
        """Whether it mixes the batch, with its labels."""
        return self.mixes is not _none


def _floats(kit: Kit) -> Any:
    """Bytes to numbers of 0 to 1."""
    float32 = require("torch", extra="torch").float32
    return kit.ToDtype(float32) if kit is augment else kit.ToDtype(float32, scale=True)


def _ended(kit: Kit, dtype: str) -> list[Any]:
    """How images become a model's input."""
    return [*([_floats(kit)] if dtype == "uint8" else []), kit.Normalize(MEAN, STD)]


def _mode(name: str) -> Any:
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
        kit.RandomResizedCrop(SIDE, interpolation=_mode("bicubic")),
        kit.RandomHorizontalFlip(),
        kit.RandAugment(2, 9),
        *_ended(kit, dtype),
        kit.RandomErasing(0.25, value="random"),
    ]


def _after_the_crop(name: str) -> Callable[[Kit, str], list[Any]]:
    """A policy with torchvision's defaults, as what follows the crop in a script."""
    return lambda kit, dtype: [kit.RandomHorizontalFlip(), getattr(kit, name)(), *_ended(kit, dtype)]


def _mixed_up(kit: Kit) -> list[Any]:
    return [kit.MixUp(num_classes=CLASSES)]


def _cut_mixed(kit: Kit) -> list[Any]:
    return [kit.CutMix(num_classes=CLASSES)]


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
    Recipe("deit", "DeiT", _deit, _mixed_up, has_policy=True),
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


def _single(
    name: str, make: Callable[[Kit], Any], dtypes: Sequence[str] = _BOTH, unit: str = "images"
) -> Recipe:
    has_more = unit == "sequences"
    return Recipe(
        f"op-{name}", name, lambda kit, dtype: [make(kit)], dtypes=dtypes, unit=unit, takes_more=has_more
    )


def _of_policy(name: str) -> Recipe:
    """With torchvision's defaults."""
    return Recipe(f"op-{name}", name, lambda kit, dtype: [getattr(kit, name)()], has_policy=True)


def _of_volumes(name: str, make: Callable[[Kit], Any]) -> Recipe:
    return _single(name, make, _FLOAT, "volumes")


def _of_motion(name: str, make: Callable[[Kit], Any]) -> Recipe:
    return _single(name, make, _FLOAT, "sequences")


_FLOAT = ("float32",)
SINGLE = (
    _single("RandomResizedCrop", lambda kit: kit.RandomResizedCrop(SIDE)),
    _single("RandomHorizontalFlip", lambda kit: kit.RandomHorizontalFlip()),
    _single("RandomVerticalFlip", lambda kit: kit.RandomVerticalFlip()),
    _single(
        "RandomAffine",
        lambda kit: kit.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=_mode("bilinear")),
    ),
    _single("RandomRotation", lambda kit: kit.RandomRotation(30, interpolation=_mode("bilinear"))),
    _single("ColorJitter", lambda kit: kit.ColorJitter(0.8, 0.8, 0.8, 0.2)),
    _single("RandomGrayscale", lambda kit: kit.RandomGrayscale(0.2)),
    _single("GaussianBlur", lambda kit: kit.GaussianBlur(23)),
    _single("RandomErasing", lambda kit: kit.RandomErasing(0.25)),
    *map(_of_policy, POLICIES),
    _single("ToDtype", _floats, ("uint8",)),
    _single("Normalize", lambda kit: kit.Normalize(MEAN, STD), _FLOAT),
    Recipe("op-MixUp", "MixUp", lambda kit, dtype: [], _mixed_up, _FLOAT),
    Recipe("op-CutMix", "CutMix", lambda kit, dtype: [], _cut_mixed, _FLOAT),
    _single("SpecAugment", lambda kit: kit.SpecAugment(2, 30, 2, 20), _FLOAT, "spectrograms"),
    _single("RandomGain", lambda kit: kit.RandomGain(6.0), _FLOAT, "spectrograms"),
    _single("TimeShift", lambda kit: kit.TimeShift(40), _FLOAT, "spectrograms"),
    _of_volumes("RandomAffine3D", lambda kit: kit.RandomAffine3D(30, (0.7, 1.4))),
    _of_volumes("RandomElastic3D", lambda kit: kit.RandomElastic3D((3, 4, 4), 3.0)),
    _of_volumes("RandomFlip3D", lambda kit: kit.RandomFlip3D()),
    _of_volumes("RandomRotate90", lambda kit: kit.RandomRotate90()),
    _of_volumes("GaussianNoise3D", lambda kit: kit.GaussianNoise3D((0.0, 0.1))),
    _of_volumes("GaussianBlur3D", lambda kit: kit.GaussianBlur3D((0.5, 1.0))),
    _of_volumes("Brightness3D", lambda kit: kit.Brightness3D((0.75, 1.25))),
    _of_volumes("Contrast3D", lambda kit: kit.Contrast3D((0.75, 1.25))),
    _of_volumes("LowResolution3D", lambda kit: kit.LowResolution3D((0.5, 1.0))),
    _of_volumes("Gamma3D", lambda kit: kit.Gamma3D((0.7, 1.5))),
    _of_motion("MotionSpeed", lambda kit: kit.MotionSpeed((0.8, 1.25))),
    _of_motion("MotionTranslation", lambda kit: kit.MotionTranslation(0.1)),
    _of_motion("MotionScale", lambda kit: kit.MotionScale((0.9, 1.1))),
    _of_motion("MotionMirror", lambda kit: kit.MotionMirror(PAIRS)),
)


def chain_of(recipe: Recipe, dtype: str, **options: Any) -> Any:
    """A recipe as ``augment.Compose``.

    Args:
        recipe: what is done.
        dtype: of the images before.
        options: of ``Compose``.
    """
    if recipe.unit == "sequences" and recipe.takes_more:
        options["lengths"] = 1
    return augment.Compose([*recipe.ops(augment, dtype), *recipe.mixes(augment)], **options)


def sampled(recipe: Recipe, dtype: str) -> Callable[..., Any]:
    """A recipe sample by sample, as a dataset and a collate function do it.

    Args:
        recipe: what is done.
        dtype: of the images before.

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


# ---- The rows of the case that augment in this process ----------------------------------------------


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
    """A `Contender` that augments one batch again and again.

    Args:
        key: its name.
        work: augments the batch once.
        batch_size: samples in it.
        device: where it is; the clock is read when a device has done everything.
        threads: how many threads torch may use; None for as many as it does by itself.
    """

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
    """The rows of a recipe in this process; what scripts do comes first.  Single operations have fewer.

    Args:
        place: the recipe.
        batches: what it is applied to.
    """
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


# ----------------------------------------------------------------------------------------------------
# The rows of the case that are loaders: recipes from files to a model's input, whole and split.


@dataclass(frozen=True)
class Loaded:
    """A transform of a dataset, from PIL images to tensors.

    Attributes:
        key: the name of its section in the JSON file.
        label: its name in tables.
        transform: makes it.
    """

    key: str
    label: str
    transform: Callable[[], Any]


def _of_recipe(number: int) -> Any:
    """A recipe as a script's transform: what can be done to PIL images is, and tensors are made after it."""
    v2 = require("torchvision.transforms.v2", extra="torch")
    ops = RECIPES[number].ops(v2, "uint8")
    at = next(at for at, op in enumerate(ops) if isinstance(op, v2.ToDtype))
    return v2.Compose([*ops[:at], v2.ToImage(), *ops[at:]])


def _cropped(number: int) -> Any:
    """A recipe that follows the crop, with the crop."""
    v2 = require("torchvision.transforms.v2", extra="torch")
    return v2.Compose([v2.RandomResizedCrop(SIDE), *_of_recipe(number).transforms])


def _grey() -> Any:
    """The least that can be split off."""
    kit: Kit = require("torchvision.transforms", extra="torch")
    crop, flip, *end = train_transform("float32").transforms
    return kit.Compose([crop, flip, kit.RandomGrayscale(0.2), *end])


# Another transform to be loaded with is another line here.
LOADED = (
    Loaded("files-simclr", "from files: SimCLR", lambda: _of_recipe(0)),
    Loaded("files-deit", "from files: DeiT, no MixUp", lambda: _of_recipe(1)),
    Loaded("files-randaugment", "from files: crop, flip, RandAugment, normalise", lambda: _cropped(5)),
    Loaded(
        "files-trivialaugmentwide",
        "from files: crop, flip, TrivialAugmentWide, normalise",
        lambda: _cropped(6),
    ),
    Loaded("files-grey", "from files: crop, flip, RandomGrayscale(.2), normalise", _grey),
    Loaded("files-crop", "from files: crop, flip, normalise", lambda: train_transform("float32")),
)


def loader_rows(
    loaded: Loaded, photos: Photos, batch_size: int, cores: int
) -> list[tuple[RowInfo, Callable[[], LoaderRow]]]:
    """The rows of a section, and what makes them.

    Args:
        loaded: the transform.
        photos: what is loaded.
        batch_size: images in a batch.
        cores: how many workers the replaced loader has.
    """
    fast = "FastImageFolder + FastLoader"
    specs: Sequence[LoaderSpec] = (
        LoaderSpec(
            f"{loaded.key}-replaced", f"ImageFolder + DataLoader(num_workers={cores})", "replaced", cores
        ),
        LoaderSpec(f"{loaded.key}-whole", fast, "fastpipe"),
        LoaderSpec(f"{loaded.key}-auto", f'{fast}, augment="auto"', "fastpipe", augment="auto"),
    )

    def row(spec: LoaderSpec) -> tuple[RowInfo, Callable[[], LoaderRow]]:
        info = RowInfo(
            spec.key, spec.label, spec.group, spec.num_workers, "float32", spec.note, section=loaded.key,
            unit="images",
        )  # fmt: skip
        return info, lambda: LoaderRow(spec, photos.folder, photos.indices, batch_size, loaded.transform())

    return [row(spec) for spec in specs]


# ----------------------------------------------------------------------------------------------------
# Before anything is timed: are the images those of torchvision's functions? And does a call wait?

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

# What the CUDA runtime calls what keeps the host waiting.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


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
    """

    batches: int = 0
    alike: int = 0
    values: int = 0
    far: int = 0
    largest: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, what: str, found: Any, wanted: Any, near: float, most_far: float) -> None:
        """Compare a batch.

        Args:
            what: whose.
            found: tensor to check.
            wanted: what it should be.
            near: how far apart two values may be.
            most_far: the part of its values that may be far from it.
        """
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
        """Compare a batch that is only like what it should be.

        Args:
            what, found, wanted: as of `add`.
            most_apart: how far values may be apart on average.
        """
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
        told = {name: getattr(self, name) for name in ("batches", "alike", "values", "far", "largest")}
        return {**told, "problems": list(self.problems), "ok": self.ok, "text": self.sentence()}


def check_chains(
    places: Iterable[Place], batches: Batches, say: Callable[[str], None] = lambda text: None
) -> ChainCheck:
    """Compare each chain with its ``reference``, in each way that it is applied.

    Args:
        places: the recipes, with what they are applied to.
        batches: the data.
        say: told what is compared.
    """
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


def calls_that_wait(
    places: Iterable[Place], batches: Batches, say: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Chains on a device whose call keeps the host waiting, with what it waits in.

    Args:
        places: those on CUDA are looked at, all of fastpipe's ways.
        batches: the data.
        say: told what is looked at.
    """
    found = []
    for place in places:
        for way in ways_of(place) if place.device != "cpu" else ():
            say(f"profiling: {place.label}: {way.label}")
            chain, given = chain_of(place.recipe, place.dtype, **way.options), place.given(batches)
            if waits := _waits_of(lambda chain=chain, given=given: chain(*given)):  # type: ignore[misc]
                found.append(f"{place.label}: {way.label}: {', '.join(sorted(set(waits)))}")
    return found


def _waits_of(call: Callable[[], Any]) -> list[str]:
    """Names of the events within a call in which the host waits for the device."""
    torch, profiler = require("torch", extra="torch"), require("torch.profiler", extra="torch")
    for _ in range(2):  # pinned memory and kernels are made in the first call
        call()
    torch.cuda.synchronize()
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=activities) as profile:
        # The profiler itself waits at its end: only what is within the mark counts.
        with profiler.record_function("fastpipe-call"):
            call()
        torch.cuda.synchronize()
    return waits_within(profile.events(), "fastpipe-call")


def waits_within(events: Iterable[Any], mark: str) -> list[str]:
    """Names of those events, begun within the one called ``mark``, that wait for a device.

    Args:
        events: of torch's profiler.
        mark: the name.
    """
    told = list(events)
    spans = [event.time_range for event in told if event.name == mark]
    return [
        event.name
        for event in told
        if event.name in _WAITS and any(span.start <= event.time_range.start <= span.end for span in spans)
    ]


# ---- The case ``augment``: its options, its rows, its result ----------------------------------------

BATCH, QUICK_BATCH = 64, 4
# Of a measurement of a single operation, of which there are many.
SINGLE_S = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder whose photos are augmented (default: "
        "$FASTPIPE_PHOTOS, else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), metavar="N",
        help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
    add("--recipe", action="append", choices=[one.key for one in RECIPES], metavar="NAME",
        help="only this, and single operations on the same: " + ", ".join(one.key for one in RECIPES)
        + "; may be given again (default: all, and from files)")  # fmt: skip
    add("--no-single", action="store_true", help="leave single operations out, which are most of the rows")
    add_run_arguments(parser, "kornia, albumentations, torchaudio, batchgeneratorsv2 and MONAI")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when images are not those of torchvision's functions.

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
    bench = _Bench(args, machine.cores_allowed(), progress, batches=batches, photos=photos, devices=devices)
    return bench.run(console)


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "augment"
    batches: Batches = field(kw_only=True)
    photos: Photos = field(kw_only=True)
    devices: Sequence[str] = field(kw_only=True)

    def __post_init__(self) -> None:
        asked = self.args.recipe
        recipes = [one for one in RECIPES if not asked or one.key in asked]
        units = {one.unit for one in recipes}
        single = [] if self.args.no_single else [one for one in SINGLE if not asked or one.unit in units]
        self.places, self.single = (
            [Place(one, dtype, device) for device in self.devices for one in kind for dtype in one.dtypes]
            for kind in (recipes, single)
        )
        self.loaded = () if asked else LOADED
        self.main = f"{self.places[0].key}-batch"

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy, every = self.begin(), [*self.places, *self.single]
        check = check_chains(every, self.batches, self.progress.now)
        self.progress.done(f"check: {check.sentence()}")
        if not check.ok:
            return None
        waiting = self._waiting(every)
        with ExitStack() as stack:
            children = self._children(stack, every)
            contenders = [row for place in every for row in self._rows(place, children, stack)]
            contenders += self._loaders(stack)
            session = self.measure(contenders)
        sections = {*(place.key for place in self.places), *(one.key for one in self.loaded)}
        rows = entries([info for info in self.infos.values() if info.section in sections], session)
        result = self._facts(busy) | {
            "method": {**self.method(session.rounds), "single_s": SINGLE_S},
            "check": {**check.as_json(), "waiting": waiting},
            "main": self.main,
            "rows": rows,
            "best": _best(rows),
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": str(chain_of(self.places[0].recipe, "float32")),
            "single": single_of(self.single, self.infos, session.samples, self.batches.count),
            "targets": targets(session.samples, waiting, self.args.recipe or ()),
        }
        result["verdict"] = verdict(result)
        return result

    def seconds_of(self, contender: Contender) -> float:
        """Single operations are measured for less long."""
        seconds = super().seconds_of(contender)
        return min(seconds, SINGLE_S) if contender.key.startswith("op-") else seconds

    def _waiting(self, places: Sequence[Place]) -> list[str] | None:
        """Calls on CUDA that keep the host waiting; None where there is no CUDA."""
        if "cuda" not in self.devices:
            self.miss("cuda", "on CUDA", "torch finds no CUDA device")
            return None
        found = calls_that_wait(places, self.batches, self.progress.now)
        for text in found:
            self.warnings.append(f"a call waits for the device: {text}")
        self.progress.done(f"check: {len(found)} chains on CUDA keep the host waiting")
        return found

    def _rows(
        self, place: Place, children: Sequence[tuple[AugmentPeer, AugmentChild]], stack: ExitStack
    ) -> list[Contender]:
        """All rows of a recipe."""
        found: list[Contender] = []
        for info, row in own_rows(place, self.batches):
            stack.callback(row.close)
            self.infos[info.key] = info
            found.append(row)
        for peer, child in children:
            if peer.does(place):
                info = child.told(peer.info(place))
                self.infos[info.key] = info
                found.append(TaskRow(info.key, child, place.task, self.batches.count(place.recipe.unit)))
        return found

    def _loaders(self, stack: ExitStack) -> list[Contender]:
        """The rows from files."""
        size, found = len(self.batches), []
        for loaded in self.loaded:
            for info, make in loader_rows(loaded, self.photos, size, self.cores):
                if (row := self.open(stack, info, make)) is not None:
                    found.append(row)
        return found

    def _children(self, stack: ExitStack, places: list[Place]) -> list[tuple[AugmentPeer, AugmentChild]]:
        """Start the peers; one that is not there is noted, and what one lacks."""
        if not self.args.peers:
            return []
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
        files, found = self.batches.save(folder), []
        for peer in AUGMENT_PEERS:
            if (child := self._child(peer, files, wanted_of(peer, places))) is not None:
                stack.callback(child.close)
                found.append((peer, child))
                for recipe, why in (peer.lacks or {}).items():
                    self.miss(f"{recipe}-{peer.peer.key}", f"{recipe}: {peer.peer.label}", why)
        return found

    def _child(self, peer: AugmentPeer, files: Mapping[str, str], places: list[Place]) -> AugmentChild | None:
        """The process of a peer, or ``None``."""
        one, python = peer.peer, interpreter(peer.peer)
        if not places:
            return None
        if python is None:
            self.miss(one.key, one.label, f"not installed: {one.install}")
            return None
        self.progress.now(f"starting {one.label}")
        try:
            return AugmentChild(peer, python, files, places, len(self.batches), self.cores)
        except ContenderError as error:
            self.miss(one.key, one.label, str(error))
            return None

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, size = self.args, len(self.batches)
        words = [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--batch-size {size}"] if args.batch_size else []
        words += [f"--recipe {one}" for one in args.recipe or ()]
        words += ["--no-single"] if args.no_single else []
        counts = sorted({self.batches.count(place.recipe.unit) for place in self.places})
        of = " or ".join(map(str, counts))
        return self.facts(words, busy) | {
            "data": {"text": self.batches.text, "name": self.batches.name, "samples": size},
            "sections": {
                **{place.key: {"label": place.label} for place in self.places},
                **{loaded.key: {"label": loaded.label} for loaded in self.loaded},
            },
            "job": {
                "text": f"augmentation of batches of {of}: recipes, from decoded samples to a model's input",
                "short": f"augmentation of batches of {of}",
                "batch_size": size,
                "replaces": "transform",
            },
        }


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Section → the faster of the rows that are replaced."""
    best: dict[str, str] = {}
    replaced = [entry for entry in rows if entry["group"] == "replaced"]
    for entry in sorted(replaced, key=lambda entry: rate_of(entry)["median"]):
        best[entry["section"]] = entry["key"]
    return best
