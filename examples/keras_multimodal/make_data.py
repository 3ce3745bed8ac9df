"""Make a small table of wounds: of each, four images with boxes, four numbers, and its phase of healing.

    python examples/keras_multimodal/make_data.py FOLDER [ROWS [PHOTOS]]

FOLDER gets table.csv with ROWS rows, and for each row a JPEG in depth_rgb, depth_map, thermal_rgb and
thermal_map.  There are 300, or a multiple of 288, which each of three folds has in whole batches: Keras takes
none that leaves a replica without rows.  The phase shows within a box only; around it is what another phase
looks like.  Backgrounds are photographs of the folder PHOTOS; without one they are made up.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, ImageFilter, ImageOps

from fastpipe.bench.synthetic import photograph

CAMERAS = {"depth": (1280, 720), "thermal": (640, 480)}
EDGES = ("left", "top", "right", "bottom")
PHASES = {
    "inflammation": lambda u, v: np.sin(u) * np.sin(v) > 0.35,
    "proliferation": lambda u, v: np.sin(u) > 0.2,
    "remodelling": lambda u, v: np.sin(np.hypot(u, v)) > 0.2,
}
COLOURS = {"inflammation": (200, 30, 30), "proliferation": (60, 160, 60), "remodelling": (60, 60, 200)}
# By how much a number grows from phase to phase, beside its noise of 1.
NUMBERS = {"age": 0.0, "days": 0.6, "exudate": -0.4, "temperature": -0.3}


def background(rng: np.random.Generator, size: tuple[int, int], photos: list[Path]) -> Image.Image:
    if not photos:
        return Image.fromarray(photograph(rng, size[::-1]))
    with Image.open(photos[rng.integers(len(photos))]) as photo:
        image = ImageOps.fit(photo.convert("RGB"), size, centering=tuple(rng.random(2)))
    return ImageOps.mirror(image) if rng.random() < 0.5 else image


def measured(photo: Image.Image) -> Image.Image:
    """A smooth map in false colours, as cameras of depth and of warmth save it."""
    grey = photo.convert("L").filter(ImageFilter.GaussianBlur(6))
    return ImageOps.colorize(grey, "navy", "yellow", mid="crimson")


def box_of(rng: np.random.Generator, size: tuple[int, int]) -> list[int]:
    """Left, top, right and bottom of 30 to 60 % of an image's area."""
    area, aspect = rng.uniform(0.3, 0.6), rng.uniform(0.8, 1.25)
    width, height = int(size[0] * (area * aspect) ** 0.5), int(size[1] * (area / aspect) ** 0.5)
    left, top = (int(rng.integers(most + 1)) for most in (size[0] - width, size[1] - height))
    return [left, top, left + width, top + height]


def texture(rng: np.random.Generator, size: tuple[int, int], phase: str) -> np.ndarray:
    """Return a mask of the coloured tissue of a phase: bool (height, width)."""
    turn, period = rng.uniform(0, 2 * np.pi), rng.uniform(0.06, 0.12) * size[1]
    x, y = (
        (np.arange(side, dtype=np.float32) - rng.uniform(0, side)) * (2 * np.pi / period) for side in size
    )
    y = y[:, None]
    return PHASES[phase](x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn))


def draw(rng: np.random.Generator, image: Image.Image, box: list[int], phase: str) -> Image.Image:
    """Faint tissue of a phase in the box, and of another around it."""
    outside = rng.choice([other for other in PHASES if other != phase])
    pixels, strength = np.array(image, np.float32), rng.uniform(0.05, 0.3)
    is_inside = np.zeros(pixels.shape[:2], bool)
    is_inside[box[1] : box[3], box[0] : box[2]] = True
    for name, part in ((phase, is_inside), (outside, ~is_inside)):
        where = texture(rng, image.size, name) & part
        colour = np.clip(rng.normal(COLOURS[name], 70), 0, 255).astype(np.float32)
        pixels[where] += strength * (colour - pixels[where])
    return Image.fromarray(pixels.round().astype(np.uint8))


def main(folder: str, rows: int = 300, photos: str | None = None) -> None:
    found = [] if photos is None else sorted(path for path in Path(photos).rglob("*") if path.is_file())
    table = []
    for number in range(rows):
        rng = np.random.default_rng(number)
        label = number % len(PHASES)
        phase, row = list(PHASES)[label], {"row": number}
        for camera, size in CAMERAS.items():
            photo, box = background(rng, size, found), box_of(rng, size)
            for name, image in ((f"{camera}_rgb", photo), (f"{camera}_map", measured(photo))):
                row[name] = f"{number:05d}.jpg"
                path = Path(folder, name, row[name])
                path.parent.mkdir(parents=True, exist_ok=True)
                draw(rng, image, box, phase).save(path, quality=90)
            row |= {f"{camera}_{edge}": value for edge, value in zip(EDGES, box, strict=True)}
        row |= {name: round(slope * label + rng.normal(), 3) for name, slope in NUMBERS.items()}
        table.append({**row, "phase": phase})
    pd.DataFrame(table).to_csv(Path(folder, "table.csv"), index=False)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:])
