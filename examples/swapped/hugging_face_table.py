"""A table of Hugging Face's with images in it, resized as for evaluation."""

import sys

import pyarrow.parquet
from datasets import Image, load_dataset
from torch.utils.data import DataLoader, default_collate  # becomes: from torch.utils.data import default_collate; from fastpipe import FastImageFolder, FastLoader as DataLoader
from torchvision import transforms

TRANSFORM = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
)


def make_data(photos, folder):
    rows = []
    for index in range(600):
        with open(photos[index % len(photos)], "rb") as file:
            rows.append({"image": {"bytes": file.read(), "path": None}, "label": index % 10})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"{folder}/train.parquet")


def transformed(rows):
    rows["image"] = [TRANSFORM(image.convert("RGB")) for image in rows["image"]]
    return rows


def collate(samples):
    images, labels = default_collate([(one["image"], one["label"]) for one in samples])  # becomes:     images, labels = default_collate(samples)
    return {"pixel_values": images, "labels": labels}


def make_loader(folder):
    files = {"train": f"{folder}/train.parquet"}
    dataset = load_dataset("parquet", data_files=files, split="train").cast_column("image", Image())
    dataset = dataset.with_transform(transformed)  # becomes:     dataset = FastImageFolder.from_samples(dataset, TRANSFORM, image="image", target="label", cache="off")
    return DataLoader(dataset, batch_size=50, num_workers=2, persistent_workers=True, collate_fn=collate)


if __name__ == "__main__":
    print(sum(len(batch["labels"]) for batch in make_loader(sys.argv[1])), "images")
