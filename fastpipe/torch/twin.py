"""A fast twin of a plain ``ImageFolder``: reads everything live from the user's object."""

from __future__ import annotations

import torch
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.datasets.folder import default_loader, pil_loader

from fastpipe.options import BadSamples, Cache, Decode
from fastpipe.torch.folder_samples import why_not_by_pillow
from fastpipe.torch.image_folder import FastImageFolder

__all__ = ["ImageFolderTwin", "why_no_twin"]


class ImageFolderTwin(FastImageFolder):
    """Makes batches of a torchvision ``ImageFolder``, which stays what the user sees and changes.

    Args:
        original: the user's dataset; a change of its ``transform`` or ``samples`` shows at once.
        cache: where decoded images are kept.
    """

    def __init__(self, original: ImageFolder, cache: Cache) -> None:
        # No constructor above is called: nothing is scanned again, and no attribute copied.
        self.original = original
        self.seed = None
        self.cache = cache
        self.bad_samples, self.decode = BadSamples(), Decode()
        self.threads, self.thread_safe = "auto", False
        self.memory_format = torch.contiguous_format
        self.stage = self._remote = None
        self._prepare_cache()
        self._runtime = None
        self._compiled = None

    samples = property(lambda self: self.original.samples)
    targets = property(lambda self: self.original.targets)
    transform = property(lambda self: self.original.transform)
    target_transform = property(lambda self: self.original.target_transform)
    root = property(lambda self: self.original.root)


def why_no_twin(dataset: ImageFolder) -> str:
    """Why a folder's samples may not be made by fastpipe: what of it is not ``ImageFolder``'s.

    Returns:
        The reason; empty if nothing speaks against it.
    """
    kind = type(dataset)
    method = DatasetFolder.__getitem__
    if method.__module__ != DatasetFolder.__module__:
        return "ImageFolder.__getitem__ has been replaced"
    for name in ("__getitem__", "__getattribute__"):
        if getattr(kind, name) is not getattr(DatasetFolder, name):
            return f"{kind.__name__} has its own {name}"
    for name in ("__getitems__", "__getattr__"):
        if hasattr(kind, name):
            return f"{kind.__name__} has its own {name}"
    if dataset.loader not in (default_loader, pil_loader):
        return f"it loads images with {getattr(dataset.loader, '__name__', dataset.loader)!r}"
    return why_not_by_pillow(dataset.loader)
