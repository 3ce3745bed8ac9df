"""Has something done by another process, in which it may crash or hang."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from fastpipe.core.processes import signal_name

__all__ = ["Answer", "Question", "ask"]

# What the parent may import the child may: paths first, then what is asked.  The answer is a line.
_BEGIN = """\
import json, sys
_path, _asked = json.loads(sys.stdin.read())
sys.path[:] = _path
def answer(value):
    sys.stdout.write("\\nfastpipe-answer " + json.dumps(value) + "\\n")
    sys.stdout.flush()
"""
_MARK = "fastpipe-answer "
_SHOWN = 300


@dataclass(frozen=True)
class Answer:
    """What became of a question.

    Attributes:
        value: the last answer; None if there is none.
        why: it did not come to its end: the error's last line, the signal, or that it took too long.
    """

    value: Any
    why: str = ""


class Question:
    """Code that runs in a process of its own from now on.

    Args:
        code: Python that calls ``answer(value)`` with something that JSON can have, and again when it knows
            more.  It has what it was given as ``_asked``.
        asked: that, as JSON can have it.

    Use it as a context: the process ends with it.
    """

    def __init__(self, code: str, asked: Any = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._asked = json.dumps([sys.path, asked]).encode()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN + code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._asked)
            self._process.stdin.close()
        self._process.stdin = None

    def answer(self, seconds: float) -> Answer:
        """Wait for the answer.

        Args:
            seconds: at most.
        """
        is_late = False
        try:
            said, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            is_late = True
            self._process.kill()
            said, _ = self._process.communicate()
        marked = [line for line in said.decode(errors="replace").split("\n") if line.startswith(_MARK)]
        value = None
        if marked:  # among what libraries print
            with contextlib.suppress(ValueError):
                value = json.loads(marked[-1][len(_MARK) :])
        if is_late:
            return Answer(value, f"it took more than {seconds:.0f} s")
        return Answer(value, self._why() if self._process.returncode or not marked else "")

    def _why(self) -> str:
        code = self._process.returncode
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            return f"it crashed with {signal_name(-code)}"
        return lines[-1].strip()[:_SHOWN] if lines else f"it ended with exit code {code}"

    def __enter__(self) -> Question:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()


def ask(code: str, asked: Any = None, *, seconds: float) -> Answer:
    """Ask, and wait.

    >>> ask("answer(_asked + 1)", 2, seconds=30).value
    3
    >>> ask("import os; os.abort()", seconds=30).why
    'it crashed with SIGABRT'
    """
    with Question(code, asked) as question:
        return question.answer(seconds)
