"""A Dataset of Hugging Face's with a column of images, and a transform."""

import sys

from datasets import load_dataset
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torchvision import transforms


class Transform:
    def __init__(self):
        self.train = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        )

    def __call__(self, rows):
        images = [self.train(image.convert("RGB")) for image in rows["image"]]
        return {"pixel_values": images, "label": rows["label"]}


def make_loader(folder):
    files = {"train": f"{folder}/**/*.jpg"}
    dataset = load_dataset("imagefolder", data_files=files, split="train").with_transform(Transform())
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(batch["label"]) for batch in make_loader(sys.argv[1])), "images")
