"""torchaudio's SpecAugment: spectrogram by spectrogram, or the batch with masks of each sample's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.children.chosen import Work, spectrograms_of, stream_of
from benchmarks.peers.children.protocol import AugmentJob, Stream

__all__ = ["HAS", "stream"]


# Recipes that it has, and what differs in them.
HAS: Mapping[str, str] = {"specaugment": "", "op-SpecAugment": ""}


def stream(job: AugmentJob) -> Stream:
    """Batches of the recipe chosen; ``options["whole"]`` says whether the batch is given as one."""
    import torch

    torch.set_num_threads(job.threads)
    torchaudio = _torchaudio()
    spectrograms = spectrograms_of(job)
    mask = torchaudio.transforms.SpecAugment(2, 30, 2, 20, iid_masks=True)

    def make(recipe: str, dtype: str) -> Work:
        if job.options.get("whole"):
            return lambda: mask(spectrograms)
        return lambda: torch.stack([mask(one) for one in spectrograms])

    return stream_of(job, make, ("torchaudio", "torch"))


def _torchaudio() -> Any:
    """torchaudio, whatever version of CUDA it was built for."""
    import torch

    # It refuses to be imported beside a torch built for another CUDA than its own.  Its kernels need that;
    # SpecAugment is operations of torch's.  A torch without CUDA is not compared.
    version: Any = torch.version
    built_for = version.cuda
    version.cuda = None
    try:
        import torchaudio
    finally:
        version.cuda = built_for
    return torchaudio
