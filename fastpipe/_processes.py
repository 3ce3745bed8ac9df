"""This process and those below it, as the kernel tells of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

__all__ = ["memory_of_processes", "process_tree", "signal_name", "why_no_processes"]

_PROC = Path("/proc")


def process_tree(root: int, ticks: dict[int, int] | None = None) -> list[int]:
    """A process and all below it.

    Args:
        root: its number.
        ticks: gets for each process of the machine how long it has run, in the kernel's ticks.

    >>> process_tree(os.getpid())[0] == os.getpid()
    True
    """
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # The name, in parentheses, may have blanks and parentheses in it.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
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
    """Return why ``multiprocessing`` can start no process from this one; empty if it can.

    To be asked where processes are fastpipe's choice: a script that asks for them gets the error.

    >>> why_no_processes()
    ''
    """
    if multiprocessing.current_process().daemon:
        return "this is a daemonic process, which may have no children"
    if getattr(sys, "frozen", False):
        return "this is a frozen program, which would be started once more"
    try:
        # Of this context, as it leaves no name and starts no other process.
        multiprocessing.get_context("fork").Lock()
    except ValueError:  # there is none here
        return ""
    except (OSError, ImportError) as error:  # no /dev/shm, or one that is not this user's
        return f"semaphores cannot be made here ({error})"
    return ""


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none of their own in Python.

    >>> signal_name(9), signal_name(1000)
    ('SIGKILL', 'signal 1000')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
        return f"signal {number}" + (f" (SIGRTMIN+{number - first})" if first <= number <= last else "")


def memory_of_processes(*, of_files: bool = False) -> int | None:
    """Bytes of memory of this process and those below it, each page that they share counted once: their PSS.

    Args:
        of_files: whether pages of mapped files count, which the kernel may drop at any time; those of
            libraries count for more as soon as another process that has the same ones ends.  Before Linux
            5.4 they always do.

    Returns:
        Bytes; None where there is no ``/proc``.

    >>> memory_of_processes() is None or memory_of_processes() > 1 << 20
    True
    """
    total, is_known = 0, False
    for number in process_tree(os.getpid()):
        try:
            lines = (_PROC / str(number) / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        found = {name: int(value) << 10 for name, value, *_ in map(str.split, lines[1:])}
        own = found.get("Pss_Anon:", found["Pss:"]) + found.get("Pss_Shmem:", 0)
        total += found["Pss:"] if of_files else own
        is_known = True
    return total if is_known else None
