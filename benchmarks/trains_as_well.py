"""Does a swap train as well?  Accuracies before and after it, from many seeds.

::

    python benchmarks/trains_as_well.py --json result.json
    python benchmarks/trains_as_well.py --only motion --seeds 32

A *run* trains a small model from a seed and returns the part of a large test set that it is right about, in
percent.  *Before* is the script, the transform or the layer that is replaced; *after* is fastpipe.  Both
runs of a seed begin with the same weights, and learn from the same samples; augmentations have these in the
same order.  Random changes are drawn apart.  So runs are compared in pairs: the mean of the differences, with
its 95 % interval by Student's t.  The interval should hold 0 and be narrower than ± 2 points.  One in twenty
misses 0 by chance, so a swap that does is measured again with other seeds, three times as many; the table has
the second measurement, and the JSON file both.

Tasks are made up, and so noisy that no model is right about all samples.  Each is made once; of each seed
another part is learned.  Seeds are spawned from one ``numpy.random.SeedSequence``: none shares anything with
another.

Scripts of the examples run as they are but for their sizes (see the functions that are named after them),
and load in the process that trains.  ``augment="auto"`` may leave a transform whole, so that of
imagefolder_resnet ``augment="split"`` is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401
from scipy import stats
from scipy.ndimage import affine_transform
from tables import trained_row

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import torch
from rounds import save_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.cases import scripts
from fastpipe import FastImageFolder, FastLoader, Stage, augment

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ENTROPY = 20_261_126
WIDEST = 2.0  # points on each side of the mean
MEAN, STD = (0.5,) * 3, (0.25,) * 3


@dataclass(frozen=True)
class Seed:
    """The random parts of a run: weights and order, the same before and after, and draws of its own."""

    shared: int
    before: int
    after: int


def seeds(count: int) -> list[Seed]:
    """Independent seeds, three numbers for each."""
    children = np.random.SeedSequence(ENTROPY).spawn(count)
    return [Seed(*(int(one) for one in child.generate_state(3))) for child in children]


def seeded(seed: int) -> None:
    """Seed every global generator."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


Run = Callable[[Seed, str], float]  # the side, "before" or "after", to an accuracy in percent


@dataclass(frozen=True)
class Case:
    """A swap.

    Attributes:
        group: what it is part of.
        name, before, after: for the table.
        make: prepares data in a folder and returns the function that trains.
        times: how many times as many seeds as others it has, as its runs differ more.
    """

    group: str
    name: str
    before: str
    after: str
    make: Callable[[Path], Run]
    times: int = 1


# ---- made-up tasks ---------------------------------------------------------------------------------------


CLASSES = 6


@dataclass(frozen=True)
class Task:
    """Samples to learn from and to be judged by.

    Attributes:
        samples, labels: of both, those to be judged by last.
        learned: how many there are to choose from.
        taken: how many a run learns from.
        model: a new one.
        epochs, batch, rate: of training.
    """

    samples: Tensor
    labels: Tensor
    learned: int
    taken: int
    model: Callable[[], nn.Module]
    epochs: int = 5
    batch: int = 40
    rate: float = 6e-3


def fields(rng: np.random.Generator, *shape: int, fine: int, side: int) -> np.ndarray:
    """Smooth fields at random, along the last axes of a shape: (*shape, side, …)."""
    rank = len(shape) - 2
    values = torch.from_numpy(rng.normal(0, 1, (*shape[:2], *(fine,) * rank)).astype(np.float32))
    mode = "bicubic" if rank == 2 else "trilinear"
    return nn.functional.interpolate(values, (side,) * rank, mode=mode, align_corners=True).numpy()


def templates(
    count: int, channels: int, side: int, rank: int, seed: int, strength: float = 0.48
) -> tuple[np.ndarray, np.ndarray]:
    """Classes by what is faintly there, somewhere about the middle: float32 (N, channels, side, …)."""
    most = side // 8
    kinds = fields(np.random.default_rng(99), CLASSES, channels, *(0,) * rank, fine=6, side=side + 2 * most)
    rng, labels = np.random.default_rng(seed), np.arange(count) % CLASSES
    values = fields(rng, count, channels, *(0,) * rank, fine=5, side=side)
    values += 0.4 * rng.normal(0, 1, values.shape).astype(np.float32)
    for number, label in enumerate(labels):
        box = tuple(slice(at, at + side) for at in rng.integers(0, 2 * most + 1, rank))
        values[number] += kinds[(label, slice(None), *box)] * rng.uniform(0.5, 1.5) * strength
    return values, labels


