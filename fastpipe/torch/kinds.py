"""Which datasets are fastpipe's HDF5 datasets, asked without importing what makes them.

Who reads images only need not wait for the kernels of HDF5's filters, which are compiled once: where their
module has not been imported, no object is of a class of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from fastpipe.torch.hdf5.dataset import FastHDF5Dataset
    from fastpipe.torch.source import Source

__all__ = ["hdf5_class", "hdf5_source", "is_fast_hdf5", "is_hdf5"]

_MODULE, _SOURCE = "fastpipe.torch.hdf5.dataset", "fastpipe.torch.hdf5.source"


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


def hdf5_source(dataset: Any, ends: Sequence[FastHDF5Dataset]) -> Source:
    """What makes batches of a dataset, all ends of which are of that class."""
    source: Source = importlib.import_module(_SOURCE).HDF5Source(dataset, ends)
    return source
