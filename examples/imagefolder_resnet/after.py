"""Train a ResNet-18 for a few steps on a folder of photographs: the script with fastpipe.

    python examples/imagefolder_resnet/after.py FOLDER [STEPS] [plain]

FOLDER has one sub-folder for each class.  `diff before.py after.py` shows the whole swap.  With
`plain` nothing is random but the order, and the losses of both scripts are the same.
"""

import sys
import time

import torch
from torchvision import models, transforms

from fastpipe import FastImageFolder, FastLoader


def training_data(
    folder: str, side: int = 224, plain: bool = False, batch_size: int = 32
) -> torch.utils.data.DataLoader:
    resize = [transforms.Resize(side * 8 // 7), transforms.CenterCrop(side)]
    augment = [
        transforms.RandomResizedCrop(side),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.4, 0.4, 0.4),
    ]
    transform = transforms.Compose([
        *(resize if plain else augment),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    dataset = FastImageFolder(folder, transform)
    return FastLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=2, augment="auto")


def main(folder: str, steps: int = 20, plain: bool = False) -> list[float]:
    torch.manual_seed(0)
    loader = training_data(folder, plain=plain)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(loader.dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, images, waited, asked = [], 0, 0.0, time.perf_counter()
    while len(losses) < steps:
        for image, label in loader:
            waited += time.perf_counter() - asked
            loss = torch.nn.functional.cross_entropy(model(image.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses, images = [*losses, loss.item()], images + len(image)
            print(f"step {len(losses)}: loss {losses[-1]:.6f}")
            asked = time.perf_counter()
            if len(losses) == steps:
                break
    print(f"{steps} steps, {images} images; waited {1000 * waited / steps:.0f} ms a step for data")
    return losses


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4) or sys.argv[3:] not in ([], ["plain"]):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]), plain=len(sys.argv) == 4)
