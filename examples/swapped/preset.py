"""Transforms behind a class of the script's own, as torchvision's reference scripts have them."""

import sys

import torch
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


class TrainPreset:
    def __init__(self, size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)):
        self.transforms = v2.Compose(
            [
                v2.RandomResizedCrop(size, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.PILToTensor(),
                v2.ToDtype(torch.float, scale=True),
                v2.Normalize(mean, std),
            ]
        )

    def __call__(self, image):
        return self.transforms(image)


def make_loader(folder):
    dataset = ImageFolder(folder, TrainPreset(224))
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(labels) for images, labels in make_loader(sys.argv[1])), "images")
