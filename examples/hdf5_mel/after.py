"""Train a small net on mel segments of HDF5 files and judge it by file: the script with fastpipe.

    python examples/hdf5_mel/make_data.py FOLDER
    python examples/hdf5_mel/after.py FOLDER [EPOCHS] [plain]

FOLDER has train.h5 and test.h5.  `diff before.py after.py` shows the whole swap.  Bands of time and
of frequency are masked while it trains; with `plain` nothing is random but the order, and the losses of both
scripts are the same.
"""

import sys
import time

import torch
from torch import nn

from fastpipe import FastHDF5Dataset, FastLoader, augment, group_batches, segment_reduce


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 4 * 2, 10),
    )  # fmt: skip


def train(model: nn.Module, path: str, epochs: int, plain: bool = False) -> list[float]:
    dataset = FastHDF5Dataset(path, ["segments", "labels"], sample_dims=3)
    masked = None if plain else augment.SpecAugment(1, 4, 1, 8)
    loader = FastLoader(dataset, batch_size=256, shuffle=True, num_workers=2, augment=masked)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(epochs):
        model.train()
        total, start = 0.0, time.perf_counter()
        for segments, labels in loader:
            loss = nn.functional.cross_entropy(model(segments.unsqueeze(1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        losses.append(total / len(dataset))
        rate = len(dataset) / (time.perf_counter() - start)
        print(f"epoch {epoch}: loss {losses[-1]:.5f}, {rate:,.0f} samples/s")
    return losses


def evaluate(model: nn.Module, path: str) -> tuple[list[int], list[int]]:
    model.eval()
    votes, words = [], []
    dataset = FastHDF5Dataset(path, ["segments", "labels"], sample_dims=3)
    with torch.inference_mode():
        for (segments, labels), files in group_batches(dataset, k=16):
            votes += segment_reduce(model(segments.unsqueeze(1)), files, "vote").values.tolist()
            words += segment_reduce(labels, files, "max").values.tolist()
    return votes, words


def main(folder: str, epochs: int = 2, plain: bool = False) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = small_net()
    losses = train(model, f"{folder}/train.h5", epochs, plain)
    start = time.perf_counter()
    votes, words = evaluate(model, f"{folder}/test.h5")
    right = sum(vote == word for vote, word in zip(votes, words, strict=True)) / len(words)
    print(f"{right:.1%} of {len(words)} files, {len(words) / (time.perf_counter() - start):,.0f} files/s")
    return losses, right


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4) or sys.argv[3:] not in ([], ["plain"]):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]), plain=len(sys.argv) == 4)
