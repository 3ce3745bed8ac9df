"""The loop that lets workers make blocks of rows and handles failures, and the display of the progress."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fastpipe.console import in_time, print_line
from fastpipe.core.text import in_bytes, printable
from fastpipe.errors import GenerationError, WorkerError
from fastpipe.generation.storage import Journal, Stored, Writer
from fastpipe.generation.workers import Done, Workers

_BLOCK_S = 1.0
_FIRST_BLOCK_S = 0.1  # used until the duration of rows in workers is known
_LEAST_BLOCK_S = 0.02
_BLOCK_NBYTES = 8 << 20  # so small that memory is reused and a block is in the CPU's cache when it is written
_COMMIT_S = 1.0
_DEATHS = 3  # after this many deaths of workers in a block of one call, its first row is reported
_LOOK_S = 0.25  # interval at which interrupts are checked
_LINE_S = 30.0  # interval between lines of progress if there is no terminal
_RATE_S = 0.2  # least time before a rate is shown
_log = logging.getLogger("fastpipe.generate")


class Report:
    """Shows the progress of a file during the ``with`` block.  Important messages are always logged, too."""

    def __init__(
        self, name: str, rows: int, *, is_shown: bool = True, console: Console | None = None
    ) -> None:
        self._name, self._rows, self._is_shown = name, rows, is_shown
        self._console = console or Console(stderr=True)
        self._done = self._made = self._nbytes = self._failed = 0
        self._begun = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Report:
        if self._is_shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(),
                TextColumn("{task.fields[told]}", markup=False), console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(printable(self._name), total=self._rows, told="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int) -> None:
        """Start the clock; ``done`` rows exist already."""
        self._done, self._begun = done, time.monotonic()
        self._said = self._begun
        self._show()

    def advance(self, rows: int, nbytes: int, failed: int) -> None:
        """Count ``rows`` new rows with ``nbytes`` bytes of values; ``failed`` of these rows are left out."""
        self._done += rows
        self._made += rows
        self._nbytes += nbytes
        self._failed += failed
        self._show()

    def step(self, text: str) -> None:
        """Show ``text`` as the current step, for example reading files; do nothing without a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, told=printable(text))

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Log a message, and print it as a line that the display of the progress does not overwrite."""
        _log.log(level, "%s", text)
        if self._is_shown:
            print_line(self._console, text)

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, told=self._told(now))
        elif now - self._said > _LINE_S:
            self._said = now
            self.say(f"{self._name}: {self._told(now)}")

    def _told(self, now: float) -> str:
        words = [f"{self._done:,} of {self._rows:,} rows"]
        seconds = now - self._begun
        if seconds > _RATE_S and self._made:
            rate = self._made / seconds
            words.append(f"{rate:,.3g} rows/s" if rate < 100 else f"{rate:,.0f} rows/s")
            words += [in_bytes(self._nbytes), f"{in_time((self._rows - self._done) / rate)} left"]
        if self._failed:
            words.append(f"{self._failed:,} failed")
        return ", ".join(words)


class Interrupts:
    """A context manager that counts each Ctrl-C in the main thread, instead of raising KeyboardInterrupt.

    With ``is_here=True`` the main thread itself makes the rows, so no thread checks the count meanwhile.  In
    this case the second Ctrl-C does raise KeyboardInterrupt.
    """

    def __init__(self, *, is_here: bool = False) -> None:
        self.count, self._is_here = 0, is_here
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        # If the script has its own handler or ignores interrupts, nothing is changed.
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, None
        if before is not None:
            signal.signal(signal.SIGINT, before)

    def _add(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._is_here and self.count > 1:
            raise KeyboardInterrupt


class Missing:
    """The rows that are still to be made, in blocks of consecutive rows.

    A block begins at a multiple of ``align`` or directly after rows that are done.

    >>> missing = Missing(10, [(2, 4)])
    >>> missing.take(5), missing.take(5), missing.take(5), missing.left
    ((0, 2), (4, 9), (9, 10), 0)
    """

    def __init__(self, rows: int, done: Sequence[tuple[int, int]], align: int = 1) -> None:
        self.align, self._ranges = align, list[tuple[int, int]]()
        at = 0
        for first, last in sorted((min(first, rows), last) for first, last in done):
            if first > at:
                self._ranges.append((at, first))
            at = max(at, last)
        if at < rows:
            self._ranges.append((at, rows))
        self._ranges.reverse()
        self.left = sum(last - first for first, last in self._ranges)

    def take(self, rows: int) -> tuple[int, int] | None:
        """Take a block of about ``rows`` missing rows; return None if no row is left.

        The result has the index of the block's first row, and the index after the block's last row.
        """
        if not self._ranges:
            return None
        first, end = self._ranges.pop()
        last = min(end, max(1, (first + rows) // self.align) * self.align)
        if last <= first:
            last = min(end, (first // self.align + 1) * self.align)
        if last < end:
            self._ranges.append((last, end))
        self.left -= last - first
        return first, last

    def give_back(self, first: int, last: int) -> None:
        """Put back a block that was taken, but whose rows were not made."""
        self._ranges.append((first, last))
        self.left += last - first


class Schedule:
    """The loop in which workers make all missing rows, which are stored and listed in the journal.

    ``expected`` has the approximate seconds and bytes of a row; None means that they are unknown.
    """

    def __init__(
        self, workers: Workers, missing: Missing, journal: Journal, writer: Writer, report: Report,
        interrupts: Interrupts, expected: tuple[float, int] | None = None,
    ) -> None:  # fmt: skip
        self._workers, self._missing, self._journal, self._writer = workers, missing, journal, writer
        self._report, self._interrupts = report, interrupts
        self._row_s, self._row_nbytes = expected or (_FIRST_BLOCK_S, 1)
        self._is_measured = False
        self._flying: dict[Future[Done], tuple[int, int]] = {}
        self._pending: list[Stored] = []
        self._committed = time.monotonic()
        self._deaths: dict[int, int] = {}
        self._most: dict[int, int] = {}  # after a worker's death: first row of a block -> its most rows
        self._stop: BaseException | None = None

    def run(self) -> None:
        """Make all missing rows; finished rows are kept even if an error is raised.

        Raises:
            GenerationError: a row failed, or the workers cannot make rows.
            KeyboardInterrupt: the user interrupted the loop.  Blocks that workers had begun were finished,
                except after a second interrupt.
            OSError: rows cannot be written, for instance because the disk is full.
        """
        try:
            while self._flying or (self._stop is None and self._missing.left):
                self._fill()
                self._collect()
                if self._interrupts.count and self._stop is None:
                    self._stop = KeyboardInterrupt()
                if self._stop is not None:
                    self._withdraw()
                if self._interrupts.count > 1:  # do not wait for blocks in flight
                    self._workers.abandon()
                    self._collect()
                    break
                if time.monotonic() - self._committed > _COMMIT_S:
                    self._commit()
        finally:
            if self._flying:
                self._workers.abandon()
            self._commit()
        if self._interrupts.count and self._stop is None:
            self._stop = KeyboardInterrupt()
        if self._stop is not None:
            raise self._stop

    def _fill(self) -> None:
        """Submit blocks of rows until the workers have as many blocks as they may have."""
        while self._stop is None and len(self._flying) < self._workers.slots:
            block = self._missing.take(self._block_rows())
            if block is None:
                return
            if (most := self._most.get(block[0])) is not None and block[1] - block[0] > most:
                self._missing.give_back(block[0] + most, block[1])
                block = block[0], block[0] + most
            try:
                self._flying[self._workers.submit(*block)] = block
            except Exception as error:  # the executor was shut down, or is broken
                text = f"workers take no more rows: {type(error).__name__}: {error}"
                self._end(GenerationError(text), *block, error)

    def _withdraw(self) -> None:
        """Take back the blocks that no worker has started."""
        for future in list(self._flying):
            if future.cancel():
                self._missing.give_back(*self._flying.pop(future))

    def _block_rows(self) -> int:
        """Return the number of rows of the next block.

        A block takes about a second.  The last blocks are smaller, so that all workers end together.
        """
        wanted = (_BLOCK_S if self._is_measured else _FIRST_BLOCK_S) / self._row_s
        share = self._missing.left / (2 * max(self._workers.count, 1))
        # One row may be far slower than the others: derive no minimum from it before a block is measured.
        least = _LEAST_BLOCK_S / self._row_s if self._is_measured else 1
        return max(1, min(int(min(wanted, max(share, least))), _BLOCK_NBYTES // self._row_nbytes))

    def _collect(self) -> None:
        """Wait until a block is done or a short time has passed, and handle the blocks that are done."""
        ready, _ = wait(self._flying, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in ready:
            first, last = self._flying.pop(future)
            try:
                self._take(future.result(), first, last)
            except WorkerError as error:
                self._died(error, first, last)
            except CancelledError:
                self._missing.give_back(first, last)
            except OSError as error:
                self._end(error, first, last)
            except Exception as error:
                text = f"a worker cannot make rows: {type(error).__name__}: {error}"
                self._end(GenerationError(text), first, last, error)

    def _take(self, done: Done, first: int, last: int) -> None:
        stored, rows = done.stored, done.stored.last - done.stored.first
        if rows:
            if (block := done.block()) is not None:
                stored = self._writer.put(block)
            self._pending.append(stored)
            self._report.advance(rows, stored.nbytes, len(stored.failed))
            row_s = max(done.seconds / rows, 1e-9)
            self._row_s = 0.5 * (self._row_s + row_s) if self._is_measured else row_s
            self._row_nbytes, self._is_measured = max(1, stored.nbytes // rows), True
        if (failure := done.failure) is not None:
            self._missing.give_back(first + rows, last)
            text = f"row {failure.index} failed: {failure.error}"
            self._stop = self._stop or GenerationError(text, index=failure.index, trace=failure.trace)

    def _died(self, error: WorkerError, first: int, last: int) -> None:
        """Put back the rows of a worker that died, to be made in smaller blocks that isolate the cause."""
        self._missing.give_back(first, last)
        if self._stop is not None:
            return
        calls = -(-(last - first) // self._missing.align)  # number of calls; the rows of a call stay together
        self._most[first] = max(1, calls // 2) * self._missing.align
        self._deaths[first] = self._deaths.get(first, 0) + (calls == 1)
        if self._deaths[first] >= _DEATHS or sum(self._deaths.values()) + len(self._most) > 40:
            text = f"{error}. Was memory short? Does a library that it calls crash?"
            self._stop = GenerationError(text, index=first)
            self._stop.__cause__ = error

    def _end(self, error: BaseException, first: int, last: int, cause: BaseException | None = None) -> None:
        """Put a block back, and stop because of an error that would occur in the next block, too."""
        self._missing.give_back(first, last)
        if self._stop is None:
            self._stop = error
            error.__cause__ = cause

    def _commit(self) -> None:
        """Flush finished blocks to the disk, then add them to the journal."""
        pending, self._pending = self._pending, []
        self._committed = time.monotonic()
        if not pending:
            return
        try:
            self._writer.sync(pending)
            self._journal.add(pending)
        except OSError as error:
            if self._stop is None:
                self._stop = error
