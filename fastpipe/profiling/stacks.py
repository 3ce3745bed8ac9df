"""Which stage a thread is in, and in which line of the script, from its stack."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from fastpipe.profiling.calls import Calls
from fastpipe.profiling.stages import OTHER, stage_of

__all__ = ["Boundary", "Line", "Stacks"]

_IMPORTING = "<frozen importlib"
_OWN = str(Path(__file__).resolve().parents[1])


class Line(NamedTuple):
    """A line of the script.

    Attributes:
        file: its path; empty where no code of the script's is on the stack.
        line: from 1.
        function: that it is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.function}" if self.file else "–"


class Boundary(NamedTuple):
    """A function below which a stack is looked at.

    Attributes:
        kind: what happens below it, such as ``"dataset"``.
        stage: of all that happens there; None to tell it from what is called.
    """

    kind: str
    stage: str | None = None


class Stacks:
    """Looks at stacks of threads.

    Args:
        boundaries: by code.
    """

    def __init__(self, boundaries: dict[CodeType, Boundary]) -> None:
        self._boundaries = boundaries
        self._calls = Calls()
        self._stages: dict[CodeType, str | None] = {}
        self._are_users: dict[str, bool] = {}
        paths = sysconfig.get_paths()
        places = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], _OWN]
        places += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(sys.executable)]
        self._libraries = tuple(f"{os.path.realpath(place)}{os.sep}" for place in places)

    def look(self, stack: Sequence[FrameType]) -> tuple[str, str, Line]:
        """What a thread does whose innermost frame this is.

        Returns:
            The kind of the boundary that it is below (empty for none), the stage, and the script's innermost
            line.
        """
        stage = stage_of(self._calls.name(stack[0])) if stack else None
        line = Line("", 0, "")
        for frame in stack:
            code = frame.f_code
            boundary = self._boundaries.get(code)
            if boundary is not None:
                return boundary.kind, boundary.stage or stage or OTHER, line
            if self.is_users(code.co_filename):
                if not line.file:
                    line = Line(code.co_filename, frame.f_lineno, _name(code))
            elif stage is None:
                stage = self._stage(frame)
        return "", stage or OTHER, line

    def functions(self, stack: Sequence[FrameType]) -> list[tuple[str, str]]:
        """File and name of the script's functions that are on a stack, once each, the innermost first.

        What a module that is being imported does is no work of those that import it.
        """
        found: dict[tuple[str, str], None] = {}
        for frame in stack:
            code = frame.f_code
            if code.co_filename.startswith(_IMPORTING):
                break
            if self.is_users(code.co_filename):
                found.setdefault((code.co_filename, _name(code)))
        return list(found)

    def is_users(self, file: str) -> bool:
        """Whether a file is of the script's, not of Python, of an installed package or of fastpipe."""
        found = self._are_users.get(file)
        if found is None:
            path = os.path.realpath(file)
            if os.path.isfile(path):
                found = not path.startswith(self._libraries)
            else:  # of others without a file, such as "<string>", there is nothing that can be shown
                is_cell = file in linecache.cache and not file.startswith("<")  # where IPython notes them
                found = is_cell or file.startswith(("<stdin", "<ipython-input"))
            self._are_users[file] = found
        return found

    def _stage(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if code not in self._stages:
            name = getattr(code, "co_qualname", code.co_name)
            self._stages[code] = stage_of(f"{frame.f_globals.get('__name__', '')}.{name}")
        return self._stages[code]


def _name(code: CodeType) -> str:
    """What a function is called, with its class's name where Python tells that (from 3.11 on)."""
    name = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")
    for inner in (".<genexpr>", ".<listcomp>", ".<dictcomp>", ".<setcomp>"):
        name = name.removesuffix(inner)
    return name
