"""A process for each pipeline, as TensorFlow and the forks of torch's loader do not go together."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fastpipe.core.processes import signal_name

__all__ = ["outcome_apart"]

_COMMAND = (sys.executable, "-m", "fastpipe.bench.overview.child")
_LOOK_S, _GONE_S = 0.5, 0.02
# What a process gets to end when it is told to, before the next and less polite signal.
_PATIENCE_S = 5.0
# The sockets of multiprocessing lie in temporary folders, and no name of one may have more than 107 bytes.
_LONGEST_FOLDER = 107 - len("/pymp-abcdefgh/listener-abcdefgh")
_ENOUGH_OF_AN_ERROR = 4000  # bytes


def outcome_apart(
    case: str,
    folder: Path,
    quick: bool,
    limit_s: float,
    say: Callable[[str], None],
    command: tuple[str, ...] = _COMMAND,
) -> dict[str, Any]:
    """Measure a pipeline in a process of its own.

    Args:
        case: its key.
        folder: for data that is made, and for everything else that the process writes.
        quick: whether it is enough that it runs.
        limit_s: seconds after which the process is ended.
        say: told what it does.
        command: what is run.

    Returns:
        As of ``child.outcome``; or ``crash``, what happened to the process.
    """
    out, errors = folder / f"{case}.json", folder / f"{case}.err"
    job = {"case": case, "folder": str(folder), "quick": quick, "out": str(out)}
    with errors.open("wb") as stderr, _running(command, folder, stderr) as process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it is gone already: its exit code tells
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        if not _followed(process, process.stdout, time.monotonic() + limit_s, say):
            return {"crash": f"it was not done after {limit_s:g} s"}
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found
    return {"crash": f"its process {_ending(process.returncode)}: {_last_line(errors)}"}


@contextmanager
def _running(command: tuple[str, ...], folder: Path, stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process and those that it starts, which have all ended afterwards, however this block is left."""
    environment = dict(os.environ)
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        # What they leave in temporary folders, also when they are killed, is in this one.
        environment["TMPDIR"] = str(folder)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment,
        start_new_session=True,  # Ctrl-C is ours, who pass it on; and a group can be ended as a whole
    )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                _send(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_S)
        _end_group(process.pid)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def _end_group(group: int) -> None:
    """End what a process that has ended has left behind, and wait for that."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _PATIENCE_S
        _send(group, number)
        while _is_alive(group) and time.monotonic() < deadline:
            time.sleep(_GONE_S)


def _is_alive(group: int) -> bool:
    """Whether a process of a group runs; those that have ended stay in it until somebody waits for them."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it is gone
            continue
        if int(of) == group and state not in "ZX":
            return True
    return False


def _send(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _followed(
    process: subprocess.Popen[bytes], output: IO[bytes], deadline: float, say: Callable[[str], None]
) -> bool:
    """Pass on what a process says until it ends; whether it did in time."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            is_over = process.poll() is not None
            if selector.select(0 if is_over else _LOOK_S):
                part = os.read(output.fileno(), 1 << 16)
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.strip():
                        say(line.decode(errors="replace").strip())
                if part:
                    continue
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            if is_over or process.returncode is not None:
                return True
    return False


def _ending(code: int) -> str:
    """How a process ended, in words.

    >>> _ending(-9), _ending(1)
    ('was killed by SIGKILL', 'ended with code 1')
    """
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal_name(-code)}"


def _last_line(errors: Path) -> str:
    """The end of what a process has said about its errors."""
    with errors.open("rb") as file:
        file.seek(max(0, errors.stat().st_size - _ENOUGH_OF_AN_ERROR))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no message"
