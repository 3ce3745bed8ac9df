"""Images and targets of different sizes, with a collate_fn of the script's own, as for detection."""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torch.utils.data import Dataset
from torchvision.transforms import functional as F


class Boxes(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).rglob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        boxes = torch.tensor([[0, 0, image.width // (n + 1), image.height] for n in range(index % 5 + 1)])
        image, size = F.resize(image, 320, max_size=533), image.size
        if torch.rand(1) < 0.5:
            image = F.hflip(image)
            boxes[:, [0, 2]] = size[0] - boxes[:, [2, 0]]
        return F.to_tensor(image), {"boxes": boxes, "image_id": index}


def as_lists(samples):
    return tuple(zip(*samples))


def make_loader(folder):
    return DataLoader(
        Boxes(folder), batch_size=8, shuffle=True, num_workers=2, collate_fn=as_lists, persistent_workers=True
    )


if __name__ == "__main__":
    print(sum(len(images) for images, targets in make_loader(sys.argv[1])), "images")
