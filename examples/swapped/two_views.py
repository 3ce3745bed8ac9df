"""Two random views of each image, as for contrastive learning (MoCo, SimCLR)."""

import sys

from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


class TwoViews:
    def __init__(self, base):
        self.base = base

    def __call__(self, image):
        return [self.base(image), self.base(image)]


def make_loader(folder):
    view = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=(0.2, 1.0)),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    dataset = ImageFolder(folder, TwoViews(view))
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(labels) for views, labels in make_loader(sys.argv[1])), "images")
