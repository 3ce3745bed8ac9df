"""Progress: a moving line in a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

__all__ = ["Progress"]


class Progress:
    """Says what goes on.

    Args:
        console: where to; normally standard error.

    In a terminal one line shows the present step; otherwise each finished step is a line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the moving line away, for output that is to stay; the next step shows it again."""
        if self._status is not None:
            self._status.stop()

    def now(self, text: str) -> None:
        """What is being done; shown in a terminal only."""
        if self._status is not None:
            self._status.update(Text(text))
            self._status.start()

    def done(self, text: str) -> None:
        """What is finished; one line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def step(self, text: str) -> None:
        """A small step: replaces the moving line, or is a line where there is none."""
        if self._status is not None:
            self.now(text)
        else:
            self.done(text)
