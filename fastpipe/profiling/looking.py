"""A thread that looks at something every so often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["LookingThread"]

_END_S = 1.0


class LookingThread:
    """Looks until it is stopped, and then a last time.

    Args:
        name: of the thread.
        interval_s: seconds between two looks.
        look: called for each, with whether it is the last.
        close: called at the end, in the thread.

    >>> looks = []
    >>> thread = LookingThread("fastpipe-example", 0.001, looks.append, lambda: None)
    >>> thread.start()
    >>> thread.stop()
    >>> looks[-1]
    True
    """

    def __init__(
        self, name: str, interval_s: float, look: Callable[[bool], object], close: Callable[[], object]
    ) -> None:
        self._interval_s = interval_s
        self._look: Callable[[bool], object] | None = look
        self._close: Callable[[], object] | None = close
        # What a signal's handler raises may end `stop` anywhere.  These stay usable then; an event does not.
        self._ending: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End, after a last look; or the rest of it, where an earlier call was ended by an exception.

        Called in the thread itself, where garbage may be collected, it waits for nothing.
        """
        self._ending.put(None)
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        if not self._is_over:
            self._ended.get()
        # A thread that is still there when the interpreter ends may abort it.  It is about to end, so the
        # time matters only where a handler's exception has left the thread's own lock taken.
        self._thread.join(_END_S)
        self._look = self._close = None  # which refer to whoever has this

    def _run(self) -> None:
        look, close = self._look, self._close
        assert look is not None and close is not None
        try:
            is_last = False
            while not is_last:
                is_last = self._is_ending()
                look(is_last)
        finally:
            close()
            self._is_over = True
            self._ended.put(None)

    def _is_ending(self) -> bool:
        """Whether the end has been asked for, after a while in which it might be."""
        try:
            self._ending.get(timeout=self._interval_s)
        except Empty:
            return False
        return True
