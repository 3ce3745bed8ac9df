"""Make a small image folder of which a net learns something in a minute: shapes on made-up photographs.

    python examples/imagefolder_resnet/make_data.py FOLDER [COUNT]

FOLDER/train has COUNT images of each of five shapes (default: 100), FOLDER/test two fifths as many.
"""

import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fastpipe.testing import photograph

SIZE = 160
SHAPES = {"cross": 0, "disc": 1, "ring": 2, "square": 3, "triangle": 4}


def draw(rng: np.random.Generator, shape: str) -> Image.Image:
    image = Image.fromarray(photograph(rng, (SIZE, SIZE)))
    pen = ImageDraw.Draw(image)
    x, y = rng.uniform(0.35 * SIZE, 0.65 * SIZE, 2)
    radius, turn = rng.uniform(0.18 * SIZE, 0.3 * SIZE), rng.uniform(0, 2 * math.pi)
    colour = tuple(rng.integers(0, 256, 3).tolist())

    def corners(count: int, at: float = 0.0) -> list[tuple[float, float]]:
        angles = [turn + at + 2 * math.pi * k / count for k in range(count)]
        return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]

    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "disc":
        pen.ellipse(box, fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=round(radius / 3))
    elif shape == "cross":
        for first, second in zip(corners(2), corners(2, math.pi / 2), strict=True):
            pen.line((x, y, *first), fill=colour, width=round(radius / 2.5))
            pen.line((x, y, *second), fill=colour, width=round(radius / 2.5))
    else:
        pen.polygon(corners(4 if shape == "square" else 3), fill=colour)
    return image


def main(folder: str, count: int = 100) -> None:
    for part, images in (("train", count), ("test", max(1, count * 2 // 5))):
        for shape, label in SHAPES.items():
            to = Path(folder, part, shape)
            to.mkdir(parents=True, exist_ok=True)
            for number in range(images):
                rng = np.random.default_rng([part == "test", label, number])
                draw(rng, shape).save(to / f"{number:04d}.jpg", quality=90)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
