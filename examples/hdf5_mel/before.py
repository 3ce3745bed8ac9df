"""Train a small net on mel segments of HDF5 files and judge it by file: the script as it was.

    python examples/hdf5_mel/make_data.py FOLDER
    python examples/hdf5_mel/before.py FOLDER [EPOCHS] [plain]

FOLDER has train.h5 and test.h5.  `diff before.py after.py` shows the whole swap.  Bands of time and
of frequency are masked while it trains; with `plain` nothing is random but the order, and the losses of both
scripts are the same.
"""

import sys
import time

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def masked(mels: torch.Tensor) -> torch.Tensor:
    mean = mels.mean()
    for dim, most in ((1, 4), (0, 8)):  # fewer than 4 frames, and than 8 bands
        width = torch.rand(()) * most
        begin = torch.rand(()) * (mels.shape[dim] - width)
        mels.narrow(dim, int(begin), int(width)).fill_(mean)
    return mels


class Segments(Dataset):
    def __init__(self, path: str, plain: bool) -> None:
        self.path, self.plain, self.file = path, plain, None
        with h5py.File(path) as file:
            self.shape = file["segments"].shape

    def __len__(self) -> int:
        return int(np.prod(self.shape[:3]))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:  # each worker has its own
            self.file = h5py.File(self.path)
        place = np.unravel_index(index, self.shape[:3])
        mels = torch.from_numpy(self.file["segments"][place])
        return mels if self.plain else masked(mels), int(self.file["labels"][place])


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 4 * 2, 10),
    )  # fmt: skip


def train(model: nn.Module, path: str, epochs: int, plain: bool = False) -> list[float]:
    dataset = Segments(path, plain)
    loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=2)
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
    with torch.inference_mode(), h5py.File(path) as file:
        for number in range(len(file["segments"])):  # one file at a time
            segments = torch.from_numpy(file["segments"][number]).flatten(0, 1)
            chosen = model(segments.unsqueeze(1)).argmax(1)
            votes.append(int(chosen.bincount().argmax()))
            words.append(int(file["labels"][number, 0, 0]))
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