def images(count: int, side: int, seed: int, strength: float = 0.48) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (N, side, side, 3)."""
    values, labels = templates(count, 3, side, 2, seed, strength)
    pixels = ((0.5 + 0.25 * values).clip(0, 1) * 255).round().astype(np.uint8)
    return np.moveaxis(pixels, 1, 3), labels


def image_net(classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2, padding=2), nn.BatchNorm2d(12), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, classes),
    )  # fmt: skip


@functools.cache
def image_task() -> Task:
    values, labels = images(1200 + 3000, 32, 0)
    samples = torch.from_numpy(values).movedim(3, 1).float() / 255
    return Task(samples, torch.from_numpy(labels), 1200, 400, image_net)


@functools.cache
def spectrogram_task() -> Task:
    """Eight sweeps of frequency under noise: (N, 20, 40)."""
    rng, count = np.random.default_rng(1), 1200 + 3000
    labels = np.arange(count) % 8
    begin, slope, wave = (labels % 2)[:, None], (labels // 2 % 2)[:, None], (labels // 4)[:, None]
    at = np.arange(40) / 40 + rng.uniform(-0.2, 0.2, (count, 1))
    place = (
        4 + 8 * begin + (6 * slope - 3) * at + 2.5 * wave * np.sin(9 * at) + rng.normal(0, 1.2, (count, 1))
    )
    values = np.exp(-(((np.arange(20)[:, None] - place[:, None]) / 1.2) ** 2)) * rng.uniform(
        0.4, 1.6, (count, 1, 1)
    )
    values += rng.normal(0, 0.8, values.shape)
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Unflatten(1, (1, 20)), nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d((5, 2)), nn.Flatten(), nn.Linear(160, 8),
    )  # fmt: skip
    return Task(torch.from_numpy(values).float(), torch.from_numpy(labels), 1200, 480, model)


@functools.cache
def volume_task() -> Task:
    """Six fields under others: (N, 1, 12, 12, 12)."""
    values, labels = templates(800 + 2000, 1, 12, 3, 2, 0.65)
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv3d(1, 8, 3, stride=2, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten(),
        nn.Linear(8 * 27, CLASSES),
    )  # fmt: skip
    return Task(torch.from_numpy(values), torch.from_numpy(labels), 800, 300, model, batch=30)


@functools.cache
def motion_task() -> Task:
    """Eight ways in which six joints swing, under noise: (N, 30, 6, 3)."""
    rng, count, frames = np.random.default_rng(3), 1200 + 3000, 30
    labels = np.arange(count) % 8
    tempo, lag, shape = (labels % 2)[:, None], (labels // 2 % 2)[:, None], (labels // 4)[:, None]
    beat = np.arange(frames) * (0.5 + 0.25 * tempo + rng.normal(0, 0.08, (count, 1))) + rng.uniform(
        0, 7, (count, 1)
    )
    joints = np.arange(6)[:, None]
    swing = np.sin(beat[:, None] + joints * (0.3 + 0.7 * lag[:, None]))
    swing = swing + 0.5 * shape[:, None] * np.sin(2 * beat[:, None] + joints)
    values = np.stack([swing, 0.5 * swing[:, ::-1], 0 * swing], 3).swapaxes(1, 2) * rng.uniform(
        0.5, 1.5, (count, 1, 1, 1)
    )
    values += rng.normal(0, 0.7, values.shape) + rng.normal(0, 0.3, (count, 1, 1, 3))
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Flatten(2), _Turned(), nn.Conv1d(18, 24, 5, stride=2), nn.BatchNorm1d(24), nn.ReLU(),
        nn.Conv1d(24, 24, 5, stride=2), nn.BatchNorm1d(24), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(24, 8),
    )  # fmt: skip
    return Task(torch.from_numpy(values).float(), torch.from_numpy(labels), 1200, 480, model)


class _Turned(nn.Module):
    """(N, T, F) to (N, F, T)."""

    def forward(self, values: Tensor) -> Tensor:
        return values.transpose(1, 2)


def learned(model: nn.Module, batches: Iterable[Any], steps: int, rate: float, draws: int) -> nn.Module:
    """Train on batches, with other random numbers from here on."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    seeded(draws)
    for samples, labels in batches:
        loss = nn.functional.cross_entropy(model(samples), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def accuracy(model: nn.Module, samples: Tensor, labels: Tensor) -> float:
    """The part of labels that is found, in percent."""
    with torch.no_grad():
        right = [
            (model(one).argmax(1) == of).float()
            for one, of in zip(samples.split(500), labels.split(500), strict=True)
        ]
    return 100 * float(torch.cat(right).mean())


def of_task(task: Task, before: Callable[..., Any], after: Callable[..., Any]) -> Run:
    """Train on batches that are changed by a function of samples and labels."""
    rest = task.samples[task.learned :], task.labels[task.learned :]

    def run(seed: Seed, side: str) -> float:
        torch.manual_seed(seed.shared)
        model = task.model()
        chosen = torch.randperm(task.learned)[: task.taken]
        orders = [chosen[torch.randperm(task.taken)] for _ in range(task.epochs)]
        change = before if side == "before" else after

        def batches() -> Iterator[Any]:
            for order in orders:
                for at in order.split(task.batch):
                    yield change(task.samples[at], task.labels[at])

        steps = task.epochs * math.ceil(task.taken / task.batch)
        learned(model, batches(), steps, task.rate, getattr(seed, side))
        return accuracy(model, *rest)

    return run


# ---- augmentations ---------------------------------------------------------------------------------------


Make = Callable[[Any], Any]  # of a kit, the module that has the classes, an operation


def _of_images(make: Make) -> Callable[[Path], Run]:
    ours, theirs = make(augment), make(v2)

    def before(samples: Tensor, labels: Tensor) -> Any:
        return torch.stack([theirs(one) for one in samples]), labels

    return lambda folder: of_task(image_task(), before, lambda samples, labels: (ours(samples), labels))


def _mixing(make: Make) -> Callable[[Path], Run]:
    return lambda folder: of_task(image_task(), make(v2), make(augment))


def _of_scripts(kit: Any, task: Callable[[], Task], make: Make) -> Callable[[Path], Run]:
    ours, theirs = make(augment), make(kit)

    def before(samples: Tensor, labels: Tensor) -> Any:
        return torch.stack([theirs(one) for one in samples]), labels

    return lambda folder: of_task(task(), before, lambda samples, labels: (ours(samples), labels))


def _of_motion(make: Make) -> Callable[[Path], Run]:
    """Sequences are as long as there are frames; afterwards those that have become shorter end in zeros."""
    ours, theirs = augment.Compose([make(augment)], lengths=1), make(scripts)

    def before(samples: Tensor, labels: Tensor) -> Any:
        return torch.stack([theirs(one, torch.tensor(one.shape[0]))[0] for one in samples]), labels

    def after(samples: Tensor, labels: Tensor) -> Any:
        return ours(samples, torch.full((len(samples),), samples.shape[1]))[0], labels

    return lambda folder: of_task(motion_task(), before, after)


def _elastic(folder: Path) -> Run:
    """As a script of the examples bends patches."""
    before = _scripts("volume_patches")["before"]
    before.POINTS, before.BEND = (3, 3, 3), 1.5
    ours = augment.RandomElastic3D(before.POINTS, before.BEND, fill="edge")

    def bent(samples: Tensor, labels: Tensor) -> Any:
        found = [before.elastic(one, one)[0] for one in samples[:, 0].numpy()]
        return torch.from_numpy(np.stack(found))[:, None], labels

    return of_task(volume_task(), bent, lambda samples, labels: (ours(samples), labels))


class _Affine3D(scripts.RandomAffine3D):
    """As nnU-Net resamples: what is beyond the outermost voxels is between them and the fill."""

    def __call__(self, volume: Tensor) -> Tensor:
        matrix = self.matrix()
        if matrix is None:
            return volume
        middle = (np.array(volume.shape[1:]) - 1) / 2
        options = {"order": 1, "mode": "grid-constant"}
        warp = functools.partial(affine_transform, matrix=matrix, offset=middle - matrix @ middle, **options)
        return torch.from_numpy(np.stack([warp(one) for one in volume.numpy()]))


def _affine(folder: Path) -> Run:
    ours, theirs = augment.RandomAffine3D(30, (0.7, 1.4)), _Affine3D(30, (0.7, 1.4))

    def before(samples: Tensor, labels: Tensor) -> Any:
        return torch.stack([theirs(one) for one in samples]), labels

    return of_task(volume_task(), before, lambda samples, labels: (ours(samples), labels))


def _nnunet(folder: Path) -> Run:
    """nnU-Net's list, each operation by NumPy and SciPy."""
    kit = scripts
    ops = [
        _Affine3D(30, (0.7, 1.4), p_rotation=0.2, p_scale=0.2),
        kit.RandomApply(kit.GaussianNoise3D((0.0, 0.1)), 0.1),
        kit.RandomApply(kit.GaussianBlur3D((0.5, 1.0), p_channel=0.5), 0.2),
        kit.RandomApply(kit.Brightness3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.Contrast3D((0.75, 1.25)), 0.15),
        kit.RandomApply(kit.LowResolution3D((0.5, 1.0), p_channel=0.5), 0.25),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5), inverted=True), 0.1),
        kit.RandomApply(kit.Gamma3D((0.7, 1.5)), 0.3),
        kit.RandomFlip3D(),
    ]
    ours = augment.nnunet_default()

    def before(samples: Tensor, labels: Tensor) -> Any:
        found = []
        for one in samples:
            for op in ops:
                one = op(one)
            found.append(one)
        return torch.stack(found), labels

    return of_task(volume_task(), before, lambda samples, labels: (ours(samples), labels))


