from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastpipe.cli import main

Command = Callable[..., tuple[int, str, str]]


def _command(name: str, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([name, *map(str, arguments)])
        captured = capsys.readouterr()
        print(*captured)  # shown where a test fails
        return code, *captured

    return run


@pytest.fixture
def repack(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``fastpipe repack``; its exit code, output and errors."""
    return _command("repack", capsys)


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``fastpipe inspect``; its exit code, output and errors."""
    return _command("inspect", capsys)
