"""Which datasets are fastpipe's HDF5 datasets, asked without importing what makes them.

Who reads images only need not wait for the kernels of HDF5's filters, which are compiled once: where their
module has not been imported, no object is of a class of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from fastpipe.torch.hdf5.dataset import FastHDF5Dataset

__all__ = ["hdf5_class", "is_fast_hdf5", "is_hdf5"]

_MODULE = "fastpipe.torch.hdf5.dataset"


def is_hdf5(dataset: Any) -> TypeGuard[FastHDF5Dataset]:
    """Whether a dataset is a ``FastHDF5Dataset``, or of a subclass."""
    return (kind := hdf5_class()) is not None and isinstance(dataset, kind)


def is_fast_hdf5(dataset: Any) -> TypeGuard[FastHDF5Dataset]:
    """Whether a dataset is one whose batches fastpipe makes, and no subclass in its own way."""
    kind = hdf5_class()
    return (
        kind is not None
        and isinstance(dataset, kind)
        and type(dataset).__getitems__ is kind.__getitems__
        and dataset._answers_for_batches()
    )


def hdf5_class() -> type[FastHDF5Dataset] | None:
    """``FastHDF5Dataset``; None where there cannot be one."""
    # Another thread may be importing the module just now.
    return getattr(sys.modules.get(_MODULE), "FastHDF5Dataset", None)
