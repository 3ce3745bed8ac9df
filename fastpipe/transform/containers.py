"""Containers of transforms, taken apart: ``Compose``, ``Sequential``, the presets of weights."""

from __future__ import annotations

import weakref
from typing import Any

from fastpipe._extras import require

__all__ = ["flatten", "is_pristine", "is_torchvision"]


def flatten(transform: Any) -> list[Any]:
    """The transforms in a Compose, Sequential or weights' preset, nested ones included, in order."""
    if transform is None:
        return []
    if not is_pristine(transform):
        return [transform]
    if is_torchvision(transform, "Compose"):
        return [inner for child in transform.transforms for inner in flatten(child)]
    kind = type(transform)
    if kind.__module__.startswith("torch.nn.") and kind.__qualname__ == "Sequential":
        return [inner for child in transform for inner in flatten(child)]
    if kind.__module__ == "torchvision.transforms._presets" and kind.__qualname__ == "ImageClassification":
        return _preset(transform)
    return [transform]


_presets: weakref.WeakKeyDictionary[Any, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()


def _preset(t: Any) -> list[Any]:
    """What the transform that belongs to a model's weights does, step by step."""
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


def is_pristine(transform: Any) -> bool:
    """Whether nobody has put a hook, or a function in a method's place, on this object."""
    own = getattr(transform, "__dict__", {})
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
        return False
    return not any(callable(getattr(type(transform), name, None)) for name in own)


def is_torchvision(transform: Any, name: str | None = None) -> bool:
    kind = type(transform)
    return kind.__module__.startswith("torchvision.transforms.") and name in (None, kind.__qualname__)
