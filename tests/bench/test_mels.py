"""Log-mel spectrograms, of sound and made up."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from fastpipe.bench.synthetic import log_mels, mel_rows, mel_segments, read_wav, spoken, write_table
from fastpipe.errors import OptionError


def test_rows_depend_on_the_seed_alone() -> None:
    one, other = (mel_rows(np.random.default_rng(7), 300, (16, 20)) for _ in range(2))
    assert one.dtype == np.float32 and np.array_equal(one, other)
    assert not np.array_equal(one, mel_rows(np.random.default_rng(8), 300, (16, 20)))
    with pytest.raises(OptionError, match="both ≥ 2"):
        mel_rows(np.random.default_rng(0), 1, (1, 5))


def test_rows_are_smooth_and_compress_as_real_ones(tmp_path: Path) -> None:
    rows = mel_rows(np.random.default_rng(0), 64)
    assert np.diff(rows, axis=1).std() < 0.6 * rows.std() and np.diff(rows, axis=2).std() < 0.6 * rows.std()
    ratios = {}
    for compression in ("gzip", "lzf", None):
        path = write_table(
            tmp_path / f"{compression}.h5",
            "x",
            [rows],
            rows.shape,
            chunk=(16, 64, 128),
            compression=compression,
        )
        with h5py.File(path) as file:
            assert np.array_equal(file["x"][:], rows)
            ratios[compression] = rows.nbytes / file["x"].id.get_storage_size()
    # 260 s of speech at 8 kHz, 64 bands, in the same chunks: 1.27 and 1.17.
    assert 1.2 < ratios["gzip"] < 1.4 and 1.1 < ratios["lzf"] < 1.3 and ratios[None] == 1


def test_a_tone_is_loudest_in_the_band_of_its_frequency() -> None:
    bands, rate = 40, 16000
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2) / 2595) - 1)
    for frequency in (300.0, 1000.0, 5000.0):
        tone = np.sin(2 * np.pi * frequency * np.arange(rate) / rate)
        loudest = log_mels(tone, rate, bands=bands).mean(1).argmax()
        assert edges[loudest] < frequency < edges[loudest + 2]


def test_silence_and_short_sounds_have_a_spectrogram() -> None:
    assert log_mels(np.zeros(3), 8000).shape == (64, 1)
    assert np.allclose(log_mels(np.zeros(8000), 8000), np.log(1e-6))


def test_segments_are_parts_of_the_spectrogram() -> None:
    mels = np.arange(2 * 40, dtype=np.float32).reshape(2, 40)
    segments = mel_segments(mels, 3, 2, 8)
    assert segments.shape == (3, 2, 2, 8)
    assert np.array_equal(segments[0, 0], mels[:, :8])
    assert np.array_equal(segments[2, 1], mels[:, 32:])
    assert mel_segments(mels[:, :3], 2, 2, 8).shape == (2, 2, 2, 8)


def test_words_differ_more_than_their_speakers() -> None:
    mels = [
        [log_mels(spoken(np.random.default_rng([word, number]), word), 8000).mean(1) for number in range(8)]
        for word in (0, 4, 9)
    ]
    centres = [np.mean(one, axis=0) for one in mels]
    for word, found in enumerate(mels):
        distances = [np.linalg.norm(np.mean(found, axis=0) - centre) for centre in centres]
        assert int(np.argmin(distances)) == word
        assert min(np.linalg.norm(centres[word] - c) for c in centres if c is not centres[word]) > 1


def test_what_is_no_wav_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound")
    with pytest.raises(OptionError, match="is not a WAV file"):
        read_wav(tmp_path / "a.wav")
