"""Fixtures of the augmentations' tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler counts with tqdm, whose thread would stay."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
