"""Run code in a process of its own, because the code may crash or hang."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any, NamedTuple

from fastpipe.core.processes import signal_name

# The child gets the parent's ``sys.path``, so that it can import the same modules, and the argument.
# The answer is one line.
_BEGIN = """\
import json, sys
_path, _asked = json.loads(sys.stdin.read())
sys.path[:] = _path
def answer(value):
    sys.stdout.write("\\nfastpipe-answer " + json.dumps(value) + "\\n")
    sys.stdout.flush()
"""
_MARK = b"fastpipe-answer "
_SHOWN = 300


class Answer(NamedTuple):
    value: Any
    why: str = ""


def ask(code: str, asked: Any = None, *, seconds: float) -> Answer:
    command, given = [sys.executable, "-c", _BEGIN + code], json.dumps([sys.path, asked]).encode()
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=seconds, check=False)
        output, ending = done.stdout, _why(done)
        why = ending if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, why = error.stdout or b"", f"it took more than {seconds:.0f} s"
        ending = why
    marked = [line for line in output.split(b"\n") if line.startswith(_MARK)]  # libraries print, too
    if not marked:
        return Answer(None, ending)
    with contextlib.suppress(ValueError):
        return Answer(json.loads(marked[-1][len(_MARK) :]), why)
    return Answer(None, why)


def _why(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"it crashed with {signal_name(-done.returncode)}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:_SHOWN] if lines else f"it ended with exit code {done.returncode}"
