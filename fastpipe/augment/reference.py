"""The reference: torchvision's own functions, applied to one image at a time with the same parameters.

The reference is slow.  ``op.reference(images, parameters)`` is used to test ``op.apply``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpipe.augment.parameters import Parameters
from fastpipe.core.extras import require

Row = dict[str, float]
Changes = Mapping[str, Callable[[Any, Any, Row], Any]]  # by an operation's name


def chain_reference(
    ops: Sequence[Any], images: Tensor, parameters: Sequence[Parameters], changes: Changes | None = None
) -> Tensor:
    """Change images with torchvision's functions, one operation after the other. If ``changes`` is given, its
    functions are used instead."""
    for op, one in zip(ops, parameters, strict=True):
        images = _reference(op, images, one, _CHANGES if changes is None else changes)
    return images


def _reference(op: Any, images: Tensor, parameters: Parameters, changes: Changes) -> Tensor:
    """Change images with one operation. 16-bit floats are computed as float32 and rounded once."""
    dtype, values = op.dtype_after(images.dtype), images
    is_float = op.kind == "volumes" and dtype == torch.float32
    if is_float or dtype in (torch.float16, torch.bfloat16):
        values = images.float()
    if op.mixes:
        found = _MIXED[type(op).__name__](op, values, parameters)
    else:
        rows = [dict(zip(parameters, row, strict=True)) for row in parameters.table.tolist()]
        found = torch.stack(
            [changed_sample(op, image, row, changes) for image, row in zip(values, rows, strict=True)]
        )
    return found if found.dtype == torch.uint8 else found.to(dtype)


def changed_sample(op: Any, image: Any, p: Row, changes: Changes) -> Any:
    """Change a sample with one operation, including operations nested in the operation."""
    if any(kind.__name__ == "RandomApply" for kind in type(op).__mro__):
        for at, inner in enumerate(op.ops if p["is_applied"] else ()):
            own = {name: p[f"{at}.{name}"] for name in inner.names_for(len(image))}
            image = changed_sample(inner, image, own, changes)
        return image
    kind = next(kind.__name__ for kind in type(op).__mro__ if kind.__name__ in changes)
    return changes[kind](op, image, p)


class _Functional:
    """torchvision's functions, imported on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(require("torchvision.transforms.v2.functional", extra="torch"), name)


_F = _Functional()


def _crop(op: Any, image: Tensor, p: Row) -> Any:
    box = [int(p[name]) for name in ("top", "left", "height", "width")]
    return _F.resized_crop(image, *box, list(op.size), _F.InterpolationMode(op.interpolation), antialias=True)


def _affine(op: Any, image: Tensor, p: Row) -> Any:
    shift, shear = [int(p["translate_x"]), int(p["translate_y"])], [p["shear_x"], p["shear_y"]]
    mode = _F.InterpolationMode(op.interpolation)
    return _F.affine(
        image, p["angle"], shift, p["scale"], shear, mode, _fill(op), op.center and list(op.center)
    )


def _rotation(op: Any, image: Tensor, p: Row) -> Any:
    mode, center = _F.InterpolationMode(op.interpolation), op.center and list(op.center)
    return _F.rotate(image, p["angle"], mode, center=center, fill=_fill(op))


def _fill(op: Any) -> Any:
    return list(op.fill) if isinstance(op.fill, tuple) else op.fill


def _jitter(op: Any, image: Tensor, p: Row) -> Any:
    kinds = ("brightness", "contrast", "saturation", "hue")
    for place in ("first", "second", "third", "fourth"):
        kind = kinds[int(p[place])]
        image = getattr(_F, f"adjust_{kind}")(image, p[kind])
    return image


def _normalized(op: Any, image: Tensor, p: Row) -> Any:
    mean, std = (list(numbers) * (len(image) if len(numbers) == 1 else 1) for numbers in (op.mean, op.std))
    return _F.normalize(image, mean, std)


