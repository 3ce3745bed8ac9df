"""Which samples an image folder has: those of its folders or its bucket, or those that a script names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchvision.datasets import ImageFolder

from fastpipe.index.tables import SampleTable, TargetTable

if TYPE_CHECKING:
    from fastpipe.torch.image_folder import FastImageFolder

__all__ = ["samples_found", "targets_of"]


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
    from fastpipe.index import folder
    from fastpipe.index.progress import ScanProgress

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
