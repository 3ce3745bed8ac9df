"""Train one net in both ways, that of before.py and that of after.py, from several seeds: is it as good?

python examples/imagefolder_resnet/make_data.py FOLDER
python examples/imagefolder_resnet/compare.py FOLDER [EPOCHS [SEEDS]]
"""

import statistics
import sys
import time

import after
import before
import torch
from torch.utils.data import DataLoader
from torchvision import models

SIDE = 64


def trained(loader: DataLoader, epochs: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = models.resnet18(num_classes=len(loader.dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(loader))
    for _ in range(epochs):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: torch.nn.Module, loader: DataLoader) -> float:
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(right).mean().item()


def main(folder: str, epochs: int = 10, seeds: int = 3) -> dict[str, list[float]]:
    test = before.training_data(f"{folder}/test", SIDE, plain=True)
    found: dict[str, list[float]] = {}
    for name, script in (("before.py", before), ("after.py", after)):
        loader = script.training_data(f"{folder}/train", SIDE)
        begin = time.perf_counter()
        found[name] = [accuracy(trained(loader, epochs, seed), test) for seed in range(seeds)]
        told = ", ".join(f"{value:.1%}" for value in found[name])
        seconds = (time.perf_counter() - begin) / seeds
        print(f"{name}: {told}; mean {statistics.mean(found[name]):.1%}; {seconds:.0f} s each", flush=True)
    return found


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
