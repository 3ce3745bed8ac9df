"""A picture of what augmentations make of a batch."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import Augmentation
from fastpipe.augment.captions import caption, title
from fastpipe.augment.colour import Normalize, ToDtype
from fastpipe.augment.compose import Compose
from fastpipe.augment.grids import GridRow, Pixels, draw_grid, fitted, grey, heat
from fastpipe.augment.parameters import Parameters
from fastpipe.core.files import write_whole
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["preview"]

_TILE = (32, 1024)  # least and greatest
_WIDER = 1.5  # spectrograms than images
# Resampling by a cubic goes beyond the range, though not far.
_RANGE = (-0.25, 1.25)


def preview(
    ops: Compose | Augmentation | Sequence[Augmentation],
    images: Tensor,
    path: str | os.PathLike[str] | None = None,
    *,
    draws: int | None = None,
    count: int = 8,
    names: Any = None,
    generator: torch.Generator | None = None,
    key: Key | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    tile: int = 160,
) -> Image:
    """Show what augmentations make of a batch: the originals, and below them the images after each step.

    Below each image is what was drawn for its sample.  ``Normalize`` is undone for the picture.  Spectrograms
    are drawn as heat maps, low frequencies at the bottom, with the colours of each sample's original; of
    volumes the plane in the middle of the depth is, in greys that are those of the original's values.

    Args:
        ops: the augmentations: ``Compose``, one of them, or several.
        images: a batch, as the augmentations take it: (N, C, H, W) of 3 channels or 1, uint8 or floats in
            [0, 1]; or spectrograms, floats (N, F, T) or (N, C, F, T); or volumes, (N, D, H, W) or
            (N, C, D, H, W).
        path: a PNG file to write, which appears whole or not at all; its folder is made if it is missing.
        draws: show so many results of the whole chain, in the place of its steps.
        count: greatest number of samples that are shown; the first ones of the batch.
        names: what samples are called beside their numbers, such as labels: one for each.
        generator, key: where parameters come from, as of calling the augmentations; with ``draws=`` each
            draw is of the next epoch of the key.  Default: torch's global generator, which is left as it was.
        mean, std: what the images have been normalised with before.
        tile: pixels of an image's longer side in the picture.

    Returns:
        The picture, ``PIL.Image.Image``, which notebooks display.

    Raises:
        AugmentError: images that the augmentations do not take or that cannot be shown, or an argument that
            cannot work.
        OptionError: ``key`` is of another number of samples.

    >>> from fastpipe import augment
    >>> views = augment.Compose([augment.RandomResizedCrop(32), augment.RandomHorizontalFlip()])
    >>> path = getfixture("tmp_path") / "views.png"
    >>> picture = augment.preview(views, torch.rand(4, 3, 64, 64), path, names=["cat", "dog", "dog", "cat"])
    >>> path.exists(), picture.mode
    (True, 'RGB')
    """
    chain = _chain_of(ops)
    file = None if path is None else _png(path)
    _check_numbers(draws, count, tile)
    if not isinstance(images, Tensor):
        raise AugmentError(f"preview takes a tensor (N, C, H, W), got {type(images).__name__}")
    with _left_as_it_was(generator is None and key is None):
        tables = [chain.draw(images.shape, generator=generator, key=one) for one in _keys(key, draws or 1)]
    count = min(count, len(images))
    show = _Pictures(chain, images.detach(), count, tile, _given(mean, std, images))
    rows = [GridRow(["original"], show.originals(), [()] * count)]
    rows += _steps(chain, show, tables[0]) if draws is None else _draws(chain, show, tables)
    picture = draw_grid(_headings(names, count, len(images)), rows, _note(chain, draws is None))
    if file is not None:
        _write(file, picture)
    return picture


# ---- rows ------------------------------------------------------------------------------------------


class _Pictures:
    """The samples that are shown, and how."""

    def __init__(
        self, chain: Compose, images: Tensor, count: int, tile: int, given: Normalize | None
    ) -> None:
        # Of ops that mix, the first sample is mixed with the batch's last.
        is_whole = any(op.mixes for op in chain.ops)
        self.total, self.fuse = len(images), chain.fuse
        self.images = images if is_whole else images[:count]
        self.count, self.given = count, given
        self.is_plane = chain.ops[0].kind == "volumes"
        self.is_heat = not self.is_plane and (images.ndim == 3 or any(3 in op.ranks for op in chain.ops))
        self.tile = (round(_WIDER * tile), tile) if self.is_heat else (tile, tile)
        original = self._values(self.images, ())
        if self.is_heat or self.is_plane:
            self.ranges = [_finite_range(one) for one in original]
        else:
            _check_colours(original, images)

    def originals(self) -> list[Pixels]:
        return self._shown(self.images, ())

    def after(self, ops: Sequence[Augmentation], parameters: Sequence[Parameters]) -> list[Pixels]:
        """What some augmentations make of the samples."""
        rows = [one.rows(slice(len(self.images))) for one in parameters]
        return self._shown(Compose(ops, fuse=self.fuse).apply(self.images, rows), ops)

    def _shown(self, images: Tensor, ops: Sequence[Augmentation]) -> list[Pixels]:
        values = self._values(images, ops)
        if self.is_heat or self.is_plane:
            # Channels one below the other.
            rows, draw = (values, grey) if self.is_plane else (values[..., ::-1, :], heat)
            flat = rows.reshape(len(values), -1, values.shape[-1])
            found = [draw(one, *limits) for one, limits in zip(flat, self.ranges, strict=True)]
        else:
            colours = np.nan_to_num(values).clip(0, 1) * 255
            found = list(np.broadcast_to(colours, (len(values), 3, *values.shape[2:])).round())
            found = [np.ascontiguousarray(one.transpose(1, 2, 0).astype(np.uint8)) for one in found]
        return [fitted(one, *self.tile, keeps_shape=not self.is_heat) for one in found]

    def _values(self, images: Tensor, ops: Sequence[Augmentation]) -> Any:
        """Numbers without normalisation, bytes as parts of their range: float32."""
        values = images[: self.count]
        if self.is_plane:
            return values[..., values.shape[-3] // 2, :, :].float().cpu().numpy()
        values = values.cpu()
        values = values.float() / 255 if values.dtype == torch.uint8 else values.float()
        given = [] if self.given is None else [self.given]
        for op in reversed([*given, *(op for op in ops if isinstance(op, Normalize))]):
            mean, std = (torch.tensor(one).view(-1, 1, 1) for one in (op.mean, op.std))
            values = values * std + mean
        return values.numpy()


def _steps(chain: Compose, show: _Pictures, parameters: Sequence[Parameters]) -> Iterator[GridRow]:
    """A row for each augmentation, after all before it."""
    for at, op in enumerate(chain.ops):
        if not isinstance(op, (Normalize, ToDtype)):  # of which nothing is to be seen
            pictures = show.after(chain.ops[: at + 1], parameters[: at + 1])
            yield GridRow(title(op), pictures, _captions(op, parameters[at], show))


def _draws(chain: Compose, show: _Pictures, tables: Sequence[Sequence[Parameters]]) -> Iterator[GridRow]:
    """A row for each draw; what was drawn has room below it where it is for one augmentation."""
    seen = [at for at, op in enumerate(chain.ops) if not isinstance(op, (Normalize, ToDtype))]
    for number, parameters in enumerate(tables):
        lines: list[Any] = [()] * show.count
        if len(seen) == 1:
            lines = _captions(chain.ops[seen[0]], parameters[seen[0]], show)
        yield GridRow([f"draw {number + 1}"], show.after(chain.ops, parameters), lines)


def _captions(op: Augmentation, parameters: Parameters, show: _Pictures) -> list[list[str]]:
    found = []
    for at in range(show.count):
        row = {name: float(column[at]) for name, column in parameters.items()}
        found.append(caption(op, row, f"sample {(at - 1) % show.total}"))
    return found


def _headings(names: Any, count: int, total: int) -> list[str]:
    if names is None:
        return [f"sample {at}" for at in range(count)]
    given = names.tolist() if hasattr(names, "tolist") else list(names)
    if len(given) != total:
        raise AugmentError(f"names= has one for each of the {total} samples, got {len(given)}")
    texts = [_in_ascii(str(name)) for name in given[:count]]
    return [f"{at} · {text}" if text else f"sample {at}" for at, text in enumerate(texts)]


def _in_ascii(text: str) -> str:
    """Text without accents, and without letters that Pillow's font does not have."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _note(chain: Compose, is_of_steps: bool) -> str:
    notes = []
    if any(isinstance(op, Normalize) for op in chain.ops):
        notes.append("Normalize is undone in this picture.")
    if is_of_steps and any(isinstance(op, ToDtype) for op in chain.ops):
        notes.append("ToDtype has no row: it changes nothing that is to be seen.")
    return " ".join(notes)


