"""The case ``tf`` with more of TensorFlow's own datasets, and what was asked for."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from benchmarks.lines import Studied
from benchmarks.targets import Asked, judged_rates
from fastpipe.bench import tf
from fastpipe.bench.runner import ContenderError, Sample, Session
from fastpipe.bench.synthetic import mel_rows, write_table
from fastpipe.bench.tf import (
    DEGREES,
    FULL,
    PART,
    QUICK,
    SIDE,
    Lengths,
    Make,
    Setting,
    Spec,
    Table,
    batches_of,
    by_pillow,
    images_of,
    in_memory,
    script_of,
    spec_of,
    tensorflow,
)
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.errors import MissingDependencyError

SECTIONS = {
    **tf.SECTIONS,
    "hdf5": "rows of 64×128 floats of an HDF5 file, gzip",
    "patches": "patches of 32×64×64 of a Zarr volume",
}
_PILLOW = "× tf.py_function with Pillow"

ASKED = (
    Asked(f"boxes, {_PILLOW}", "crop-threads", "crop-replaced", 2),
    Asked("boxes, × TensorFlow's operations by hand", "crop-threads", "crop-hand", 1.25),
    Asked(f"boxes, kept in memory, {_PILLOW}", "crop-ram", "crop-replaced", 20),
    Asked(f"boxes, kept on disk, {_PILLOW}", "crop-disk", "crop-replaced", 8),
    Asked("folder, × image_dataset_from_directory", "folder-threads", "folder-replaced", 1.5),
)


def targets(samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Return all targets with the measured figures.

    Args:
        samples: of a finished run, by row.
    """
    return judged_rates(samples, ASKED)


def by_hand(table: Table, batch_size: int, *, is_shuffled: bool) -> Any:
    """TensorFlow's operations, of which one decodes no more than the box; the resize is not antialiased."""
    tf = tensorflow()

    def sample(row: Any) -> Any:
        left, top, right, bottom = tf.unstack(row["image"])
        window = tf.stack([top, left, bottom - top, right - left])
        image = tf.io.decode_and_crop_jpeg(tf.io.read_file(row["file"]), window, channels=3)
        return tf.image.resize(image, (SIDE, SIDE)), row["label"]

    return batches_of(table, sample, batch_size, is_shuffled)


def by_hand_antialiased(table: Table, batch_size: int, *, is_shuffled: bool) -> Any:
    """TensorFlow's operations, nearer to Pillow's pixels."""
    library = tensorflow()

    def sample(row: Any) -> Any:
        left, top, right, bottom = library.unstack(row["image"])
        image = library.io.decode_jpeg(library.io.read_file(row["file"]), channels=3)
        image = library.image.crop_to_bounding_box(image, top, left, bottom - top, right - left)
        return library.image.resize(image, (SIDE, SIDE), antialias=True), row["label"]

    return batches_of(table, sample, batch_size, is_shuffled)


def kept_by_tensorflow(in_file: bool) -> Make:
    """``Dataset.cache`` after Pillow, in memory or in a file."""
    return lambda setting, is_shuffled: by_pillow(
        setting.crops, setting.batch_size, is_shuffled=is_shuffled,
        kept=str(setting.scratch / "tf-cache") if in_file else "",
    )  # fmt: skip


# ---- Rows of an HDF5 file, and patches of a volume --------------------------------------------------


@dataclass(frozen=True)
class ArrayLengths(Lengths):
    """Samples of an epoch, with rows of an HDF5 file and patches of a volume."""

    rows: int = 1024
    patches: int = 128


def _lengths(setting: Setting) -> ArrayLengths:
    assert isinstance(setting.lengths, ArrayLengths)
    return setting.lengths


_MEL = (64, 128)
_IN_CHUNK = 16
_WINDOW = 16  # chunks whose rows are mixed
_VOLUME, _CHUNK, _PATCH = (96, 256, 256), (32, 64, 64), (32, 64, 64)
_PATCHES_IN_BATCH = 2


def rows_by_h5py(setting: Setting, *, is_shuffled: bool) -> Any:
    """A generator over an open file: a row at a time, as scripts have it."""
    h5py = require("h5py", extra="hdf5")
    path, count = _table(setting), _lengths(setting).rows
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
    """The file of rows, created at the first use."""
    path, count = setting.scratch / "mels.h5", _lengths(setting).rows
    if not path.exists():
        mels = mel_rows(np.random.default_rng(0), count, _MEL)
        write_table(
            path, "mels", [mels], mels.shape, chunk=(min(_IN_CHUNK, count), *_MEL), compression="gzip",
            labels=np.arange(count),
        )  # fmt: skip
    return path


