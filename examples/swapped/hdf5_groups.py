"""An HDF5 file with a group for each sample."""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torch.utils.data import Dataset


class Groups(Dataset):
    def __init__(self, path):
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.names = sorted(file)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        if self.file is None:
            self.file = h5py.File(self.path)
        group = self.file[self.names[index]]
        return torch.from_numpy(group["volume"][...]), int(group.attrs["label"])


def make_data(photos, folder):
    """Write 128 volumes of 32 x 128 x 128 voxels."""
    rng = np.random.default_rng(0)
    with h5py.File(Path(folder, "scans.h5"), "w") as file:
        for number in range(128):
            group = file.create_group(f"{number:04}")
            group["volume"] = rng.standard_normal((32, 128, 128), np.float32)
            group.attrs["label"] = number % 10


def make_loader(folder):
    dataset = Groups(Path(folder, "scans.h5"))
    return DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(labels) for volumes, labels in make_loader(sys.argv[1])), "volumes")
