"""Fixtures that several of the tools' tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fastpipe.tools import diagnosis


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script and returns its path."""

    def write(content: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(content)
        return str(path)

    return write


@pytest.fixture
def without_least_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that are no faster are advised, too: what is measured depends on what else the machine does."""
    monkeypatch.setattr(diagnosis, "GAIN", 0.0)
    monkeypatch.setattr(diagnosis, "_LEAST_GAIN", 0.0)
