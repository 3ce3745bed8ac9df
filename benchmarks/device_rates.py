"""Measure how many images a second a GPU decodes for a ``FastLoader``, by threads and prefetched batches.

::

    python benchmarks/device_rates.py --photos FOLDER --threads 2 4 8 16 --ahead 2 3 4 5

Files come from the page cache; batches of 256 are decoded, cropped at random, resized and mirrored on the
GPU, and dropped.  Settings take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import RandomSampler
from torchvision import transforms

from fastpipe import Decode, FastImageFolder, FastLoader

_BATCH, _LEAD, _TIMED = 256, 6, 18


def _loader(folder: str, threads: int, ahead: int, backend: Any) -> Any:
    transform = transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()
    ])  # fmt: skip
    dataset = FastImageFolder(folder, transform, cache="off", threads=threads, decode=Decode(backend))
    sampler = RandomSampler(dataset, replacement=True, num_samples=_BATCH * (_LEAD + _TIMED))
    return FastLoader(dataset, _BATCH, sampler=sampler, device="cuda", prefetch_batches=ahead)


def _rate(loader: Any) -> float:
    start = 0.0
    for number, _ in enumerate(loader):
        if number == _LEAD - 1:
            torch.cuda.synchronize()
            start = perf_counter()
    torch.cuda.synchronize()
    return _BATCH * _TIMED / (perf_counter() - start)


def _told(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):7,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f})"


def main() -> None:
    """Print images a second: median and range."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", required=True, help="an image folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--ahead", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", choices=["nvimgcodec", "dali"], default="nvimgcodec")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    loaders = {
        (threads, ahead): _loader(options.photos, threads, ahead, options.backend)
        for threads, ahead in itertools.product(options.threads, options.ahead)
    }
    rates: dict[tuple[int, int], list[float]] = {setting: [] for setting in loaders}
    print(f"{torch.cuda.get_device_name()}, {options.backend}")
    for _ in range(options.rounds):
        for setting, loader in loaders.items():
            rates[setting].append(_rate(loader))
    for (threads, ahead), seen in rates.items():
        print(f"{threads:2} threads, {ahead} batches ahead  {_told(seen)}")
    for loader in loaders.values():
        loader.dataset.close()


if __name__ == "__main__":
    main()
