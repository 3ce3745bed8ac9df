"""What is printed on a console, and is the same text for ``print``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from io import StringIO

from rich.console import Console

__all__ = ["Shown"]

_WIDTH = 110


class Shown(ABC):
    """Something that shows itself on a console; its ``str`` and ``repr`` are that without colours."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print it on a console, in its width and colours."""

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=_WIDTH, force_terminal=False, color_system=None)
        self.show(console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines())

    def __repr__(self) -> str:
        return str(self)
