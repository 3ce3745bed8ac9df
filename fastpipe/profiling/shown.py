"""What is printed on a console, is the same text for ``print``, and JSON for programs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from io import StringIO
from typing import Any

from rich.console import Console

__all__ = ["Shown"]

_WIDTH = 110


class Shown(ABC):
    """Something that shows itself on a console; its ``str`` and ``repr`` are that without colours."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print it on a console, in its width and colours."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Everything, as plain numbers, texts, lists and dictionaries."""

    def json(self) -> str:
        """Everything as a JSON object."""
        return json.dumps(self.as_json(), indent=1)

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=_WIDTH, force_terminal=False, color_system=None)
        self.show(console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines())

    def __repr__(self) -> str:
        return str(self)
