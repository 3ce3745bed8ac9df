"""A training loop with Accelerate."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator  # becomes: from accelerate import Accelerator; from fastpipe.torch import prepare
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms


class Photos(Dataset):
    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform
        self.classes = sorted({path.parent.name for path in paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = self.transform(Image.open(path).convert("RGB"))
        return {"image": image, "label": self.classes.index(path.parent.name)}


def make_training(folder, accelerator):
    transform = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    dataset = Photos(sorted(Path(folder).rglob("*.jpg")), transform)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
    model = models.squeezenet1_1()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader)  # becomes:     return accelerator.prepare(model, optimizer, prepare(accelerator, loader))


def make_loader(folder):
    return make_training(folder, Accelerator())[-1]


if __name__ == "__main__":
    accelerator = Accelerator()
    model, optimizer, loader = make_training(sys.argv[1], accelerator)
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {loss:.2f}")
