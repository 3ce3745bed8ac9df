"""A Dataset of the script's own with albumentations."""

import sys
from pathlib import Path

import albumentations as A
import numpy as np
from albumentations.pytorch import ToTensorV2
from PIL import Image
from torch.utils.data import DataLoader, Dataset  # becomes: from torch.utils.data import Dataset; from fastpipe import FastLoader as DataLoader


class Photos(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).rglob("*.jpg"))
        self.transform = A.Compose(
            [
                A.RandomResizedCrop((224, 224)),
                A.HorizontalFlip(),
                A.ColorJitter(),
                A.Normalize(),
                ToTensorV2(),
            ],
            seed=0,
        )

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = np.array(Image.open(self.files[index]).convert("RGB"))
        return self.transform(image=image)["image"], index


def make_loader(folder):
    return DataLoader(Photos(folder), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(images) for images, _ in make_loader(sys.argv[1])), "images")
