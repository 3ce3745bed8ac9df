"""``stitch`` blends predictions of patches into volumes on disk."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.core.casting import unheld
from fastpipe.core.files import remove_tree
from fastpipe.core.growing_folder import LOCK, GrowingFolder, folder_of, opened_folder, remove_folder
from fastpipe.core.text import printable
from fastpipe.errors import OptionError, VolumeError
from fastpipe.torch.patch_dataset import FastPatchDataset
from fastpipe.volumes.blending import Blender, gaussian_weights
from fastpipe.volumes.tensorstore import opened_by_tensorstore

_PART, _LEAST_PART = 128, 16  # largest and smallest side, in voxels, of a part that is written in one call


def stitch(
    predictions: Iterable[Any],
    dataset: FastPatchDataset,
    out: Any,
    *,
    weights: Literal["gaussian", "constant"] | npt.NDArray[np.floating[Any]] = "gaussian",
    apply: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]] | None = None,
    max_bytes: int = 1 << 30,
) -> Any:
    """Blend predictions of overlapping patches into whole volumes.

    Overlapping predictions are averaged with weights.  Each part of the volume is written as soon as no
    further patch can overlap it.  The memory that this needs does not depend on the volume's size.  Voxels
    that no patch covers are 0.

    Args:
        predictions: an iterable of tensors or arrays (N, *channels, *patch_size), one for each batch of
            patches, in the dataset's order.
        dataset: a dataset with ``sampling=Grid(…)`` or ``Positions(…)``.
        out: the output, of shape (*channels, *volume).  It is a NumPy array, or a path that ends in ``.zarr``
            or ``.npy`` and does not exist yet.  For a dataset of several volumes, pass a sequence of outputs.
        weights: the weight of each voxel in a patch.  ``"gaussian"`` is largest in the middle (sigma is an
            eighth of each side, as in nnU-Net and MONAI).  ``"constant"`` is the same for all voxels.  It may
            also be an array of the patch's size.
        apply: a function that receives each blended part, float32 (*channels, …), and returns the part to
            write, whose last dimensions must not change.  For example,
            ``lambda p: p.argmax(0).astype("uint8")`` converts scores to labels.
        max_bytes: how many bytes of memory sums of predictions may use.  A batch of predictions needs memory
            in addition.  If the sums need more, they are stored in a file next to ``out``, or in the folder
            for temporary files if ``out`` is an array.

    Returns:
        ``out``.

    Raises:
        FileExistsError: ``out`` exists already.
        OptionError: predictions have another shape, or there are more or fewer predictions than patches.

    >>> from fastpipe.sampling import Grid
    >>> volume = np.arange(6 * 6, dtype=np.float32).reshape(6, 6)
    >>> dataset = FastPatchDataset(volume, (4, 4), sampling=Grid(stride=2))
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=3)
    >>> made = stitch((2 * batch for batch in loader), dataset, np.empty((6, 6), np.float32))
    >>> bool(np.allclose(made, 2 * volume))
    True
    """
    volumes, starts, outs = _checked(dataset, out)
    shapes = dataset._space.shapes.tolist()
    rows = _rows(predictions, len(dataset), len(dataset.patch_size))
    chosen = _weights(weights, dataset.patch_size)
    targets = [_target(one, shape) for one, shape in zip(outs, shapes, strict=True)]
    try:
        for volume, (shape, target) in enumerate(zip(shapes, targets, strict=True)):
            _stitch_one(rows, shape, starts[volumes == volume], chosen, target, apply, max_bytes)
        next(rows, None)  # raises an error if there are more predictions than patches
        for target in targets:
            target.finish()
    except BaseException:
        for target in targets:
            target.give_up()
        raise
    return out


def _checked(
    dataset: FastPatchDataset, out: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Sequence[Any]]:
    if not isinstance(dataset, FastPatchDataset):
        raise OptionError(
            f"stitch needs the FastPatchDataset itself, got {type(dataset).__name__}; for some of its "
            "patches make one with sampling=Positions(array)"
        )
    if dataset._places.is_random:
        raise OptionError(
            f"stitch needs patches that are the same each time: sampling=Grid(…), not {dataset.sampling!r}"
        )
    if any(dataset.margin):
        raise OptionError(
            f"stitch needs patches alone, and the dataset cuts a margin of {dataset.margin}: make one without"
        )
    if dataset.bad_samples.policy != "raise":
        raise OptionError(
            f"with bad_samples={dataset.bad_samples.policy!r} predictions would be written to the "
            "positions of other patches: make the dataset for stitch with bad_samples='raise'"
        )
    volumes, starts = dataset.places()
    outs = out if isinstance(out, (list, tuple)) else [out]
    if len(outs) != len(dataset._space.shapes):
        raise OptionError(f"the dataset has {len(dataset._space.shapes)} volumes, and out= names {len(outs)}")
    names = [os.path.realpath(one) if isinstance(one, (str, os.PathLike)) else str(id(one)) for one in outs]
    twice = [one for one, name in zip(outs, names, strict=True) if names.count(name) > 1]
    if twice:
        raise OptionError(f"out= must have another target for each volume, but several times {twice[0]!r}")
    if (np.diff(volumes) < 0).any():
        raise OptionError("Positions(array) must have the patches of a volume after each other for stitch")
    return volumes, starts, outs


def _stitch_one(
    rows: Iterator[npt.NDArray[np.float32]], shape: Sequence[int], starts: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32], target: _Array | _File,
    apply: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]] | None, max_bytes: int,
) -> None:  # fmt: skip
    dims = len(shape)

    def write(start: Sequence[int], blended: npt.NDArray[np.float32]) -> None:
        made = blended if apply is None else np.asarray(apply(blended))
        if made.shape[made.ndim - dims :] != blended.shape[blended.ndim - dims :]:
            raise OptionError(
                f"apply= has made {made.shape} of {blended.shape}: it must keep the last dimensions"
            )
        sizes = made.shape[made.ndim - dims :]
        box = (slice(at, at + size) for at, size in zip(start, sizes, strict=True))
        target.write((..., *box), made, made.shape[: made.ndim - dims])

    # The first prediction shows how many channels there are.
    firsts = [next(rows)] if len(starts) else []
    channels = math.prod(firsts[0].shape[: firsts[0].ndim - dims]) if firsts else 1
    side = _PART  # the side of a part that is written in one call; reduced until several parts fit in memory
    while side > _LEAST_PART and 16 * (channels + 1) * side**dims > max_bytes:
        side //= 2
    part = [min(side, max(1, size)) for size in shape]
    target.begin(part)
    with Blender(shape, starts, weights, part, write, max_bytes, target.folder) as blender:
        for start, row in zip(starts.tolist(), chain(firsts, rows), strict=False):
            blender.add(start, row)


def _rows(batches: Iterable[Any], count: int, dims: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the predictions of single patches.  Raise an error if there are not exactly ``count``."""
    taken = 0
    for batch in batches:
        if isinstance(batch, torch.Tensor):
            batch = batch.detach().cpu()
            # Half precision is converted to float32, because NumPy has no bfloat16.
            batch = batch.float() if batch.is_floating_point() and batch.itemsize < 4 else batch.numpy()
        array = np.asarray(batch)
        if unheld(array, np.dtype(np.float32)).any():
            raise OptionError(
                f"predictions are blended as float32, which cannot hold these elements of {array.dtype}: "
                "give scores, and make labels of them with apply="
            )
        if array.ndim <= dims:
            raise OptionError(
                f"predictions must be batches (N, *channels, *patch_size), got one of {array.shape}"
            )
        for row in array.astype(np.float32, copy=False):
            if taken == count:
                raise OptionError(f"there were predictions for more than the {count:,} patches")
            taken += 1
            yield row
    if taken < count:
        raise OptionError(
            f"there were predictions for {taken:,} of {count:,} patches: go through the dataset in its own "
            "order, without shuffle= and drop_last="
        )


