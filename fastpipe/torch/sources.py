"""What fastpipe makes batches of: image folders and datasets of rows, also behind torch's wrappers.

Each kind's modules are imported where there is a dataset of it: rows of arrays need no torchvision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.options import Cache
from fastpipe.torch.source import Source
from fastpipe.torch.views import ends_of, is_folder, is_rows

if TYPE_CHECKING:
    from fastpipe.torch.image_folder import FastImageFolder

__all__ = ["source_of", "why_no_source"]


def source_of(dataset: Any, twins: dict[int, FastImageFolder], cache: Cache) -> Source | None:
    """Return the source behind a dataset, if every object on the way is one whose code is known.

    Args:
        dataset: the user's dataset.
        twins: by the ``id`` of a plain ``ImageFolder``, what makes batches of it; more are added.
        cache: where these keep decoded images.
    """
    ends = ends_of(dataset)
    if all(map(is_rows, ends)):
        from fastpipe.torch.rows.dataset import is_fast_rows
        from fastpipe.torch.rows.source import RowsSource

        return RowsSource(dataset, ends) if all(map(is_fast_rows, ends)) else None
    if all(map(is_folder, ends)):
        from fastpipe.torch.folder_source import folder_source_of

        return folder_source_of(dataset, ends, twins, cache)
    return None


def why_no_source(dataset: Any) -> str:
    """Return why ``source_of`` gives None, in words; empty where it does not."""
    ends = ends_of(dataset)
    reasons = [_why_not_alone(end) for end in ends]
    if not any(reasons) and len(set(map(is_rows, ends))) > 1:
        return "image folders and arrays make no batches together"
    return next(filter(None, reasons), "")


def _why_not_alone(dataset: Any) -> str:
    if is_rows(dataset):
        from fastpipe.torch.rows.dataset import is_fast_rows

        return "" if is_fast_rows(dataset) else f"{type(dataset).__name__} makes its samples in its own way"
    if is_folder(dataset):
        from fastpipe.torch.folder_source import why_not_fast

        return why_not_fast(dataset)
    return f"{type(dataset).__name__} is no ImageFolder"
