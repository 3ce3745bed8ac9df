"""What was drawn for a sample, in few words: the captions of ``preview``.

Words are of ASCII, and ``°`` and ``±``: the font that Pillow brings has little else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["caption", "title"]

Row = Mapping[str, float]
NOTHING = "-"


def title(op: Any) -> list[str]:
    """An augmentation's name, and what part of the samples it changes, in lines.

    >>> from fastpipe import augment
    >>> title(augment.RandomApply([augment.ColorJitter(0.4), augment.GaussianBlur(5)], p=0.8))
    ['ColorJitter', 'GaussianBlur', 'p = 0.8']
    """
    kind = type(op).__name__
    if kind == "RandomApply":
        return [*(line for inner in op.ops for line in title(inner)), f"p = {op.p:g}"]
    if kind == "RandAugment":
        return [kind, f"{op.num_ops} of magnitude {op.magnitude}"]
    has_part = kind.startswith("Random") and hasattr(op, "p")
    return [kind, f"p = {op.p:g}"] if has_part else [kind]


def caption(op: Any, row: Row, before: str = "") -> list[str]:
    """What was drawn for a sample, in lines; an augmentation of the user's own shows its numbers.

    Args:
        op: the augmentation.
        row: name → number.
        before: how the sample before this one is called, which augmentations that mix take.

    >>> from fastpipe import augment
    >>> caption(augment.RandomRotation(30), {"angle": -12.34})
    ['-12.3°']
    """
    kinds = [kind.__name__ for kind in type(op).__mro__]
    if "RandomApply" in kinds:
        return _of_apply(op, row)
    if {"MixUp", "CutMix"} & set(kinds):
        return _of_mix(row, before)
    words = next((_WORDS[kind] for kind in kinds if kind in _WORDS), None)
    if words is None:
        return [f"{name} {number:.3g}" for name, number in row.items()]
    return words(op, row) or [NOTHING]


def _of_apply(op: Any, row: Row) -> list[str]:
    if not row["is_applied"]:
        return ["not applied"]
    found = []
    for at, inner in enumerate(op.ops):
        own = {name[len(f"{at}.") :]: number for name, number in row.items() if name.startswith(f"{at}.")}
        found += caption(inner, own)
    return found


def _of_mix(row: Row, before: str) -> list[str]:
    if "kept" in row:
        return [f"{1 - row['kept']:.0%} of {before}"]
    size = _box(row["bottom"] - row["top"], row["right"] - row["left"])
    return [f"{size} of {before}"] if size else [NOTHING]


def _box(height: float, width: float) -> str:
    """A box's size, width first, as sizes of pictures are given; empty where it has no area."""
    return f"{width:.0f} x {height:.0f}" if height and width else ""


def _crop(op: Any, row: Row) -> list[str]:
    return [f"{_box(row['height'], row['width'])} at {row['left']:.0f}, {row['top']:.0f}"]


def _erased(op: Any, row: Row) -> list[str]:
    return _crop(op, row) if row["height"] and row["width"] else []


def _jitter(op: Any, row: Row) -> list[str]:
    """Changes in the order in which they are made, without those that the arguments leave out."""
    kinds = ("brightness", "contrast", "saturation", "hue")
    order = [kinds[int(row[place])] for place in ("first", "second", "third", "fourth")]
    words = {
        kind: f"{kind} {row[kind]:+.2f}" if kind == "hue" else f"{kind} x{row[kind]:.2f}" for kind in kinds
    }
    still = {kind for kind in kinds if getattr(op, kind) == ((0, 0) if kind == "hue" else (1, 1))}
    return [words[kind] for kind in order if kind not in still]


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
    """A number with one decimal, which is not -0.0."""
    return f"{round(number, 1) + 0.0:+.1f}"


def _policy(op: Any, row: Row) -> list[str]:
    pairs = zip(op.names[::2], op.names[1::2], strict=True)
    return [_CHANGES[int(row[change])](row[magnitude]) for change, magnitude in pairs]


def _masks(op: Any, row: Row) -> list[str]:
    """Frames and bins that are masked, as Python's ranges."""
    found = []
    for begin, end in zip(op.names[::2], op.names[1::2], strict=True):
        name = begin[:4]
        if row[end] > row[begin]:
            found.append(f"{name} {row[begin]:.0f}:{row[end]:.0f}")
    return found


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
    """Words for each channel that is changed; which it is, where there are several."""

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


# In the order of the numbers that policies draw.
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
    "RandomErasing": _erased,
    "RandomFlip3D": lambda op, row: [" ".join(name[6:] for name in op.names if row[name])][
        : any(row.values())
    ],
    "RandomGain": lambda op, row: [f"{_signed(row['gain_db'])} dB"],
    "RandomGrayscale": lambda op, row: ["grey"] if row["is_grey"] else [],
    "RandomHorizontalFlip": lambda op, row: ["mirrored"] if row["is_flipped"] else [],
    "RandomResizedCrop": _crop,
    "RandomRotate90": lambda op, row: [f"{90 * row['turns']:.0f}°"] if row["turns"] else [],
    "RandomRotation": lambda op, row: [f"{_signed(row['angle'])}°"],
    "RandomVerticalFlip": lambda op, row: ["upside down"] if row["is_flipped"] else [],
    "SpecAugment": _masks,
    "TimeShift": lambda op, row: [f"{row['shift']:+.0f} frames"],
    "TrivialAugmentWide": _policy,
}
