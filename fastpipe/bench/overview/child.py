"""What runs in the process of one pipeline: ``python -m fastpipe.bench.overview.child``.

It reads its job from its standard input, says on its standard output what it does, and ends, together with
all processes of its group, when that input does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.driver import FILES
from fastpipe.bench.overview.cases import CASES, Ground
from fastpipe.bench.overview.pair import Pair
from fastpipe.bench.results import write_json
from fastpipe.bench.runner import ContenderError
from fastpipe.console import Progress
from fastpipe.errors import FastpipeError

__all__ = ["outcome"]

_WIDTH = 400


def outcome(case: str, folder: Path, quick: bool, progress: Progress) -> dict[str, Any]:
    """Measure a pipeline.

    Args:
        case: its key.
        folder: for data that is made.
        quick: whether it is enough that it runs.
        progress: told what is done.

    Returns:
        ``result``, the content of a result file; or ``check``, where outputs differ; or ``why`` it cannot be
        measured.
    """
    cores = machine.cores_allowed()
    files = dict.fromkeys((*FILES, "compare"))
    args = Namespace(quick=quick, rounds=None, seconds=None, peers=False, usual={}, **files)
    try:
        made = CASES[case](Ground(folder, cores, quick, progress.step))
        found = Pair(args, cores, progress, pipeline=made).result()
    except (FastpipeError, ContenderError) as error:
        return {"why": str(error)}
    assert found is not None
    return {"result": found} if "rows" in found else found


def _end_with_input(folder: Path) -> None:
    """Wait until whoever started this process is gone, and leave nothing behind."""
    os.read(0, 1)  # not through a file object, whose lock the end of the interpreter wants
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGTERM)


def _child() -> None:
    job = json.loads(sys.stdin.readline())
    folder = Path(job["folder"])
    threading.Thread(target=_end_with_input, args=(folder,), daemon=True).start()
    with Progress(Console(file=sys.stdout, width=_WIDTH, force_terminal=False)) as progress:
        told = outcome(job["case"], folder, job["quick"], progress)
    write_json(told, Path(job["out"]))


if __name__ == "__main__":
    _child()
