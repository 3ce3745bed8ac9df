"""Containers of transforms, taken apart: ``Compose``, ``Sequential``, the presets of weights."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from fastpipe._extras import require

__all__ = ["flatten", "is_pristine", "is_torchvision"]


def flatten(transform: Any) -> list[Any]:
    """The transforms in a Compose, Sequential or weights' preset, nested ones included, in order."""
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


_METHODS = ("__call__", "forward", "get_params", "make_params", "transform")


def is_pristine(transform: Any) -> bool:
    """Whether nobody has put a hook, or a function in a method's place, on this object or its class."""
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
    """Names that an object's own attributes would hide."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


@cache
def _own_methods(kind: Any) -> list[tuple[Any, str, Any]]:
    """Where torchvision's classes among the bases say what a call does (not ``torch.nn.Module``, whose
    ``__call__`` tools wrap for all modules), and what they say, if that is torchvision's."""
    bases = [base.__dict__ for base in kind.__mro__ if base.__module__.startswith("torchvision.")]
    found = [(members, name, members[name]) for members in bases for name in _METHODS if name in members]
    return [(members, name, known if _is_of_torchvision(known) else None) for members, name, known in found]


def _is_of_torchvision(method: Any) -> bool:
    function = getattr(method, "__func__", method)  # of a static or class method
    home = getattr(function, "__module__", None)
    return isinstance(home, str) and home.startswith("torchvision.")


def is_torchvision(transform: Any, name: str | None = None) -> bool:
    kind = type(transform)
    return name in (None, kind.__qualname__) and kind.__module__.startswith("torchvision.transforms.")
