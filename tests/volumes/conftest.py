"""Fixtures of the tests of ``fastpipe.volumes``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zarr


@pytest.fixture(scope="session", autouse=True)
def _zarr_has_its_threads() -> Iterator[None]:
    """zarr-python starts threads when it is first used, and keeps them: that is to be before any test."""
    with zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1}):
        zarr.create_array({}, shape=(4,), chunks=(2,), dtype="u1")[:] = 1  # type: ignore[arg-type]
        yield
