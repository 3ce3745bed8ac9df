from __future__ import annotations

from pathlib import Path

import pytest

from fastpipe.bench.synthetic import photo_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small photographs in two classes."""
    return photo_tree(tmp_path_factory.mktemp("photos"), classes=2, per_class=3, sizes=(60, 90))
