"""The case ``tf`` compares ``tf.data`` pipelines of scripts and of Keras with ``fastpipe.tf``."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.check import Compared, Outcome, RowCheck, digests_of_samples
from fastpipe.bench.data import Say, class_folders, folder_to_use, size_of, unheard
from fastpipe.bench.driver import DATA_HELP, Case, add_run_arguments
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, ContenderError, Session, Timeline, timeline_of
from fastpipe.console import positive
from fastpipe.core.extras import require
from fastpipe.errors import CacheError, FastpipeError, OptionError

# ---- TensorFlow ------------------------------------------------------------------------------------


def tensorflow() -> Any:
    """Import TensorFlow; suppress its log messages, unless the user has set their level."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow reads this variable on import
    return require("tensorflow", extra="tf")


# ---- Photos and tables -----------------------------------------------------------------------------

Kept = Literal["off", "ram", "disk"]

SIDE = 128
# The names of the images of a sample with one image, and of a sample with several images.  NUMBERS is the
# name of further numbers of a sample.
ALONE = ("image",)
MODALITIES = ("photo", "depth", "thermal", "mask")
NUMBERS = "numbers"

# The least and the largest fraction of an image's area that a box covers.
LEAST_AREA, MOST_AREA = 0.3, 0.6
# Only JPEGs, because scripts that decode boxes with TensorFlow's operations support only JPEGs.
_ENDINGS = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Lengths:
    """Number of samples in an epoch of each section; ``batches`` is a number of batches instead."""

    crops: int
    folder: int
    modalities: int
    batches: int


# Epochs are as long as those of small data sets, because the beginning and the end of an epoch take time.
# Sections with larger samples have fewer samples, so that an epoch takes about as long.
FULL = Lengths(2048, 512, 512, 32)
QUICK = Lengths(40, 24, 24, 4)


