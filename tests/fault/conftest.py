"""Fixtures for tests of faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastpipe.bench.synthetic import photo_tree


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 16 small photographs in two classes."""
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=8, sizes=(20, 24))
