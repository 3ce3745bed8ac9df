"""torchvision's transforms as steps. A step knows how many random numbers it needs, its operation, and
torchvision's function for reference.

A step is made from a transform object of the user's script.  The object is recognised by its exact class.
Objects of subclasses are not recognised, because a subclass may do anything.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Literal

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.types import Box, Size
from fastpipe.images import kernels
from fastpipe.images.pillow_rules import FILTERS, grey_is_known, pillow_filter, torch_filter

# ---- take containers of transforms apart: ``Compose``, ``Sequential``, the presets of weights ----------


def flatten(transform: Any) -> list[Any]:
    """Return a flat list of the transforms in a Compose, a Sequential or a preset of model weights, in order.
    Nested containers are flattened."""
    if transform is None:
        return []
    kind = type(transform)
    if is_torchvision(transform, "Compose"):
        children = transform.transforms
    elif kind.__qualname__ == "Sequential" and kind.__module__.startswith("torch.nn."):
        children = transform
    elif kind.__qualname__ == "ImageClassification" and kind.__module__ == "torchvision.transforms._presets":
        return _preset(transform) if is_pristine(transform) else [transform]
    else:
        return [transform]
    if not is_pristine(transform):
        return [transform]
    return [inner for child in children for inner in flatten(child)]


_presets: weakref.WeakKeyDictionary[Any, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()


def _preset(t: Any) -> list[Any]:
    """Return the steps of the preset transform that belongs to a model's weights."""
    state = repr([t.crop_size, t.resize_size, list(t.mean), list(t.std), t.interpolation, t.antialias])
    kept = _presets.get(t)
    if kept is None or kept[0] != state:
        v1 = require("torchvision.transforms", extra="torch")
        torch = require("torch", extra="torch")
        steps = [
            v1.Resize(t.resize_size, t.interpolation, antialias=t.antialias),
            v1.CenterCrop(t.crop_size),
            v1.PILToTensor(),
            v1.ConvertImageDtype(torch.float),
            v1.Normalize(t.mean, t.std),
        ]
        _presets[t] = kept = state, steps
    return kept[1]


_METHODS = ("__call__", "forward", "get_params", "make_params", "transform")


def is_pristine(transform: Any) -> bool:
    """Return whether this object and its class have no hooks and no replaced methods."""
    own = getattr(transform, "__dict__", {})
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
        return False
    kind: Any = type(transform)
    if not _callables(kind).isdisjoint(own):
        return False
    return all(
        members.get(name) is known or _is_of_torchvision(members[name])
        for members, name, known in _own_methods(kind)
    )


