"""Spectrograms: what torchaudio's transforms do, given the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.chains import on_device
from fastpipe.errors import AugmentError

OPS: dict[str, augment.BatchTransform] = {
    "masks": augment.SpecAugment(2, 30, 3, 20),
    "masks of zeros": augment.SpecAugment(1, 50, 0, 0, zero_masking=True),
    "small masks": augment.SpecAugment(2, 500, 2, 500, p=0.3),
    "gain": augment.RandomGain(12.0),
    "gain of powers": augment.RandomGain((-3.0, 12.0), "power"),
    "gain of decibels": augment.RandomGain(12.0, "decibel"),
    "shift": augment.TimeShift(0.5),
    "shift of frames": augment.TimeShift(70, rolls=False, fill=-1.0),
}


def spectrograms(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(9, 40, 70), (9, 2, 40, 70)])
@pytest.mark.parametrize("case", OPS)
def test_both_ways_are_the_reference(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    op, values = OPS[case], spectrograms(*shape, dtype=dtype)
    for seed in range(4):
        parameters = op.draw(shape, generator=torch.Generator().manual_seed(seed))
        found, wanted = op.apply(values, parameters), op.reference(values, parameters)
        assert found.dtype == dtype and found.shape == shape
        assert torch.allclose(found, wanted, rtol=0.01 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)
        planes = values.reshape(9, -1, 40, 70)
        applied = torch.from_numpy(applied_table([op], parameters.table, tuple(planes.shape[1:]))).float()
        other = on_device([op], planes, applied).view(shape)
        assert torch.allclose(other, found, rtol=0.01 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)
        if dtype == torch.float32:
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture
def torchaudio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # It refuses to be imported beside a torch of another CUDA; its spectrograms' masks are plain torch.
    monkeypatch.setattr(torch.version, "cuda", None)
    yield pytest.importorskip("torchaudio", reason="make peers installs torchaudio")


@pytest.mark.parametrize("zero_masking", [False, True])
@pytest.mark.parametrize("p", [1.0, 0.4])
def test_masks_are_torchaudios(
    torchaudio: Any, p: float, zero_masking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its random numbers are given to both."""
    op = augment.SpecAugment(2, 30, 3, 20, p, zero_masking)
    theirs = torchaudio.transforms.SpecAugment(2, 30, 3, 20, True, p, zero_masking)
    values = spectrograms(9, 1, 40, 70)
    u = np.random.default_rng(0).random((9, op.draws)).astype(np.float32)
    parameters = augment.Parameters.of_table(op.names, op.table(u.astype(np.float64), (1, 40, 70)))
    for at in range(9):
        numbers = iter(u[at])
        monkeypatch.setattr(torch, "rand", lambda *a, _n=numbers, **k: torch.tensor([[next(_n)]]))
        wanted = theirs(values[at : at + 1])
        found = op.apply(values[at : at + 1], parameters.rows(slice(at, at + 1)))
        assert torch.allclose(found, wanted, atol=1e-6)


def test_gain_is_torchaudios(torchaudio: Any) -> None:
    op, values = augment.RandomGain(12.0), spectrograms(9, 40, 70)
    parameters = op.draw(values.shape)
    for one, found, gain in zip(values, op.apply(values, parameters), parameters["gain_db"], strict=True):
        assert torch.allclose(found, torchaudio.functional.gain(one, float(gain)), rtol=1e-5)


def test_what_is_wrong_is_said() -> None:
    values = spectrograms(4, 40, 70)
    for op, given, message in (
        (augment.SpecAugment(1, 71, 0, 0), values, "time_mask_param=71 is more than there is: 70"),
        (augment.SpecAugment(0, 0, 1, 41), values, "freq_mask_param=41 is more than there is: 40"),
        (augment.SpecAugment(1, 5, 1, 5), values.to(torch.uint8), "takes floats, got uint8"),
        (augment.SpecAugment(1, 5, 1, 5), values[0], r"\(N, F, T\) or \(N, C, F, T\), got shape \(40, 70\)"),
        (augment.SpecAugment(1, 5, 1, 5), values[:0], "empty batch"),
        (augment.SpecAugment(1, 5, 1, 5), values.numpy(), "takes a tensor"),
        (augment.TimeShift(71), values, "more than there are"),
        (augment.Compose([augment.RandomGain(), augment.ColorJitter(0.1)]), values, r"\(N, C, H, W\)"),
    ):
        with pytest.raises(AugmentError, match=message):
            op(given)
    for make, message in (
        (lambda: augment.SpecAugment(-1, 5, 1, 5), "n_time_masks"),
        (lambda: augment.SpecAugment(1, 5, 1, 5, p=1.5), "p= is a probability"),
        (lambda: augment.TimeShift(1.5), "most="),
        (lambda: augment.RandomGain(-1.0), "gain_db="),
        (lambda: augment.RandomGain(1.0, "loud"), "scale="),  # type: ignore[arg-type]
    ):
        with pytest.raises(AugmentError, match=message):
            make()
