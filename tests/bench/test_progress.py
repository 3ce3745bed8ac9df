"""Progress in a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fastpipe.console import Progress

ODD = "[red]:x:.jpg"  # rich would make a colour and a picture of it


def shown(is_terminal: bool) -> tuple[io.StringIO, Progress]:
    text = io.StringIO()
    return text, Progress(Console(file=text, force_terminal=is_terminal, width=80))


def test_elsewhere_steps_are_lines_and_the_present_is_not_shown() -> None:
    text, progress = shown(is_terminal=False)
    with progress:
        progress.now("comparing")
        progress.step(f"step {ODD}")
        progress.stop()
        progress.done(f"done {ODD}")
    assert text.getvalue() == f"step {ODD}\ndone {ODD}\n"


@pytest.mark.parametrize("method", ["now", "step"])
def test_in_a_terminal_a_line_moves_until_it_is_stopped(method: str) -> None:
    text, progress = shown(is_terminal=True)
    with progress:
        assert text.getvalue() == ""  # nothing flashes where nothing takes long
        getattr(progress, method)(f"comparing {ODD}")
        progress.stop()
        assert f"comparing {ODD}" in text.getvalue()
        before = len(text.getvalue())
        progress.stop()
        assert len(text.getvalue()) == before
        getattr(progress, method)("again")
    assert "again" in text.getvalue()[before:]
