"""Tables of what the commands found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

__all__ = ["table"]


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table.

    Args:
        title: above it.
        left: heads of the first columns, of words.
        right: heads of the others, of numbers.
    """
    made = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", overflow="fold")
    return made
