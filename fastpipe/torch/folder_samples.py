"""Which samples an image folder has: those of its folders or bucket, or those that a script names; and what
opens them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchvision import get_image_backend
from torchvision.datasets import ImageFolder, folder
from torchvision.datasets.folder import default_loader, pil_loader

from fastpipe.core.files import is_url
from fastpipe.core.sample_tables import SampleTable, TargetTable
from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Decode

if TYPE_CHECKING:
    from fastpipe.torch.image_folder import FastImageFolder

__all__ = ["ListedSamples", "check_loader", "samples_found", "targets_of", "why_not_by_pillow"]


def samples_found(
    dataset: FastImageFolder,
    extensions: tuple[str, ...] | None,
    is_valid_file: Callable[[str], bool] | None,
    allow_empty: bool,
) -> Any:
    """A dataset's ``samples``, a table or a list; arguments and errors as of ``ImageFolder.make_dataset``."""
    options: dict[str, Any] = {
        "extensions": extensions, "is_valid_file": is_valid_file, "allow_empty": allow_empty
    }  # fmt: skip
    if dataset._listed is not None:
        return dataset._listed.samples
    if (
        type(dataset).make_dataset is not ImageFolder.make_dataset
    ):  # a subclass finds its files in its own way
        return dataset.make_dataset(dataset.root, class_to_idx=dataset.class_to_idx, **options)
    from fastpipe.core import class_folders as folder
    from fastpipe.core.class_folders import ScanProgress

    with ScanProgress(dataset.root) as on_progress:
        options |= {"cache": dataset._index_cache(), "on_progress": on_progress}
        if dataset._remote is not None:
            return dataset._remote.scan(dataset.class_to_idx, **options)
        return folder.scan_folder(dataset.root, dataset.class_to_idx, **options)


def targets_of(samples: Any) -> Any:
    """The ``targets`` of ``samples``."""
    if isinstance(samples, SampleTable):
        return TargetTable(samples.targets_array() if samples.is_flat else (item[1] for item in samples))
    return [sample[1] for sample in samples]


_OF_FOLDERS = ("is_valid_file", "allow_empty", "stage", "storage_options", "refresh")


class ListedSamples:
    """The checked arguments of ``FastImageFolder.from_samples``.

    Attributes:
        samples: a :class:`SampleTable` where all targets are integers, else a list.

    Args:
        samples, root, classes: as there.
        options: the others.

    Raises:
        OptionError: as there.
    """

    def __init__(
        self,
        samples: Iterable[tuple[str | os.PathLike[str], Any]],
        root: str | os.PathLike[str],
        classes: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        for name in _OF_FOLDERS:
            if name in options:
                raise OptionError(
                    f"{name}= is for images that are looked for in a folder, and from_samples() is told "
                    f"which there are, got {name}={options[name]!r}. Leave it out, or use "
                    "FastImageFolder(root, …)"
                )
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
            raise OptionError(f"classes must be names of classes, got {classes!r}")
        self._classes = list(classes)
        items = [_item(number, sample, root) for number, sample in enumerate(samples)]
        if not items:
            raise OptionError("from_samples(samples=…) has no samples: is the table empty, or filtered away?")
        self.samples: Any = items
        if all(type(target) is int for _, target in items):
            self.samples = SampleTable(items)

    def find_classes(self) -> tuple[list[str], dict[str, int]]:
        """Names and their indices."""
        return self._classes, {name: index for index, name in enumerate(self._classes)}


def _item(number: int, sample: Any, root: str | os.PathLike[str]) -> tuple[str, Any]:
    """A sample with its whole path."""
    try:
        path, target = sample
        text = os.fsdecode(path)
    except (TypeError, ValueError):
        raise OptionError(
            f"from_samples(samples=…)[{number}] must be (path, target), such as ('cat/1.jpg', 0), "
            f"got {sample!r}"
        ) from None
    if is_url(text) or is_url(os.fspath(root)):
        raise OptionError(
            f"from_samples(samples=…)[{number}] must be a file of this machine, got {text!r} in {root!r}. "
            'For a bucket use FastImageFolder("s3://bucket/folder", …), which fetches images ahead'
        )
    return os.path.join(root, text), target


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