# ---- arguments -------------------------------------------------------------------------------------


def _chain_of(ops: Any) -> Compose:
    if isinstance(ops, Augmentation):
        ops = [ops]
    if not isinstance(ops, Compose):
        if not isinstance(ops, Sequence):
            raise AugmentError(
                f"preview takes augmentations of batches, of fastpipe.augment, got {type(ops).__name__}: "
                "they are the first argument, and the images the second"
            )
        ops = Compose(ops)
    chain: Compose = ops
    if not chain.ops:
        raise AugmentError("preview takes at least one augmentation, got none")
    if (kind := chain.ops[0].kind) not in ("images", "volumes"):
        raise AugmentError(f"preview shows images, spectrograms and volumes, got augmentations of {kind}")
    return chain


def _check_numbers(draws: Any, count: Any, tile: Any) -> None:
    for name, value in (("draws", 1 if draws is None else draws), ("count", count)):
        if not isinstance(value, int) or value < 1:
            raise AugmentError(f"{name}= is a whole number of at least 1, got {value!r}")
    if not isinstance(tile, int) or not _TILE[0] <= tile <= _TILE[1]:
        raise AugmentError(f"tile= is pixels, from {_TILE[0]} to {_TILE[1]}, got {tile!r}")


def _given(mean: Any, std: Any, images: Tensor) -> Normalize | None:
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise AugmentError("mean= and std= belong together: give both, or none")
    found = Normalize(mean, std)
    found.dtype_after(images.dtype)
    found.check(images.shape)
    return found


