"""An LMDB of images and labels, with a Dataset of the script's own, resized as for evaluation."""

import io
import sys

import lmdb
from PIL import Image
from torch.utils.data import DataLoader, Dataset  # becomes: from torch.utils.data import Dataset; from fastpipe import FastImageFolder, FastLoader as DataLoader
from torchvision import transforms

TRANSFORM = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


def make_data(photos, folder):
    with lmdb.open(f"{folder}/train.lmdb", map_size=1 << 30) as env, env.begin(write=True) as txn:
        for index in range(600):
            with open(photos[index % len(photos)], "rb") as file:
                txn.put(f"image-{index:09}".encode(), file.read())
            txn.put(f"label-{index:09}".encode(), str(index % 10).encode())


class LmdbImages(Dataset):
    def __init__(self, path, transform):
        self.path, self.transform, self.env = path, transform, None
        with lmdb.open(path, readonly=True, lock=False) as env:
            self.length = env.stat()["entries"] // 2

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.env is None:  # each worker process opens the file
            self.env = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
        with self.env.begin() as txn:
            image = txn.get(f"image-{index:09}".encode())
            label = txn.get(f"label-{index:09}".encode())
        return self.transform(Image.open(io.BytesIO(image)).convert("RGB")), int(label)


def make_loader(folder):
    dataset = LmdbImages(f"{folder}/train.lmdb", TRANSFORM)  # becomes:     dataset = FastImageFolder.from_samples(f"{folder}/train.lmdb", TRANSFORM, int, image="image-*", target="label-*", cache="off")
    return DataLoader(dataset, batch_size=50, num_workers=2, persistent_workers=True)


if __name__ == "__main__":
    print(sum(len(labels) for _, labels in make_loader(sys.argv[1])), "images")