def _weights(weights: str | npt.NDArray[np.floating[Any]], patch: Sequence[int]) -> npt.NDArray[np.float32]:
    if isinstance(weights, np.ndarray):
        with np.errstate(over="ignore"):
            made = weights.astype(np.float32) if weights.dtype.kind in "biuf" else np.zeros((), np.float32)
        if made.shape != tuple(patch) or not ((made > 0) & np.isfinite(made)).all():
            raise OptionError(
                f"weights= must be positive numbers of shape {tuple(patch)}, got {weights.shape} of "
                f"{weights.dtype}; as float32 none may be 0 or infinite"
            )
        return made
    if weights == "gaussian":
        return gaussian_weights(patch)
    if weights == "constant":
        return np.ones(tuple(patch), np.float32)
    raise OptionError(f"weights must be 'gaussian', 'constant' or an array, got {weights!r}")


def _target(out: Any, shape: Sequence[int]) -> _Array | _File:
    if isinstance(out, np.ndarray):
        return _Array(out, shape)
    path = os.fspath(out) if isinstance(out, (str, os.PathLike)) else f"a {type(out).__name__}"
    if not path.endswith((".zarr", ".npy")):
        raise OptionError(f"out= must be a NumPy array, or a path that ends in .zarr or .npy, got {path}")
    if os.path.lexists(path):
        raise FileExistsError(printable(f"{path} exists; remove it, or name another"))
    return _File(path, shape)


