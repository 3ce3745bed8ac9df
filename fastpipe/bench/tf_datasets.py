"""The datasets of the case ``tf``: as scripts write them, and as ``fastpipe.tf`` makes them."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.synthetic import mel_rows, write_table
from fastpipe.core.extras import require
from fastpipe.errors import MissingDependencyError, OptionError

__all__ = [
    "ALONE",
    "FULL",
    "MODALITIES",
    "NUMBERS",
    "QUICK",
    "SIDE",
    "Lengths",
    "Photos",
    "Setting",
    "Table",
    "by_augment",
    "by_hand",
    "by_keras",
    "by_operations",
    "by_pillow",
    "by_stateless_operations",
    "crops",
    "folder",
    "from_directory",
    "modalities",
    "patches",
    "patches_by_zarr",
    "rows",
    "rows_by_h5py",
    "tensorflow",
]


# ---- TensorFlow ------------------------------------------------------------------------------------


def tensorflow() -> Any:
    """The package, which keeps its messages to itself unless the user has said otherwise.

    Raises:
        MissingDependencyError: it is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when it is imported
    return require("tensorflow", extra="tf")


# ---- Photos and tables -----------------------------------------------------------------------------

SIDE = 128
# Names of the images of a sample, and of the numbers beside them.
ALONE = ("image",)
MODALITIES = ("photo", "depth", "thermal", "mask")
NUMBERS = "numbers"

# The part of an image's area that a box has.
LEAST_AREA, MOST_AREA = 0.3, 0.6
# JPEGs alone: whoever decodes boxes with TensorFlow's operations has nothing else.
_ENDINGS = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Lengths:
    """Samples of an epoch, in each section.

    Attributes:
        crops: one box of each.
        folder: photos of a folder.
        modalities: four boxes of each.
        batches: batches in memory, of which it is the number.
        rows: of an HDF5 file.
        patches: of a volume.
    """

    crops: int
    folder: int
    modalities: int
    batches: int
    rows: int
    patches: int


# Epochs as long as those of small data sets, for each has a beginning and an end that cost something; of
# larger samples fewer, so that an epoch takes as long.
FULL = Lengths(2048, 512, 512, 32, 1024, 128)
QUICK = Lengths(40, 24, 24, 4, 40, 6)


