"""``shard=`` under torchrun, on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchvision import transforms

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("rank_script.py")
RANDOM = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=5, sizes=(32, 40))


def run_ranks(world: int, tree: Path, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, str(_SCRIPT), str(tree), str(folder)], capture_output=True, text=True, timeout=170, check=False,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_share_an_epoch(world: int, tree: Path, tmp_path: Path) -> None:
    ranks = run_ranks(world, tree, tmp_path)
    assert [rank["shard"] for rank in ranks] == [[number, world, number, world] for number in range(world)]
    for epoch in range(2):
        loader = FastLoader(FastImageFolder(tree, RANDOM), 1, shuffle=True, seed=3)
        loader.set_epoch(epoch)
        alone = [[int(labels[0]), float(images.double().sum())] for images, labels in loader]
        batches = [rank["train"][epoch] for rank in ranks]
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert len(batches[0]) == ranks[0]["lengths"][0]
        for step in zip(*batches, strict=True):
            assert len({len(batch) for batch in step}) == 1
        # Position p of the order is at rank p mod world.
        by_rank = [[row for batch in of_rank for row in batch] for of_rank in batches]
        merged = [row for rows in zip(*by_rank, strict=True) for row in rows]
        assert merged[:15] == alone, "the samples and the augmentation of one process"
    # Each sample exactly once: as many of each label as there are.
    labels = [label for rank in ranks for batch in rank["eval"] for label, _ in batch]
    assert sorted(labels) == sorted([0] * 5 + [1] * 5 + [2] * 5)
    assert len({len(rank["eval"]) for rank in ranks}) == 1
    assert ranks[0]["alone"] == -(-15 // (2 * world)), "a loader that one rank uses alone does not hang"
    assert [rank["warned"] for rank in ranks] == [[]] * world
    for number, rank in enumerate(ranks):
        (warning,) = rank["disagree"]
        assert f"rank {number} and rank" in warning
        assert "seed is" in warning
