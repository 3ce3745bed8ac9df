"""Code that runs in a process of its own, in which it may crash or hang."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from fastpipe.core.processes import signal_name

# What the parent may import the child may: paths first, then the argument.  The answer is a line.
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


class Answer(NamedTuple):
    """A child's last answer, None without one; and why it did not end well."""

    value: Any
    why: str = ""


class Child:
    """A process that runs ``code`` from now on, and ends with this context; ``asked`` is its argument
    ``_asked``.

    The code calls ``answer(value)`` with something that JSON can have, and again when it knows more.
    """

    def __init__(self, code: str, asked: Any = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN + code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([sys.path, asked]).encode())
            self._process.stdin.close()
        self._process.stdin = None

    def answer(self, seconds: float) -> Answer:
        is_late = False
        try:
            output, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            is_late = True
            self._process.kill()
            output, _ = self._process.communicate()
        marked = [line for line in output.decode(errors="replace").split("\n") if line.startswith(_MARK)]
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

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()


def ask(code: str, asked: Any = None, *, seconds: float) -> Answer:
    """Run code in a child, and wait for its answer."""
    with Child(code, asked) as child:
        return child.answer(seconds)