_BILINEAR = v2.InterpolationMode.BILINEAR
_PAIRS = ((0, 1), (2, 3), (4, 5))
_IMAGES: dict[str, Make] = {
    "RandomResizedCrop": lambda kit: kit.RandomResizedCrop(32, scale=(0.4, 1.0)),
    "RandomHorizontalFlip": lambda kit: kit.RandomHorizontalFlip(),
    "RandomVerticalFlip": lambda kit: kit.RandomVerticalFlip(),
    "RandomAffine": lambda kit: kit.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=_BILINEAR),
    "RandomRotation": lambda kit: kit.RandomRotation(30, interpolation=_BILINEAR),
    "ColorJitter": lambda kit: kit.ColorJitter(0.8, 0.8, 0.8, 0.2),
    "RandomGrayscale": lambda kit: kit.RandomGrayscale(0.4),
    "GaussianBlur": lambda kit: kit.GaussianBlur(5),
    "RandomErasing": lambda kit: kit.RandomErasing(0.5),
    "RandomErasing(value='random')": lambda kit: kit.RandomErasing(0.5, value="random"),
    "RandAugment": lambda kit: kit.RandAugment(2, 9),
    "RandomApply": lambda kit: kit.RandomApply([kit.ColorJitter(0.8, 0.8), kit.GaussianBlur(5)], 0.6),
}
_MIXES: dict[str, Make] = {
    "MixUp": lambda kit: kit.MixUp(num_classes=CLASSES),
    "CutMix": lambda kit: kit.CutMix(num_classes=CLASSES),
}
_SPECTROGRAMS: dict[str, Make] = {
    "SpecAugment": lambda kit: kit.SpecAugment(2, 10, 2, 6),
    "RandomGain": lambda kit: kit.RandomGain(6.0),
    "TimeShift": lambda kit: kit.TimeShift(8),
}
_VOLUMES: dict[str, Make] = {
    "RandomFlip3D": lambda kit: kit.RandomFlip3D(),
    "RandomRotate90": lambda kit: kit.RandomRotate90(),
    "GaussianNoise3D": lambda kit: kit.GaussianNoise3D((0.0, 0.8)),
    "GaussianBlur3D": lambda kit: kit.GaussianBlur3D((0.5, 1.0)),
    "Brightness3D": lambda kit: kit.Brightness3D((0.5, 2.0)),
    "Contrast3D": lambda kit: kit.Contrast3D((0.5, 2.0)),
    "Gamma3D": lambda kit: kit.Gamma3D((0.5, 2.0)),
    "LowResolution3D": lambda kit: kit.LowResolution3D((0.5, 1.0)),
}
_MOTION: dict[str, Make] = {
    "MotionSpeed": lambda kit: kit.MotionSpeed((0.8, 1.25)),
    "MotionTranslation": lambda kit: kit.MotionTranslation(0.5),
    "MotionScale": lambda kit: kit.MotionScale((0.7, 1.4)),
    "MotionMirror": lambda kit: kit.MotionMirror(_PAIRS),
}


