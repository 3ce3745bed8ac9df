"""Normal noise that is a function of a seed and of where a voxel is: on every device the same, but for the
last digits of logarithms and cosines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastpipe.augment.volumes.volume import PIECE, Volume

__all__ = ["SEEDS", "add", "normal"]

SEEDS = 2**32
# Of MurmurHash3's finaliser (A. Appleby, 2011), as numbers of 32 bits with a sign.
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_GOLDEN = 0x9E3779B9  # between channels
_UNIT = 2.0**-24


def add(volume: Volume, std: float, seed: int) -> None:
    """Add noise of a standard deviation to all channels."""
    for channel, values in enumerate(volume.values):
        begin, own = 0, (seed + channel * _GOLDEN) % SEEDS
        for piece in torch.split(values.view(-1), PIECE):
            even, odd = normal(begin, len(piece), own, piece.device)
            piece[::2].add_(even, alpha=std)
            piece[1::2].add_(odd[: len(piece) // 2], alpha=std)
            begin += len(piece)


def normal(begin: int, count: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Normal numbers of voxels from ``begin``, which is even, on: by Box and Muller, two of two.

    Args:
        begin, count: which voxels.
        seed: below ``SEEDS``.
        device: where they are made.

    Returns:
        Those of even voxels, and of odd ones; as many.
    """
    pairs = torch.arange(begin // 2, begin // 2 + (count + 1) // 2, dtype=torch.int32, device=device)
    mixed = _mixed(_mixed(pairs) ^ _signed(seed))
    first, second = _mixed(mixed ^ _signed(0x5851F42D)), _mixed(mixed ^ _signed(0x14057B7E))
    # In (0, 1], of which the logarithm is finite.
    radius = _high(first).add_(1).mul_(_UNIT).log_().mul_(-2).sqrt_()
    angle = _high(second).mul_(2 * math.pi * _UNIT)
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def _mixed(values: Tensor) -> Tensor:
    """The finaliser, of what is not needed any more or is made here: products keep their low 32 bits."""
    values = values ^ ((values >> 16) & 0xFFFF)
    values.mul_(_FIRST)
    values.bitwise_xor_((values >> 13) & 0x7FFFF)
    values.mul_(_SECOND)
    return values.bitwise_xor_((values >> 16) & 0xFFFF)


def _high(values: Tensor) -> Tensor:
    """The upper 24 bits, as floats."""
    return ((values >> 8) & 0xFFFFFF).float()


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
