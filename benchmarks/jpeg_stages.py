"""Measure the share of entropy decoding in the decoding of JPEGs, and what kept coefficients would bring.

::

    python benchmarks/jpeg_stages.py --data FOLDER --json result.json

It takes the photographs as they are, and encoded again with other qualities, samplings and sizes; of each,
a crop of ``RandomResizedCrop`` and the centre that evaluation needs.  ``jpeg_stages.cpp`` measures each image
on one core; it is compiled with g++, libjpeg-turbo and zstd.  The predictions assume that kept coefficients
leave out entropy decoding, and that all other stages take as long as libjpeg's.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rounds import add_photo_options, photos_of, save_facts

_SOURCE = Path(__file__).with_suffix(".cpp")
_COLUMNS = ("whole", "entropy of the whole", "region", "entropy", "entropy above", "inflation", "expansion")
_SIZES = ("file", "raw", "packed", "packed in strips")
_MOST_PHOTOS = 100
_KINDS: dict[str, dict[str, Any] | None] = {
    "as they are": None,
    **{f"quality {quality}": {"quality": quality} for quality in (60, 75, 90, 95)},
    "quality 90, 4:2:2": {"quality": 90, "subsampling": 1},
    "quality 90, 4:4:4": {"quality": 90, "subsampling": 0},
    "shorter side 256": {"quality": 85, "side": 256},
    "shorter side 1024": {"quality": 85, "side": 1024},
}


def compiled(folder: Path) -> Path:
    """Compile ``jpeg_stages.cpp``; return the program."""
    program = folder / "jpeg_stages"
    command = ["g++", "-std=c++17", "-O2", str(_SOURCE), "-o", str(program), "-ljpeg", "-lzstd"]
    subprocess.run(command, check=True)
    return program


def encoded(files: Sequence[str], folder: Path, side: int | None = None, **options: Any) -> list[str]:
    """Encode photographs again, with Pillow's options and the shorter side's length; return the paths."""
    folder.mkdir()
    made = []
    for number, file in enumerate(files):
        image = Image.open(file).convert("RGB")
        if side is not None:
            scale = side / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)))
        made.append(str(folder / f"{number}.jpg"))
        image.save(made[-1], **{"subsampling": 2, **options})
    return made


def region(file: str, part: str) -> tuple[int, int, int, int]:
    """Return a part of an image: left, top, width, height."""
    from torchvision.transforms import RandomResizedCrop

    image = Image.open(file)
    if part == "crop":
        top, left, height, width = RandomResizedCrop.get_params(
            image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]
        )
        return left, top, width, height
    side = min(image.size) * 224 // 256
    return (image.width - side) // 2, (image.height - side) // 2, side, side


def measured(program: Path, files: Sequence[str], part: str) -> dict[str, float]:
    """Return the mean microseconds and bytes of an image, shares, and predicted ratios."""
    lines = "".join(f"{' '.join(map(str, region(file, part)))} {file}\n" for file in files)
    done = subprocess.run([program], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    means = np.array([line.split() for line in done.stdout.splitlines()], float).mean(0)
    found = dict(zip((*_COLUMNS, *_SIZES), means.tolist(), strict=True))
    rest = found["region"] - found["entropy"]
    return {
        **{name: round(value, 1) for name, value in found.items()},
        "share": round(found["entropy"] / found["region"], 3),
        "share of the whole": round(found["entropy of the whole"] / found["whole"], 3),
        **{f"bytes, {name}": round(found[name] / found["file"], 3) for name in _SIZES[1:]},
        "x without rows above": round(found["region"] / (found["region"] - found["entropy above"]), 2),
        "x raw": round(found["region"] / (rest + found["expansion"]), 2),
        "x packed": round(found["region"] / (rest + found["expansion"] + found["inflation"]), 2),
    }


def main() -> None:
    """Measure all kinds of files; print a table."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_photo_options(parser, 1)
    args = parser.parse_args()
    photos, rows = photos_of(args), []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        program = compiled(folder)
        for number, (name, options) in enumerate(_KINDS.items()):
            files = list(photos.files)[:_MOST_PHOTOS]
            if options is not None:
                files = encoded(files, folder / str(number), **options)
            for part in ("crop", "evaluation"):
                rows.append({"files": name, "part": part, **measured(program, files, part)})
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    save_facts(args.json, photos, {"rows": rows})


if __name__ == "__main__":
    main()