# ---- Keras -----------------------------------------------------------------------------------------------


def _of_keras(arguments: dict[str, Any], make: Callable[[Any], list[Any]]) -> Callable[[Path], Run]:
    """``fastpipe.tf.Augment`` against Keras's layers, before the same small net of torch's."""

    def by_layers() -> Callable[[Tensor], Tensor]:
        import keras

        layers = make(keras.layers)

        def change(samples: Tensor) -> Tensor:
            values = samples.movedim(1, 3).contiguous().numpy()
            for layer in layers:
                values = layer(values, training=True)
            return torch.from_numpy(np.array(values)).movedim(3, 1)

        return change

    return _of_layer(arguments, by_layers)


def _of_torchvision(arguments: dict[str, Any], make: Callable[[], Any]) -> Callable[[Path], Run]:
    """``fastpipe.tf.Augment`` against torchvision's transform, whose formulas it has."""

    def by_samples() -> Callable[[Tensor], Tensor]:
        transform = make()
        return lambda samples: torch.stack([transform(one) for one in samples])

    return _of_layer(arguments, by_samples)


def _of_layer(
    arguments: dict[str, Any], make: Callable[[], Callable[[Tensor], Tensor]]
) -> Callable[[Path], Run]:
    def prepared(folder: Path) -> Run:
        from fastpipe.tf import Augment

        ours, theirs = Augment(value_range=(0, 1), **arguments), make()

        def after(samples: Tensor, labels: Tensor) -> Any:
            values = ours(samples.movedim(1, 3).contiguous().numpy())
            return torch.from_numpy(np.array(values)).movedim(3, 1), labels

        return of_task(image_task(), lambda samples, labels: (theirs(samples), labels), after)

    return prepared


