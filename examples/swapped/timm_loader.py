"""timm's dataset, transform and collate function."""

import sys

from timm.data import create_dataset, create_transform
from timm.data.loader import fast_collate
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader


def make_loader(folder):
    transform = create_transform(224, is_training=True, use_prefetcher=True, color_jitter=None, auto_augment=None)
    dataset = create_dataset("", root=folder, transform=transform)
    return DataLoader(
        dataset, batch_size=64, shuffle=True, num_workers=2, collate_fn=fast_collate, persistent_workers=True
    )


if __name__ == "__main__":
    print(sum(len(labels) for images, labels in make_loader(sys.argv[1])), "images")
