"""Generate scenes of a moving actor and learn what it does in them: the script as it was.

    python examples/motion_generation/before.py FOLDER [SAMPLES [EPOCHS [SEED]]]

FOLDER gets train_SEED.npz, with SAMPLES scenes and four variations of each, and test.npz.  `diff before.py
after.py` shows the swap; `get_poses` in actor.py comes with it.  How long 100,000 scenes would take, and why:

    cd examples/motion_generation
    fastpipe generate before:sample -n 100000 --out motion.h5 --seed 0 --dry-run
"""

import os
import sys
import time

import numpy as np
import torch
from actor import FRAME, FRAMES, JOINTS, PAIRS, THEMES, Actor, generate_random_scene
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEST_SEED = 1000  # of the scenes that judge it; those of training have the seed that is given
AUGMENTATIONS = ("speed", "position", "scale", "mirror")


def sample(index: int, rng: np.random.Generator) -> dict:
    """A scene at random, frame by frame: 250 × `get_pose`."""
    scene = generate_random_scene(rng)
    actor = Actor(scene)
    frames = [actor.get_pose(frame * FRAME) for frame in range(FRAMES)]
    return {"motion": np.array(frames, np.float32), "theme": scene.theme}


def augment_motion_sequence(motion: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind == "speed":
        place = np.minimum(np.arange(FRAMES) * np.exp(rng.uniform(*np.log([0.8, 1.25]))), FRAMES - 1)
        at = place.astype(int)
        weight = (place - at)[:, None, None]
        motion = motion[at] * (1 - weight) + motion[np.minimum(at + 1, FRAMES - 1)] * weight
    elif kind == "position":
        motion = motion + rng.uniform(-0.5, 0.5, size=3) * [1, 0, 1]
    elif kind == "scale":
        motion = motion * np.exp(rng.uniform(*np.log([0.9, 1.1])))
    elif kind == "mirror":
        order = np.arange(JOINTS)
        for right, left in PAIRS:
            order[right], order[left] = left, right
        motion = motion[:, order] * [-1, 1, 1]
    return motion.astype(np.float32)


def generate_dataset(path: str, num_samples: int, seed: int, augment: bool) -> None:
    motions, themes = [], []
    for i in range(num_samples):
        rng = np.random.default_rng([seed, i])
        base = sample(i, rng)
        motions.append(base["motion"])
        themes.append(base["theme"])
        if augment:
            for kind in AUGMENTATIONS:
                motions.append(augment_motion_sequence(base["motion"], kind, rng))
                themes.append(base["theme"])
    np.savez(path, motion=np.stack(motions), theme=np.array(themes))


def generate(folder: str, samples: int, seed: int) -> tuple[str, str]:
    """Scenes to learn from and scenes to judge by, a quarter as many: their files."""
    train_path, test_path = f"{folder}/train_{seed}.npz", f"{folder}/test.npz"
    os.makedirs(folder, exist_ok=True)
    start = time.perf_counter()
    generate_dataset(train_path, samples, seed, augment=True)
    seconds = time.perf_counter() - start
    rate, size = samples / seconds, os.path.getsize(train_path)
    print(f"generated {samples} scenes in {seconds:.2f} s: {rate:,.1f} scenes/s, {size:,} bytes", flush=True)
    generate_dataset(test_path, -(-samples // 4), TEST_SEED, augment=False)
    return train_path, test_path


def opened(path: str) -> TensorDataset:
    with np.load(path) as file:
        return TensorDataset(torch.from_numpy(file["motion"]), torch.from_numpy(file["theme"]))


class SmallNet(nn.Module):
    """Return the scores of themes (N, 5) for motion (N, 250, 25, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(JOINTS * 3),
            nn.Conv1d(JOINTS * 3, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 64, 5, stride=2), nn.BatchNorm1d(64), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, len(THEMES)),
        )  # fmt: skip

    def forward(self, motions: torch.Tensor) -> torch.Tensor:
        return self.layers(motions.flatten(2).transpose(1, 2))


def train(model: nn.Module, path: str, epochs: int) -> list[float]:
    """The mean loss of each epoch."""
    loader = DataLoader(opened(path), batch_size=64, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(epochs):
        model.train()
        total, count, start = 0.0, 0, time.perf_counter()
        for motions, themes in loader:
            loss = nn.functional.cross_entropy(model(motions), themes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(themes), count + len(themes)
        losses.append(total / count)
        print(f"epoch {epoch}: loss {losses[-1]:.5f}, {count / (time.perf_counter() - start):,.0f} samples/s")
    return losses


def evaluate(model: nn.Module, path: str) -> float:
    """The part of scenes whose theme is found."""
    model.eval()
    right = count = 0
    with torch.inference_mode():
        for motions, themes in DataLoader(opened(path), batch_size=64):
            right += int((model(motions).argmax(1) == themes).sum())
            count += len(themes)
    return right / count


def main(folder: str, samples: int = 300, epochs: int = 5, seed: int = 0) -> tuple[list[float], float]:
    train_path, test_path = generate(folder, samples, seed)
    torch.manual_seed(seed)
    model = SmallNet()
    losses = train(model, train_path, epochs)
    accuracy = evaluate(model, test_path)
    print(f"accuracy {accuracy:.1%}")
    return losses, accuracy


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4, 5):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