# ---- loaders ---------------------------------------------------------------------------------------------


def _folder(folder: Path, side: int = 48) -> Path:
    """A folder of JPEGs to learn from: made once."""
    root = folder / "images"
    if not root.exists():
        from PIL import Image

        made, labels = images(360, side, 4, 0.8)
        unfinished = Path(tempfile.mkdtemp(dir=folder))
        for number, (pixels, label) in enumerate(zip(made, labels, strict=True)):
            (unfinished / f"{label}").mkdir(exist_ok=True)
            Image.fromarray(pixels).save(unfinished / f"{label}" / f"{number:04d}.jpg", quality=92)
        with contextlib.suppress(OSError):  # another process was faster
            unfinished.rename(root)
    return root


def _judged(mean: Any = MEAN, std: Any = STD, side: int = 48) -> tuple[Tensor, Tensor]:
    """Images to be judged by: the middle of them."""
    made, labels = images(3000, side, 5, 0.8)
    cut = (side - 32) // 2
    samples = torch.from_numpy(made[:, cut:-cut, cut:-cut]).movedim(3, 1).float() / 255
    return v2.functional.normalize(samples, list(mean), list(std)), torch.from_numpy(labels)


def _learned_epochs(model: nn.Module, loader: Any, draws: int, judged: tuple[Tensor, Tensor]) -> float:
    batches = (batch for _ in range(6) for batch in loader)
    return accuracy(learned(model, batches, 6 * len(loader), 6e-3, draws), *judged)


def _of_loaders(
    before: Callable[[str, Any], Any], after: Callable[[str, Any], Any], transform: Callable[[], Any]
) -> Callable[[Path], Run]:
    def prepared(folder: Path) -> Run:
        root, judged = str(_folder(folder)), _judged()

        def run(seed: Seed, side: str) -> float:
            torch.manual_seed(seed.shared)
            model = image_net()
            loader = (before if side == "before" else after)(root, transform())
            return _learned_epochs(model, loader, getattr(seed, side), judged)

        return run

    return prepared


def _recipe(*more: Any) -> Any:
    return v1.Compose([
        v1.RandomResizedCrop(32, scale=(0.6, 1.0)), v1.RandomHorizontalFlip(), *more, v1.ToTensor(),
        v1.Normalize(MEAN, STD),
    ])  # fmt: skip


def _colours() -> Any:
    return _recipe(v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8), v1.RandomGrayscale(0.2))


def _stock(root: str, transform: Any) -> Any:
    return DataLoader(ImageFolder(root, transform), batch_size=48, shuffle=True)


def _fast(root: str, transform: Any, **options: Any) -> Any:
    return FastLoader(FastImageFolder(root, transform), batch_size=48, shuffle=True, **options)


# ---- examples --------------------------------------------------------------------------------------------


def _scripts(name: str) -> dict[str, Any]:
    """The scripts of an example, as modules."""
    found = {}
    sys.path.insert(0, str(EXAMPLES / name))
    for path in sorted((EXAMPLES / name).glob("*.py")):
        sys.modules.pop(path.stem, None)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        found[path.stem] = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[path.stem])
    sys.path.remove(str(EXAMPLES / name))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _hdf5_mel(folder: Path) -> Run:
    """Two epochs of the script's own training; judged by segment, of which there are more than files."""
    import h5py

    found = _scripts("hdf5_mel")
    with _quiet():
        found["make_data"].main(str(folder), files=100)
        found["make_data"].main(str(folder / "more"), files=400)
    before, after = found["before"], found["after"]
    before.DataLoader = functools.partial(_without_workers, before.DataLoader)
    with h5py.File(folder / "more" / "test.h5") as file:
        samples = torch.from_numpy(file["segments"][:]).flatten(0, 2).unsqueeze(1)
        labels = torch.from_numpy(file["labels"][:].astype(np.int64)).flatten()

    def run(seed: Seed, side: str) -> float:
        torch.manual_seed(seed.shared)
        model = before.small_net()
        seeded(getattr(seed, side))
        with _quiet():
            (before if side == "before" else after).train(model, str(folder / "train.h5"), 2)
        return accuracy(model.eval(), samples, labels)

    return run


def _without_workers(loader: Any, *given: Any, **options: Any) -> Any:
    for name in ("num_workers", "multiprocessing_context", "prefetch_factor", "persistent_workers"):
        options.pop(name, None)
    return loader(*given, **options)


