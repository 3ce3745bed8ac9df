"""A picture that shows the effect of augmentations on a batch, drawn with Pillow."""

from __future__ import annotations

import functools
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.base import Augmentation
from fastpipe.augment.colour import Normalize, ToDtype
from fastpipe.augment.compose import Compose
from fastpipe.augment.parameters import Parameters
from fastpipe.core.extras import require
from fastpipe.core.files import write_whole
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

if TYPE_CHECKING:
    from PIL.Image import Image


# ---- rows of small pictures with titles, headings and captions ---------------------------------------

Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
INK, MUTED, LINE = "#1f2328", "#6a717b", "#e3e6ea"
_LARGE, _SMALL = 14, 12  # font sizes
_LARGE_LINE, _SMALL_LINE = 19, 16
_MARGIN, _GAP, _ROW_GAP = 18, 10, 20
_LEAST_COLUMN = 104  # wide enough for most captions
_FEW_PIXELS = 3  # at this factor of enlargement and above, pixels are shown as squares
# Evenly spaced colours of matplotlib's colour map viridis.
_HEAT = (
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128),
    (94, 201, 98), (173, 220, 48), (253, 231, 37),
)  # fmt: skip
_GREY = ((0, 0, 0), (255, 255, 255))


class GridRow(NamedTuple):
    """A row of a grid of pictures. Title lines stand at the left, and the first line is a name. Each picture
    has a caption below it."""

    title: Sequence[str]
    pictures: Sequence[Pixels]
    captions: Sequence[Sequence[str]]


