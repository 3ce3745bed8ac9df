"""Functions for this process and its child processes: list them, measure their memory, and end them."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl


_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1


def process_tree(root: int, ticks: dict[int, int] | None = None) -> list[int]:
    """Return the numbers of the process ``root`` and of all its descendants.

    If ``ticks`` is given, the dict gets the CPU time of each process of the machine, in clock ticks.

    >>> process_tree(os.getpid())[0] == os.getpid()
    True
    """
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # The process's name, in parentheses, may contain blanks and parentheses.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        number = int(folder.name)
        children.setdefault(int(fields[1]), []).append(number)
        if ticks is not None:
            ticks[number] = sum(map(int, fields[11:15]))
    found, todo = [], [root]
    while todo:
        number = todo.pop()
        found.append(number)
        todo += children.get(number, ())
    return found


def why_no_processes() -> str:
    """Return why ``multiprocessing`` cannot start a child of this process; an empty string if it can.

    Call this only where fastpipe itself decides to start processes.  If the user's script requests processes,
    the script gets the error of ``multiprocessing``.

    >>> why_no_processes()
    ''
    """
    if multiprocessing.current_process().daemon:
        return "this is a daemonic process, which may have no children"
    if getattr(sys, "frozen", False):
        return "this is a frozen program, which would be started once more"
    try:
        # Use this context, because it leaves no name and starts no other process.
        multiprocessing.get_context("fork").Lock()
    except ValueError:  # this system has no "fork"
        return ""
    except (OSError, ImportError) as error:  # /dev/shm is missing, or not accessible to this user
        return f"semaphores cannot be made here ({error})"
    return ""


def signal_name(number: int) -> str:
    """Return the name of a signal, or a text with its number if Python has no name for the signal.

    >>> signal_name(9), signal_name(1000)
    ('SIGKILL', 'signal 1000')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
        return f"signal {number}" + (f" (SIGRTMIN+{number - first})" if first <= number <= last else "")


def memory_of_processes(*, of_files: bool = False) -> int | None:
    """Return the bytes of memory of this process and its descendants; None without ``/proc``.

    A page that n processes share counts as 1/n page for each of them (PSS).  ``of_files`` includes the pages
    of mapped files, which the kernel may drop at any time.  The result for pages of libraries grows when
    another process with the same libraries ends.  Before Linux 5.4, pages of mapped files are always
    included.

    >>> memory_of_processes() is None or memory_of_processes() > 1 << 20
    True
    """
    total, is_known = 0, False
    for number in process_tree(os.getpid()):
        try:
            lines = (_PROC / str(number) / "smaps_rollup").read_text().splitlines()
        except OSError:  # the process has just ended
            continue
        found = {name: int(value) << 10 for name, value, *_ in map(str.split, lines[1:])}
        own = found.get("Pss_Anon:", found["Pss:"]) + found.get("Pss_Shmem:", 0)
        total += found["Pss:"] if of_files else own
        is_known = True
    return total if is_known else None


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C until the ``with`` block ends, such as while processes are forked.

    Python ignores exceptions in functions that ``os.register_at_fork`` has registered, so a KeyboardInterrupt
    there would be lost.  Other threads than the main thread, and handlers of the script, are not affected.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_interrupted = False

    def note(number: int, frame: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_interrupted:
            raise KeyboardInterrupt


def end_with_parent(parent: int | None) -> bool:
    """Make the kernel kill this process when its parent ends, even if this process is stuck or stopped.

    ``parent`` is the number of the parent.  Return False, and change nothing, if the system is not Linux or
    ``parent`` is not the direct parent.
    """
    global _end
    if sys.platform != "linux" or os.getppid() != parent:
        return False

    def arrange(is_wanted: bool) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_wanted else 0, 0, 0, 0)

    _end = _End(arrange, lambda: os.getppid() != parent)
    return True


def end_with_pipe() -> None:
    """Make the kernel kill this process of ``multiprocessing`` when its parent ends.

    This process reads from a pipe whose writing end the parent holds.  The kernel sends the signal when the
    writing end is closed.  If other children of the parent also hold the writing end, the signal comes later.
    """
    global _end
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)

    def arrange(is_wanted: bool) -> None:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid() if is_wanted else 0)

    _end = _End(arrange, lambda: bool(poll.poll(0)))


@contextmanager
def outliving_parent() -> Iterator[None]:
    """Keep this process alive during the ``with`` block even if the parent ends.

    The process is then killed after the block.  Use this for short work that must not be left incomplete.

    In other threads than the one that called ``end_with_parent`` or ``end_with_pipe``, this has no effect.
    """
    end = _end
    if end is None or end.caller != _caller():  # a forked child inherits ``_end``, which is not for it
        yield
        return
    end.arrange(False)
    try:
        yield
    finally:
        end.begin()


class _End:
    def __init__(self, arrange: Callable[[bool], None], has_parent_ended: Callable[[], bool]) -> None:
        self.caller = _caller()
        self.arrange = arrange
        self._has_parent_ended = has_parent_ended
        self.begin()

    def begin(self) -> None:
        self.arrange(True)
        if self._has_parent_ended():  # the parent ended before the signal was arranged
            os.kill(os.getpid(), signal.SIGKILL)


_end: _End | None = None


def _caller() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def load_triton_apart() -> None:
    """Load triton, which torch imports on demand, in a way that keeps triton from using TensorFlow's LLVM.

    TensorFlow's libraries export the symbols of the LLVM that they contain.  A library with its own LLVM that
    is loaded later uses these symbols and registers the options of LLVM a second time.  The process then
    aborts, for example at ``import torchvision``.  So this function loads triton with its own symbols first.
    If triton is loaded already, or if torch or TensorFlow is not loaded, the function does nothing.
    """
    if "triton" in sys.modules or "torch" not in sys.modules or "tensorflow" not in sys.modules:
        return
    if not hasattr(os, "RTLD_DEEPBIND"):  # not Linux with glibc
        return
    before = sys.getdlopenflags()
    sys.setdlopenflags(before | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("triton._C.libtriton")
    except ImportError:
        pass  # torch also works without triton
    finally:
        sys.setdlopenflags(before)
