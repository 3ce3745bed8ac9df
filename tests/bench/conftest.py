from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_results import Run

from benchmarks.floor import floor_share
from benchmarks.run import main as measure
from fastpipe.bench.results import SCHEMA, RowInfo, best_of, entries, verdict
from fastpipe.bench.runner import Sample, Session
from fastpipe.bench.synthetic import photo_tree
from fastpipe.cli import main


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small photographs in two classes."""
    return photo_tree(tmp_path_factory.mktemp("photos"), classes=2, per_class=3, sizes=(60, 90))


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


# Two rounds in which the machine is half as fast the second time.
_RATES = {
    "replaced-workers0": (100.0, 50.0),
    "replaced-workers2": (200.0, 80.0),
    "stock-workers0": (300.0, 160.0),
    "stock-workers2": (250.0, 120.0),
    "fastloader-float32": (500.0, 240.0),
    "fastloader-uint8": (600.0, 240.0),
    "floor": (1000.0, 400.0),
    "dali": (320.0, 160.0),
}


@pytest.fixture
def session() -> Session:
    return Session(
        {
            key: [Sample(number, 1000, 1000 / rate) for number, rate in enumerate(pair)]
            for key, pair in _RATES.items()
        },
        rounds=2,
    )


@pytest.fixture
def infos() -> list[RowInfo]:
    return [
        RowInfo("replaced-workers0", "ImageFolder + DataLoader(num_workers=0)", "replaced", 0, "float32", ""),
        RowInfo("replaced-workers2", "ImageFolder + DataLoader(num_workers=2)", "replaced", 2, "float32", ""),
        RowInfo("stock-workers0", "FastImageFolder + DataLoader(num_workers=0)", "stock", 0, "float32", ""),
        RowInfo("stock-workers2", "FastImageFolder + DataLoader(num_workers=2)", "stock", 2, "float32", ""),
        RowInfo("fastloader-float32", "FastImageFolder + FastLoader", "fastpipe", 0, "float32", "threads"),
        RowInfo("fastloader-uint8", "FastImageFolder + FastLoader, uint8", "fastpipe", 0, "uint8", ""),
        RowInfo("floor", "decode only, the floor", "floor", None, "crops", "from memory"),
        RowInfo("dali", "DALI, CPU pipeline", "peer", None, "float32", "own crops"),
    ]


@pytest.fixture
def result(session: Session, infos: list[RowInfo]) -> dict[str, Any]:
    """The content of a result file."""
    rows = entries(infos, session)
    machine = {"cpu": "Some(R) CPU @ 2.00GHz", "cores": 2, "memory_gib": 8.0, "os": "Linux"}
    why = "not installed; pip install tensorflow-cpu"
    made: dict[str, Any] = {
        "schema": SCHEMA, "case": "images", "command": "python -m fastpipe.bench images --data photos",
        "date": "2030-01-02T03:04:05+00:00",
        "machine": {**machine, "python": "CPython 3.11.7", "load_at_start": 0.1},
        "versions": {"fastpipe": "0.1.0", "torch": "2.15.0"},
        "revision": {"commit": "0" * 40, "modified": False},
        "data": {"name": "photos", "classes": 4, "total": 200, "photos": 100, "bytes": 9_000_000},
        "job": {"text": "the job", "short": "job", "batch_size": 64},
        "method": {"rounds": 2, "seconds": 2.5, "settle_s": 0.2, "quick": False, "warnings": ["a warning"]},
        "check": {"ok": True, "text": "outputs agree", "problems": []}, "rows": rows,
        "best": {group: best_of(rows, group) for group in ("replaced", "stock")},
        "missing": [{"key": "tfdata", "label": "tf.data", "why": why}],
        "stages": {"seconds": {"read": 0.1, "decode": 1.6, "transform": 0.8, "wait": 1.0}, "images": 2000},
        "floor_share": floor_share(session.samples), "plan": "a plan",
    }  # fmt: skip
    made["verdict"] = verdict(made)
    return made
