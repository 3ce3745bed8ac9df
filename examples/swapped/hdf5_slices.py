"""Slices of MRI volumes of several sizes, an HDF5 file for each volume, as those of fastMRI."""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastHDF5Dataset, FastLoader as DataLoader
from torch.utils.data import Dataset


class Slices(Dataset):
    def __init__(self, paths):
        self.slices = []
        for path in paths:
            with h5py.File(path) as file:
                self.slices += [(path, number) for number in range(len(file["kspace"]))]

    def __len__(self):
        return len(self.slices)

    def __getitem__(self, index):
        path, number = self.slices[index]
        with h5py.File(path) as file:
            return file["kspace"][number], file["reconstruction_rss"][number], file.attrs["max"]


def cropped(samples):
    """Collate slices whose k-space has several widths."""
    width = min(kspace.shape[-1] for kspace, _, _ in samples)
    kspaces = []
    for kspace, _, _ in samples:
        first = (kspace.shape[-1] - width) // 2
        kspaces.append(torch.from_numpy(kspace[..., first : first + width]))
    targets = torch.stack([torch.from_numpy(target) for _, target, _ in samples])
    return torch.stack(kspaces), targets, torch.tensor([float(maximum) for _, _, maximum in samples])


def make_data(photos, folder):
    """Write 16 volumes of 8 to 11 slices, 4 coils and 128 x 80 to 104 values."""
    rng = np.random.default_rng(0)
    for number in range(16):
        slices, width = 8 + number % 4, 80 + 8 * (number % 4)
        with h5py.File(Path(folder, f"file_{number:04}.h5"), "w") as file:
            parts = rng.standard_normal((2, slices, 4, 128, width), np.float32)
            file["kspace"] = parts[0] + 1j * parts[1]
            file["reconstruction_rss"] = rng.random((slices, 128, 128), np.float32)
            file.attrs["max"] = 1.0


def make_loader(folder):
    paths = sorted(Path(folder).glob("*.h5"))
    dataset = Slices(paths)  # becomes:     dataset = FastHDF5Dataset(paths, ["kspace", "reconstruction_rss", "@max"], cache="off")
    return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=cropped)


if __name__ == "__main__":
    print(sum(len(targets) for kspaces, targets, maxima in make_loader(sys.argv[1])), "slices")