@dataclass(frozen=True)
class Photos:
    """Some of the JPEGs of an image folder."""

    name: str  # the folder's name in the report
    files: tuple[str, ...]
    labels: npt.NDArray[np.int32]  # (N,): class numbers; every class occurs
    classes: tuple[str, ...]  # names of the classes
    sizes: npt.NDArray[np.int64]  # (N, 2): width and height
    total: int  # number of JPEGs in the folder

    @classmethod
    def of(cls, folder: Path, name: str, most: int) -> Photos:
        """Choose at most ``most`` JPEGs evenly from a folder; raise an OptionError if it has no JPEGs."""
        every = (path for one in class_folders(folder) for path in sorted(one.rglob("*")))
        files = [path for path in every if path.suffix.lower() in _ENDINGS and path.is_file()]
        count = min(len(files), most)
        chosen = [files[i * len(files) // count] for i in range(count)]
        sizes = {path: size for path in chosen if (size := size_of(path, "JPEG"))[0]}
        if not sizes:
            raise OptionError(f"{str(folder)!r} has no JPEGs in its class folders, which this case needs")
        of_class = [path.relative_to(folder).parts[0] for path in sizes]
        found, labels = np.unique(of_class, return_inverse=True)
        return cls(
            name, tuple(map(str, sizes)), labels.astype(np.int32), tuple(found.tolist()),
            np.array(list(sizes.values()), np.int64), len(files),
        )  # fmt: skip

    @cached_property
    def nbytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.files)

    @property
    def text(self) -> str:
        count, classes = len(self.files), len(self.classes)
        part = "" if count == self.total else f" of {self.total:,}"
        each = f"{self.nbytes / count / 1000:.0f} kB each"
        return f"{count:,}{part} photos in {classes} classes, {each} ({self.name})"

    def table(self, count: int, names: tuple[str, ...] = ALONE) -> Table:
        """Return a table of ``count`` samples; photos are repeated, each time with other random boxes."""
        at = np.arange(count) % len(self.files)
        boxes = {name: _boxes(self.sizes[at], seed) for seed, name in enumerate(names)}
        numbers = np.random.default_rng(len(names)).random((count, 2)).astype(np.float32)
        return Table(tuple(self.files[i] for i in at), self.labels[at], boxes, numbers)

    def copied(self, folder: Path, count: int) -> Path:
        """Fill ``folder`` with ``count`` copies of photos.  Links to one file would be cached only once."""
        for number in range(count):
            at = number % len(self.files)
            target = folder / self.classes[self.labels[at]] / f"{number:06d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.files[at], target)
        return folder


@dataclass(frozen=True)
class Table:
    """The samples of an epoch, like the content of a data frame in a user's script."""

    files: tuple[str, ...]
    labels: npt.NDArray[np.int32]  # (N,)
    boxes: Mapping[str, npt.NDArray[np.int32]]  # name of an image -> (N, 4): left, top, right, bottom
    numbers: npt.NDArray[np.float32]  # (N, 2): further inputs, for samples with several images

    def __len__(self) -> int:
        return len(self.files)

    @property
    def is_single(self) -> bool:
        return tuple(self.boxes) == ALONE

    @property
    def columns(self) -> dict[str, Any]:
        return {"file": list(self.files), "label": self.labels, NUMBERS: self.numbers, **self.boxes}


@dataclass(frozen=True)
class Setting:
    """The inputs of the datasets to measure; ``scratch`` is a folder for temporary files."""

    photos: Photos
    lengths: Lengths
    batch_size: int
    scratch: Path

    @cached_property
    def crops(self) -> Table:
        return self.photos.table(self.lengths.crops)

    @cached_property
    def several(self) -> Table:
        return self.photos.table(self.lengths.modalities, MODALITIES)

    def cache(self, where: Kept) -> fastpipe.Cache:
        """Return the cache for samples; datasets with equal options share their stored samples."""
        return fastpipe.Cache(where, dir=self.scratch / "kept" if where == "disk" else None)

    @cached_property
    def folder(self) -> Path:
        return self.photos.copied(self.scratch / "photos", self.lengths.folder)


def _boxes(sizes: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int32]:
    """Return a random box in each image, int32 (N, 4), with random shape and position."""
    rng, count = np.random.default_rng(seed), len(sizes)
    area = rng.uniform(LEAST_AREA, MOST_AREA, count)
    wide = area ** rng.uniform(0, 1, count)  # from a box of full width to a box of full height
    parts = np.stack([wide, area / wide], axis=1)
    spans = np.clip(np.rint(parts * sizes), 1, sizes)
    start = np.floor(rng.uniform(0, 1, (count, 2)) * (sizes - spans + 1))
    return np.hstack([start, start + spans]).astype(np.int32)


# ---- Datasets of scripts ---------------------------------------------------------------------------


def by_pillow(table: Table, batch_size: int, *, is_shuffled: bool, kept: str | None = None) -> Any:
    """Return a dataset that calls Pillow by ``tf.py_function`` for each image of a sample."""
    tf, image_of = tensorflow(), require("PIL.Image", extra="image")

    def load(path: Any, box: Any) -> npt.NDArray[np.float32]:
        with image_of.open(path.numpy().decode()) as opened:
            part = opened.convert("RGB").crop(tuple(box.numpy().tolist()))
        return np.array(part.resize((SIDE, SIDE), image_of.Resampling.BILINEAR), np.float32)

    def sample(row: Any) -> Any:
        images = {}
        for name in table.boxes:
            image = tf.py_function(load, [row["file"], row[name]], tf.float32)
            image.set_shape((SIDE, SIDE, 3))
            images[name] = image
        if table.is_single:
            return images[name], row["label"]
        return {**images, NUMBERS: row[NUMBERS]}, row["label"]

    return batches_of(table, sample, batch_size, is_shuffled, kept)


def from_directory(setting: Setting, *, is_shuffled: bool) -> Any:
    """Return the dataset of Keras's ``image_dataset_from_directory`` with its defaults."""
    tensorflow()
    keras = require("keras", extra="tf")
    return keras.utils.image_dataset_from_directory(
        str(setting.folder), batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, verbose=False
    )


def batches_of(
    table: Table, sample: Callable[[Any], Any], batch_size: int, is_shuffled: bool, kept: str | None = None
) -> Any:
    """Return a dataset of batches; ``sample`` makes a sample from a row of ``table``."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensor_slices(table.columns)
    if is_shuffled and kept is None:
        made = made.shuffle(len(table))
    made = made.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    if kept is not None:
        made = made.cache(kept)
        made = made.shuffle(len(table)) if is_shuffled else made
    return made.batch(batch_size).prefetch(tf.data.AUTOTUNE)


# ---- Augmentation of batches in memory -------------------------------------------------------------

DEGREES, PART = 10, 0.2


def by_augment(setting: Setting) -> Any:
    layer = fastpipe.tf.Augment(horizontal_flip=0.5, rotation=DEGREES, brightness=PART, contrast=PART, seed=0)
    return _batchwise(setting, layer)


def by_keras(setting: Setting) -> Any:
    tensorflow()
    keras = require("keras", extra="tf")
    layers = keras.layers
    model = keras.Sequential([
        layers.RandomFlip("horizontal", seed=0),
        layers.RandomRotation(DEGREES / 360, fill_mode="constant", seed=0),
        layers.RandomBrightness(PART, seed=0),
        layers.RandomContrast((PART, PART), seed=0),  # a single number would give factors from 1 to 1 + PART
    ])  # fmt: skip
    return _batchwise(setting, lambda images: model(images, training=True))


def _batchwise(setting: Setting, change: Callable[[Any], Any]) -> Any:
    """Return a dataset that repeats one batch; ``change`` is applied to the whole batch."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensors(images_of(setting)).repeat(setting.lengths.batches)
    return made.map(change, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def images_of(setting: Setting) -> Any:
    """Return a batch of crops, float32 (N, 128, 128, 3), with values from 0 to 255."""
    table = setting.photos.table(setting.batch_size)
    return next(iter(by_pillow(table, setting.batch_size, is_shuffled=False)))[0]


# ---- Datasets of fastpipe --------------------------------------------------------------------------


def crops(
    setting: Setting,
    *,
    is_shuffled: bool,
    cache: Kept = "off",
    engine: Literal["threads", "graph"] = "threads",
) -> Any:
    table = setting.crops
    return fastpipe.tf.image_dataset(
        {"file": list(table.files), "label": table.labels}, boxes=table.boxes["image"], image_size=SIDE,
        batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, cache=setting.cache(cache), engine=engine,
    )  # fmt: skip


def modalities(setting: Setting, *, is_shuffled: bool, cache: Kept = "off") -> Any:
    table = setting.several
    first, second = table.numbers.T
    return fastpipe.tf.image_dataset(
        {"file": list(table.files), "label": table.labels, "first": first, "second": second},
        modalities={name: {"boxes": boxes} for name, boxes in table.boxes.items()},
        tabular={NUMBERS: ["first", "second"]}, image_size=SIDE, batch_size=setting.batch_size,
        shuffle=is_shuffled, seed=0, cache=setting.cache(cache),
    )  # fmt: skip


def folder(setting: Setting, *, is_shuffled: bool, cache: Kept = "off") -> Any:
    return fastpipe.tf.image_dataset(
        str(setting.folder), batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, verbose=False,
        cache=setting.cache(cache),
    )  # fmt: skip


# ---- Rows ------------------------------------------------------------------------------------------

# The name of a section -> its label in tables.
SECTIONS = {
    "crop": "a box of each photo at 128×128",
    "folder": "a folder of photos at 256×256",
    "modalities": "four boxes of each photo at 128×128, and numbers",
    "augment": "batches in memory: flip, rotation, brightness, contrast",
}
_KEPT = "from the second epoch on"


class Make(Protocol):
    """A function that makes a dataset from a `Setting`, in sample order or reshuffled in each epoch."""

    def __call__(self, setting: Setting, *, is_shuffled: bool) -> Any: ...


@dataclass(frozen=True)
class Spec(RowInfo):
    """Describes one dataset to measure."""

    section: str = "crop"
    make: Make = crops
    most_apart: int | None = None  # largest allowed difference from the replaced values; None: no comparison
    process: str = "scripts"  # name of a process; rows without fastpipe run in the process of this name

    def samples(self, lengths: Any, batch_size: int) -> int:
        names = {"crop": "crops", "hdf5": "rows", "augment": "batches"}
        count = int(getattr(lengths, names.get(self.section, self.section)))
        return count * batch_size if self.section == "augment" else count


UNITS = {"modalities": "samples", "hdf5": "rows", "patches": "patches"}


def spec_of(section: str, kind: str, label: str, group: str, make: Make, note: str = "", **more: Any) -> Spec:
    """Describe a dataset; by default, fastpipe's values must equal those of the dataset that it replaces."""
    more = {"most_apart": 0 if group == "fastpipe" and section != "augment" else None} | more
    unit = UNITS.get(section, "images")
    key = f"{section}-{kind}"
    return Spec(key, label, group, note=note, section=section, unit=unit, make=make, **more)


def script_of(make: Callable[..., Any], table: str, **more: Any) -> Make:
    """Return a function that makes a dataset from a table, the setting's attribute named ``table``."""

    def script(setting: Setting, *, is_shuffled: bool) -> Any:
        return make(getattr(setting, table), setting.batch_size, is_shuffled=is_shuffled, **more)

    return script


def in_memory(make: Callable[[Setting], Any]) -> Make:
    """Return a function that makes a dataset of batches in memory, which have no order."""
    return lambda setting, is_shuffled: make(setting)


def specs() -> list[Spec]:
    """Describe the datasets to measure; in each section, the dataset that fastpipe replaces is first."""
    fast, several, ram = "image_dataset", "image_dataset(modalities=…)", 'cache="ram"'
    return [
        spec_of("crop", "replaced", "tf.py_function + Pillow", "replaced", script_of(by_pillow, "crops")),
        spec_of("crop", "threads", fast, "fastpipe", crops),
        spec_of("crop", "graph", f'{fast}, engine="graph"', "fastpipe", partial(crops, engine="graph"),
                "TensorFlow's operations, within 1 of 255", most_apart=1),
        spec_of("crop", "ram", f"{fast}, {ram}", "fastpipe", partial(crops, cache="ram"), _KEPT),
        spec_of("crop", "disk", f'{fast}, cache="disk"', "fastpipe", partial(crops, cache="disk"), _KEPT),
        spec_of("folder", "replaced", "keras image_dataset_from_directory", "replaced", from_directory),
        spec_of("folder", "threads", fast, "fastpipe", folder),
        spec_of("folder", "ram", f"{fast}, {ram}", "fastpipe", partial(folder, cache="ram"),
                f"float32, {_KEPT}"),
        spec_of("modalities", "replaced", "four tf.py_function + Pillow in one map", "replaced",
                script_of(by_pillow, "several")),
        spec_of("modalities", "threads", several, "fastpipe", modalities),
        spec_of("modalities", "ram", f"{several}, {ram}", "fastpipe", partial(modalities, cache="ram"),
                _KEPT),
        spec_of("augment", "replaced", "keras.layers, Sequential", "replaced", in_memory(by_keras),
                "brightness is added"),
        spec_of("augment", "layer", "fastpipe.tf.Augment", "fastpipe", in_memory(by_augment),
                "brightness is a factor"),
    ]  # fmt: skip


class EpochRow(Contender):
    """Measures whole epochs of a dataset (a `Contender`).

    The iterator is created after the clock starts, and is exhausted before the clock stops.  So no batch is
    prefetched earlier, and no thread continues afterwards.
    """

    def __init__(self, spec: Spec, setting: Setting) -> None:
        self.spec, self.key = spec, spec.key
        self.chunk = spec.samples(setting.lengths, setting.batch_size)
        try:
            self.dataset = spec.make(setting, is_shuffled=True)
        except CacheError as error:
            raise ContenderError(str(error)) from error

    def measure(self, count: int) -> float:
        errors, seconds = tensorflow().errors, 0.0
        for _ in range(count // self.chunk):
            seen = 0
            start = time.perf_counter()
            try:
                for batch in self.dataset:
                    seen += _samples(batch)
            except errors.OpError as error:
                raise ContenderError(f"it failed: {str(error).splitlines()[0]}") from error
            seconds += time.perf_counter() - start
            if seen != self.chunk:
                raise RuntimeError(f"{self.spec.label} gave {seen} samples of {self.chunk}")
        return seconds

    def timeline(self, steps: int, busy_s: float) -> Timeline:
        return timeline_of(self.dataset, lambda _: busy_s, steps)

    def stage_seconds(self) -> Mapping[str, float]:
        return dict(self.dataset.stage_seconds)

    def close(self) -> None:
        self.dataset = None  # garbage collection ends the dataset's threads and frees its memory


def _samples(batch: Any) -> int:
    inputs = batch[0] if isinstance(batch, tuple) else batch
    return int((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs).shape[0])


# ---- Are the samples equal to those of the replaced datasets? --------------------------------------

Parts = dict[str, npt.NDArray[Any]]
_LABELS = "labels"


@dataclass
class SampleCheck(RowCheck, Compared):
    """Compares samples of fastpipe's datasets with samples of the replaced datasets."""

    told: ClassVar[tuple[str, ...]] = (*RowCheck.told, "values", "differing", "over_one", "largest")

    whose: str = "those of the replaced datasets"

    def agreement(self) -> str:
        apart = "" if not self.differing else (
            f" but for {self.differing / self.values:.2%} of the values, which differ by at most"
            f" {self.largest:g} of 255"
        )  # fmt: skip
        return (
            f"{self.samples:,} samples in {self.epochs} epochs equal those of the replaced datasets bit for"
            f" bit{apart}; labels too, and each sample comes once in an epoch"
        )

    def add_batch(self, what: str, wanted: Parts, found: Parts, most_apart: int) -> None:
        """Compare the parts of two batches; record only the first problem of each part."""
        if list(wanted) != list(found):
            self._say(f"{what}: a batch", f" has {', '.join(found)}, expected {', '.join(wanted)}")
            return
        for name, right in wanted.items():
            got, part = found[name], f"{what}: {name}"
            if (got.dtype, got.shape) != (right.dtype, right.shape):
                self._say(part, f" are {got.dtype} {got.shape}, expected {right.dtype} {right.shape}")
            elif right.ndim == 4 and right.dtype == np.float32:
                if not (gap := self.count(right, got)) <= most_apart:
                    self._say(
                        part,
                        f": values differ by up to {gap:g} of 255, where {most_apart} is the most allowed",
                    )
            elif not np.array_equal(right, got):
                self._say(part, " differ")

    def _say(self, part: str, problem: str) -> None:
        if not any(known.startswith(part) for known in self.problems):
            self.problems += (part + problem,)


def check_rows(
    setting: Setting, rows: Sequence[EpochRow], say: Say = unheard, every: Callable[[], list[Spec]] = specs
) -> SampleCheck:
    """Compare each of fastpipe's datasets with the dataset that it replaces.

    First an epoch in sample order is compared number by number.  Then an epoch in random order, as it is
    measured, must have the same samples.  If a dataset has a cache, the first of these epochs fills it.
    """
    check, errors = SampleCheck(), tensorflow().errors
    compared = [row for row in rows if row.spec.most_apart is not None]
    for section in dict.fromkeys(row.spec.section for row in compared):
        say(f"comparing: {section}")
        replaced = next(spec for spec in every() if spec.section == section and spec.group == "replaced")
        try:
            _check_section(check, setting, replaced, [row for row in compared if row.spec.section == section])
        except errors.OpError as error:
            check.problems += (f"{section}: {str(error).splitlines()[0]}",)
    return check


def _check_section(check: SampleCheck, setting: Setting, replaced: Spec, rows: Sequence[EpochRow]) -> None:
    ordered = [row.spec.make(setting, is_shuffled=False) for row in rows]
    found: list[Counter[bytes]] = [Counter() for _ in rows]
    for wanted, *batches in zip_longest(replaced.make(setting, is_shuffled=False), *ordered):
        right = _parts(wanted)
        for row, samples, batch in zip(rows, found, batches, strict=True):
            made = _parts(batch)
            check.add_batch(f"{row.spec.section}: {row.spec.label}", right, made, row.spec.most_apart or 0)
            samples.update(digests_of_samples(*made.values()))
    for row, samples in zip(rows, found, strict=True):
        check.epochs, check.samples = check.epochs + 1, check.samples + samples.total()
        again: Counter[bytes] = Counter()
        for batch in row.dataset:
            again.update(digests_of_samples(*_parts(batch).values()))
        what = f"{row.spec.section}: {row.spec.label}"
        if not any(known.startswith(what) for known in check.problems):
            check.add_epoch(what, samples, again, "of a shuffled epoch are none of the others")


def _parts(batch: Any) -> Parts:
    """Return the arrays of a batch by name, in the order of the names; an empty dict if ``batch`` is None."""
    if batch is None:
        return {}
    inputs, labels = batch
    named = dict(inputs) if isinstance(inputs, dict) else {"images": inputs}
    return {name: np.asarray(value) for name, value in sorted({**named, _LABELS: labels}.items())}


# ---- Datasets without fastpipe, in their own process -----------------------------------------------
#
# fastpipe's datasets are TensorFlow datasets of a Python generator.  The first such dataset in a process
# makes TensorFlow fix malloc's limit above which memory is mapped for each allocation.  Scripts without a
# generator allocate memory for each image.  In the process of fastpipe's datasets they would be slower than
# in their own process.


class Apart:
    """A process that iterates epochs of datasets on request, and is idle between requests."""

    def __init__(self, setting: Setting, specs: Callable[[], list[Spec]] = specs) -> None:
        # The process is not forked, because a fork would lack the threads that TensorFlow has started here.
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare, (setting, specs))

    def ask(self, key: str, count: int, busy_s: float | None = None) -> Any:
        """Iterate ``count`` samples of the benchmark's row ``key``, and return the seconds.  If ``busy_s`` is
        given, iterate ``count`` steps, each busy for ``busy_s`` seconds, and return their timeline."""
        try:
            return self._pool.submit(_answer, key, count, busy_s).result()
        except BrokenProcessPool:
            raise ContenderError("its process ended") from None

    def close(self) -> None:
        """End the process.  This method may be called twice."""
        self._pool.shutdown(cancel_futures=True)


class ApartRow(Contender):
    """Measures whole epochs of a dataset in another process (a `Contender`)."""

    def __init__(self, spec: Spec, setting: Setting, apart: Apart) -> None:
        self.key, self.chunk = spec.key, spec.samples(setting.lengths, setting.batch_size)
        self._apart = apart  # several rows share this process; they do not close it

    def measure(self, count: int) -> float:
        return float(self._apart.ask(self.key, count))

    def timeline(self, steps: int, busy_s: float) -> Timeline:
        found: Timeline = self._apart.ask(self.key, steps, busy_s)
        return found


# Used in the process of `Apart`: the setting, the descriptions of datasets, and the rows that were built.
_served: tuple[Setting, dict[str, Spec], dict[str, EpochRow]]


def _prepare(setting: Setting, specs: Callable[[], list[Spec]]) -> None:
    global _served
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also arrives here, but must end only the caller
    _served = setting, {spec.key: spec for spec in specs()}, {}


def _answer(key: str, count: int, busy_s: float | None) -> float | Timeline:
    setting, by_key, rows = _served
    if key not in rows:
        rows[key] = EpochRow(by_key[key], setting)
        gc.collect()
        gc.freeze()  # like `Driver.measure`, which measures the other rows
    return rows[key].measure(count) if busy_s is None else rows[key].timeline(count, busy_s)


# ---- The case --------------------------------------------------------------------------------------

BATCH, QUICK_BATCH = 32, 8


class Bench(Case):
    case = "tf"
    about = "TensorFlow: tf.py_function + Pillow, and Keras's loader and layers against fastpipe.tf"
    quick_s = 0.05
    main = "crop-threads"
    labels: ClassVar[Mapping[str, str]] = SECTIONS  # labels of sections in tables
    full: ClassVar[Lengths] = FULL
    quick: ClassVar[Lengths] = QUICK
    specs: Callable[[], list[Spec]] = staticmethod(specs)
    setting: Setting

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--data", metavar="FOLDER", type=Path,
            help=f"image folder whose JPEGs are read{DATA_HELP}")  # fmt: skip
        add("--batch-size", type=positive(int), metavar="N",
            help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
        add_run_arguments(parser)

    def prepare(self) -> None:
        tensorflow()
        args = self.args
        lengths = self.quick if args.quick else self.full
        folder, name, _ = folder_to_use(args.data, self.progress.done)
        photos = Photos.of(folder, name, lengths.crops)
        size = args.batch_size or (QUICK_BATCH if args.quick else BATCH)
        scratch = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-"))
        self.setting = Setting(photos, lengths, size, Path(scratch))

    def rows(self) -> list[EpochRow]:
        self.stack.callback(gc.collect)  # once, after all rows are closed, because it is slow with TensorFlow
        own = [spec for spec in self.specs() if spec.group == "fastpipe"]
        self.own = self.opened((spec, partial(EpochRow, spec, self.setting)) for spec in own)
        return self.own

    def compared(self, rows: Sequence[Any]) -> Outcome:
        return check_rows(self.setting, rows, self.progress.now, self.specs)

    def others(self) -> list[Contender]:
        """Return the rows of datasets without fastpipe, which run in other processes."""
        _ = self.setting.folder  # creates the folder before other processes need it
        specs = self.specs()
        apart = {name: Apart(self.setting, self.specs) for name in sorted({spec.process for spec in specs})}
        for one in apart.values():
            self.stack.callback(one.close)
        strange = [spec for spec in specs if spec.group != "fastpipe"]
        found = [self.added(spec, ApartRow(spec, self.setting, apart[spec.process])) for spec in strange]
        self.infos = {spec.key: self.infos[spec.key] for spec in specs if spec.key in self.infos}
        return list(found)

    def described(self, session: Session) -> dict[str, Any]:
        self._require_replaced(session)
        photos, lengths, size = self.setting.photos, self.setting.lengths, self.setting.batch_size
        images, main = max(1, self.stages["images"]), self.infos[self.main]
        spent = ", ".join(f"{name} {1000 * s / images:.2f}" for name, s in self.stages["seconds"].items())
        self.infos[self.main] = replace(main, note=f"ms an image in its threads: {spent}")
        epochs = (
            f"epochs of {lengths.crops:,} boxes, {lengths.folder:,} photos of a folder and"
            f" {lengths.modalities:,} times four boxes, of these photos again and again"
        )
        return {
            "data": {"text": f"{photos.text}; {epochs}", "name": photos.name, "classes": len(photos.classes),
                     "total": photos.total, "photos": len(photos.files), "bytes": photos.nbytes,
                     "samples": lengths.crops},
            "sections": {key: {"label": label} for key, label in self.labels.items()},
            "job": {"text": f"tf.data: shuffled float32 batches of {size}, consumed in Python",
                    "short": f"tf.data pipelines, batches of {size}", "batch_size": size,
                    "replaces": "dataset"},
            "stages": {"seconds": {}, "images": 0},
            "plan": next(row.dataset.plan for row in self.own if row.key == self.main),
        }  # fmt: skip

    def _require_replaced(self, session: Session) -> None:
        """Raise an error if a section has measurements, but none of the dataset that fastpipe replaces."""
        for section, label in self.labels.items():
            of_it = [spec for spec in self.specs() if spec.section == section]
            replaced = [spec.key for spec in of_it if spec.group == "replaced"]
            is_measured = any(session.samples.get(spec.key) for spec in of_it)
            if is_measured and not any(session.samples.get(key) for key in replaced):
                why = "; ".join(session.failures.get(key, "not measured") for key in replaced)
                raise FastpipeError(f"{label}: what is replaced could not be measured ({why}): run it again")
