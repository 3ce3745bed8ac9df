"""Make a small image folder of which a net learns something in a minute: patterns over made-up photographs.

    python examples/imagefolder_resnet/make_data.py FOLDER [COUNT]

FOLDER/train has COUNT images of each of five patterns (default: 300), FOLDER/test two fifths as many.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fastpipe.bench.synthetic import photograph

SIZE = 160
PATTERNS = {
    "checks": lambda u, v: np.sin(u) * np.sin(v) > 0,
    "dots": lambda u, v: np.sin(u) * np.sin(v) > 0.5,
    "rings": lambda u, v: np.sin(np.hypot(u, v)) > 0,
    "stripes": lambda u, v: np.sin(u) > 0,
    "waves": lambda u, v: np.sin(u + 2 * np.sin(v)) > 0,
}


def draw(rng: np.random.Generator, pattern: str) -> Image.Image:
    image = photograph(rng, (SIZE, SIZE)).astype(np.float64)
    turn, period = rng.uniform(0, 2 * np.pi), rng.uniform(16, 32)
    y, x = (np.mgrid[:SIZE, :SIZE] - rng.uniform(0, SIZE, (2, 1, 1))) * (2 * np.pi / period)
    u, v = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    where = PATTERNS[pattern](u, v)
    image[where] = 0.2 * image[where] + 0.8 * rng.uniform(0, 255, 3)
    return Image.fromarray(image.round().astype(np.uint8))


def main(folder: str, count: int = 300) -> None:
    for part, images in (("train", count), ("test", max(1, count * 2 // 5))):
        for label, pattern in enumerate(PATTERNS):
            to = Path(folder, part, pattern)
            to.mkdir(parents=True, exist_ok=True)
            for number in range(images):
                rng = np.random.default_rng([part == "test", label, number])
                draw(rng, pattern).save(to / f"{number:04d}.jpg", quality=90)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
