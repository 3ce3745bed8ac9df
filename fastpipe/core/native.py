"""Import of the native module, with an error that says how to install the module."""

from __future__ import annotations

from fastpipe.core.files import closes_idle
from fastpipe.errors import MissingDependencyError

try:
    import fastpipe.native._native as native
except ImportError as error:  # pragma: no cover - a source tree that was never installed
    raise MissingDependencyError(
        f"fastpipe's native core cannot be loaded ({error}). It is compiled when fastpipe is installed: run "
        "'pip install .' in its folder, with a C++17 compiler, libjpeg-turbo, libdeflate, zstd and LZ4 "
        "(apt-get install g++ libjpeg-dev libdeflate-dev libzstd-dev liblz4-dev)"
    ) from error

__all__ = ["native"]

closes_idle(native.close_idle_files)