@cache
def _callables(kind: Any) -> frozenset[str]:
    """Return the names of a class's callable attributes. An object's own attribute with such a name would
    hide the class's attribute."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


@cache
def _own_methods(kind: Any) -> list[tuple[Any, str, Any]]:
    """Return the methods that run when an object of this class is called. Each item has the ``__dict__`` of a
    class, the method's name and the method.

    None replaces a method that is not torchvision's own.  Only torchvision's base classes are checked,
    because some tools wrap ``torch.nn.Module.__call__`` for all modules.
    """
    bases = [base.__dict__ for base in kind.__mro__ if base.__module__.startswith("torchvision.")]
    found = [(members, name, members[name]) for members in bases for name in _METHODS if name in members]
    return [(members, name, known if _is_of_torchvision(known) else None) for members, name, known in found]


def _is_of_torchvision(method: Any) -> bool:
    function = getattr(method, "__func__", method)  # the function of a static or class method
    home = getattr(function, "__module__", None)
    return isinstance(home, str) and home.startswith("torchvision.")


def is_torchvision(transform: Any, name: str | None = None) -> bool:
    kind = type(transform)
    return name in (None, kind.__qualname__) and kind.__module__.startswith("torchvision.transforms.")


# The type of a value between two steps: a PIL image, a tensor with the image's bytes, or any other value.
Domain = Literal["pil", "bytes", "other"]

_PIL_MODES = {**FILTERS, "nearest-exact": kernels.NEAREST}


@dataclass(frozen=True)
class Step:
    """One recognised transform.

    Attributes:
        transform: the user's object.
        draws: the number of uniform random numbers in [0, 1) that a sample needs.
        reference: torchvision's own functional, called with the drawn parameters.
        described: returns a ``native.Step`` for a domain (PIL image, bytes, or other), or None. None means
            that only torchvision can run the step, because the arithmetic of the installed Pillow is unknown,
            a parameter is not a plain number, or torchvision raises an error.  ``described`` is None for a
            pointwise step, whose effect is measured on all byte values.
        static_size: the output's size, if the step determines this size for all inputs. Otherwise None.
    """

    transform: Any
    draws: int
    reference: Callable[[Any, Sequence[float]], Any]
    described: Callable[[Domain], Any] | None = None
    static_size: Size | None = None

    @property
    def name(self) -> str:
        return type(self.transform).__name__


def recognise(transform: Any) -> Step | None:
    """Return the step for a transform; None if the transform is unknown."""
    if not _is_known(transform):
        return None
    return _BUILDERS[type(transform).__qualname__](transform)


def state_of(transform: Any) -> Any:
    """Return the state of a transform. A plan compiled from the transform is valid while the state stays
    equal."""
    seen = _seen.get(id(transform))
    if seen is not None and seen[0]() is transform and vars(transform) == seen[1] and is_pristine(transform):
        return seen[2]
    if not _is_known(transform):
        return id(transform)
    public = {k: v for k, v in vars(transform).items() if k[0] != "_" and k != "training"}
    state = id(transform), tuple((name, type(value), _exactly(value)) for name, value in public.items())
    if all(map(_never_changes, public.values())):
        if len(_seen) > _MOST_SEEN:
            _seen.clear()
        _seen[id(transform)] = weakref.ref(transform), dict(vars(transform)), state
    return state


_PLAIN = (int, float, bool, str, type(None))
_MOST_SEEN = 1000
# The attributes and states of transforms, by ``id``. The attributes of these transforms change only if a
# script assigns them.
_seen: dict[int, tuple[weakref.ref[Any], dict[str, Any], Any]] = {}


def _never_changes(value: Any) -> bool:
    """Return whether a value is immutable."""
    if type(value) is tuple:
        return all(map(_never_changes, value))
    return type(value) in _PLAIN or isinstance(value, Enum)


def _exactly(value: Any) -> Any:
    """Return a form of a value for comparison. Two forms are equal only if the values are equal."""
    if isinstance(value, (list, tuple)):
        return tuple(_exactly(item) for item in value)
    if hasattr(value, "tolist"):
        return str(value.dtype), repr(value.tolist())
    return type(value), value if type(value) in _PLAIN else repr(value)


def _is_known(transform: Any) -> bool:
    """Return whether the transform is an unchanged object of a known torchvision class."""
    return is_torchvision(transform) and type(transform).__qualname__ in _BUILDERS and is_pristine(transform)


def _is_v2(transform: Any) -> bool:
    return type(transform).__module__.startswith("torchvision.transforms.v2")


def _functional(transform: Any) -> Any:
    """Return the functional module that belongs to the transform's version (v1 or v2)."""
    version = ".v2" if _is_v2(transform) else ""
    return require(f"torchvision.transforms{version}.functional", extra="torch")


def _pair(size: Any) -> Size | None:
    """Return a transform's ``size`` as (height, width); None if ``size`` gives only one edge."""
    if isinstance(size, int) or size is None:
        return None
    return Size(int(size[0]), int(size[1])) if len(size) == 2 else None


# Kinds of steps, from fastpipe/native/geometry.h.
_RANDOM_RESIZED_CROP, RESIZE, _CENTER_CROP, _RANDOM_CROP, FLIP, GREY, BOX, PROPORTION = range(8)


_NUMBERS = (int, float, bool, np.float64)  # types that the native core computes with as Python does


