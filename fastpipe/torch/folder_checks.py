"""What opens the images of a folder, and options that have no effect together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchvision import get_image_backend
from torchvision.datasets import folder
from torchvision.datasets.folder import default_loader, pil_loader

from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Decode

if TYPE_CHECKING:
    from fastpipe.torch.image_folder import FastImageFolder

__all__ = ["check_loader", "why_not_by_pillow"]


def why_not_by_pillow(loader: Any) -> str:
    """Return why torchvision's loader of a dataset does not open images as it is written, by Pillow; empty
    where it does."""
    if folder.pil_loader is not pil_loader:
        return "torchvision.datasets.folder.pil_loader has been replaced"
    if loader is default_loader and get_image_backend() != "PIL":
        return f"torchvision's image backend is {get_image_backend()!r}"
    return ""


def check_loader(dataset: FastImageFolder) -> None:
    """Refuse a loader of the script's own where fastpipe would have to read files.

    Raises:
        OptionError: an option says how, or the images are in a store.
    """
    if dataset.loader is default_loader:
        return
    if dataset._remote is not None:
        raise OptionError(
            f"a loader of your own, which got {dataset.loader!r}, opens files, and {dataset.root!r} has "
            "none. Leave it out, or copy the images to a folder of your own"
        )
    keeps = dataset.cache.where in ("ram", "disk")
    if dataset.bad_samples != BadSamples() or dataset.decode != Decode() or keeps:
        raise OptionError(
            "cache=, bad_samples= and decode= say how fastpipe reads files; with a loader of your own, "
            f"which got {dataset.loader!r}, they would have no effect. Leave one or the other out."
        )
