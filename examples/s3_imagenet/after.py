"""Train a ResNet-18 for a few steps on 100 classes of ImageNet in a bucket: the script with fastpipe.

    python examples/s3_imagenet/serve.py
    python examples/s3_imagenet/after.py URL [STEPS] [plain]

URL is s3://BUCKET/FOLDER, with one sub-folder for each class, or where the bucket is mounted; serve.py has
such a bucket on this machine.  Credentials are the environment's.  Images are staged in the folder `stage`
of the current one.  `diff before.py after.py` shows the whole swap.  With `plain` nothing is random but the
order, and the losses of both scripts are the same.
"""

import random
import sys
import time

import torch
from torchvision import models, transforms

from fastpipe import FastImageFolder, FastLoader, Stage

CLASSES, SEED = 100, 42
STAGE = Stage("stage")  # a folder on a local disk


def choose(names: list[str]) -> list[str]:
    return sorted(random.Random(SEED).sample(sorted(names), CLASSES))


def main(folder: str, steps: int = 20, plain: bool = False) -> list[float]:
    torch.manual_seed(0)
    resize = [transforms.Resize(256), transforms.CenterCrop(224)]
    augment = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([
        *(resize if plain else augment),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    dataset = FastImageFolder(folder, transform, classes=choose, stage=STAGE)
    loader = FastLoader(dataset, batch_size=32, shuffle=True, num_workers=8)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, waited, start = [], 0.0, time.perf_counter()
    asked = start
    while len(losses) < steps:
        for image, label in loader:
            waited += time.perf_counter() - asked
            loss = torch.nn.functional.cross_entropy(model(image.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"step {len(losses)}: loss {losses[-1]:.6f}")
            asked = time.perf_counter()
            if len(losses) == steps:
                break
    seconds = time.perf_counter() - start
    print(f"{steps / seconds:.2f} it/s; waited {1000 * waited / steps:.0f} ms a step for data")
    return losses


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4) or sys.argv[3:] not in ([], ["plain"]):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]), plain=len(sys.argv) == 4)
