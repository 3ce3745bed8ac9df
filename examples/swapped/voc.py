"""torchvision's VOCSegmentation, whose images and masks are transformed together."""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torchvision import tv_tensors
from torchvision.datasets import VOCSegmentation, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2


def make_data(photos, folder):
    """Write images, and masks with a palette, in the folders of VOC 2012."""
    base = Path(folder, "VOCdevkit", "VOC2012")
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (base / name).mkdir(parents=True)
    names = [f"{number:06}" for number in range(len(photos))]
    for name, photo in zip(names, photos):
        (base / "JPEGImages" / f"{name}.jpg").write_bytes(Path(photo).read_bytes())
        Image.open(photo).convert("RGB").quantize(21).save(base / "SegmentationClass" / f"{name}.png")
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text("\n".join(names))


def make_loader(folder):
    transforms = v2.Compose(
        [
            v2.RandomResizedCrop((256, 256), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}, scale=True),
        ]
    )
    dataset = wrap_dataset_for_transforms_v2(VOCSegmentation(folder, image_set="train", transforms=transforms))
    return DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(masks) for images, masks in make_loader(sys.argv[1])), "images")
