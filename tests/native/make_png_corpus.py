"""Make the PNGs with which fuzzing begins.

    PYTHONPATH=tests/support python tests/native/make_png_corpus.py fastpipe/native/fuzz/corpus/png

They are small PNGs of every kind, whole and with hostile chunks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from odd_images import pngs

from fastpipe.bench.synthetic import photograph

MOST = 4_000  # bytes of a file


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for _, name, blob, _ in pngs(photograph(np.random.default_rng(0), (17, 20))):
        if len(blob) <= MOST:
            (folder / name).write_bytes(blob)


if __name__ == "__main__":
    main()