class _Array:
    """An output array that the user has passed."""

    def __init__(self, array: npt.NDArray[Any], shape: Sequence[int]) -> None:
        if list(array.shape[array.ndim - len(shape) :]) != list(shape):
            raise OptionError(f"out= has shape {array.shape}, and the volume {tuple(shape)}")
        self._array = array
        self.folder = tempfile.gettempdir()

    def begin(self, part: Sequence[int]) -> None:
        """Fill the array with 0, the value of voxels that no patch covers."""
        self._array[...] = 0

    def write(self, box: Any, part: npt.NDArray[Any], lead: tuple[int, ...]) -> None:
        wanted = self._array.shape[: self._array.ndim - len(box) + 1]
        if lead != wanted:
            raise OptionError(
                f"out= has {wanted} in front of the volume's dimensions, and the predictions, or what apply= "
                f"makes of them, {lead}"
            )
        if unheld(part, self._array.dtype).any():
            raise OptionError(
                f"out= has elements of {self._array.dtype}, which cannot hold those of {part.dtype}: "
                "give another array, or apply= a function that makes such elements"
            )
        self._array[box] = part

    def finish(self) -> None:
        """Do nothing: the array is complete."""

    def give_up(self) -> None:
        """Do nothing: written parts stay in the array, which belongs to the user."""


class _File:
    """An output file or folder that is renamed to its final name when it is complete."""

    def __init__(self, path: str, shape: Sequence[int]) -> None:
        self._path, self._shape, self._part = path, tuple(shape), tuple(shape)
        self.folder = os.path.dirname(os.path.abspath(path))
        self._out, self._name = Path(path), "array.npy" if path.endswith(".npy") else "array"
        self._partial = str(folder_of(self._out) / self._name)
        self._begun = False
        self._store: Any = None
        self._dtype = np.dtype(np.float32)

    def begin(self, part: Sequence[int]) -> None:
        """Remove the files of an interrupted run, and prepare to write parts of shape ``part``."""
        self._part = tuple(part)
        with _Unfinished(self._out, VolumeError):
            remove_tree(self._partial)
        self._begun = True

    def write(self, box: Any, part: npt.NDArray[Any], lead: tuple[int, ...]) -> None:
        """Write a part of the volume.  The first part determines the dtype and the channels."""
        if self._store is None:
            self._store, self._dtype = self._made(lead, part.dtype), part.dtype
        if unheld(part, self._dtype).any():
            raise OptionError(
                f"apply= has made elements of {self._dtype} first, which cannot hold those of {part.dtype} "
                "that it made later: have it make one type"
            )
        self._store[box] = part.astype(self._dtype, copy=False)

    def _made(self, lead: Sequence[int], dtype: np.dtype[Any]) -> Any:
        shape = (*lead, *self._shape)
        if self._path.endswith(".npy"):
            return np.lib.format.open_memmap(self._partial, "w+", dtype, shape)
        os.makedirs(self._partial, exist_ok=True)
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": os.path.abspath(self._partial) + "/"},
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {
                    "name": "regular", "configuration": {"chunk_shape": [*[1] * len(lead), *self._part]},
                },
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "shuffle"}},
                ],
            },
        }  # fmt: skip
        return opened_by_tensorstore(spec, create=True, delete_existing=True)

    def finish(self) -> None:
        if self._store is None:  # there were no patches
            self._store = self._made((), np.dtype(np.float32))
        if self._path.endswith(".npy"):
            self._store.flush()
        self._store = None
        if os.path.lexists(self._path):
            raise FileExistsError(f"{self._path} has come meanwhile; remove it, or name another")
        with opened_folder(self._out) as folder:
            os.rename(os.path.join(folder, self._name), self._path)
        remove_folder(self._out, (LOCK,))

    def give_up(self) -> None:
        self._store = None
        if self._begun:
            remove_folder(self._out, (self._name, LOCK))


class _Unfinished(GrowingFolder):
    """The folder that contains an unfinished volume.  Its name is ``out`` followed by ``.partial``."""

    def _check_own(self) -> None:
        if not set(os.listdir(self.folder)) <= {LOCK, "array", "array.npy"}:
            raise OptionError(
                f"{self.folder} is not that of an unfinished volume; move it away, or remove it"
            )
