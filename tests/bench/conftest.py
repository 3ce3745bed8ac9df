from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.floor import floor_share
from benchmarks.studies import first as startup
from fastpipe.bench.results import SCHEMA, RowInfo, best_of, entries, verdict
from fastpipe.bench.runner import Sample, Session
from fastpipe.bench.synthetic import photo_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small photographs in two classes; a module that needs others has a ``tree`` of its own."""
    return photo_tree(tmp_path_factory.mktemp("photos"), classes=2, per_class=3, sizes=(60, 90))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has what modules would run in new processes run in this one, where everything is imported."""

    def here(*modules: ModuleType) -> None:
        children = {module.__name__: module._child for module in modules}

        def run(module: str, job: dict[str, Any], environment: dict[str, str]) -> str:
            output = io.StringIO()
            with monkeypatch.context() as patch, contextlib.redirect_stdout(output):
                patch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
                patch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
                children[module]()
            return output.getvalue().splitlines()[-1]

        for module in {startup, *modules}:
            monkeypatch.setattr(module, "in_child", run, raising=False)

    return here


@pytest.fixture
def session() -> Session:
    """Two rounds in which the machine is half as fast the second time."""
    rates = {
        "replaced-workers0": (100.0, 50.0),
        "replaced-workers2": (200.0, 80.0),
        "stock-workers0": (300.0, 160.0),
        "stock-workers2": (250.0, 120.0),
        "fastloader-float32": (500.0, 240.0),
        "fastloader-uint8": (600.0, 240.0),
        "floor": (1000.0, 400.0),
        "dali": (320.0, 160.0),
    }
    return Session(
        samples={
            key: [Sample(number, 1000, 1000 / rate) for number, rate in enumerate(pair)]
            for key, pair in rates.items()
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
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "case": "images",
        "command": "python -m fastpipe.bench images --data photos",
        "date": "2030-01-02T03:04:05+00:00",
        "machine": {
            "cpu": "Some(R) CPU @ 2.00GHz",
            "cores": 2,
            "memory_gib": 8.0,
            "os": "Linux",
            "python": "CPython 3.11.7",
            "load_at_start": 0.1,
        },
        "versions": {"fastpipe": "0.1.0", "torch": "2.15.0"},
        "revision": {"commit": "0" * 40, "modified": False},
        "data": {"name": "photos", "classes": 4, "total": 200, "photos": 100, "bytes": 9_000_000},
        "job": {"text": "the job", "short": "job", "batch_size": 64},
        "method": {"rounds": 2, "seconds": 2.5, "settle_s": 0.2, "quick": False, "warnings": ["a warning"]},
        "check": {"ok": True, "text": "outputs agree", "problems": []},
        "rows": rows,
        "best": {group: best_of(rows, group) for group in ("replaced", "stock")},
        "missing": [
            {"key": "tfdata", "label": "tf.data", "why": "not installed; pip install tensorflow-cpu"}
        ],
        "stages": {"seconds": {"read": 0.1, "decode": 1.6, "transform": 0.8, "wait": 1.0}, "images": 2000},
        "floor_share": floor_share(session.samples),
        "plan": "a plan",
    }
    made["verdict"] = verdict(made)
    return made
