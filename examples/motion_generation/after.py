"""Generate scenes of a moving actor and learn what it does in them: the script with fastpipe.

    python examples/motion_generation/after.py FOLDER [SAMPLES [EPOCHS [SEED]]]

FOLDER gets train_SEED.h5, with SAMPLES scenes that are varied anew each time they are used, and test.h5.
`diff before.py after.py` shows the swap; `get_poses` in actor.py comes with it.  Stopped, the same command
goes on; with more SAMPLES it makes those that are missing.  How long 100,000 scenes take; and all of them:

    cd examples/motion_generation
    fastpipe generate after:sample -n 100000 --out motion.h5 --seed 0 --dry-run
    fastpipe generate after:sample -n 100000 --out motion.h5 --seed 0
"""

import itertools
import os
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from actor import FRAME, FRAMES, JOINTS, PAIRS, THEMES, Actor, generate_random_scene, get_poses
from torch import nn

import fastpipe
from fastpipe import FastHDF5Dataset, FastLoader, augment

TEST_SEED = 1000  # of the scenes that judge it; those of training have the seed that is given
VIEWS = 5  # of each scene in an epoch: before.py stores as many, the scene and each variation by itself
AUGMENTATIONS = augment.Compose(
    [
        augment.MotionSpeed((0.8, 1.25)),
        augment.MotionTranslation((0.5, 0.0, 0.5)),
        augment.MotionScale((0.9, 1.1)),
        augment.MotionMirror(PAIRS),
    ]
)


def sample(index: int, rng: np.random.Generator) -> dict:
    """A scene at random, frame by frame: 250 × `get_pose`."""
    scene = generate_random_scene(rng)
    actor = Actor(scene)
    frames = [actor.get_pose(frame * FRAME) for frame in range(FRAMES)]
    return {"motion": np.array(frames, np.float32), "theme": scene.theme}


def sample_batch(indices: np.ndarray, rng: Sequence[np.random.Generator]) -> dict:
    """The same scenes, many at once: `rng` draws each one's numbers of its own generator."""
    scenes = generate_random_scene(rng)
    return {"motion": get_poses(scenes), "theme": scenes.theme}


sample.batch = sample_batch


def generate(folder: str, samples: int, seed: int) -> tuple[str, str]:
    """Scenes to learn from and scenes to judge by, a quarter as many: their files."""
    train_path, test_path = f"{folder}/train_{seed}.h5", f"{folder}/test.h5"
    os.makedirs(folder, exist_ok=True)
    start = time.perf_counter()
    fastpipe.generate(sample, samples, train_path, seed=seed)
    seconds = time.perf_counter() - start
    rate, size = samples / seconds, os.path.getsize(train_path)
    print(f"generated {samples} scenes in {seconds:.2f} s: {rate:,.1f} scenes/s, {size:,} bytes", flush=True)
    fastpipe.generate(sample, -(-samples // 4), test_path, seed=TEST_SEED)
    return train_path, test_path


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
    dataset = FastHDF5Dataset(path, ["motion", "theme"])
    loader = FastLoader(dataset, batch_size=64, shuffle=True, augment=AUGMENTATIONS)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(epochs):
        model.train()
        total, count, start = 0.0, 0, time.perf_counter()
        for motions, themes in itertools.chain(*[loader] * VIEWS):
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
        for motions, themes in FastLoader(FastHDF5Dataset(path, ["motion", "theme"]), batch_size=64):
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
