"""Images and masks, cropped alike, as for segmentation (U-Net)."""

import random
import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as F


class Pairs(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder, "images").glob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        mask = Image.open(path.parents[1] / "masks" / f"{path.stem}.png")
        box = RandomResizedCrop.get_params(image, scale=(0.25, 1.0), ratio=(1.0, 1.0))
        image = F.resized_crop(image, *box, (256, 256))
        mask = F.resized_crop(mask, *box, (256, 256), InterpolationMode.NEAREST)
        if random.random() < 0.5:
            image, mask = F.hflip(image), F.hflip(mask)
        return F.to_tensor(image), F.pil_to_tensor(mask).squeeze(0).to(torch.int64)


def make_data(photos, folder):
    """Write images, and masks of four levels of brightness."""
    for name in ("images", "masks"):
        Path(folder, name).mkdir()
    for number, photo in enumerate(photos):
        Path(folder, "images", f"{number}.jpg").write_bytes(Path(photo).read_bytes())
        mask = Image.open(photo).convert("L").point([value // 64 for value in range(256)])
        mask.save(Path(folder, "masks", f"{number}.png"))


def make_loader(folder):
    return DataLoader(Pairs(folder), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(masks) for images, masks in make_loader(sys.argv[1])), "images")
