from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_results import Run, rated

from benchmarks.floor import floor_share
from benchmarks.run import main as measure
from fastpipe.bench.results import SCHEMA, RowInfo, best_of, entries, verdict
from fastpipe.bench.runner import Session
from fastpipe.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Run]:
    """Runs ``fastpipe bench …``, or ``benchmarks/run.py …``, with all files that it can write."""

    def command(arguments: Sequence[str], is_full: bool = False, *, files: bool = True) -> Run:
        names = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")] if files else []
        capsys.readouterr()
        given = [*map(str, arguments), *names]
        code = measure(given) if is_full else main(["bench", *given])
        return Run(code, *capsys.readouterr(), tmp_path)

    return command


# Rates in two rounds, in which the machine is half as fast the second time, and what the row is.
_ROWS = [
    ((100, 50), ("replaced-workers0", "ImageFolder + DataLoader(num_workers=0)", "replaced", 0, "float32", "")),
    ((200, 80), ("replaced-workers2", "ImageFolder + DataLoader(num_workers=2)", "replaced", 2, "float32", "")),
    ((300, 160), ("stock-workers0", "FastImageFolder + DataLoader(num_workers=0)", "stock", 0, "float32", "")),
    ((250, 120), ("stock-workers2", "FastImageFolder + DataLoader(num_workers=2)", "stock", 2, "float32", "")),
    ((500, 240), ("fastloader-float32", "FastImageFolder + FastLoader", "fastpipe", 0, "float32", "threads")),
    ((600, 240), ("fastloader-uint8", "FastImageFolder + FastLoader, uint8", "fastpipe", 0, "uint8", "")),
    ((1000, 400), ("floor", "decode only, the floor", "floor", None, "crops", "from memory")),
    ((320, 160), ("dali", "DALI, CPU pipeline", "peer", None, "float32", "own crops")),
]  # fmt: skip


@pytest.fixture
def session() -> Session:
    return Session({info[0]: rated(*rates) for rates, info in _ROWS}, rounds=2)


@pytest.fixture
def infos() -> list[RowInfo]:
    return [RowInfo(*info) for _, info in _ROWS]


@pytest.fixture
def result(session: Session, infos: list[RowInfo]) -> dict[str, Any]:
    """The content of a result file."""
    rows = entries(infos, session)
    made: dict[str, Any] = {
        "schema": SCHEMA, "case": "images", "command": "python -m fastpipe.bench images --data photos",
        "date": "2030-01-02T03:04:05+00:00",
        "machine": {
            "cpu": "Some(R) CPU @ 2.00GHz", "cores": 2, "memory_gib": 8.0, "os": "Linux", "python": "CPython 3.11.7",
            "load_at_start": 0.1,
        },
        "versions": {"fastpipe": "0.1.0", "torch": "2.15.0"},
        "revision": {"commit": "0" * 40, "modified": False},
        "data": {"name": "photos", "classes": 4, "total": 200, "photos": 100, "bytes": 9_000_000},
        "job": {"text": "the job", "short": "job", "batch_size": 64},
        "method": {"rounds": 2, "seconds": 2.5, "settle_s": 0.2, "quick": False, "warnings": ["a warning"]},
        "check": {"ok": True, "text": "outputs agree", "problems": []}, "rows": rows,
        "best": {group: best_of(rows, group) for group in ("replaced", "stock")},
        "missing": [{"key": "tfdata", "label": "tf.data", "why": "not installed; pip install tensorflow-cpu"}],
        "stages": {"seconds": {"read": 0.1, "decode": 1.6, "transform": 0.8, "wait": 1.0}, "images": 2000},
        "floor_share": floor_share(session.samples), "plan": "a plan",
    }  # fmt: skip
    made["verdict"] = verdict(made)
    return made
