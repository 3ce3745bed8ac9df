"""The options of images: ``Modality``, and the checked ``ImageSpec`` that is made from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from fastpipe.core.types import Size
from fastpipe.errors import OptionError

_BOX_FORMATS = ("xyxy", "yxyx", "xywh", "center_xywh", "rel_xyxy", "rel_yxyx", "rel_xywh")
_CHANNELS = {"rgb": 3, "grayscale": 1, "rgba": 4}
# Keras's names of filters, mapped to the library's names. Keras's "area" is Pillow's "box".
_FILTERS: dict[str, dict[str, str]] = {
    "tf": {
        name: name
        for name in (
            "bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic",
        )
    },
    "pil": {
        "bilinear": "bilinear", "nearest": "nearest", "bicubic": "bicubic", "area": "box", "box": "box",
        "hamming": "hamming", "lanczos": "lanczos", "lanczos3": "lanczos",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Modality:
    """One image of each row of a table.  If an argument is None, ``image_dataset``'s argument is used.

    Args:
        files: the column with the file names.  Default: ``image_dataset(files=…)``. If this argument is None
            as well, the column with the modality's name.
        folder: the folder that contains the files.
        boxes: the part of each image to use, given as an array (N, 4), a column with four numbers per row, or
            the names of four columns.
        box_format: the meaning of the four numbers; see ``image_dataset``.
        outside: how to handle boxes that reach outside their image: ``"error"``, ``"clip"``, or ``"pad"``
            with black as ``PIL.Image.crop`` does.
        image_size, color_mode, interpolation, antialias, rescale: see ``image_dataset``.
        preprocess: a function of the user; see ``image_dataset``.
        thread_safe: a promise that ``preprocess`` may be called from several threads at once.

    >>> Modality(folder="thermal", boxes=("x0", "y0", "x1", "y1"))
    Modality(folder='thermal', boxes=('x0', 'y0', 'x1', 'y1'))
    """

    files: str | None = None
    folder: str | os.PathLike[str] | None = None
    boxes: Any = None
    box_format: str | None = None
    outside: Literal["error", "clip", "pad"] | None = None
    image_size: int | tuple[int, int] | None = None
    color_mode: Literal["rgb", "grayscale", "rgba"] | None = None
    interpolation: str | None = None
    antialias: bool | None = None
    rescale: float | tuple[float, float] | None = None
    preprocess: Callable[..., Any] | None = None
    thread_safe: bool | None = None

    def __post_init__(self) -> None:
        check_choice("box_format", self.box_format, (None, *_BOX_FORMATS))
        check_choice("outside", self.outside, (None, "error", "clip", "pad"))
        check_choice("color_mode", self.color_mode, (None, *_CHANNELS))
        if self.preprocess is not None and not callable(self.preprocess):
            raise OptionError(f"preprocess must be a function, got {self.preprocess!r}")
        if self.interpolation is not None:
            object.__setattr__(self, "interpolation", str(self.interpolation).lower())
            check_choice("interpolation", self.interpolation, (*_FILTERS["tf"], *_FILTERS["pil"]))
        if self.image_size is not None:
            object.__setattr__(self, "image_size", _size(self.image_size))
        if self.rescale is not None:
            object.__setattr__(self, "rescale", _rescale(self.rescale))

    @classmethod
    def of(cls, name: str, value: Modality | Mapping[str, Any]) -> Modality:
        """Return ``value``. If ``value`` is a dict of arguments, return the modality made from them."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            what = "must be a dict of options or a fastpipe.tf.Modality"
            raise OptionError(f"modalities={{{name!r}: …}} {what}, got {value!r}")
        known = [field.name for field in fields(cls)]
        try:
            for key in value:
                if key not in known:
                    raise OptionError(f"has no option {key!r}; there are {', '.join(known)}")
            return cls(**value)
        except OptionError as error:
            raise OptionError(f"modalities={{{name!r}: …}}: {error}") from None

    def over(self, other: Modality) -> Modality:
        """Return this modality, with options that are None replaced by the options of ``other``."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in mine.items() if value is not None})

    @property
    def scaling(self) -> tuple[float, float] | None:
        """The factor and the offset of ``rescale``."""
        scale = self.rescale
        return scale if scale is None or isinstance(scale, tuple) else (scale, 0.0)

    def __repr__(self) -> str:
        said = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return f"Modality({', '.join(f'{name}={value!r}' for name, value in said if value is not None)})"


@dataclass(frozen=True)
class ImageSpec:
    """The checked options for the images of a column."""

    size: Size
    channels: int
    filter: str
    antialias: bool
    parity: Literal["pil", "tf"]
    aspect: Literal["crop", "pad"] | None
    outside: Literal["error", "clip", "pad"]

    @property
    def elements(self) -> int:
        """The number of values in an image."""
        return self.size.height * self.size.width * self.channels


def spec_of(
    modality: Modality, parity: Literal["pil", "tf"], aspect: Literal["crop", "pad"] | None
) -> ImageSpec:
    """Return the checked options of a modality. Raise an OptionError if its options contradict each other."""
    name = modality.interpolation or "bilinear"
    if name not in _FILTERS[parity]:
        whose = {"pil": "Pillow's", "tf": "TensorFlow's"}
        other = "tf" if parity == "pil" else "pil"
        raise OptionError(
            f"interpolation={name!r} is none of {whose[parity]} ({', '.join(_FILTERS[parity])}): with "
            f"parity={other!r} it is {whose[other]}"
        )
    antialias = name != "nearest" if parity == "pil" else bool(modality.antialias)
    if parity == "pil" and modality.antialias is False and antialias:
        raise OptionError(
            "Pillow always antialiases where it makes an image smaller: antialias=False needs parity='tf'"
        )
    if parity == "tf" and modality.outside == "pad":
        raise OptionError("outside='pad' is what Pillow's crop does: it needs parity='pil'")
    size = _size(modality.image_size or 256)
    channels = _CHANNELS[modality.color_mode or "rgb"]
    outside = modality.outside or "error"
    return ImageSpec(Size(*size), channels, _FILTERS[parity][name], antialias, parity, aspect, outside)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise an OptionError if ``value`` is none of ``choices``."""
    if value not in choices:
        words = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise OptionError(f"{name} must be one of {words}, got {value!r}")


def _size(value: Any) -> tuple[int, int]:
    size = (value, value) if isinstance(value, int) else value
    is_pair = isinstance(size, (tuple, list)) and len(size) == 2
    if not is_pair or not all(isinstance(one, int) and one > 0 for one in size):
        raise OptionError(f"image_size must be (height, width) in pixels, got {value!r}")
    return int(size[0]), int(size[1])


def _rescale(value: Any) -> tuple[float, float]:
    pair = value if isinstance(value, (tuple, list)) else (value, 0.0)
    try:
        scale, offset = (float(one) for one in pair)
    except (TypeError, ValueError):
        text = f"rescale must be a factor such as 1/255, or (factor, offset), got {value!r}"
        raise OptionError(text) from None
    return scale, offset