def _volume(setting: Setting) -> Path:
    """The volume, created at the first use."""
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
    """Return random positions for the patches of an epoch."""
    most = np.array(_VOLUME) - _PATCH
    drawn = np.random.default_rng(1).random((_lengths(setting).patches, len(_PATCH)))
    return np.floor(drawn * (most + 1)).astype(np.int64)


_LEVELS = PART * 255  # of brightness, where it is added


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


def _imagewise(setting: Setting, change: Callable[..., Any], *, is_seeded: bool) -> Any:
    """A batch, again and again, of which each image is changed before they are put together."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensor_slices(images_of(setting)).repeat(setting.lengths.batches)
    if is_seeded:
        made = tf.data.Dataset.zip((made, tf.data.Dataset.counter()))
    made = made.map(change, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(setting.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


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


# ---- What is measured -------------------------------------------------------------------------------


def _arrays() -> list[Spec]:
    fast, cut = "hdf5_dataset", "patch_dataset"
    # A script's own are datasets of a Python generator, in a process of their own.
    rows_of = partial(spec_of, "hdf5", process="generators")
    cut_of = partial(spec_of, "patches", process="generators", output="uint16")
    return [
        rows_of("replaced", "generator over h5py, row by row", "replaced", rows_by_h5py),
        rows_of("window", f'{fast}, shuffle=Shuffle(16, "group")', "fastpipe", partial(rows, unit="group"),
                "chunks, then rows of 16 chunks at a time"),
        rows_of("ram", f'{fast}, cache="ram"', "fastpipe", partial(rows, cache="ram"),
                "from the second epoch on"),
        cut_of("replaced", "generator that slices a zarr array", "replaced", patches_by_zarr),
        cut_of("uniform", cut, "fastpipe", patches, "a third of the volume fits"),
        cut_of("tour", f'{cut}, shuffle=Shuffle(unit="group")', "fastpipe", partial(patches, unit="group"),
               "the same room; neighbours come together"),
    ]  # fmt: skip


def specs() -> list[Spec]:
    """The datasets that are measured with ``--peers``; a section's come together."""
    pillow, kept = "tf.py_function + Pillow", "float32, from the second epoch on"
    more = [
        spec_of("crop", "antialiased", "tf.io.decode_jpeg + crop + resize(antialias=True)", "peer",
                script_of(by_hand_antialiased, "crops"), "nearer to Pillow's pixels"),
        spec_of("crop", "tf-ram", f"{pillow}, Dataset.cache()", "peer", kept_by_tensorflow(False), kept),
        spec_of("crop", "tf-disk", f"{pillow}, Dataset.cache(file)", "peer", kept_by_tensorflow(True), kept),
    ]  # fmt: skip
    return sorted([*own_specs(), *more], key=lambda spec: list(SECTIONS).index(spec.section))


def own_specs() -> list[Spec]:
    """Return the datasets that are measured without ``--peers``."""
    each = "image by image; rotated as by TensorFlow Addons"
    *others, keras, layer = tf.specs()
    return [
        *others[:5],
        spec_of("crop", "hand", "tf.io.decode_and_crop_jpeg + tf.image.resize", "peer",
                script_of(by_hand, "crops"), "other pixels: another decoding, no antialiasing"),
        *others[5:], keras,
        spec_of("augment", "images", "tf.image.random_…", "replaced", in_memory(by_operations), each),
        spec_of("augment", "stateless", "tf.image.stateless_random_…", "replaced",
                in_memory(by_stateless_operations), each),
        layer, *_arrays(),
    ]  # fmt: skip


class Bench(Studied, tf.Bench):
    """One run of the case, with the figures that were asked for, and with everything."""

    labels: ClassVar[Mapping[str, str]] = SECTIONS
    full: ClassVar[Lengths] = ArrayLengths(**vars(FULL))
    quick: ClassVar[Lengths] = ArrayLengths(**vars(QUICK), rows=40, patches=6)
    specs = staticmethod(own_specs)

    def __init__(self, args: Namespace, progress: Progress) -> None:
        super().__init__(args, progress)
        if args.peers:
            self.specs = specs

    def studies(self, session: Session) -> dict[str, Any]:
        """Judge the figures that were asked for."""
        return {"targets": targets(session.samples)}
