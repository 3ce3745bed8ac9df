"""Before anything is timed: are the batches of the bucket those of the local folder, each sample once?"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastpipe
from fastpipe.bench.loaders import check_transform
from fastpipe.bench.s3.bucket import Bucket
from fastpipe.bench.s3.rows import remote_dataset
from fastpipe.bench.samples import RowCheck, digests_of_samples
from fastpipe.core.extras import require

__all__ = ["check_bucket"]


def check_bucket(bucket: Bucket, batch_size: int, say: Callable[[str], None] = lambda text: None) -> RowCheck:
    """Compare epochs of the bucket, with a stage and without, with the local folder.

    Args:
        bucket: what is read.
        batch_size: images in a batch.
        say: told what is compared.
    """
    check = RowCheck(whose="the local folder's")
    transform = check_transform()
    local = fastpipe.FastImageFolder(str(bucket.folder), transform, cache="off")
    expected: Counter[bytes] = Counter()
    for images, labels in fastpipe.FastLoader(local, batch_size):
        expected.update(digests_of_samples(images.numpy(), labels.numpy()))
    stock = require("torchvision", extra="torch").datasets.ImageFolder(str(bucket.folder))
    for stages in (False, True):
        say(f"comparing: the bucket {'with' if stages else 'without'} a stage")
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as folder:
            dataset = remote_dataset(bucket, Path(folder, "stage") if stages else None, 0, transform)
            names = [path.removeprefix(f"{bucket.url}/") for path, _ in dataset.samples]
            if names != [str(Path(path).relative_to(bucket.folder)) for path, _ in stock.samples]:
                check.problems += ("the bucket's samples are not those that torchvision finds",)
            loader: Any = fastpipe.FastLoader(dataset, batch_size, shuffle=True)
            for epoch in range(1 + stages):
                check.add(f"{'with' if stages else 'without'} a stage, epoch {epoch}", expected, loader)
            dataset.close()
    return check