def _erased(op: Any, image: Tensor, p: Row) -> Any:
    top, left, height, width = (int(p[name]) for name in ("top", "left", "height", "width"))
    if op.value is None:  # noise differs for each pixel, and torchvision would draw new noise
        noise = op.noise(image[None], torch.tensor([p["noise"]]))[0]
        value = noise[:, top : top + height, left : left + width]
    else:
        value = torch.tensor(op.value)[:, None, None]
    return _F.erase(image, top, left, height, width, value)


def _policy(op: Any, image: Tensor, p: Row) -> Any:
    policy = require("torchvision.transforms.v2", extra="torch").RandAugment(
        interpolation=_F.InterpolationMode(op.interpolation), fill=_fill(op)
    )
    names = list(policy._AUGMENTATION_SPACE)
    for change, magnitude in zip(op.names[::2], op.names[1::2], strict=True):
        image = policy._apply_image_or_video_transform(
            image, names[int(p[change])], p[magnitude], policy.interpolation, policy._fill
        )
    return image


# ---- spectrograms: torchaudio's formulas, because its functions draw their own random numbers -------


def _masked(op: Any, image: Tensor, p: Row) -> Any:
    value = 0.0 if op.zero_masking else image.mean()
    for begin, end in zip(op.names[::2], op.names[1::2], strict=True):
        dim = -1 if begin.startswith("time") else -2
        places = torch.arange(image.shape[dim]).view(-1 if dim == -1 else (-1, 1))
        image = torch.where((places >= p[begin]) & (places < p[end]), value, image)
    return image


def _louder(op: Any, image: Tensor, p: Row) -> Any:
    if op.scale == "decibel":
        return image + p["gain_db"]
    return image * 10 ** (p["gain_db"] / (20 if op.scale == "amplitude" else 10))


def _shifted(op: Any, image: Tensor, p: Row) -> Any:
    shift = int(p["shift"])
    found = image.roll(shift, -1)
    if not op.rolls and shift:
        found[..., slice(None, shift) if shift > 0 else slice(shift, None)] = op.fill
    return found


# ---- mixing --------------------------------------------------------------------------------------


def _mixed(op: Any, images: Tensor, parameters: Parameters) -> Tensor:
    mix = require("torchvision.transforms.v2", extra="torch").MixUp(num_classes=1)
    mixed: dict[float, Tensor] = {}  # one result for the batch, or one result per sample
    rows = []
    for at, lam in enumerate(parameters["kept"].tolist()):
        if lam not in mixed:
            mixed[lam] = mix.transform(images, {"labels": None, "batch_size": len(images), "lam": lam})
        rows.append(mixed[lam][at])
    return torch.stack(rows)


def _cut(op: Any, images: Tensor, parameters: Parameters) -> Tensor:
    mix = require("torchvision.transforms.v2", extra="torch").CutMix(num_classes=1)
    rows = []
    for at in range(len(images)):
        top, left, bottom, right = (int(parameters[name][at]) for name in op.names)
        given = {"labels": None, "batch_size": len(images), "box": (left, top, right, bottom)}
        rows.append(mix.transform(images, given)[at])
    return torch.stack(rows)


_CHANGES: Changes = {
    "ColorJitter": _jitter,
    "GaussianBlur": lambda op, image, p: _F.gaussian_blur(image, list(op.kernel_size), [p["sigma"]] * 2),
    "Normalize": _normalized,
    "RandAugment": _policy,
    "RandomAffine": _affine,
    "RandomErasing": _erased,
    "RandomGain": _louder,
    "RandomGrayscale": lambda op, image, p: _F.rgb_to_grayscale(image, len(image)) if p["is_grey"] else image,
    "RandomHorizontalFlip": lambda op, image, p: _F.horizontal_flip(image) if p["is_flipped"] else image,
    "RandomResizedCrop": _crop,
    "RandomRotation": _rotation,
    "RandomVerticalFlip": lambda op, image, p: _F.vertical_flip(image) if p["is_flipped"] else image,
    "SpecAugment": _masked,
    "TimeShift": _shifted,
    "ToDtype": lambda op, image, p: _F.to_dtype(image, op.dtype, scale=True),
    "TrivialAugmentWide": _policy,
}
_MIXED: dict[str, Callable[[Any, Tensor, Parameters], Tensor]] = {"MixUp": _mixed, "CutMix": _cut}