def described_step(kind: int, **fields: Any) -> Any:
    """Return a ``native.Step`` with these fields. The defaults of fields are in fastpipe/native/geometry.h.

    Return None if a field holds a value that is not a plain number, or a number that needs more than 32 bits.
    """
    step = native.Step()
    step.kind = kind
    for name, value in fields.items():
        values = value if isinstance(value, (tuple, list)) else [value]
        if not all(type(one) in _NUMBERS for one in values):
            return None
        try:
            setattr(step, name, value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the number does not fit into 32 bits
            return None
    return step


def described_short_side(side: int) -> Any:
    """Return the ``native.Step`` that resizes bilinearly to ``side`` pixels on the shorter side. Return None
    if Pillow's arithmetic is unknown."""
    found = pillow_filter(kernels.BILINEAR)
    return None if found is None else described_step(RESIZE, size=(side, 0), filter=found[0], order=found[1])


def filter_of(transform: Any, domain: Domain) -> dict[str, int] | None:
    """Return the kernels' filter for a transform's interpolation, and for PIL images the order of its passes.

    Return None if only torchvision can resample with this interpolation.
    """
    name = getattr(transform.interpolation, "value", transform.interpolation)
    if domain == "pil":
        mode = _PIL_MODES.get(name)
        found = None if mode is None else pillow_filter(mode)
        return None if found is None else {"filter": found[0], "order": found[1]}
    if domain != "bytes" or not _is_v2(transform):  # v1 resizes floats
        return None
    mode = torch_filter(name, bool(transform.antialias))
    return None if mode is None else {"filter": mode}


def _integer(uniform: float, count: int) -> int:
    """Return a uniform random integer in 0 … count - 1, as ``torch.randint`` draws it."""
    return min(int(uniform * count), count - 1)


# ---- random resized crop -------------------------------------------------------------------


def random_resized_crop_box(
    image: Size, scale: Sequence[float], ratio: Sequence[float], u: Sequence[float]
) -> Box:
    """Return the box that ``RandomResizedCrop.get_params`` gives for 22 uniform random numbers.

    The numbers determine the area and the aspect ratio of ten tries, then the top and left of the box.

    >>> random_resized_crop_box(Size(100, 100), (1.0, 1.0), (1.0, 1.0), [0.5] * 22)
    Box(top=0, left=0, height=100, width=100)
    """
    height, width = image
    area = height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(10):
        target = area * (scale[0] + u[2 * attempt] * (scale[1] - scale[0]))
        aspect = math.exp(low + u[2 * attempt + 1] * (high - low))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(_integer(u[20], height - h + 1), _integer(u[21], width - w + 1), h, w)
    w, h = width, height  # all ten tries were too large: use the largest central box that fits
    if width / height < min(ratio):
        h = round(width / min(ratio))
    elif width / height > max(ratio):
        w = round(height * max(ratio))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def _random_resized_crop(t: Any) -> Step:
    target = _pair(t.size)
    assert target is not None  # torchvision converts every accepted value to a pair

    def reference(value: Any, u: Sequence[float]) -> Any:
        box = random_resized_crop_box(_size_of(value), t.scale, t.ratio, u)
        return _functional(t).resized_crop(value, *box, list(target), t.interpolation, antialias=t.antialias)

    def described(domain: Domain) -> Any:
        how = filter_of(t, domain)
        return how and described_step(
            _RANDOM_RESIZED_CROP, size=target, scale=tuple(t.scale), ratio=tuple(t.ratio), **how
        )

    return Step(t, 22, reference, described, target)


# ---- resize and crops ----------------------------------------------------------------------


def _resize(t: Any) -> Step:
    def described(domain: Domain) -> Any:
        how, exact = filter_of(t, domain), _pair(t.size)
        edge = t.size if isinstance(t.size, int) else 0 if t.size is None else t.size[0]
        if how is None or not _is_valid(t) or 0 in (exact or ()):
            return None  # torchvision raises its own error
        return described_step(RESIZE, size=exact or (edge, 0), max_size=t.max_size or 0, **how)

    return Step(t, 0, lambda value, u: t(value), described, _pair(t.size))


def _is_valid(t: Any) -> bool:
    if t.max_size is None or t.size is None:
        return True
    return _pair(t.size) is None and t.max_size > (t.size if isinstance(t.size, int) else t.size[0])


def resized_size(t: Any, image: Size) -> Size:
    """Return the size to which ``t``, torchvision's ``Resize``, resizes an image. The length of the longer
    edge is rounded down."""
    exact = _pair(t.size)
    if exact is not None:
        return exact
    short, long = sorted(image)
    if t.size is None:
        new_short, new_long = int(t.max_size * short / long), t.max_size
    else:
        wanted = t.size if isinstance(t.size, int) else t.size[0]
        new_short, new_long = wanted, int(wanted * long / short)
        if t.max_size is not None and new_long > t.max_size:
            new_short, new_long = int(t.max_size * new_short / new_long), t.max_size
    return Size(new_long, new_short) if image.width <= image.height else Size(new_short, new_long)


def _center_crop(t: Any) -> Step:
    target = _pair(t.size)
    assert target is not None

    def described(domain: Domain) -> Any:
        return described_step(_CENTER_CROP, size=target, has_fill=domain != "other")

    return Step(t, 0, lambda value, u: t(value), described, target)


def _random_crop(t: Any) -> Step | None:
    target = _pair(t.size)
    assert target is not None
    if isinstance(t.fill, dict):  # v2 accepts a fill for each type of input
        return None
    fill = _fill(t.fill)

    def reference(value: Any, u: Sequence[float]) -> Any:
        functional, image = _functional(t), _size_of(value)
        left, top, right, bottom = given = _padding(t)
        more_x = max(target.width - (image.width + left + right), 0) if t.pad_if_needed else 0
        more_y = max(target.height - (image.height + top + bottom), 0) if t.pad_if_needed else 0
        both = left + more_x, top + more_y, right + more_x, bottom + more_y
        height, width = image.height + both[1] + both[3], image.width + both[0] + both[2]
        if height < target.height or width < target.width:
            raise ValueError(
                f"Required crop size {tuple(target)} is larger than input image size {(height, width)}"
            )
        # v1 pads twice, which makes a difference for reflections. v2 pads once, by the sum.
        for number, padding in enumerate([both] if _is_v2(t) else [given, (more_x, more_y, more_x, more_y)]):
            if any(padding) or (number == 0 and t.padding is not None and not _is_v2(t)):
                value = functional.pad(value, list(padding), t.fill, t.padding_mode)
        corner = _integer(u[0], height - target.height + 1), _integer(u[1], width - target.width + 1)
        return functional.crop(value, *corner, *target)

    def described(domain: Domain) -> Any:
        refuses_colours = domain != "pil" and not (_is_v2(t) or isinstance(t.fill, int))  # v1, on tensors
        may_pad = t.padding_mode == "constant" and fill is not None and not refuses_colours
        always_pads = t.padding is not None and not _is_v2(t)  # v1 checks the fill even if the padding is 0
        if not may_pad and (always_pads or any(_padding(t))):
            return None
        return described_step(
            _RANDOM_CROP, size=target, padding=_padding(t), pad_if_needed=bool(t.pad_if_needed),
            may_pad=may_pad, always_pads=always_pads, fill=fill or (0, 0, 0),
            fill_by_channel=isinstance(t.fill, (tuple, list)), has_fill=domain != "other",
        )  # fmt: skip

    return Step(t, 2, reference, described, target)


def _padding(t: Any) -> tuple[int, int, int, int]:
    """Return a RandomCrop's padding as left, top, right, bottom."""
    given = t.padding
    if given is None:
        return 0, 0, 0, 0
    if isinstance(given, int):
        return given, given, given, given
    left, *rest = values = [int(v) for v in given]
    if len(values) < 4:  # one number for all sides, or left and top
        return left, values[-1], left, values[-1]
    top, right, bottom = (rest[1], rest[0], rest[2]) if _is_v2(t) else rest  # v2 has left, right, top, bottom
    return left, top, right, bottom


def _fill(fill: Any) -> tuple[int, int, int] | None:
    """Return a fill as a colour; None if only torchvision can use the fill."""
    if fill is None:
        return 0, 0, 0
    if isinstance(fill, int) and 0 <= fill <= 255:
        return fill, fill, fill
    if not isinstance(fill, (tuple, list)) or len(fill) != 3:
        return None
    inside = all(isinstance(v, int) and 0 <= v <= 255 for v in fill)
    return (fill[0], fill[1], fill[2]) if inside else None


# ---- flips, grey, pointwise ----------------------------------------------------------------


def _flip(horizontal: bool, t: Any) -> Step:
    def reference(value: Any, u: Sequence[float]) -> Any:
        functional = _functional(t)
        turn = functional.hflip if horizontal else functional.vflip
        return turn(value) if u[0] < t.p else value

    return Step(t, 1, reference, lambda domain: described_step(FLIP, probability=t.p, horizontal=horizontal))


def _grayscale(t: Any) -> Step:
    def described(domain: Domain) -> Any:
        if domain != "pil" or not grey_is_known():
            return None
        return described_step(GREY, channels=t.num_output_channels)

    return Step(t, 0, lambda value, u: t(value), described)


_POINTWISE = (
    "ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "ToDtype", "ConvertImageDtype", "Normalize",
    "Identity", "RGB",
)  # fmt: skip
_BUILDERS: dict[str, Callable[[Any], Step | None]] = {
    "RandomResizedCrop": _random_resized_crop,
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": partial(_flip, True),
    "RandomVerticalFlip": partial(_flip, False),
    "Grayscale": _grayscale,
    **dict.fromkeys(_POINTWISE, lambda t: Step(t, 0, lambda value, u: t(value))),
}


def _size_of(value: Any) -> Size:
    """Return the height and width of a PIL image or of a tensor (…, H, W)."""
    if hasattr(value, "getbands"):
        return Size(value.height, value.width)
    return Size(int(value.shape[-2]), int(value.shape[-1]))