def heat(
    values: npt.NDArray[np.float32], low: float, high: float, colours: Sequence[Sequence[int]] = _HEAT
) -> Pixels:
    """Return colours for numbers (H, W), from dark to bright. Numbers outside the range are clipped."""
    span = high - low if high > low else 1.0
    place = np.nan_to_num((values - low) / span, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    ends = np.linspace(0, 1, len(colours))
    channels = [np.interp(place, ends, channel) for channel in zip(*colours, strict=True)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def fitted(pixels: Pixels, width: int, height: int, keeps_shape: bool = True) -> Pixels:
    """Resize a picture to fit ``width`` and ``height``. If ``keeps_shape``, its proportions stay the same."""
    image = require("PIL.Image", extra="image")
    across, down = width / pixels.shape[1], height / pixels.shape[0]
    if keeps_shape:
        across = down = min(across, down)
    size = (max(1, round(pixels.shape[1] * across)), max(1, round(pixels.shape[0] * down)))
    # A box filter repeats pixels when it enlarges a picture.
    is_smooth = keeps_shape and across < _FEW_PIXELS
    filters = image.Resampling.LANCZOS if is_smooth else image.Resampling.BOX
    return np.asarray(image.fromarray(pixels).resize(size, filters))


def draw_grid(headings: Sequence[str], rows: Sequence[GridRow], note: str = "") -> Image:
    """Draw all rows, with a heading above each column and a note at the bottom."""
    image = require("PIL.Image", extra="image")
    column = max(_LEAST_COLUMN, *(one.shape[1] for row in rows for one in row.pictures))
    left = _MARGIN + max(_width(line, _LARGE) for row in rows for line in row.title) + 2 * _GAP
    width = left + len(headings) * (column + _GAP) - _GAP + _MARGIN
    tallest = [max(map(len, row.pictures)) for row in rows]
    lines = [max(map(len, row.captions)) for row in rows]
    heights = [
        max(tall + (count * _SMALL_LINE + _GAP // 2) * bool(count), len(row.title) * _LARGE_LINE)
        for row, tall, count in zip(rows, tallest, lines, strict=True)
    ]
    y = _MARGIN + _LARGE_LINE + _GAP // 2
    height = y + sum(heights) + _ROW_GAP * (len(rows) - 1) + (_SMALL_LINE + _GAP) * bool(note) + _MARGIN
    picture: Image = image.new("RGB", (width, height), "white")
    canvas = require("PIL.ImageDraw", extra="image").Draw(picture)

    def write(at: tuple[int, int], text: str, room: int, size: int = _SMALL, colour: str = MUTED) -> None:
        if _width(text, size) > room:
            while text and _width(f"{text}...", size) > room:
                text = text[:-1]
            text = f"{text.rstrip()}..."
        canvas.text(at, text, colour, font=_font(size))

    columns = [left + at * (column + _GAP) for at in range(len(headings))]
    for x, heading in zip(columns, headings, strict=True):
        write((x, _MARGIN), heading, column, _LARGE, INK)
    for row, tall, row_height in zip(rows, tallest, heights, strict=True):
        if row is not rows[0]:
            canvas.line([(_MARGIN, y - _ROW_GAP // 2), (width - _MARGIN, y - _ROW_GAP // 2)], LINE)
        for at, line in enumerate(row.title):
            # The last of several title lines is a comment on the other lines.
            form = (_LARGE, INK) if at == 0 or at < len(row.title) - 1 else (_SMALL, MUTED)
            write((_MARGIN, y + at * _LARGE_LINE), line, left, *form)
        for x, pixels, caption in zip(columns, row.pictures, row.captions, strict=True):
            picture.paste(image.fromarray(pixels), (x, y))
            for at, line in enumerate(caption):
                write((x, y + tall + _GAP // 2 + at * _SMALL_LINE), line, column)
        y += row_height + _ROW_GAP
    write((_MARGIN, height - _MARGIN - _SMALL_LINE), note, width - 2 * _MARGIN)
    return picture


@functools.cache
def _font(size: int) -> Any:
    return require("PIL.ImageFont", extra="image").load_default(size)


def _width(text: str, size: int) -> int:
    return int(_font(size).getlength(text)) + 1


# ---- captions: the parameters of a sample, in a few words -------------------------------------------
#
# Texts contain only ASCII, ``°`` and ``±``, because Pillow's own font has few other characters.

Row = Mapping[str, float]
NOTHING = "-"


def title(op: Any) -> list[str]:
    """Return lines with an augmentation's name and, if there is one, its probability ``p``."""
    kind = type(op).__name__
    if kind == "RandomApply":
        return [*(line for inner in op.ops for line in title(inner)), f"p = {op.p:g}"]
    if kind == "RandAugment":
        return [kind, f"{op.num_ops} of magnitude {op.magnitude}"]
    has_part = kind.startswith("Random") and hasattr(op, "p")
    return [kind, f"p = {op.p:g}"] if has_part else [kind]


def caption(op: Any, row: Row, before: str = "") -> list[str]:
    """Return lines that describe a sample's parameters. For a user's own augmentation, show all of them.

    ``before`` is the name of the previous sample. MixUp and CutMix mix the sample with it.
    """
    kinds = [kind.__name__ for kind in type(op).__mro__]
    if "RandomApply" in kinds:
        if not row["is_applied"]:
            return ["not applied"]
        inner = [(one, f"{at}.") for at, one in enumerate(op.ops)]
        return [line for one, own in inner for line in caption(one, _without(own, row))]
    words = next((_WORDS[kind] for kind in kinds if kind in _WORDS), None)
    if words is None:
        return [f"{name} {number:.3g}" for name, number in row.items()]
    lines = words(op, row) or [NOTHING]
    return [f"{line} of {before}" for line in lines] if op.mixes and lines != [NOTHING] else lines


def _without(prefix: str, row: Row) -> Row:
    return {name.removeprefix(prefix): number for name, number in row.items() if name.startswith(prefix)}


def _box(height: float, width: float) -> list[str]:
    """Return a line with a box's size, width first. Return no line if the box has no area."""
    return [f"{width:.0f} x {height:.0f}"] if height and width else []


def _placed_box(op: Any, row: Row) -> list[str]:
    return [f"{size} at {row['left']:.0f}, {row['top']:.0f}" for size in _box(row["height"], row["width"])]


def _jitter(op: Any, row: Row) -> list[str]:
    """Return the changes in the order in which they are made, without changes that do nothing."""
    kinds = ("brightness", "contrast", "saturation", "hue")
    order = [kinds[int(row[place])] for place in ("first", "second", "third", "fourth")]
    still = {kind for kind in kinds if getattr(op, kind) == ((0, 0) if kind == "hue" else (1, 1))}
    return [
        f"{kind} {row[kind]:+.2f}" if kind == "hue" else f"{kind} x{row[kind]:.2f}"
        for kind in order
        if kind not in still
    ]


def _affine(op: Any, row: Row) -> list[str]:
    found = [f"{_signed(row['angle'])}°"] if any(op.degrees) else []
    if row["translate_x"] or row["translate_y"]:
        found.append(f"moved {row['translate_x']:+.0f}, {row['translate_y']:+.0f}")
    if op.scale is not None:
        found.append(f"x{row['scale']:.2f}")
    shears = [f"{_signed(row[name])}°" for name in ("shear_x", "shear_y")]
    if any(op.shear[1]):
        found.append(f"shear {', '.join(shears)}")
    elif any(op.shear[0]):
        found.append(f"shear {shears[0]}")
    return found


def _signed(number: float) -> str:
    """Return a number with a sign and one decimal, but never -0.0."""
    return f"{round(number, 1) + 0.0:+.1f}"


def _policy(op: Any, row: Row) -> list[str]:
    pairs = zip(op.names[::2], op.names[1::2], strict=True)
    return [_CHANGES[int(row[change])](row[magnitude]) for change, magnitude in pairs]


def _masks(op: Any, row: Row) -> list[str]:
    """Return the masked frames and bins as Python ranges."""
    pairs = zip(op.names[::2], op.names[1::2], strict=True)
    return [f"{a[:4]} {row[a]:.0f}:{row[b]:.0f}" for a, b in pairs if row[b] > row[a]]


def _affine_3d(op: Any, row: Row) -> list[str]:
    axes = ("depth", "height", "width")
    angles, shifts = [row[f"angle_{axis}"] for axis in axes], [row[f"shift_{axis}"] for axis in axes]
    found = [", ".join(f"{_signed(angle)}°" for angle in angles)] if any(angles) else []
    if row["scale"] != 1:
        found.append(f"1/x{row['scale']:.2f}")
    if any(shifts):
        found.append(f"moved {', '.join(f'{shift:+.0f}' for shift in shifts)}")
    if row.get("is_bent"):
        found.append("bent")
    return found


def _of_channels(words: Callable[[Row], str]) -> Callable[[Any, Row], list[str]]:
    """Make a function that returns a text for each changed channel. If there are several channels, the text
    has a channel number."""

    def found(op: Any, row: Row) -> list[str]:
        flag, channels = op.of_channel[0], len(row) // len(op.of_channel)
        lines = []
        for c in range(channels):
            own = {name: row[f"{c}.{name}"] for name in op.of_channel}
            if own[flag]:
                lines.append(f"{c}: {words(own)}" if channels > 1 else words(own))
        return lines

    return found


def _sigmas(row: Row) -> str:
    return "sigma " + ", ".join(f"{row[name]:.1f}" for name in ("sigma_depth", "sigma_height", "sigma_width"))


# Texts in the order of the policies' ``change`` numbers.
_CHANGES: tuple[Callable[[float], str], ...] = (
    lambda by: "Identity",
    lambda by: f"ShearX {by:+.2f}",
    lambda by: f"ShearY {by:+.2f}",
    lambda by: f"TranslateX {int(by):+d}",
    lambda by: f"TranslateY {int(by):+d}",
    lambda by: f"Rotate {by:+.1f}°",
    lambda by: f"Brightness x{1 + by:.2f}",
    lambda by: f"Color x{1 + by:.2f}",
    lambda by: f"Contrast x{1 + by:.2f}",
    lambda by: f"Sharpness x{1 + by:.2f}",
    lambda by: f"Posterize {by:.0f} bits",
    lambda by: f"Solarize from {by:.0%}",
    lambda by: "AutoContrast",
    lambda by: "Equalize",
)
_WORDS: dict[str, Callable[[Any, Row], list[str]]] = {
    "Brightness3D": _of_channels(lambda row: f"x{row['factor']:.2f}"),
    "ColorJitter": _jitter,
    "CutMix": lambda op, row: _box(row["bottom"] - row["top"], row["right"] - row["left"]),
    "MixUp": lambda op, row: [f"{1 - row['kept']:.0%}"],
    "Contrast3D": _of_channels(lambda row: f"x{row['factor']:.2f}"),
    "Gamma3D": _of_channels(lambda row: f"power {row['factor']:.2f}"),
    "GaussianBlur": lambda op, row: [f"sigma {row['sigma']:.2f}"],
    "GaussianBlur3D": _of_channels(_sigmas),
    "GaussianNoise3D": lambda op, row: [f"std {row['std']:.3f}"],
    "LowResolution3D": _of_channels(lambda row: f"{row['scale']:.0%} of voxels"),
    "RandAugment": _policy,
    "RandomAffine": _affine,
    "RandomAffine3D": _affine_3d,
    "RandomElastic3D": _affine_3d,
    "RandomErasing": _placed_box,
    "RandomFlip3D": lambda op, row: [" ".join(name[6:] for name in op.names if row[name]) or NOTHING],
    "RandomGain": lambda op, row: [f"{_signed(row['gain_db'])} dB"],
    "RandomGrayscale": lambda op, row: ["grey"] if row["is_grey"] else [],
    "RandomHorizontalFlip": lambda op, row: ["mirrored"] if row["is_flipped"] else [],
    "RandomResizedCrop": _placed_box,
    "RandomRotate90": lambda op, row: [f"{90 * row['turns']:.0f}°"] if row["turns"] else [],
    "RandomRotation": lambda op, row: [f"{_signed(row['angle'])}°"],
    "RandomVerticalFlip": lambda op, row: ["upside down"] if row["is_flipped"] else [],
    "SpecAugment": _masks,
    "TimeShift": lambda op, row: [f"{row['shift']:+.0f} frames"],
    "TrivialAugmentWide": _policy,
}


# ---- the preview -----------------------------------------------------------------------------------

_TILE = (32, 1024)  # the smallest and the greatest value of ``tile``
_WIDER = 1.5  # pictures of spectrograms are wider than pictures of images by this factor
# The values of an image that may be shown. Bicubic resampling exceeds [0, 1] slightly.
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
    """Draw a picture of a batch: the original images, and below them the images after each augmentation.

    The text below each image shows the parameters of the image.  ``Normalize`` is undone for the picture.
    Spectrograms are shown as heat maps with low frequencies at the bottom.  Volumes are shown in greys, by
    the plane in the middle of their depth.  The colours of a spectrogram or volume span the range of values
    of the original sample.

    Args:
        ops: the augmentations: a ``Compose``, a single augmentation, or a sequence of augmentations.
        images: a batch, as the augmentations take it. Images are (N, C, H, W) with 1 or 3 channels, uint8 or
            floats in [0, 1]. Spectrograms are floats (N, F, T) or (N, C, F, T). Volumes are (N, D, H, W) or
            (N, C, D, H, W).
        path: a PNG file, which is written atomically. Its folder is created if the folder is missing.
        draws: None, or a number of results to show, each made by all augmentations with new random
            parameters. If ``draws`` is None, the picture shows the result after each augmentation instead.
        count: the greatest number of samples to show, from the start of the batch.
        names: one label per sample, such as the sample's class, shown next to the sample's number.
        generator, key: the source of the random parameters, as in a call of the augmentations. With
            ``draws=``, each result uses the key's next epoch.  Default: torch's global generator, whose state
            is restored.
        mean, std: the values with which the given images were normalised.
        tile: the length of an image's longer side in the picture, in pixels.

    Returns:
        The picture, a ``PIL.Image.Image``, which notebooks display.

    Raises:
        AugmentError: the augmentations do not accept the images, the images cannot be shown, or an argument
            is invalid.
        OptionError: ``key`` has a different number of samples than the batch.

    >>> from fastpipe import augment
    >>> views = augment.Compose([augment.RandomResizedCrop(32), augment.RandomHorizontalFlip()])
    >>> path = getfixture("tmp_path") / "views.png"
    >>> picture = augment.preview(views, torch.rand(4, 3, 64, 64), path, names=["cat", "dog", "dog", "cat"])
    >>> path.exists(), picture.mode
    (True, 'RGB')
    """
    chain = _chain_of(ops)
    file = None if path is None else _png(path)
    for what, value in (("draws", 1 if draws is None else draws), ("count", count)):
        if not isinstance(value, int) or value < 1:
            raise AugmentError(f"{what} must be a whole number of at least 1, got {value!r}")
    if not isinstance(tile, int) or not _TILE[0] <= tile <= _TILE[1]:
        raise AugmentError(f"tile must be a number of pixels from {_TILE[0]} to {_TILE[1]}, got {tile!r}")
    if not isinstance(images, Tensor):
        raise AugmentError(f"preview takes a tensor (N, C, H, W), got {type(images).__name__}")
    epochs = range(draws or 1)
    keys = [None if key is None else key._replace(epoch=key.epoch + epoch) for epoch in epochs]
    with torch.random.fork_rng(devices=[], enabled=generator is None and key is None):
        tables = [chain.draw(images.shape, generator=generator, key=one) for one in keys]
    count = min(count, len(images))
    show = _Pictures(chain, images.detach(), count, tile, _given(mean, std, images))
    rows = [GridRow(["original"], show.after((), ()), [()] * count)]
    seen = [at for at, op in enumerate(chain.ops) if not isinstance(op, (Normalize, ToDtype))]
    if draws is None:  # one row for each augmentation with a visible effect, after all previous ones
        steps = [(title(chain.ops[at]), at + 1, tables[0], [at]) for at in seen]
    else:
        steps = [([f"draw {number + 1}"], len(chain.ops), table, seen) for number, table in enumerate(tables)]
    for name, end, table, told in steps:
        lines: list[Any] = [()] * count
        if len(told) == 1:
            columns = table[told[0]].items()
            drawn = [{key: float(column[at]) for key, column in columns} for at in range(count)]
            before = [f"sample {(at - 1) % len(images)}" for at in range(count)]
            lines = [caption(chain.ops[told[0]], *one) for one in zip(drawn, before, strict=True)]
        rows.append(GridRow(name, show.after(chain.ops[:end], table[:end]), lines))
    picture = draw_grid(_headings(names, count, len(images)), rows, _note(chain, draws is None))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda stream: picture.save(stream, format="png"))
    return picture


class _Pictures:
    """The samples to show, and the methods that make their pictures."""

    def __init__(
        self, chain: Compose, images: Tensor, count: int, tile: int, given: Normalize | None
    ) -> None:
        # Mixing operations mix the first sample with the batch's last sample.
        is_whole = any(op.mixes for op in chain.ops)
        self.fuse = chain.fuse
        self.images = images if is_whole else images[:count]
        self.count, self.given = count, given
        self.is_plane = chain.ops[0].kind == "volumes"
        self.is_heat = not self.is_plane and (images.ndim == 3 or any(3 in op.ranks for op in chain.ops))
        self.tile = (round(_WIDER * tile), tile) if self.is_heat else (tile, tile)
        original = self._values(self.images, ())
        if self.is_heat or self.is_plane:
            finite = [one[np.isfinite(one)] for one in original]
            self.ranges = [(float(one.min()), float(one.max())) if one.size else (0.0, 1.0) for one in finite]
        else:
            _check_colours(original, images)

    def after(self, ops: Sequence[Augmentation], parameters: Sequence[Parameters]) -> list[Pixels]:
        """Return pictures of the samples after the augmentations ``ops``."""
        rows = [one.rows(slice(len(self.images))) for one in parameters]
        images = Compose(ops, fuse=self.fuse).apply(self.images, rows) if ops else self.images
        values = self._values(images, ops)
        if self.is_heat or self.is_plane:
            # The channels of a sample are stacked vertically.
            rows, colours = (values, _GREY) if self.is_plane else (values[..., ::-1, :], _HEAT)
            flat = rows.reshape(len(values), -1, values.shape[-1])
            found = [heat(one, *limits, colours) for one, limits in zip(flat, self.ranges, strict=True)]
        else:
            bytes_of = (np.nan_to_num(values).clip(0, 1) * 255).round().astype(np.uint8)
            wide = np.broadcast_to(bytes_of, (len(values), 3, *values.shape[2:]))
            found = list(np.ascontiguousarray(wide.transpose(0, 2, 3, 1)))
        return [fitted(one, *self.tile, keeps_shape=not self.is_heat) for one in found]

    def _values(self, images: Tensor, ops: Sequence[Augmentation]) -> Any:
        """Return the values as float32 without normalisation. Bytes become fractions of their range."""
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


def _headings(names: Any, count: int, total: int) -> list[str]:
    if names is None:
        return [f"sample {at}" for at in range(count)]
    given = names.tolist() if hasattr(names, "tolist") else list(names)
    if len(given) != total:
        raise AugmentError(f"names must have one name for each of the {total} samples, got {len(given)}")
    # Drop accents, and letters that Pillow's font does not have.
    decomposed = [unicodedata.normalize("NFKD", str(name)) for name in given[:count]]
    texts = [name.encode("ascii", "ignore").decode() for name in decomposed]
    return [f"{at} · {text}" if text else f"sample {at}" for at, text in enumerate(texts)]


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
                f"preview takes augmentations from fastpipe.augment, got {type(ops).__name__}: "
                "they are the first argument, and the images the second"
            )
        ops = Compose(ops)
    chain: Compose = ops
    if not chain.ops:
        raise AugmentError("preview takes at least one augmentation, got none")
    if (kind := chain.ops[0].kind) not in ("images", "volumes"):
        raise AugmentError(f"preview shows images, spectrograms and volumes, got augmentations of {kind}")
    return chain


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
        raise AugmentError(f"path must be a file name that ends in .png, got {os.fspath(path)!r}")
    if file.is_dir():
        raise AugmentError(f"path must be a PNG file, got the folder {os.fspath(path)!r}: add a file's name")
    return file


def _check_colours(values: Any, images: Tensor) -> None:
    """Raise an error if ``values``, (N, C, H, W), are not colours."""
    if values.shape[1] not in (1, 3):
        raise AugmentError(
            f"preview shows images of 3 channels or 1, got shape {tuple(images.shape)}: images[:, :1] is the "
            "first channel alone"
        )
    low, high = float(values.min()), float(values.max())
    if not (_RANGE[0] <= low and high <= _RANGE[1]):  # false for NaN
        raise AugmentError(
            f"preview shows floats in [0, 1], got {images.dtype} from {low:.4g} to {high:.4g}: where images "
            "have been normalised, give mean= and std=; else divide them by their greatest value"
        )
