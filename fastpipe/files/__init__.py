"""``fastpipe inspect``, ``repack``, ``stage`` and ``scan``.

How HDF5 files and volumes are laid out, and another layout; the images of a bucket on a local disk; which
samples cannot be read.

The names below are loaded when they are first used: reading needs compiled kernels, and the
command's help does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part

if TYPE_CHECKING:
    from fastpipe.files.scanning.running import restore, scan
    from fastpipe.files.staging import clear_stage, fill_stage, stage_status
    from fastpipe.hdf5.inspect_report import inspect
    from fastpipe.hdf5.repacking import repack
    from fastpipe.volumes.repacking import repack_volume
    from fastpipe.volumes.report import inspect_volume

__all__ = [
    "clear_stage", "fill_stage", "inspect", "inspect_volume", "repack", "repack_volume", "restore", "scan",
    "stage_status",
]  # fmt: skip

_LAZY = {
    "inspect": "fastpipe.hdf5.inspect_report",
    "inspect_volume": "fastpipe.volumes.report",
    "repack": "fastpipe.hdf5.repacking",
    "repack_volume": "fastpipe.volumes.repacking",
    "restore": "fastpipe.files.scanning.running",
    "scan": "fastpipe.files.scanning.running",
    "clear_stage": "fastpipe.files.staging",
    "fill_stage": "fastpipe.files.staging",
    "stage_status": "fastpipe.files.staging",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(load_part(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe.files' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
