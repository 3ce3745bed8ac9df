"""Crops of CT volumes around labelled voxels, of volumes that are scaled to 0 to 1 as a whole."""

import sys
from pathlib import Path

import nibabel
import numpy as np
import torch
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader, FastPatchDataset, Rescale, sampling
from torch.utils.data import Dataset

SIZE = 32, 32, 32


class Crops(Dataset):
    def __init__(self, images, labels, starts):
        self.images, self.labels, self.starts = images, labels, starts

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        number, *start = self.starts[index]
        box = tuple(slice(at, at + side) for at, side in zip(start, SIZE, strict=True))
        image = nibabel.load(self.images[number]).get_fdata(dtype=np.float32)
        image = (image - image.min()) / (image.max() - image.min())
        labels = np.asarray(nibabel.load(self.labels[number]).dataobj)
        return torch.from_numpy(image[box]), torch.from_numpy(labels[box])


def crops(labels, count):
    """Return the volume and the first voxel of crops whose centres are labelled, drawn once: (count, 4)."""
    rng, found = np.random.default_rng(0), []
    for number, path in enumerate(labels):
        array = np.asarray(nibabel.load(path).dataobj)
        centres = rng.choice(np.argwhere(array), count // len(labels))
        starts = np.clip(centres - np.array(SIZE) // 2, 0, np.array(array.shape) - SIZE)
        found += [(number, *start) for start in starts]
    return np.array(found)


def make_data(photos, folder):
    """Write 8 volumes of 96 x 128 x 128 voxels, and their labels."""
    rng = np.random.default_rng(0)
    for number in range(8):
        image = rng.normal(40, 300, (96, 128, 128)).clip(-1024, 3071).astype(np.int16)
        for name, array in (("image", image), ("labels", (image > 900).astype(np.uint8))):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), Path(folder, f"{name}{number}.nii"))


def make_loader(folder):
    images, labels = (sorted(Path(folder).glob(f"{name}*")) for name in ("image", "labels"))
    starts = crops(labels, 64)
    dataset = Crops(images, labels, starts)  # becomes:     dataset = FastPatchDataset(images, SIZE, labels=labels, sampling=sampling.Positions(starts), normalize=Rescale(), cache="off")
    return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)


if __name__ == "__main__":
    print(sum(len(labels) for images, labels in make_loader(sys.argv[1])), "crops")
