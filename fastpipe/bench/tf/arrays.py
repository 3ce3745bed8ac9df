"""Rows of an HDF5 file, and patches of a volume: as generators give them, and as fastpipe's datasets do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe._extras import require
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.tf.data import Setting
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.errors import MissingDependencyError
from fastpipe.testing.mels import mel_rows, write_table

__all__ = ["patches", "patches_by_zarr", "rows", "rows_by_h5py"]

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
    """The same by ``hdf5_dataset``.

    Args:
        setting, is_shuffled: as of all rows.
        cache: where chunks are kept.
        unit: what is shuffled: rows, or chunks and then the rows of some.
    """
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
    """The same by ``patch_dataset``, with room for a third of what the volume is decoded.

    Args:
        setting, is_shuffled: as of all rows.
        unit: what is shuffled: patches, or a tour through them.
    """
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
