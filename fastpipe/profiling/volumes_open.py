"""Which volumes a dataset has open: arrays of tensorstore and zarr among its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["OpenVolume", "volumes_of"]

_FORMATS = ("zarr", "zarr3", "n5")


class OpenVolume(NamedTuple):
    """A volume that is open.

    Attributes:
        path: of its folder, or its URL.
        shape: of the whole.
    """

    path: str
    shape: tuple[int, ...]


def volumes_of(dataset: Any) -> list[OpenVolume]:
    """Volumes among the attributes of a dataset, in their order.

    >>> import zarr
    >>> array = zarr.create_array(getfixture("tmp_path") / "x.zarr", shape=(4, 4), dtype="u1")
    >>> class Patches:
    ...     def __init__(self):
    ...         self.image, self.size = array, 3
    >>> [(volume.path[-6:], volume.shape) for volume in volumes_of(Patches())]
    [('x.zarr', (4, 4))]
    """
    found = []
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for path in _paths(value):
            volume = OpenVolume(path, tuple(value.shape))
            if volume not in found:
                found.append(volume)
    return found


def _paths(value: Any) -> Iterator[str]:
    """Where an array lies, if it is one that fastpipe can open there."""
    package, kind = type(value).__module__.partition(".")[0], type(value).__name__
    try:
        if package == "tensorstore" and kind == "TensorStore":
            content = value.spec().to_json()
            if content.get("driver") in _FORMATS:
                yield from _tensorstore_paths(content.get("kvstore"))
        elif package == "zarr" and kind == "Array":
            text = str(value.store_path)
            if text.startswith("file://"):
                yield text.removeprefix("file://").rstrip("/")
    except Exception:  # of an array that says nothing of itself: then nothing is known of it
        return


def _tensorstore_paths(store: Any) -> Iterator[str]:
    if isinstance(store, str):
        yield store.removeprefix("file://").rstrip("/")
    elif isinstance(store, dict) and store.get("driver") == "file":
        yield str(store["path"]).rstrip("/")
    elif isinstance(store, dict) and store.get("driver") == "http":
        yield f"{store['base_url']}{store.get('path', '')}".rstrip("/")
