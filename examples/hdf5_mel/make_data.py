"""Make the data of the example: segments of log-mel spectrograms of spoken words, in two HDF5 files.

    python examples/hdf5_mel/make_data.py FOLDER [--files N] [--wav-folder WAVS]

FOLDER/train.h5 and FOLDER/test.h5 each get ``segments`` (files, long, short, bands, frames) and ``labels``
(files, long, short).  The sounds are made up, or with --wav-folder read from WAV files that are named
word_speaker_number.wav; every fifth goes to the test.  ``sounds.py`` has the formulas of the
spectrograms.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sounds import log_mels, mel_segments, read_wav, spoken

from fastpipe.bench.synthetic import write_table

LONG, SHORT, BANDS, FRAMES = 4, 8, 32, 16


def made_up(files: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """Sounds, samples a second, words."""
    rng = np.random.default_rng(0)
    for number in range(files):
        word = number % 10
        yield spoken(rng, word), 8000, word


def from_wavs(folder: Path) -> Iterator[tuple[np.ndarray, int, int]]:
    """The same of WAV files, in an order that mixes words and speakers."""
    paths = sorted(folder.glob("*.wav"))
    words = sorted({path.name.split("_")[0] for path in paths})
    for number in np.random.default_rng(0).permutation(len(paths)):
        sound, rate = read_wav(paths[number])
        yield sound, rate, words.index(paths[number].name.split("_")[0])


def main(folder: str, files: int = 600, wav_folder: str | None = None) -> None:
    sounds = made_up(files) if wav_folder is None else from_wavs(Path(wav_folder))
    parts: dict[str, list[tuple[np.ndarray, int]]] = {"train": [], "test": []}
    for number, (sound, rate, word) in enumerate(sounds):
        mels = log_mels(sound, rate, bands=BANDS, hop=rate // 100)
        # Ten words follow each other, so that each fifth round of them is for the test.
        part = "test" if number // 10 % 5 == 4 else "train"
        parts[part].append((mel_segments(mels, LONG, SHORT, FRAMES), word))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for part, found in parts.items():
        labels = np.repeat([word for _, word in found], LONG * SHORT).reshape(-1, LONG, SHORT)
        shape = (len(found), LONG, SHORT, BANDS, FRAMES)
        write_table(
            Path(folder) / f"{part}.h5", "segments", (one[None] for one, _ in found), shape,
            chunk=(1, 1, *shape[2:]), compression="gzip", labels=labels,
        )  # fmt: skip
        print(f"{part}.h5: {len(found)} files of {LONG * SHORT} segments")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--files", type=int, default=600, help="how many to make up (default: 600)")
    parser.add_argument("--wav-folder")
    args = parser.parse_args()
    main(args.folder, args.files, args.wav_folder)
