"""kornia.augmentation: modules that take a batch, each sample with parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.children.chosen import Work, labels_of, photos_of, stream_of
from benchmarks.peers.children.protocol import AugmentJob, Stream

__all__ = ["HAS", "stream"]


_CROP = "no antialiasing"
_POLICY = "RandAugment takes the same operations for the whole batch"
# Recipes that it has, and what differs in them.
HAS: Mapping[str, str] = {
    "simclr": _CROP,
    "deit": f"{_CROP}; {_POLICY}; erased with one number",
    "op-RandomResizedCrop": _CROP, "op-RandomHorizontalFlip": "", "op-RandomVerticalFlip": "",
    "op-RandomAffine": "", "op-RandomRotation": "", "op-ColorJitter": "", "op-RandomGrayscale": "",
    "op-GaussianBlur": "", "op-RandomErasing": "", "op-RandAugment": _POLICY, "op-Normalize": "",
    "op-MixUp": "", "op-CutMix": "",
}  # fmt: skip
_SIGMA = (0.1, 2.0)


def stream(job: AugmentJob) -> Stream:
    """Batches of the recipe chosen.  ``same_on_batch=False``, which is kornia's default."""
    import torch

    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)
    photos = photos_of(job)
    floats, labels = photos / 255, labels_of(job)

    def make(recipe: str, dtype: str) -> Work:
        modules = torch.nn.Sequential(*_modules(recipe, job)).to(job.device)
        mix = _mix(recipe)
        if mix is None:
            # It takes floats only.
            return (lambda: modules(photos / 255)) if dtype == "uint8" else (lambda: modules(floats))
        if dtype == "uint8":
            return lambda: mix(modules(photos / 255), labels)
        return lambda: mix(modules(floats), labels)

    wait = torch.cuda.synchronize if job.device != "cpu" else None
    return stream_of(job, make, ("kornia", "torch"), wait)


def _modules(recipe: str, job: AugmentJob) -> list[Any]:
    """Return the operations for each sample."""
    from kornia import augmentation
    from kornia.augmentation.auto import RandAugment

    def crop(resample: str = "BILINEAR") -> Any:
        # Three times as fast as its default, "slice", which goes through the batch image by image.
        size = (job.side, job.side)
        return augmentation.RandomResizedCrop(size, resample=resample, cropping_mode="resample")

    def jitter(p: float) -> Any:
        return augmentation.ColorJitter(0.8, 0.8, 0.8, 0.2, p=p)

    def blur(p: float) -> Any:
        return augmentation.RandomGaussianBlur((23, 23), _SIGMA, p=p)

    flip = augmentation.RandomHorizontalFlip(p=0.5)
    normalize = augmentation.Normalize(tuple(job.mean), tuple(job.std))
    erase = augmentation.RandomErasing(p=0.25)
    grey = augmentation.RandomGrayscale(p=0.2)
    found: dict[str, list[Any]] = {
        "simclr": [crop(), flip, jitter(0.8), grey, blur(0.5), normalize],
        "deit": [crop("BICUBIC"), flip, RandAugment(2, 9), normalize, erase],
        "op-RandomResizedCrop": [crop()],
        "op-RandomHorizontalFlip": [flip],
        "op-RandomVerticalFlip": [augmentation.RandomVerticalFlip(p=0.5)],
        "op-RandomAffine": [augmentation.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, p=1.0)],
        "op-RandomRotation": [augmentation.RandomRotation(30, p=1.0)],
        "op-ColorJitter": [jitter(1.0)],
        "op-RandomGrayscale": [grey],
        "op-GaussianBlur": [blur(1.0)],
        "op-RandomErasing": [erase],
        "op-RandAugment": [RandAugment(2, 9)],
        "op-Normalize": [normalize],
        "op-MixUp": [],
        "op-CutMix": [],
    }
    return found[recipe]


def _mix(recipe: str) -> Any:
    """Return the operation that mixes the batch, or None."""
    from kornia import augmentation

    keys: Any = ["input", "class"]
    if recipe in ("deit", "op-MixUp"):
        return augmentation.RandomMixUpV2(data_keys=keys)
    return augmentation.RandomCutMixV2(data_keys=keys) if recipe == "op-CutMix" else None
