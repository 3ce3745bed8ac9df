"""What every case of ``fastpipe bench`` writes and prints, whatever it measures."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.lines import markdown
from fastpipe.bench.report import print_result, short_markdown
from fastpipe.bench.results import load
from fastpipe.bench.runner import Sample


class Run(NamedTuple):
    """A finished command: its exit code, what it printed, what it said, and the folder of its files."""

    code: int
    printed: str
    said: str
    folder: Path


def ran(folder: Path, *command: object, **environment: str) -> Run:
    """Run Python with a command that is to write all files to a folder."""
    given = [
        sys.executable,
        *map(str, command),
        "--json",
        str(folder / "r.json"),
        "--plot",
        str(folder / "r.png"),
    ]
    done = subprocess.run(
        given, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    return Run(done.returncode, done.stdout, done.stderr, folder)


def checked_result(run: Run, *secrets: Path, rounds: int = 1) -> dict[str, Any]:
    """Check what all cases have in common; the content of the result file ``r.json`` in the folder."""
    assert run.code == 0, run.said
    result = load(run.folder / "r.json")
    assert result["verdict"] in " ".join(run.printed.split())
    assert result["check"]["ok"] and result["check"]["text"] in " ".join(run.said.split())
    assert run.printed.count("asked: ") == len(result.get("targets", ()))
    for row in result["rows"]:
        assert row[f"{row.get('unit', 'images')}_per_s"]["median"] > 0 and len(row["samples"]) == rounds
    if "sections" in result:
        assert set(result["best"]) == {row["section"] for row in result["rows"]} == set(result["sections"])
    written = (run.folder / "r.json").read_text()
    for secret in (run.folder, Path.home(), *secrets):
        assert str(secret) not in written
    if (picture := run.folder / "r.png").exists():
        assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 10_000
    for text in (markdown(result), short_markdown(result) if "sections" in result else ""):
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1
    for width in (80, 160):
        output = io.StringIO()
        print_result(result, Console(file=output, width=width))
        assert max(map(len, output.getvalue().splitlines()[:16])) <= width
    return result


def rated(*rates: float) -> list[Any]:
    """Samples of these rates, one a round."""
    return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]
