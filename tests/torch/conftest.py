"""Fixtures of the tests of ``fastpipe.torch``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastpipe.testing import photo_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen small photographs in three classes; a module that needs others has a ``tree`` of its own."""
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=5, sizes=(52, 64))