@dataclass(frozen=True)
class Photos:
    """JPEGs of an image folder.

    Attributes:
        name: what the report calls the folder.
        files: their paths.
        labels: int32 (N,): numbers of their classes, all of which occur.
        classes: names of these.
        sizes: (N, 2): width and height.
        total: how many JPEGs the folder has.
    """

    name: str
    files: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    classes: tuple[str, ...]
    sizes: npt.NDArray[np.int64]
    total: int

    @classmethod
    def of(cls, folder: Path, name: str, most: int) -> Photos:
        """At most so many photos of a folder, spread evenly over it.

        Raises:
            OptionError: there are no class folders, or no JPEGs in them.
        """
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if not classes:
            raise OptionError(
                f"{str(folder)!r} has no class folders; an image folder has one sub-folder per class"
            )
        files = [
            path for one in classes for path in sorted((folder / one).rglob("*"))
            if path.suffix.lower() in _ENDINGS and path.is_file()
        ]  # fmt: skip
        count = min(len(files), most)
        chosen = [files[i * len(files) // count] for i in range(count)]
        sizes = {path: size for path in chosen if (size := _size(path)) is not None}
        if not sizes:
            raise OptionError(f"{str(folder)!r} has no JPEGs in its class folders, which this case needs")
        of_class = [path.relative_to(folder).parts[0] for path in sizes]
        found, labels = np.unique(of_class, return_inverse=True)
        return cls(
            name, tuple(map(str, sizes)), labels.astype(np.int32), tuple(found.tolist()),
            np.array(list(sizes.values()), np.int64), len(files),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(os.path.getsize(path) for path in self.files)

    @property
    def text(self) -> str:
        """The photos in one line."""
        count, part = len(self.files), "" if len(self.files) == self.total else f" of {self.total:,}"
        return (
            f"{count:,}{part} photos in {len(self.classes)} classes, {self.nbytes / count / 1000:.0f} kB each"
            f" ({self.name})"
        )

    def table(self, count: int, names: tuple[str, ...] = ALONE) -> Table:
        """Rows of so many samples: photos again and again, each time with other boxes."""
        at = np.arange(count) % len(self.files)
        boxes = {name: _boxes(self.sizes[at], seed) for seed, name in enumerate(names)}
        numbers = np.random.default_rng(len(names)).random((count, 2)).astype(np.float32)
        return Table(tuple(self.files[i] for i in at), self.labels[at], boxes, numbers)

    def copied(self, folder: Path, count: int) -> Path:
        """A folder with so many photos in class folders.

        They are copies: a cache knows one file in two places to be one.
        """
        for number in range(count):
            at = number % len(self.files)
            target = folder / self.classes[self.labels[at]] / f"{number:06d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.files[at], target)
        return folder


@dataclass(frozen=True)
class Table:
    """What a script's data frame holds.

    Attributes:
        files: of each row.
        labels: int32 (N,): of each row.
        boxes: name of an image → int32 (N, 4): left, top, right, bottom.
        numbers: float32 (N, 2): further inputs, of tables with several images.
    """

    files: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    boxes: Mapping[str, npt.NDArray[np.int32]]
    numbers: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def is_single(self) -> bool:
        """Whether the input of a model is one image."""
        return tuple(self.boxes) == ALONE

    @property
    def columns(self) -> dict[str, Any]:
        """All of it, for ``from_tensor_slices``."""
        return {"file": list(self.files), "label": self.labels, NUMBERS: self.numbers, **self.boxes}


@dataclass(frozen=True)
class Setting:
    """What datasets are made of.

    Attributes:
        photos: the photos.
        lengths: samples of epochs.
        batch_size: samples in a batch.
        scratch: a folder for what is written while measuring.
    """

    photos: Photos
    lengths: Lengths
    batch_size: int
    scratch: Path

    @cached_property
    def crops(self) -> Table:
        """A table of one image in each row."""
        return self.photos.table(self.lengths.crops)

    @cached_property
    def several(self) -> Table:
        """A table of four images in each row."""
        return self.photos.table(self.lengths.modalities, MODALITIES)

    def cache(self, where: Literal["off", "ram", "disk"]) -> fastpipe.Cache:
        """Where samples are kept: of the same option in the same place, as long as a dataset has it."""
        return fastpipe.Cache(where, dir=self.scratch / "kept" if where == "disk" else None)

    @cached_property
    def folder(self) -> Path:
        """An image folder."""
        return self.photos.copied(self.scratch / "photos", self.lengths.folder)


def _size(path: Path) -> tuple[int, int] | None:
    """Width and height of a JPEG; None of what is none."""
    image = require("PIL.Image", extra="image")
    try:
        with image.open(path) as opened:
            return (opened.width, opened.height) if opened.format == "JPEG" else None
    except OSError:
        return None


def _boxes(sizes: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int32]:
    """A box in each image, of any form and anywhere."""
    rng, count = np.random.default_rng(seed), len(sizes)
    area = rng.uniform(LEAST_AREA, MOST_AREA, count)
    wide = area ** rng.uniform(0, 1, count)  # from all of the width to all of the height
    parts = np.stack([wide, area / wide], axis=1)
    spans = np.clip(np.rint(parts * sizes), 1, sizes)
    start = np.floor(rng.uniform(0, 1, (count, 2)) * (sizes - spans + 1))
    return np.hstack([start, start + spans]).astype(np.int32)


# ---- As scripts write them -------------------------------------------------------------------------

Sample = Callable[[Any], Any]


def by_pillow(table: Table, batch_size: int, *, is_shuffled: bool, kept: str | None = None) -> Any:
    """Pillow in ``tf.py_function``: one call for each image of a sample."""
    tf, load = tensorflow(), _pillow()

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


def by_hand(table: Table, batch_size: int, *, is_shuffled: bool) -> Any:
    """TensorFlow's operations, of which one decodes no more than the box; the resize is not antialiased."""
    tf = tensorflow()

    def sample(row: Any) -> Any:
        left, top, right, bottom = tf.unstack(row["image"])
        window = tf.stack([top, left, bottom - top, right - left])
        image = tf.io.decode_and_crop_jpeg(tf.io.read_file(row["file"]), window, channels=3)
        return tf.image.resize(image, (SIDE, SIDE)), row["label"]

    return batches_of(table, sample, batch_size, is_shuffled)


def from_directory(setting: Setting, *, is_shuffled: bool) -> Any:
    """Keras's loader at its defaults."""
    tensorflow()
    keras = require("keras", extra="tf")
    return keras.utils.image_dataset_from_directory(
        str(setting.folder), batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, verbose=False
    )


def _pillow() -> Callable[[Any, Any], npt.NDArray[np.float32]]:
    """The function of the script's that loads an image."""
    image = require("PIL.Image", extra="image")

    def load(path: Any, box: Any) -> npt.NDArray[np.float32]:
        with image.open(path.numpy().decode()) as opened:
            part = opened.convert("RGB").crop(tuple(box.numpy().tolist()))
        return np.array(part.resize((SIDE, SIDE), image.Resampling.BILINEAR), np.float32)

    return load


def batches_of(
    table: Table, sample: Sample, batch_size: int, is_shuffled: bool, kept: str | None = None
) -> Any:
    """A dataset of batches, in which each row is made by a function."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensor_slices(table.columns)
    if is_shuffled and kept is None:
        made = made.shuffle(len(table))
    made = made.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    if kept is not None:
        made = made.cache(kept)
        made = made.shuffle(len(table)) if is_shuffled else made
    return made.batch(batch_size).prefetch(tf.data.AUTOTUNE)


# ---- Rows of an HDF5 file, and patches of a volume -------------------------------------------------

_MEL = (64, 128)
_IN_CHUNK = 16
_WINDOW = 16  # chunks whose rows are mixed
_VOLUME, _CHUNK, _PATCH = (96, 256, 256), (32, 64, 64), (32, 64, 64)
_PATCHES_IN_BATCH = 2


def rows_by_h5py(setting: Setting, *, is_shuffled: bool) -> Any:
    """A generator over an open file: a row at a time, as scripts have it."""
    h5py = require("h5py", extra="hdf5")
    path, count = _table(setting), setting.lengths.rows
    rng = np.random.default_rng(0)

    def samples() -> Iterator[Any]:
        with h5py.File(path, "r") as file:
            mels, labels = file["mels"], file["labels"]
            for row in (rng.permutation(count) if is_shuffled else np.arange(count)).tolist():
                yield mels[row], labels[row]

    spec = tensorflow().TensorSpec
    return _generated(samples, (spec(_MEL, "float32"), spec((), "int64")), setting.batch_size)


def rows(
    setting: Setting,
    *,
    is_shuffled: bool,
    cache: Literal["off", "ram"] = "off",
    unit: Literal["sample", "group"] = "sample",
) -> Any:
    """The same by ``hdf5_dataset``."""
    shuffle = fastpipe.Shuffle(_WINDOW, "group") if unit == "group" else True
    return fastpipe.tf.hdf5_dataset(
        _table(setting), "mels", "labels", setting.batch_size, shuffle if is_shuffled else False, 0,
        cache=setting.cache(cache),
    )  # fmt: skip


def patches_by_zarr(setting: Setting, *, is_shuffled: bool) -> Any:
    """A generator that slices a Zarr array, as scripts have it."""
    path, places = _volume(setting), _places(setting)
    rng = np.random.default_rng(0)

    def samples() -> Iterator[Any]:
        volume = _zarr().open_array(str(path), mode="r")
        for number in (rng.permutation(len(places)) if is_shuffled else np.arange(len(places))).tolist():
            box = tuple(
                slice(at, at + side) for at, side in zip(places[number].tolist(), _PATCH, strict=True)
            )
            yield volume[box]

    spec = tensorflow().TensorSpec
    return _labelled(_generated(samples, spec(_PATCH, "uint16"), _PATCHES_IN_BATCH))


def patches(setting: Setting, *, is_shuffled: bool, unit: Literal["sample", "group"] = "sample") -> Any:
    """The same by ``patch_dataset``, with room for a third of what the volume is decoded."""
    shuffle = fastpipe.Shuffle(unit=unit) if unit == "group" else True
    room = int(np.prod(_VOLUME)) * 2 // 3
    made = fastpipe.tf.patch_dataset(
        str(_volume(setting)), _PATCH, None, _PATCHES_IN_BATCH, shuffle if is_shuffled else False, 0,
        sampling=fastpipe.sampling.Positions(_places(setting)), cache=fastpipe.Cache("ram", max_bytes=room),
    )  # fmt: skip
    return _labelled(made)


def _generated(samples: Any, signature: Any, batch_size: int) -> Any:
    tf = tensorflow()
    made = tf.data.Dataset.from_generator(samples, output_signature=signature)
    return made.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _labelled(made: Any) -> Any:
    """Patches in the form that rows of the case have, with labels that say nothing."""
    tf = tensorflow()
    return made.map(lambda patches: (patches, tf.zeros(tf.shape(patches)[:1], tf.int64)))


def _table(setting: Setting) -> Path:
    """The file of rows; made by whoever needs it first."""
    path, count = setting.scratch / "mels.h5", setting.lengths.rows
    if not path.exists():
        mels = mel_rows(np.random.default_rng(0), count, _MEL)
        write_table(
            path, "mels", [mels], mels.shape, chunk=(min(_IN_CHUNK, count), *_MEL), compression="gzip",
            labels=np.arange(count),
        )  # fmt: skip
    return path


def _volume(setting: Setting) -> Path:
    """The volume; made by whoever needs it first."""
    path = setting.scratch / "volume.zarr"
    if not path.exists():
        smooth = np.cumsum(np.random.default_rng(0).integers(-9, 10, _VOLUME), axis=2) + (1 << 15)
        _zarr().create_array(str(path), data=smooth.astype(np.uint16), chunks=_CHUNK)
    return path


def _zarr() -> Any:
    try:
        return require("zarr", extra="bench")
    except MissingDependencyError as error:
        raise ContenderError(str(error)) from error


def _places(setting: Setting) -> npt.NDArray[np.int64]:
    """Where the patches of an epoch are, anywhere in the volume."""
    most = np.array(_VOLUME) - _PATCH
    drawn = np.random.default_rng(1).random((setting.lengths.patches, len(_PATCH)))
    return np.floor(drawn * (most + 1)).astype(np.int64)


# ---- Augmentation of batches in memory -------------------------------------------------------------

DEGREES, PART = 10, 0.2
_LEVELS = PART * 255  # of brightness, where it is added


def by_augment(setting: Setting) -> Any:
    """``fastpipe.tf.Augment``."""
    layer = fastpipe.tf.Augment(horizontal_flip=0.5, rotation=DEGREES, brightness=PART, contrast=PART, seed=0)
    return _batchwise(setting, layer)


def by_keras(setting: Setting) -> Any:
    """Keras's layers, one after the other."""
    tensorflow()
    keras = require("keras", extra="tf")
    layers = keras.layers
    model = keras.Sequential([
        layers.RandomFlip("horizontal", seed=0),
        layers.RandomRotation(DEGREES / 360, fill_mode="constant", seed=0),
        layers.RandomBrightness(PART, seed=0),
        layers.RandomContrast((PART, PART), seed=0),  # of one number, factors are 1 to 1 + PART
    ])  # fmt: skip
    return _batchwise(setting, lambda images: model(images, training=True))


def by_operations(setting: Setting) -> Any:
    """``tf.image.random_…``, image by image."""
    tf = tensorflow()

    def change(image: Any) -> Any:
        image = tf.image.random_flip_left_right(image)
        image = _rotated(tf, image, tf.random.uniform((), -1.0, 1.0))
        image = tf.image.random_brightness(image, _LEVELS)
        return tf.image.random_contrast(image, 1 - PART, 1 + PART)

    return _imagewise(setting, change, is_seeded=False)


def by_stateless_operations(setting: Setting) -> Any:
    """``tf.image.stateless_random_…``, image by image, with seeds that are counted."""
    tf = tensorflow()

    def change(image: Any, number: Any) -> Any:
        seeds = [tf.stack([number, tf.constant(kind, tf.int64)]) for kind in range(4)]
        image = tf.image.stateless_random_flip_left_right(image, seeds[0])
        image = _rotated(tf, image, tf.random.stateless_uniform((), seeds[1], -1.0, 1.0))
        image = tf.image.stateless_random_brightness(image, _LEVELS, seeds[2])
        return tf.image.stateless_random_contrast(image, 1 - PART, 1 + PART, seeds[3])

    return _imagewise(setting, change, is_seeded=True)


def _batchwise(setting: Setting, change: Callable[[Any], Any]) -> Any:
    """A batch, again and again, changed as a whole."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensors(_images(setting)).repeat(setting.lengths.batches)
    return made.map(change, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def _imagewise(setting: Setting, change: Callable[..., Any], *, is_seeded: bool) -> Any:
    """A batch, again and again, of which each image is changed before they are put together."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensor_slices(_images(setting)).repeat(setting.lengths.batches)
    if is_seeded:
        made = tf.data.Dataset.zip((made, tf.data.Dataset.counter()))
    made = made.map(change, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(setting.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _images(setting: Setting) -> Any:
    """A full batch of crops, float32 (N, 128, 128, 3) of 0 to 255."""
    table = setting.photos.table(setting.batch_size)
    return next(iter(by_pillow(table, setting.batch_size, is_shuffled=False)))[0]


def _rotated(tf: Any, image: Any, part: Any) -> Any:
    """An image rotated about its centre by a part of the greatest angle.

    ``tf.image`` has no such function; this is TensorFlow Addons'.
    """
    angle = part * math.radians(DEGREES)
    sine, cosine, centre = tf.sin(angle), tf.cos(angle), (SIDE - 1) / 2
    right = centre - cosine * centre + sine * centre
    down = centre - sine * centre - cosine * centre
    matrix = tf.stack([cosine, -sine, right, sine, cosine, down, 0.0, 0.0])
    made = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None], transforms=matrix[None], output_shape=[SIDE, SIDE], fill_value=0.0,
        interpolation="BILINEAR", fill_mode="CONSTANT",
    )  # fmt: skip
    return tf.ensure_shape(made[0], (SIDE, SIDE, 3))


# ---- Of fastpipe -----------------------------------------------------------------------------------


def crops(
    setting: Setting,
    *,
    is_shuffled: bool,
    cache: Literal["off", "ram", "disk"] = "off",
    engine: Literal["threads", "graph"] = "threads",
) -> Any:
    """One image of each row, with its box."""
    table = setting.crops
    return fastpipe.tf.image_dataset(
        {"file": list(table.files), "label": table.labels}, boxes=table.boxes["image"], image_size=SIDE,
        batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, cache=setting.cache(cache), engine=engine,
    )  # fmt: skip


def modalities(setting: Setting, *, is_shuffled: bool, cache: Literal["off", "ram", "disk"] = "off") -> Any:
    """Four images of each row, and numbers."""
    table = setting.several
    first, second = table.numbers.T
    return fastpipe.tf.image_dataset(
        {"file": list(table.files), "label": table.labels, "first": first, "second": second},
        modalities={name: {"boxes": boxes} for name, boxes in table.boxes.items()},
        tabular={NUMBERS: ["first", "second"]}, image_size=SIDE, batch_size=setting.batch_size,
        shuffle=is_shuffled, seed=0, cache=setting.cache(cache),
    )  # fmt: skip


def folder(setting: Setting, *, is_shuffled: bool, cache: Literal["off", "ram", "disk"] = "off") -> Any:
    """A folder, at the defaults of ``image_dataset_from_directory``."""
    return fastpipe.tf.image_dataset(
        str(setting.folder), batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, verbose=False,
        cache=setting.cache(cache),
    )  # fmt: skip
