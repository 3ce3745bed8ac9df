"""The case ``all``: processes of pipelines, their outcomes put together, and the whole command."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from scripts import ran, started, wait_until_ended

from fastpipe.bench import overview as case
from fastpipe.bench.overview import CASES, outcome_apart
from fastpipe.bench.results import load, save
from fastpipe.cli import main
from fastpipe.console import Progress

# A process that has another, which does not end by itself; nor does the first.
_START = """
import signal, subprocess, sys
code = "import signal; print('there', flush=True); signal.pause()"
other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
other.stdout.readline()
print("started", other.pid, flush=True)
"""
_ENDLESS = _START + "signal.pause()\n"
_DEAF = "import signal\nfor one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, signal.SIG_IGN)\n"


def apart(
    code: str, folder: Path, limit_s: float = 60.0, say: Callable[[str], None] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The outcome of a process that runs this code, and the lines that it printed."""
    said: list[str] = []
    command = sys.executable, "-c", code
    return outcome_apart("hdf5_mel", folder, False, limit_s, say or said.append, command), said


@pytest.mark.parametrize("is_long", [False, True])
def test_a_process_gets_its_job_and_tells_what_it_does(is_long: bool, tmp_path: Path) -> None:
    usual = Path(tempfile.gettempdir())
    given = tmp_path / "too_long_for_sockets_".ljust(80, "x") if is_long else usual / "fastpipe-bench-1"
    code = (
        "import json, sys, tempfile, pathlib\n"
        "job = json.loads(sys.argv[1])\n"
        "print('half'); print('done')\n"
        "told = {'result': {'job': job, 'temporary': tempfile.gettempdir()}}\n"
        "pathlib.Path(job['out']).write_text(json.dumps(told))\n"
    )
    given.mkdir()
    try:
        found, said = apart(code, given)
    finally:
        shutil.rmtree(given)
    assert said == ["half", "done"]
    job = found["result"]["job"]
    assert found["result"]["temporary"] == str(usual if is_long else given)
    assert (job["case"], job["folder"], job["quick"]) == ("hdf5_mel", str(given), False)


@pytest.mark.few(2)
@pytest.mark.parametrize(("code", "limit_s", "crash"), [
    ("raise ValueError('no such thing')", 60, "its process ended with code 1: ValueError: no such thing"),
    ("import os; os.kill(os.getpid(), 9)", 60, "its process was killed by SIGKILL: no message"),
    ("pass", 60, "its process ended with code 0: no message"),
    (_ENDLESS, 5, "it was not done after 5 s"),
    (_DEAF + _ENDLESS, 5, "it was not done after 5 s"),
    (_START + "import os; os._exit(3)", 60, "its process ended with code 3: no message"),
    (_DEAF + _START + "import os; os._exit(3)", 60, "its process ended with code 3: no message"),
], ids=["error", "killed", "nothing", "endless", "deaf and endless", "left", "deaf and left"])  # fmt: skip
def test_a_process_that_ends_badly_or_never_is_ended_with_all_that_it_started(
    code: str, limit_s: float, crash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case, "_PATIENCE_S", 0.2)
    found, said = apart(code, tmp_path, limit_s)
    assert found == {"crash": crash}
    wait_until_ended(int(line.split()[1]) for line in said)


def test_an_interrupt_ends_the_process(tmp_path: Path) -> None:
    lines: list[str] = []

    def interrupted(line: str) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart(_ENDLESS, tmp_path, say=interrupted)
    wait_until_ended([int(lines[0].split()[1])])


