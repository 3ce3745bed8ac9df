"""Fixtures of the tests of profiles."""

from __future__ import annotations

import pytest

from fastpipe.tools import diagnosis


@pytest.fixture
def whatever_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways are told that are no faster, as where tests beside this one begin something meanwhile."""
    monkeypatch.setattr(diagnosis, "GAIN", 0.0)
