"""What tests of memoize share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where results are kept."""
    return tmp_path / "kept"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that seals pickled results is not the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What memoize said since it was last asked."""
    return _messages(caplog, logging.INFO)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What memoize warned of since it was last asked."""
    return _messages(caplog, logging.WARNING)


def _messages(caplog: pytest.LogCaptureFixture, least: int) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "fastpipe.memoize")

    def messages() -> list[str]:
        found = [
            record.getMessage()
            for record in caplog.records
            if record.name == "fastpipe.memoize" and record.levelno >= least
        ]
        caplog.clear()
        return found

    return messages