def _imagefolder_resnet(folder: Path) -> Run:
    """Loaders of the scripts, at 32 pixels, before a small net."""
    found = _scripts("imagefolder_resnet")
    before, after = found["before"], found["after"]
    before.DataLoader = functools.partial(_without_workers, before.DataLoader)
    after.FastLoader = lambda *given, **options: FastLoader(*given, **{**options, "augment": "split"})
    root, judged = str(_folder(folder)), _judged([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

    def run(seed: Seed, side: str) -> float:
        torch.manual_seed(seed.shared)
        model = image_net()
        loader = (before if side == "before" else after).training_data(root, 32)
        return _learned_epochs(model, loader, getattr(seed, side), judged)

    return run


def _s3_imagenet(folder: Path) -> Run:
    """Datasets of the scripts, at 32 pixels, from a folder that is staged, before a small net."""
    found = _scripts("s3_imagenet")
    before, after = found["before"], found["after"]
    before.CLASSES = after.CLASSES = 5
    stage = Stage(folder / "stage")
    transform = _recipe()
    root = str(_folder(folder))
    samples, labels = _judged()
    names = sorted(path.name for path in Path(root).iterdir())
    chosen = [names.index(name) for name in before.choose(names)]
    is_judged = torch.isin(labels, torch.tensor(chosen))
    places = torch.tensor([chosen.index(at) if at in chosen else -1 for at in range(len(names))])
    judged = samples[is_judged], places[labels[is_judged]]

    def run(seed: Seed, side: str) -> float:
        torch.manual_seed(seed.shared)
        model = image_net(5)
        if side == "before":
            loader = DataLoader(before.SomeClasses(root, transform), batch_size=32, shuffle=True)
        else:
            dataset = FastImageFolder(root, transform, classes=after.choose, stage=stage)
            loader = FastLoader(dataset, batch_size=32, shuffle=True)
        return _learned_epochs(model, loader, getattr(seed, side), judged)

    return run


def _volume_patches(folder: Path) -> Run:
    """The script's own training, on patches of 16×32×32; judged by the voxels of such patches."""
    found = _scripts("volume_patches")
    before, after, make_data = found["before"], found["after"], found["make_data"]
    before.PATCH = after.PATCH = (16, 32, 32)
    before.DataLoader = functools.partial(_without_workers, before.DataLoader)
    with _quiet():
        make_data.main(str(folder), shape=(48, 96, 96))
    image, labels = make_data.made_up((48, 96, 96), seed=2)
    starts = itertools.product(range(0, 48, 16), range(0, 96, 32), range(0, 96, 32))
    grid = [(slice(z, z + 16), slice(y, y + 32), slice(x, x + 32)) for z, y, x in starts]
    samples = torch.from_numpy(np.stack([image[box] for box in grid]).astype(np.float32))
    wanted = torch.from_numpy(np.stack([labels[box] for box in grid]).astype(np.int64))

    def run(seed: Seed, side: str) -> float:
        torch.manual_seed(seed.shared)
        model = before.UNet()
        seeded(getattr(seed, side))
        with _quiet():
            (before if side == "before" else after).train(model, str(folder), 60)
        model.eval()
        with torch.no_grad():
            return 100 * float((model(samples).argmax(1) == wanted).float().mean())

    return run


def _motion_generation(folder: Path) -> Run:
    """The script's own training; scenes are generated at once, which gives the same numbers."""
    import h5py

    found = _scripts("motion_generation")
    before, after, actor = found["before"], found["after"], found["actor"]
    before.FRAMES = after.FRAMES = actor.FRAMES = 64  # as far apart as they were
    actor.FRAME = 0.16

    def scenes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = [actor.generate_random_scene(np.random.default_rng([seed, at])) for at in range(count)]
        many = actor.Scene(*(np.array([getattr(one, name) for one in drawn]) for name in vars(drawn[0])))
        return actor.get_poses(many), many.theme

    motion, theme = scenes(2500, 10**6)
    judged = torch.from_numpy(motion), torch.from_numpy(theme)

    def run(seed: Seed, side: str) -> float:
        motion, theme = scenes(100, seed.shared)
        path = folder / f"{side}.{'npz' if side == 'before' else 'h5'}"
        if side == "before":
            rng = np.random.default_rng(seed.before)
            views = [motion]
            for kind in before.AUGMENTATIONS:
                views.append(np.stack([before.augment_motion_sequence(one, kind, rng) for one in motion]))
            np.savez(path, motion=np.concatenate(views), theme=np.tile(theme, len(views)))
        else:
            with h5py.File(path, "w") as file:
                file["motion"], file["theme"] = motion, theme
        torch.manual_seed(seed.shared)
        model = before.SmallNet()
        seeded(getattr(seed, side))
        with _quiet():
            (before if side == "before" else after).train(model, str(path), 5)
        return accuracy(model.eval(), *judged)

    return run


def _keras_multimodal(folder: Path) -> Run:
    """The scripts' datasets, augmentation, branch and classifier, of one camera at 32 pixels, by ``fit``.

    Models are compiled once; of each seed they get its weights.
    """
    import keras
    import pandas as pd
    import tensorflow as tf

    found = _scripts("keras_multimodal")
    before, after, make_data = found["before"], found["after"], found["make_data"]
    before.SIDE = after.SIDE = 32
    make_data.CAMERAS = {"depth": (96, 54), "thermal": (80, 60)}
    make_data.main(str(folder), 1440)
    table = before.read_table(str(folder)).assign(**dict.fromkeys(before.FORESTS, 0.0))
    table[before.TABULAR] = 0.0  # images alone
    rest, name = table.iloc[480:], before.MODALITIES[0]
    strategy = tf.distribute.get_strategy()
    before.replicas = after.replicas = lambda: strategy
    judged = [(inputs[name], labels) for inputs, labels in before.dataset(rest, str(folder), (name,))]
    models = {}
    for side, script, given in (("before", before, ()), ("after", after, (False,))):
        keras.utils.set_random_seed(1)
        branch = script.branch(*given)
        model = script.classifier({name: branch}, 3)
        model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
        models[side] = model

    def run(seed: Seed, side: str) -> float:
        script, model = (before, after)[side == "after"], models[side]
        rng = np.random.default_rng(seed.shared)
        part = pd.concat([table.iloc[:480].sample(288, random_state=seed.shared % 2**31)])
        for weight in model.weights:  # of the same kinds and shapes on both sides, in the same order
            if len(weight.shape) > 1:  # by Glorot's rule, as Keras
                area = int(np.prod(weight.shape[:-2]))
                limit = (6 / (area * sum(weight.shape[-2:]))) ** 0.5
                weight.assign(rng.uniform(-limit, limit, weight.shape))
            elif weight.shape:
                is_scale = weight.name in ("gamma", "moving_variance")
                weight.assign(np.full(weight.shape, float(is_scale)))
        for variable in model.optimizer.variables:
            if variable.name != "learning_rate":
                variable.assign(tf.zeros_like(variable.value))
        keras.utils.set_random_seed(getattr(seed, side) % 2**32)
        data = script.dataset(part, str(folder), (name,), getattr(seed, side) % 2**31)
        model.fit(data, epochs=8, shuffle=False, verbose=0)
        zero = np.zeros((before.BATCH, len(before.TABULAR + before.FORESTS)), np.float32)
        right = []
        for images, labels in judged:
            chosen = model.predict_on_batch({name: images, "tabular": zero[: len(images)]}).argmax(1)
            right.append(chosen == labels.numpy())
        return 100 * float(np.mean(np.concatenate(right)))

    return run


# ---- all of them -----------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Every swap."""
    stock, fast = "ImageFolder, DataLoader", "FastImageFolder, FastLoader"
    split = functools.partial(_fast, augment="split")
    plain, more = "crop, flip, normalise", "crop, flip, colours, grey, normalise"
    made = [
        Case("loader", plain, stock, fast, _of_loaders(_stock, _fast, _recipe)),
        Case("loader", more, stock, fast, _of_loaders(_stock, _fast, _colours)),
        Case("loader", more, stock, '… augment="split"', _of_loaders(_stock, split, _colours)),
    ]
    for make, times in (
        (_hdf5_mel, 1), (_imagefolder_resnet, 2), (_keras_multimodal, 1), (_motion_generation, 1),
        (_s3_imagenet, 1), (_volume_patches, 1),
    ):  # fmt: skip
        made.append(Case("example", make.__name__[1:], "before.py", "after.py", make, times))
    ours, numpy = "fastpipe.augment", "NumPy, SciPy"
    for name, make_op in _IMAGES.items():
        made.append(Case("images", name, "torchvision v2", ours, _of_images(make_op)))
    for name, make_op in _MIXES.items():
        made.append(Case("images", name, "torchvision v2", ours, _mixing(make_op)))
    for name, make_op in _SPECTROGRAMS.items():
        run = _of_scripts(scripts, spectrogram_task, make_op)
        made.append(Case("spectrograms", name, "torchaudio's formulas", ours, run))
    for name, make_op in _VOLUMES.items():
        run = _of_scripts(scripts, volume_task, make_op)
        made.append(Case("volumes", name, numpy, ours, run))
    made.append(Case("volumes", "RandomAffine3D", numpy, ours, _affine))
    made.append(Case("volumes", "RandomElastic3D", numpy, ours, _elastic))
    made.append(Case("volumes", "nnunet_default", numpy, ours, _nnunet, 2))
    for name, make_op in _MOTION.items():
        made.append(Case("motion", name, "NumPy", ours, _of_motion(make_op)))
    layer = "fastpipe.tf.Augment"
    flips = {"horizontal_flip": 0.5, "vertical_flip": 0.5}
    for name, arguments, layers in (
        ("flips", flips, lambda keras: [keras.RandomFlip("horizontal"), keras.RandomFlip("vertical")]),
        ("rotation", {"rotation": 30}, lambda keras: [keras.RandomRotation(30 / 360, fill_mode="constant")]),
    ):
        made.append(Case("Keras", name, "Keras's layers", layer, _of_keras(arguments, layers)))
    affine = functools.partial(v2.RandomAffine, interpolation=_BILINEAR)
    colours = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
    for name, arguments, transform in (
        ("zoom", {"zoom": 0.3}, lambda: affine(0, scale=(0.7, 1.3))),
        ("translation", {"translation": 0.2}, lambda: affine(0, (0.2, 0.2))),
        ("colours", colours, lambda: v2.ColorJitter(**colours)),
        ("cutout", {"cutout": 0.5}, lambda: v2.RandomErasing(0.5)),
    ):
        made.append(Case("Keras", name, "torchvision v2", layer, _of_torchvision(arguments, transform)))
    return made


def summary(before: list[float], after: list[float]) -> dict[str, float]:
    """The mean of the differences and its 95 % interval.

    >>> {name: round(value, 2) for name, value in summary([60.0, 61.0, 62.0], [61.0, 61.0, 63.0]).items()}
    {'difference': 0.67, 'low': -0.77, 'high': 2.1}
    """
    apart = np.subtract(after, before)
    half = float(stats.t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / math.sqrt(len(apart)))
    mean = float(apart.mean())
    return {"difference": mean, "low": mean - half, "high": mean + half}


def pairs(run: Run, given: list[Seed]) -> dict[str, Any]:
    """Run before and after a swap from each seed: all accuracies, and by how much they differ."""
    found: dict[str, list[float]] = {"before": [], "after": []}
    for seed in given:
        for side, values in found.items():
            values.append(round(run(seed, side), 3))
    return {**found, **summary(found["before"], found["after"])}


def measured(number: int, count: int, folder: str) -> dict[str, Any]:
    """Run a case in this process: once more with other seeds, three times as many, if 0 is missed."""
    torch.set_num_threads(1)
    case, begin = cases()[number], time.perf_counter()
    own, count = Path(tempfile.mkdtemp(dir=folder)), count * case.times
    run = case.make(own)
    found = pairs(run, seeds(count))
    if not found["low"] <= 0 <= found["high"]:
        found = {**pairs(run, seeds(4 * count)[count:]), "first": found}
    shutil.rmtree(own)
    names = {"group": case.group, "name": case.name, "before_is": case.before, "after_is": case.after}
    return {**names, **found, "seconds": round(time.perf_counter() - begin, 1)}


def _key(case: dict[str, Any]) -> tuple[str, ...]:
    return case["group"], case["name"], case["after_is"]


def holds(case: dict[str, Any]) -> bool:
    """Return whether the interval holds 0 and is narrower than ± 2 points."""
    return bool(case["low"] <= 0 <= case["high"] and case["high"] - case["low"] < 2 * WIDEST)


def main() -> int:
    """Measure, print a table, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=16, help="pairs of runs of each case (default: 16)")
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in their row")
    parser.add_argument("--processes", type=int, default=2, help="cases at a time (default: 2)")
    parser.add_argument(
        "--json", type=Path, help="where to write everything; rows of a file that is there stay"
    )
    args = parser.parse_args()
    chosen = [
        at for at, case in enumerate(cases())
        if args.only.lower() in f"{case.group}: {case.name} {case.before} {case.after}".lower()
    ]  # fmt: skip
    found: dict[int, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.processes, get_context("spawn")) as pool,
    ):
        running = {pool.submit(measured, at, args.seeds, folder): at for at in chosen}
        for one in as_completed(running):
            case = found[running[one]] = one.result()
            print(trained_row(case), "" if holds(case) else "!", f"{case['seconds']:.0f} s", flush=True)
    made = [found[at] for at in chosen]
    if args.json and args.json.exists():
        others = json.loads(args.json.read_text())["cases"]
        made = [*made, *(one for one in others if all(_key(one) != _key(own) for own in made))]
        places = {(case.group, case.name, case.after): at for at, case in enumerate(cases())}
        made.sort(key=lambda one: places[_key(one)])
    print(
        f"{sum(map(holds, made))} of {len(made)} intervals hold 0 and are narrower than ± {WIDEST:g} points"
    )
    save_facts(args.json, None, {"seeds": args.seeds, "cases": made})
    return 0 if all(map(holds, made)) else 1


if __name__ == "__main__":
    sys.exit(main())
