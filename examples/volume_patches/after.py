"""Train a small 3D U-Net on patches of a volume and label another volume: the script with fastpipe.

    python examples/volume_patches/make_data.py FOLDER
    python examples/volume_patches/after.py FOLDER_OR_URL [STEPS]

FOLDER has train.zarr and test.zarr; the URL is one that serve.py prints.  The prediction goes to FOLDER, or
with a URL to the current folder.  `diff before.py after.py` shows the whole swap.
"""

import os
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fastpipe import FastLoader, FastPatchDataset, Shuffle, augment, sampling, stitch

PATCH, STRIDE = (32, 64, 64), (16, 32, 32)
CLASSES = 3  # as the MRI has; a scroll has two of them
POINTS, BEND = (3, 4, 4), 3.0  # of a patch, points are moved; by how many voxels (standard deviation)


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(),
        nn.Conv3d(outputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Return scores (N, classes, D, H, W) for patches (N, D, H, W) with values from 0 to 65,535.

    It works at half the resolution, so that a step takes little time on a CPU as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = block(1, 4), block(4, 8), block(8, 16)
        self.up_middle, self.up_fine, self.head = block(16 + 8, 8), block(8 + 4, 4), nn.Conv3d(4, CLASSES, 1)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        fine = self.fine(F.avg_pool3d(patches.unsqueeze(1).float() / 65_535, 2))
        middle = self.middle(F.max_pool3d(fine, 2))
        coarse = self.coarse(F.max_pool3d(middle, 2))
        middle = self.up_middle(torch.cat([F.interpolate(coarse, scale_factor=2), middle], 1))
        fine = self.up_fine(torch.cat([F.interpolate(middle, scale_factor=2), fine], 1))
        return F.interpolate(self.head(fine), scale_factor=2, mode="trilinear")


def train(model: nn.Module, folder: str, steps: int) -> list[float]:
    device = next(model.parameters()).device
    dataset = FastPatchDataset(
        f"{folder}/train.zarr/image",
        PATCH,
        labels=f"{folder}/train.zarr/labels",
        sampling=sampling.Uniform(steps),
    )
    bend = augment.RandomElastic3D(POINTS, BEND, fill="edge")
    loader = FastLoader(dataset, batch_size=1, shuffle=Shuffle(unit="group"), device=device, augment=bend)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    losses, times, waits, asked = [], [], [], time.perf_counter()
    for images, labels in loader:
        waits.append(time.perf_counter() - asked)
        loss = F.cross_entropy(model(images.to(device)), labels.to(device).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - asked)
        print(
            f"step {len(losses)}: loss {losses[-1]:.5f}, {times[-1]:.3f} s, {waits[-1]:.3f} s of it waiting"
        )
        asked = time.perf_counter()
    if steps > 1:  # in the first everything starts
        step, wait = np.median(times[1:]), np.median(waits[1:])
        print(f"{step:.3f} s a step, {wait / step:.0%} of it waiting for data")
    return losses


def predict(model: nn.Module, folder: str) -> str:
    """Writes the probabilities of classes, float32 (classes, D, H, W); the mean, where patches overlap."""
    device = next(model.parameters()).device
    path = os.path.join("" if "://" in folder else folder, "prediction_after.npy")
    model.eval()
    if os.path.exists(path):
        os.remove(path)
    dataset = FastPatchDataset(f"{folder}/test.zarr/image", PATCH, sampling=sampling.Grid(STRIDE))
    loader = FastLoader(dataset, batch_size=4, device=device)
    with torch.inference_mode():
        predictions = (model(images).softmax(1) for images in loader)
        stitch(predictions, dataset, path, weights="constant")
    return path


def main(folder: str, steps: int = 20) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = UNet().to("cuda" if torch.cuda.is_available() else "cpu")
    losses = train(model, folder, steps)
    start = time.perf_counter()
    path = predict(model, folder)
    print(f"{path} in {time.perf_counter() - start:.2f} s")
    return losses, path


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
