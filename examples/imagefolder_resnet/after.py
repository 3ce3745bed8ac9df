"""Train a ResNet-18 for a few steps on a folder of photographs: the script with fastpipe.

    python examples/imagefolder_resnet/after.py FOLDER [STEPS]

FOLDER has one sub-folder for each class.  `diff before.py after.py` shows the whole swap.
"""

import sys
import time

import torch
from torchvision import models, transforms

from fastpipe import FastImageFolder, FastLoader


def main(folder: str, steps: int = 20) -> None:
    transform = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    dataset = FastImageFolder(folder, transform)
    loader = FastLoader(dataset, batch_size=32, shuffle=True)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, images, waited, asked = 0, 0, 0.0, time.perf_counter()
    while step < steps:
        for image, label in loader:
            waited += time.perf_counter() - asked
            loss = torch.nn.functional.cross_entropy(model(image.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, images = step + 1, images + len(image)
            print(f"step {step}: loss {loss.item():.3f}")
            asked = time.perf_counter()
            if step == steps:
                break
    print(f"{steps} steps, {images} images; waited {1000 * waited / steps:.0f} ms a step for data")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
