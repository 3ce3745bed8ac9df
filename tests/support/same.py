"""Strict equality of samples and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in types, dtypes, shapes, strides, devices and to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.device, a.requires_grad) == (b.dtype, b.shape, b.device, b.requires_grad) and (
            not a.numel() or (a.stride() == b.stride() and torch.equal(_bytes(a), _bytes(b)))
        )  # fmt: skip
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and _same_elements(a, b)
    if isinstance(a, np.generic):
        return same(np.asarray(a), np.asarray(b))
    if isinstance(a, Image.Image):
        return (a.mode, a.size, a.info, a.tobytes()) == (b.mode, b.size, b.info, b.tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and not isinstance(a, (str, bytes)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1).view(torch.uint8)


def _same_elements(a: Any, b: Any) -> bool:
    if a.dtype.hasobject:
        return all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if a.dtype.names:  # bytes between fields are no values
        return all(same(a[name], b[name]) for name in a.dtype.names)
    return bool(a.tobytes() == b.tobytes())
