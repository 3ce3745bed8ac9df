"""The example ``hdf5_mel``: both scripts mask, learn and judge the same, and differ by the swap alone."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastpipe import augment

EXAMPLE = "hdf5_mel"


@pytest.fixture(scope="module")
def data(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mels")
    scripts["make_data"].main(str(folder), files=100)
    return str(folder)


@pytest.mark.slow
def test_both_learn_and_judge_the_same_and_masks_make_it_harder(
    scripts: Any, data: str, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, right = scripts["before"].main(data, 3, plain=True)
    assert scripts["after"].main(data, 3, plain=True) == (pytest.approx(plain, abs=1e-5), right)
    printed = capsys.readouterr().out
    assert printed.count("samples/s") == 6 and printed.count("of 20 files") == 2
    found = [scripts[name].main(data, 3) for name in ("before", "after")]
    assert all(right >= 0.7 and losses[-1] > plain[-1] for losses, right in found)  # right: of ten words
    assert found[0][0] == pytest.approx(found[1][0], rel=0.1)


def test_both_mask_the_same(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the same numbers; each draws its own."""
    mels = torch.randn(50, 32, 16, generator=torch.Generator().manual_seed(0))
    u, op = np.random.default_rng(0).random((50, 4)).astype(np.float32), augment.SpecAugment(1, 4, 1, 8)
    parameters = augment.Parameters.of_table(op.names, op.table(u.astype(np.float64), (1, 32, 16)))
    numbers = iter(torch.from_numpy(u).flatten())
    monkeypatch.setattr(torch, "rand", lambda *size: next(numbers))
    found = torch.stack([scripts["before"].masked(one.clone()) for one in mels])
    assert torch.allclose(found, op.apply(mels, parameters), atol=1e-6)
    assert (found != mels).flatten(1).any(1).sum() > 40


def test_with_the_same_weights_the_votes_are_the_same(
    scripts: Any, data: str, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts["compare"].main(data, 1)
    printed = capsys.readouterr().out
    assert "the same votes" in printed and "the swap: 38 lines go, 11 lines come" in printed


def test_the_data_can_be_made_of_wav_files(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(50):
        with wave.open(str(tmp_path / f"{number % 10}_somebody_{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
            sound = scripts["sounds"].spoken(np.random.default_rng(number), number % 10)
            file.writeframes((sound * 32767).astype("<i2").tobytes())
    scripts["make_data"].main(str(tmp_path / "made"), wav_folder=str(tmp_path))
    assert "train.h5: 40 files" in capsys.readouterr().out
    losses, right = scripts["after"].main(str(tmp_path / "made"), 1)
    assert len(losses) == 1 and 0 <= right <= 1


def test_a_tone_is_loudest_in_the_band_of_its_frequency(scripts: Any) -> None:
    bands, rate = 40, 16000
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2) / 2595) - 1)
    for frequency in (300.0, 1000.0, 5000.0):
        tone = np.sin(2 * np.pi * frequency * np.arange(rate) / rate)
        loudest = scripts["sounds"].log_mels(tone, rate, bands=bands).mean(1).argmax()
        assert edges[loudest] < frequency < edges[loudest + 2]
