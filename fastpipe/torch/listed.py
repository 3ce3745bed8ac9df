"""Images that a script names one by one, in the place of a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastpipe.errors import OptionError
from fastpipe.index.tables import SampleTable

__all__ = ["ListedSamples"]

_OF_FOLDERS = ("is_valid_file", "allow_empty", "stage", "storage_options", "refresh")


class ListedSamples:
    """What ``FastImageFolder.from_samples`` was given, checked.

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
    if "://" in text or "://" in os.fspath(root):
        raise OptionError(
            f"from_samples(samples=…)[{number}] must be a file of this machine, got {text!r} in {root!r}. "
            'For a bucket use FastImageFolder("s3://bucket/folder", …), which fetches images ahead'
        )
    return os.path.join(root, text), target
