from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastpipe.cli import main


@pytest.fixture
def repack(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``fastpipe repack``; its exit code, output and errors."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["repack", *map(str, arguments)])
        captured = capsys.readouterr()
        print(*captured)  # shown where a test fails
        return code, *captured

    return run
