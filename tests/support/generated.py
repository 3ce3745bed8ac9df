"""Files that tests make with ``generate``, and the folders of jobs that did not finish."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
from fastpipe.generation import Generated, generate


def plain(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.normal(size=3), "index": index}


def ragged(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"r": np.arange(index % 5), "text": "ä" * (index % 4), "x": rng.random()}


def failing(index: int, rng: np.random.Generator) -> dict[str, Any]:
    if index % 9 == 4:
        raise ValueError(index)
    return {"x": rng.random(), "r": np.arange(index % 5), "y": index}


def failing_in(bad: Container[int], until: int = 99) -> Callable[..., Any]:
    """Return a function that fails for some rows, in each attempt that draws no larger number."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        drawn = rng.integers(100)
        if index in bad and drawn < until + 1:
            raise ValueError(f"no scene {index}")
        return {"x": drawn, "r": np.arange(drawn % 5), "index": index}

    return sample


def made(fn: Callable[..., Any], out: Path, n: int = 60, **options: Any) -> Generated:
    """Generate in this thread, unless options say otherwise."""
    return generate(fn, n, out, **{"seed": 5, "workers": 0, "progress": False, **options})


def contents(found: Generated) -> list[bytes]:
    """The files that a job has made."""
    return [path.read_bytes() for path in found.paths]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def folder_of(out: Path) -> Path:
    """The folder of the job while it is not finished."""
    return out.with_name(f"{out.name}.partial")


def noted(out: Path) -> list[tuple[int, int]]:
    """First and last rows of the blocks that whole lines of the journal note."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder_of(out) / "journal").read_bytes().split(b"\n")[:-1]
        return [tuple(json.loads(line[9:])["rows"]) for line in lines if b'"rows":[' in line[:20]]
    return []


def noted_rows(out: Path) -> int:
    return sum(last - first for first, last in noted(out))


def environment() -> dict[str, str]:
    """Return the environment of scripts that import this fastpipe."""
    return {**os.environ, "PYTHONPATH": str(Path(fastpipe.__file__).parents[1])}
