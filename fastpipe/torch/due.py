"""An error that comes before its batch is due."""

from __future__ import annotations

__all__ = ["DueError"]


class DueError:
    """Keeps an error until the batch is asked for in whose place it comes."""

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException:
        """The error, to be raised.  It is not kept any longer, and no frame of its traceback has it:
        that refers to much."""
        assert self._error is not None
        error, self._error = self._error, None
        return error
