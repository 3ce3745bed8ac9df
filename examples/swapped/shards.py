"""Tar shards, read by WebDataset, resized as for evaluation."""

import io
import sys
import tarfile

import webdataset  # becomes: from fastpipe import FastImageFolder
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torchvision import transforms

IN_ANY_ORDER = True  # WebDataset's workers read shards of their own

SHARDS = "{000..003}.tar"
TRANSFORM = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


def make_data(photos, folder):
    for number in range(4):
        with tarfile.open(f"{folder}/{number:03}.tar", "w") as shard:
            for index in range(number * 150, number * 150 + 150):
                with open(photos[index % len(photos)], "rb") as file:
                    files = {"jpg": file.read(), "cls": str(index % 10).encode()}
                for ending, content in files.items():
                    member = tarfile.TarInfo(f"{index:06}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))


def read(shards):
    dataset = webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
    return dataset.map_tuple(TRANSFORM, int).with_length(600)


def make_loader(folder):
    dataset = read(f"{folder}/{SHARDS}")  # becomes:     dataset = FastImageFolder.from_samples(f"{folder}/{SHARDS}", TRANSFORM, image="jpg", target="cls", cache="off")
    return DataLoader(dataset, batch_size=50, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(labels) for _, labels in make_loader(sys.argv[1])), "images")
