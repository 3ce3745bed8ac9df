"""Sounds, and their log-mel spectrograms."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# Power below this is silence.
_FLOOR = 1e-6


def log_mels(signal: npt.NDArray[Any], rate: int, *, bands: int = 64, hop: int = 80) -> FloatArray:
    """The log-mel spectrogram of a sound.

    Frames of 32 ms under a Hann window, power of their Fourier transform, triangular filters
    that are equally wide in mel, ``log(power + 1e-6)``.  One mel is that of D. O'Shaughnessy,
    Speech Communication: Human and Machine (1987): ``2595 log10(1 + f / 700 Hz)``; filters as
    S. Davis and P. Mermelstein describe them in IEEE Trans. ASSP 28 (1980), 357.

    Args:
        signal: (samples,), full scale at 1.
        rate: samples a second.
        bands: mel bands from 0 to half the rate.
        hop: samples from a frame to the next.

    Returns:
        float32 (bands, frames); a signal shorter than a frame is lengthened by silence.

    >>> log_mels(np.sin(np.arange(8000)), 8000, bands=32).shape
    (32, 97)
    """
    width = max(2, rate * 32 // 1000)
    padded = np.pad(np.asarray(signal, np.float32), (0, max(0, width - len(signal))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, width)[::hop] * np.hanning(width)
    # Twice as many frequencies as the frame has: the lowest filters are narrower than one of its own.
    points = 2 * width
    power = np.abs(np.fft.rfft(frames, points)) ** 2
    found = np.log(power @ _filters(bands, points, rate).T + _FLOOR).T
    return np.ascontiguousarray(found, np.float32)


def mel_segments(mels: FloatArray, long: int, short: int, width: int) -> FloatArray:
    """Cut a spectrogram into long segments, and each of these into short ones, evenly spread.

    Args:
        mels: (bands, frames); one that is too short is repeated.
        long: how many long segments, each half as long as the whole.
        short: how many short segments in each.
        width: frames of a short segment.

    Returns:
        float32 (long, short, bands, width).

    >>> mel_segments(np.zeros((16, 50), np.float32), 4, 8, 16).shape
    (4, 8, 16, 16)
    """
    whole = np.tile(mels, -(-2 * width // mels.shape[1])) if mels.shape[1] < 2 * width else mels
    frames = whole.shape[1]
    half = frames // 2
    outer = np.linspace(0, frames - half, long).astype(int)
    inner = np.linspace(0, half - width, short).astype(int)
    starts = outer[:, None] + inner
    windows = np.lib.stride_tricks.sliding_window_view(whole, width, axis=1)
    return np.ascontiguousarray(windows[:, starts].transpose(1, 2, 0, 3))


def spoken(rng: np.random.Generator, word: int, rate: int = 8000, seconds: float = 0.8) -> FloatArray:
    """A sound that stands for a spoken word: a gliding voice, two resonances that the word decides, noise.

    Args:
        rng: the speaker and the noise.
        word: which of ten.
        rate: samples a second.
        seconds: how long.

    Returns:
        float32 (samples,), within ±1.

    >>> spoken(np.random.default_rng(0), 3).shape
    (6400,)
    """
    time = np.arange(round(rate * seconds)) / rate
    pitch = rng.uniform(90, 240) * (1 + rng.uniform(-0.2, 0.2) * time / seconds)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    centres = 300 + 120 * (word % 5) + 25 * rng.standard_normal(), 1100 + 700 * (word // 5)
    sound = np.zeros(len(time))
    for harmonic in range(1, int(0.45 * rate / pitch.max())):
        distance = [(harmonic * pitch - centre) / (120 + 0.1 * centre) for centre in centres]
        sound += np.sin(harmonic * phase) * sum(1 / (1 + one**2) for one in distance)
    sound *= np.sin(np.pi * time / seconds) ** 0.5
    sound = 0.5 * sound / np.abs(sound).max() + 0.03 * rng.standard_normal(len(time))
    return np.asarray(np.clip(sound, -1, 1), np.float32)


def read_wav(path: Path) -> tuple[FloatArray, int]:
    """A WAV file of 16 bits, its channels averaged.

    Returns:
        float32 (samples,) within ±1, and samples a second.

    Raises:
        ValueError: it is no such file.
    """
    try:
        with wave.open(str(path)) as file:
            if file.getsampwidth() != 2:
                raise ValueError(f"{str(path)!r} must have 16 bits, got {8 * file.getsampwidth()}")
            values = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)
            values /= np.float32(32768)
            sound = np.asarray(values.reshape(-1, file.getnchannels()).mean(1), np.float32)
            return sound, int(file.getframerate())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{str(path)!r} is not a WAV file: {error}") from None


def _filters(bands: int, points: int, rate: int) -> npt.NDArray[np.float64]:
    """Triangles over the frequencies of a Fourier transform: (bands, points // 2 + 1)."""
    highest = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, bands + 2) / 2595) - 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    frequency = np.fft.rfftfreq(points, 1 / rate)
    triangles = np.minimum((frequency - low) / (centre - low), (high - frequency) / (high - centre))
    return np.maximum(0.0, triangles)
