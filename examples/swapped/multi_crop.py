"""Two large and six small crops of each image, as for self-distillation (DINO, SwAV)."""

import sys

from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


class MultiCrop:
    def __init__(self):
        def view(size, scale):
            return transforms.Compose(
                [
                    transforms.RandomResizedCrop(
                        size, scale, interpolation=transforms.InterpolationMode.BICUBIC
                    ),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                ]
            )

        self.views = [view(224, (0.4, 1.0))] * 2 + [view(96, (0.05, 0.4))] * 6

    def __call__(self, image):
        return [view(image) for view in self.views]


def make_loader(folder):
    dataset = ImageFolder(folder, MultiCrop())
    return DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(labels) for views, labels in make_loader(sys.argv[1])), "images")
