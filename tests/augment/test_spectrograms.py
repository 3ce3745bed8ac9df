"""Spectrograms are changed as by torchaudio, given the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import seeded

from fastpipe import augment


@pytest.fixture
def torchaudio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # It refuses to be imported beside a torch of another CUDA; its spectrograms' masks are plain torch.
    monkeypatch.setattr(torch.version, "cuda", None)
    yield pytest.importorskip("torchaudio", reason="make peers installs torchaudio")


@pytest.mark.parametrize("zero_masking", [False, True])
@pytest.mark.parametrize("p", [1.0, 0.4])
def test_masks_are_torchaudios(torchaudio: Any, p: float, zero_masking: bool, monkeypatch: Any) -> None:
    """Its random numbers are given to both."""
    op = augment.SpecAugment(2, 30, 3, 20, p, zero_masking)
    theirs = torchaudio.transforms.SpecAugment(2, 30, 3, 20, True, p, zero_masking)
    values = torch.randn(9, 1, 40, 70, generator=seeded())
    u = np.random.default_rng(0).random((9, op.draws)).astype(np.float32)
    parameters = augment.Parameters.of_table(op.names, op.table(u.astype(np.float64), (1, 40, 70)))
    for at in range(9):
        numbers = iter(u[at])
        monkeypatch.setattr(torch, "rand", lambda *a, _n=numbers, **k: torch.tensor([[next(_n)]]))
        wanted = theirs(values[at : at + 1])
        found = op.apply(values[at : at + 1], parameters.rows(slice(at, at + 1)))
        assert torch.allclose(found, wanted, atol=1e-6)


def test_gain_is_torchaudios(torchaudio: Any) -> None:
    op, values = augment.RandomGain(12.0), torch.randn(9, 40, 70, generator=seeded())
    parameters = op.draw(values.shape)
    for one, found, gain in zip(values, op.apply(values, parameters), parameters["gain_db"], strict=True):
        assert torch.allclose(found, torchaudio.functional.gain(one, float(gain)), rtol=1e-5)