@pytest.fixture
def measured(result: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """The outcome of a pipeline whose rows are those of the fixture ``result``."""

    def made(key: str) -> dict[str, Any]:
        rows = [
            {**entry, "key": f"{key}-{entry['key']}", "section": key, "unit": "images"}
            for entry in result["rows"] if entry["group"] in ("replaced", "fastpipe")
        ]  # fmt: skip
        one = {"wait_s": [0.1], "busy_s": [0.1], "total_s": 0.2, "share": 0.5}
        steps = [{"key": entry["key"], "label": entry["label"], **one} for entry in rows[1:3]]
        fields = {
            "case": "all", "rows": rows, "missing": [], "sections": {key: {"label": str(CASES[key].label)}},
            "best": {key: f"{key}-replaced-workers2"}, "main": f"{key}-fastloader-float32",
            "timelines": {key: {"busy_s": 0.1, "rows": steps}},
        }  # fmt: skip
        return {"result": {**result, **fields}}

    return made


@pytest.fixture
def finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """The case's exit code and output, where pipelines have these outcomes, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def run(outcomes: dict[str, dict[str, Any]], *given: str) -> tuple[int, str, str]:
        text, errors, parser = io.StringIO(), io.StringIO(), ArgumentParser()
        monkeypatch.setattr(case, "outcome_apart", lambda key, *others: outcomes[key])
        case.Bench.add_arguments(parser)
        with Progress(Console(file=errors, width=200)) as progress:
            code = case.Bench(parser.parse_args(given), progress).run(Console(file=text, width=160))
        return code, text.getvalue(), errors.getvalue()

    return run


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_outcomes_are_put_together(measured: Any, finish: Any, tmp_path: Path) -> None:
    code, text, errors = finish({key: measured(key) for key in CASES}, "--json", "new.json")
    assert code == 0
    result = load(tmp_path / "new.json")
    assert list(result["sections"]) == list(result["best"]) == list(result["timelines"]) == list(CASES)
    assert len(result["rows"]) == 4 * len(CASES)
    assert result["command"] == "python -m fastpipe.bench all --json new.json"
    assert result["verdict"].startswith("5 of 5 faster: keras_multimodal 2.8×, hdf5_mel 2.8×, ")
    assert result["verdict"] in " ".join(text.split())
    assert text.count("1 steps that are busy for 100 ms each wait 50% of 0.2 s before") == 5
    names = ["new.json", "report.html", "report.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(str(tmp_path / name) in errors for name in names)
    assert result["verdict"] in (tmp_path / "report.html").read_text()


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_pipeline_that_cannot_run_is_a_row_that_says_why(
    measured: Any, finish: Any, tmp_path: Path
) -> None:
    why = "needs the package 'tensorflow': pip install '.[tf]'"
    outcomes = {"keras_multimodal": {"why": why}, "imagefolder": measured("imagefolder")}
    code, text, _ = finish(outcomes, "--only", "imagefolder,keras_multimodal")
    assert code == 0  # without TensorFlow there is nothing to put right
    assert "1 of 2 faster: imagefolder 2.8×. 1 of 2 not measured: keras_multimodal." in text
    assert f"not measured: {CASES['keras_multimodal'].label}: {why}" in text
    assert "not measured, for the reason below" in text
    assert (tmp_path / "report.html").read_text().count("pip install &#x27;.[tf]&#x27;") == 2


@pytest.mark.parametrize(("outcome", "words"), [
    ({"crash": "its process was killed"}, "run it alone: python -m fastpipe.bench hdf5"),
    ({"check": {"ok": False, "problems": ["rows differ"], "text": "outputs differ: x"}}, "outputs differ: x"),
], ids=["crash", "check"])  # fmt: skip
def test_a_fault_makes_the_exit_code_1_and_the_report_is_written_all_the_same(
    outcome: dict[str, Any], words: str, finish: Any, tmp_path: Path
) -> None:
    code, text, _ = finish({"hdf5_mel": outcome}, "--only", "hdf5_mel", "--json", "new.json")
    assert code == 1 and words in " ".join(text.split())
    result = load(tmp_path / "new.json")
    assert result["rows"] == [] and result["check"]["ok"] == ("crash" in outcome)
    assert words in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "report.png").exists()  # there is nothing to draw


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_slower_than_it_was_is_exit_code_1(measured: Any, finish: Any, tmp_path: Path) -> None:
    outcomes, only = {"hdf5_mel": measured("hdf5_mel")}, ["--only", "hdf5_mel"]
    finish(outcomes, *only, "--json", "old.json")
    old = load(tmp_path / "old.json")
    again = [*only, "--compare", "old.json", "--json", "old.json"]  # read before it is replaced
    code, text, _ = finish(outcomes, *again)
    assert code == 0 and "0 improved, 2 same, 0 regressed" in text
    for sample in old["rows"][2]["samples"]:
        sample["seconds"] /= 10
    save(old, tmp_path / "old.json")
    code, text, _ = finish(outcomes, *again)
    assert code == 1 and "0 improved, 1 same, 1 regressed" in text


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_without_matplotlib_there_is_no_picture_but_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(case, "outcome_apart", lambda *others: {"why": "no reason"})
    assert main(["bench", "--only", "hdf5_mel"]) == 0
    assert "no report.png: " in (said := capsys.readouterr().err) and ".[bench]" in said
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert main(["bench", "--only", "hdf5_mel", "--plot", "my.png"]) == 2
    assert ".[bench]" in capsys.readouterr().err


def test_outputs_that_differ_are_not_timed_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(CASES["motion_generation"]):  # type: ignore[misc]
        def compared(self, rows: Any) -> Any:
            for row in rows:
                monkeypatch.setattr(row, "stored", lambda count: {"x": [0.0]})
            return super().compared(rows)

    monkeypatch.setitem(CASES, "motion_generation", Wrong)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with Progress(Console(file=io.StringIO())) as progress:
        found = case.outcome("motion_generation", tmp_path, True, progress)
        missing = case.outcome("volume_patches", tmp_path, True, progress)
    assert list(found) == ["check"] and not found["check"]["ok"]
    assert "columns are ['x'], expected ['x', 'y']" in found["check"]["text"]
    assert "pip install '.[bench]'" in missing["why"]


_COMMAND = "-m", "fastpipe.bench", "--quick"


def left_behind() -> set[str]:
    """What of this benchmark is in the temporary folder."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("fastpipe-bench-")}


@pytest.mark.slow
def test_the_whole_command_measures_all_pipelines(tmp_path: Path) -> None:
    done = ran(*_COMMAND, "--json", "all.json", cwd=tmp_path, timeout=1000)
    assert done.returncode == 0, done.stderr
    result = load(tmp_path / "all.json")
    assert list(result["best"]) == list(CASES) and not result["missing"]
    assert list(result["timelines"]) == [key for key in CASES if key != "motion_generation"]
    assert all(len(entry["samples"]) == 2 for entry in result["rows"])
    assert "outputs agree with torchvision's" in result["check"]["text"]
    assert not left_behind()
    text = json.dumps(result)
    assert str(tmp_path) not in text and str(Path.home()) not in text
    assert "[2/" in done.stderr and str(tmp_path / "report.html") in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends signals: run on Linux or macOS")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_processes_and_files(number: signal.Signals, tmp_path: Path) -> None:
    given = *_COMMAND, "--only", "motion_generation"
    with started(*given, cwd=tmp_path, stdout=subprocess.DEVNULL) as parent:
        assert parent.stderr is not None
        for line in parent.stderr:
            if "round 1: " in line:
                break
        family = psutil.Process(parent.pid).children(recursive=True)
        assert family and left_behind()
        parent.send_signal(number)
        rest = parent.stderr.read()
        assert parent.wait(timeout=60) == (-9 if number == signal.SIGKILL else 130), rest
    assert not psutil.wait_procs(family, timeout=30)[1] and "Traceback" not in rest
    assert not left_behind() and not list(tmp_path.iterdir())