def _png(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.suffix.lower() != ".png":
        raise AugmentError(f"path= is a PNG file, whose name ends in .png, got {os.fspath(path)!r}")
    if file.is_dir():
        raise AugmentError(f"path= is a PNG file, got the folder {os.fspath(path)!r}: add a file's name")
    return file


def _check_colours(values: Any, images: Tensor) -> None:
    """Raise an error for values (N, C, H, W) that are no colours."""
    if values.shape[1] not in (1, 3):
        raise AugmentError(
            f"preview shows images of 3 channels or 1, got shape {tuple(images.shape)}: images[:, :1] is the "
            "first channel alone"
        )
    low, high = float(values.min()), float(values.max())
    if not (_RANGE[0] <= low and high <= _RANGE[1]):  # NaN neither
        raise AugmentError(
            f"preview shows floats in [0, 1], got {images.dtype} from {low:.4g} to {high:.4g}: where images "
            "have been normalised, give mean= and std=; else divide them by their greatest value"
        )


def _finite_range(values: Any) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


# ---- what is around --------------------------------------------------------------------------------


def _keys(key: Key | None, draws: int) -> list[Key | None]:
    return [None if key is None else key._replace(epoch=key.epoch + at) for at in range(draws)]


@contextlib.contextmanager
def _left_as_it_was(is_global: bool) -> Iterator[None]:
    """Within, torch's global generator draws as it would, and is put back afterwards."""
    if not is_global:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        yield


def _write(path: Path, picture: Image) -> None:
    """Make or replace a PNG file: all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: picture.save(file, format="png"))
