"""What each rank of ``test_ranks.py`` runs under torchrun; writes what it saw as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchvision import transforms

from fastpipe import FastImageFolder, FastLoader, Shard

RANDOM = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])


def seen(loader: Any) -> list[list[list[Any]]]:
    """Each batch as (label, sum of the values) pairs."""
    return [
        [[int(label), float(image.double().sum())] for image, label in zip(images, labels, strict=True)]
        for images, labels in loader
    ]


def main(tree: str, folder: str) -> None:
    dist.init_process_group("gloo")
    shard = Shard.auto()
    found: dict[str, Any] = {"shard": [shard.rank, shard.world, dist.get_rank(), dist.get_world_size()]}
    dataset = FastImageFolder(tree, RANDOM, threads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train = FastLoader(dataset, 2, shuffle=True, seed=3, shard=shard)
        found["train"] = [seen(train), seen(train)]
        found["lengths"] = [len(train)]
        evaluation = FastLoader(dataset, 2, shard=Shard.auto("eval"))
        found["eval"] = seen(evaluation)
        only_here = FastLoader(dataset, 2, shard=shard)  # as for a validation that rank 0 does alone
        found["alone"] = len(seen(only_here)) if shard.rank == 0 else None
        found["warned"] = [str(one.message) for one in caught if "do not share" in str(one.message)]
    # One collective for each batch: uneven counts would hang here, or pair different batches.
    for batch in found["train"][0]:
        total = torch.tensor([len(batch)])
        dist.all_reduce(total)
        assert int(total) == len(batch) * shard.world
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrong = FastLoader(dataset, 2, shuffle=True, seed=shard.rank, shard=shard)
        iter(wrong)
        dist.barrier()  # every rank has said what it has
        iter(wrong)
        iter(wrong)
        found["disagree"] = [str(one.message) for one in caught if "do not share" in str(one.message)]
    Path(folder, f"{shard.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
