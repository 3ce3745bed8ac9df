"""Make the data of the example: two volumes in compressed Zarr arrays, one of them with labels.

    python examples/volume_patches/make_data.py FOLDER [--mri MRI_FOLDER]

FOLDER gets train.zarr/image (uint16), train.zarr/labels (uint8) and test.zarr/image (uint16).  They are two
scrolls that are made up, labels being 1 within sheets; or with --mri one head, of which the last third goes
to the test: MRI_FOLDER has t1.nii.gz and the probabilities of two tissues, grey_matter.nii.gz and
white_matter.nii.gz, which become labels 1 and 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np

from fastpipe.bench.synthetic import scroll_slabs, write_zarr

SHAPE = (96, 192, 192)
CHUNK = (32, 64, 64)


def made_up(shape: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The values of a scroll and its labels, both of the shape that is asked for."""
    slabs = list(scroll_slabs(shape, seed=seed))
    return np.concatenate([values for values, _ in slabs]), np.concatenate([labels for _, labels in slabs])


def from_mri(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The same of a head: a voxel's label is what is likeliest there."""
    image, grey, white = (
        np.asarray(nibabel.load(folder / f"{name}.nii.gz").dataobj, np.float32)
        for name in ("t1", "grey_matter", "white_matter")
    )
    certain = max(grey.max(), white.max())
    labels = np.argmax([certain - grey - white, grey, white], axis=0)
    return (image / image.max() * 65_535).astype(np.uint16), labels.astype(np.uint8)


def main(folder: str, mri_folder: str | None = None, shape: Sequence[int] = SHAPE) -> None:
    if mri_folder is None:
        image, labels = made_up(shape, seed=0)
        test, _ = made_up([side * 2 // 3 for side in shape], seed=1)
    else:
        image, labels = from_mri(Path(mri_folder))
        cut = len(image) * 2 // 3
        test, image, labels = image[cut:], image[:cut], labels[:cut]
    for name, array in (
        ("train.zarr/image", image),
        ("train.zarr/labels", labels),
        ("test.zarr/image", test),
    ):
        path = Path(folder) / name
        if path.exists():
            sys.exit(f"{path} exists: remove it, or name another folder")
        write_zarr(path, [array], array.shape, CHUNK)
        stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        side = "×".join(map(str, array.shape))
        print(f"{name}: {side} {array.dtype}, {stored / array.nbytes:.0%} of {array.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--mri", metavar="MRI_FOLDER")
    args = parser.parse_args()
    main(args.folder, args.mri)
