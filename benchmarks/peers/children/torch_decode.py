"""torchvision's or torchcodec's decoder of batches of JPEGs, and torchvision's transforms where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import (
    Batches,
    Job,
    PeerError,
    Stream,
    endless_order,
    without_non_jpegs,
)

__all__ = ["stream"]


Decoder = Callable[[Sequence[str]], Sequence[Any]]


def stream(job: Job) -> Stream:
    """Batches of one library, on one device, without end.  Nothing is made ahead."""
    import torch

    library, device = job.options["library"], job.options["device"]
    without_non_jpegs(job, library)
    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)
    decode = {"torchvision": _torchvision, "torchcodec": _torchcodec}[library](device)
    wait = torch.cuda.synchronize if device == "cuda" else None
    return Stream(_batches(job, decode), 0, (library, "torch", "torchvision"), wait=wait)


def _batches(job: Job, decode: Decoder) -> Batches:
    import torch
    from torchvision.transforms import v2

    change = v2.Compose([v2.RandomResizedCrop(job.side, antialias=True), v2.RandomHorizontalFlip()])
    order = endless_order(job)
    while True:
        numbers = [next(order) for _ in range(job.batch_size)]
        images = decode([job.files[number] for number in numbers])
        yield torch.stack([change(image) for image in images]), np.array([job.labels[one] for one in numbers])


def _torchvision(device: str) -> Decoder:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode(files: Sequence[str]) -> Any:
        encoded = [torch.from_numpy(np.fromfile(file, np.uint8)) for file in files]
        return decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)

    return decode


def _torchcodec(device: str) -> Decoder:
    try:
        from torchcodec.decoders import decode_jpeg
    except ImportError:
        raise PeerError("this version decodes no JPEGs: pip install 'torchcodec>=0.16'") from None

    def decode(files: Sequence[str]) -> Any:
        return decode_jpeg(list(files), mode="RGB", device=device)

    return decode
