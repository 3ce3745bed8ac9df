"""Measure the host's part of batches for a GPU, in images a second, with a device that takes no time.

::

    python benchmarks/device_host.py --photos FOLDER --threads 1 2

Files are read, their headers walked, boxes drawn, and all weights computed, as for
``FastLoader(device="cuda")`` with ``Decode("nvimgcodec")``; a decoder and a kernel that do nothing stand in
for the GPU's, so no GPU is needed.  What a real one adds here is a few microseconds an image of calls to its
library.  Numbers of threads take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch
from torchvision import transforms

from fastpipe import Decode, FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.transfer import Transfer
from fastpipe.core.types import Box
from fastpipe.images import gpu_batches as making
from fastpipe.images.gpu_batches import Tables
from fastpipe.torch import runtime

_IMAGES, _BATCH = 4096, 256


class _NoDecoder:
    """Gives memory of the right sizes, of which nobody looks at the pixels."""

    def __init__(self) -> None:
        self._memory = torch.empty(1 << 27, dtype=torch.uint8)

    def decode(self, parts: Sequence[tuple[bytes, Box]], stream: Any) -> list[torch.Tensor]:
        return [self._memory[: 3 * b.height * b.width].view(b.height, b.width, 3) for _, b in parts]

    def describe(self) -> str:
        return "no decoder"


def _no_kernel(sources: Sequence[torch.Tensor], tables: Tables, out: torch.Tensor) -> None:
    """Prepare Triton's kernel on the host."""
    places = np.array([(pixels.data_ptr(), pixels.stride(0)) for pixels in sources], np.int64)
    np.column_stack([places, tables.numbers])


@contextmanager
def _device_for_nothing() -> Iterator[None]:
    """The CPU in a device's place, with nothing to do."""
    decoder = _NoDecoder()
    with (
        mock.patch.object(Transfer, "is_elsewhere", True),
        mock.patch.object(runtime, "device_decoder", lambda *_: decoder),
        mock.patch.object(making, "_resampler", lambda device: _no_kernel),
    ):
        yield


def _loader(folder: Path, threads: int) -> Any:
    transform = transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()
    ])  # fmt: skip
    dataset = FastImageFolder(
        str(folder), transform, cache="off", seed=1, threads=threads, decode=Decode("nvimgcodec")
    )
    times = -(-_IMAGES // len(dataset.samples))
    dataset.samples, dataset.targets = dataset.samples * times, dataset.targets * times
    return FastLoader(dataset, batch_size=_BATCH, shuffle=True, drop_last=True, device="cpu")


def _rate(loader: Any) -> float:
    start = perf_counter()
    count = sum(len(labels) for _, labels in loader)
    return count / (perf_counter() - start)


def main() -> None:
    """Print images a second by number of threads: median and range."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, help="an image folder (default: photographs made up)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, _device_for_nothing():
        folder = options.photos or photo_tree(Path(made), classes=4, per_class=32)
        loaders = {threads: _loader(folder, threads) for threads in options.threads}
        rates: dict[int, list[float]] = {threads: [] for threads in loaders}
        for loader in loaders.values():
            _rate(loader)
        for _ in range(options.rounds):
            for threads, loader in loaders.items():
                rates[threads].append(_rate(loader))
        for threads, seen in rates.items():
            low, middle, high = min(seen), statistics.median(seen), max(seen)
            print(f"{threads:2} threads  {middle:7,.0f} images/s ({low:,.0f} to {high:,.0f})")
        for loader in loaders.values():
            loader.dataset.close()


if __name__ == "__main__":
    main()
