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
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from fastpipe.bench import overview as apart
from fastpipe.bench import overview as case
from fastpipe.bench import overview as child
from fastpipe.bench.overview import CASES, outcome_apart
from fastpipe.bench.results import load, main_of, save, validate
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


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def told(code: str, folder: Path, limit_s: float = 60.0) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    return outcome_apart("hdf5_mel", folder, False, limit_s, said.append, python(code)), said


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int) -> None:
    """A process that was killed may get no core for a while, in which to end."""
    deadline = time.monotonic() + 30
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"{pid} lives on"


@pytest.mark.parametrize("is_long", [False, True])
def test_a_process_gets_its_job_and_tells_what_it_does(is_long: bool, tmp_path: Path) -> None:
    usual = Path(tempfile.gettempdir())
    given = (
        tmp_path / "for_sockets_too_long_a_name_".ljust(80, "x") if is_long else usual / "fastpipe-bench-1"
    )
    given.mkdir()
    try:
        _check_job(given, usual if is_long else given)
    finally:
        shutil.rmtree(given)


def _check_job(given: Path, folder: Path) -> None:
    code = (
        "import json, sys, tempfile, pathlib\n"
        "job = json.loads(sys.argv[1])\n"
        "print('half'); print('done')\n"
        "told = {'result': {'job': job, 'temporary': tempfile.gettempdir()}}\n"
        "pathlib.Path(job['out']).write_text(json.dumps(told))\n"
    )
    found, said = told(code, given)
    assert said == ["half", "done"]
    assert found["result"]["temporary"] == str(folder)
    job = found["result"]["job"]
    assert (job["case"], job["folder"], job["quick"]) == ("hdf5_mel", str(given), False)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('no such thing')", "ended with code 1: ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL: no message"),
        ("pass", "ended with code 0: no message"),
    ],
)
def test_a_process_that_does_not_end_well(code: str, words: str, tmp_path: Path) -> None:
    found, _ = told(code, tmp_path)
    assert found == {"crash": f"its process {words}"}


@pytest.mark.parametrize("code", [_ENDLESS, _DEAF + _ENDLESS], ids=["polite", "deaf"])
def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "_PATIENCE_S", 0.2)
    found, said = told(code, tmp_path, limit_s=10.0)
    assert found == {"crash": "it was not done after 10 s"}
    wait_until_gone(int(said[0].split()[1]))


def test_an_interrupt_ends_the_process(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted(line: str) -> None:
        pids.append(int(line.split()[1]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcome_apart("hdf5_mel", tmp_path, False, 60, interrupted, python(_ENDLESS))
    assert is_gone(pids[0])


@pytest.mark.parametrize("code", [_START, _DEAF + _START], ids=["polite", "deaf"])
def test_what_a_process_leaves_behind_is_ended(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "_PATIENCE_S", 0.2)
    found, said = told(f"{code}\nimport os; os._exit(3)", tmp_path)
    assert found == {"crash": "its process ended with code 3: no message"}
    wait_until_gone(int(said[0].split()[1]))


# ---- what is made of the outcomes ----------------------------------------------------------------


def options(*given: str) -> Namespace:
    parser = ArgumentParser()
    case.Bench.add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture
def measured(result: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """The outcome of a pipeline whose rows are those of the fixture ``result``."""

    def made(key: str) -> dict[str, Any]:
        rows = [
            {**entry, "key": f"{key}-{entry['key']}", "section": key, "unit": "images"}
            for entry in result["rows"]
            if entry["group"] in ("replaced", "fastpipe")
        ]
        one = {"wait_s": [0.1], "busy_s": [0.1], "total_s": 0.2, "share": 0.5}
        steps = [{"key": entry["key"], "label": entry["label"], **one} for entry in (rows[1], rows[2])]
        return {
            "result": {
                **result,
                "case": "all",
                "rows": rows,
                "missing": [],
                "sections": {key: {"label": str(CASES[key].label)}},
                "best": {key: f"{key}-replaced-workers2"},
                "main": f"{key}-fastloader-float32",
                "timelines": {key: {"busy_s": 0.1, "rows": steps}},
            }
        }

    return made


def run_with(
    outcomes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *given: str
) -> tuple[int, str, str]:
    """The case's exit code and output, where pipelines have these outcomes."""
    text, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(case, "outcome_apart", lambda key, *others: outcomes[key])
    with Progress(Console(file=errors, width=200)) as progress:
        code = case.Bench(options(*given), progress).run(Console(file=text, width=160))
    return code, text.getvalue(), errors.getvalue()


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_outcomes_are_put_together(
    measured: Callable[[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = {key: measured(key) for key in CASES}
    code, text, errors = run_with(outcomes, monkeypatch, "--json", "new.json")
    assert code == 0
    result = load(tmp_path / "new.json")
    assert list(result["sections"]) == list(result["best"]) == list(result["timelines"]) == list(CASES)
    assert len(result["rows"]) == 4 * len(CASES)
    assert result["command"] == "python -m fastpipe.bench all --json new.json"
    assert result["verdict"].startswith("5 of 5 faster: keras_multimodal 2.8×, hdf5_mel 2.8×, ")
    assert result["verdict"] in " ".join(text.split())
    assert text.count("1 steps that are busy for 100 ms each wait 50% of 0.2 s before") == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.json", "report.html", "report.png"]
    for name in ("new.json", "report.html", "report.png"):
        assert str(tmp_path / name) in errors
    assert result["verdict"] in (tmp_path / "report.html").read_text()


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_pipeline_that_fails_is_a_row_that_says_why(
    measured: Callable[[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    why = "needs the package 'tensorflow': pip install 'fastpipe[tf]'"
    outcomes = {"keras_multimodal": {"why": why}, "imagefolder": measured("imagefolder")}
    code, text, _ = run_with(outcomes, monkeypatch, "--only", "imagefolder,keras_multimodal")
    assert code == 0  # who has no TensorFlow has nothing to put right
    assert "1 of 2 faster: imagefolder 2.8×. 1 of 2 not measured: keras_multimodal." in text
    assert f"not measured: {CASES['keras_multimodal'].label}: {why}" in text
    assert "not measured, for the reason below" in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("pip install &#x27;fastpipe[tf]&#x27;") == 2


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            {"crash": "its process was killed by SIGKILL: no message"},
            "run it alone: python -m fastpipe.bench hdf5",
        ),
        (
            {"check": {"ok": False, "problems": ["rows differ"], "text": "outputs differ: rows"}},
            "outputs differ: rows",
        ),
    ],
    ids=["crash", "check"],
)
def test_what_is_wrong_makes_the_exit_code_1_and_writes_all_the_same(
    outcome: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, _ = run_with({"hdf5_mel": outcome}, monkeypatch, "--only", "hdf5_mel", "--json", "new.json")
    assert code == 1
    assert words in " ".join(text.split())
    result = load(tmp_path / "new.json")
    assert result["rows"] == [] and result["check"]["ok"] == ("crash" in outcome)
    assert words in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "report.png").exists()  # there is nothing to draw


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_slower_than_it_was_is_exit_code_1(
    measured: Callable[[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new = measured("hdf5_mel")
    run_with({"hdf5_mel": new}, monkeypatch, "--only", "hdf5_mel", "--json", "old.json")
    old = load(tmp_path / "old.json")
    again = [
        "--only",
        "hdf5_mel",
        "--compare",
        "old.json",
        "--json",
        "old.json",
    ]  # read before it is replaced
    code, text, _ = run_with({"hdf5_mel": new}, monkeypatch, *again)
    assert code == 0 and "0 improved, 2 same, 0 regressed" in text
    for sample in old["rows"][2]["samples"]:
        sample["seconds"] /= 10
    save(old, tmp_path / "old.json")
    code, text, _ = run_with({"hdf5_mel": new}, monkeypatch, *again)
    assert code == 1 and "0 improved, 1 same, 1 regressed" in text


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_without_matplotlib_there_is_no_picture_but_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(case, "outcome_apart", lambda *others: {"why": "no reason"})
    assert main(["bench", "--only", "hdf5_mel"]) == 0
    assert "no report.png: " in (said := capsys.readouterr().err) and "fastpipe[bench]" in said
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert main(["bench", "--only", "hdf5_mel", "--plot", "my.png"]) == 2
    assert "fastpipe[bench]" in capsys.readouterr().err


def test_termination_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*others: object) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(case, "outcome_apart", terminated)
    assert main(["bench", "all"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())


# ---- pipelines -----------------------------------------------------------------------------------


def test_outputs_that_differ_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CASES["motion_generation"]):  # type: ignore[misc]
        def compared(self, rows: Any) -> Any:
            for row in rows:
                monkeypatch.setattr(row, "stored", lambda count: {"x": [0.0]})
            return super().compared(rows)

    monkeypatch.setitem(child.CASES, "motion_generation", Wrong)
    with Progress(Console(file=io.StringIO())) as progress:
        found = child.outcome("motion_generation", tmp_path, True, progress)
    assert list(found) == ["check"] and not found["check"]["ok"]
    assert "columns are ['x'], expected ['x', 'y']" in found["check"]["text"]


def test_a_package_that_is_missing_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with Progress(Console(file=io.StringIO())) as progress:
        found = child.outcome("volume_patches", tmp_path, True, progress)
    assert "pip install 'fastpipe[bench]'" in found["why"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["hdf5_mel", pytest.param("volume_patches", marks=pytest.mark.slow)])
def test_a_pipeline_is_checked_and_measured(key: str, tmp_path: Path) -> None:
    with Progress(Console(file=io.StringIO())) as progress:
        found = child.outcome(key, tmp_path, True, progress)
    check_measured(key, found["result"])


def check_measured(key: str, result: dict[str, Any]) -> None:
    """A pipeline's result has what reports need."""
    assert validate(result)["check"]["ok"]
    before, after = result["rows"][0], main_of(result, key)
    assert before["group"] == "replaced" and result["best"] == {key: before["key"]}
    assert {row["section"] for row in result["rows"]} == {key}
    told_of = result["timelines"][key]
    assert [row["key"] for row in told_of["rows"]] == [before["key"], after["key"]]
    for row in told_of["rows"]:
        assert len(row["wait_s"]) == len(row["busy_s"]) >= 4
        assert min(row["busy_s"]) >= 0.99 * told_of["busy_s"]


def command(*given: str) -> list[str]:
    return [sys.executable, "-m", "fastpipe.bench", "--quick", *given]


def left_behind() -> set[str]:
    """What of this benchmark is in the temporary folder."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("fastpipe-bench-")}


@pytest.mark.slow
@pytest.mark.parametrize("only", ["motion_generation,imagefolder", pytest.param("", marks=pytest.mark.slow)])
def test_the_whole_command(only: str, tmp_path: Path) -> None:
    given = [*(["--only", only] if only else []), "--json", "all.json"]
    done = subprocess.run(command(*given), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = load(tmp_path / "all.json")
    keys = only.split(",") if only else list(CASES)
    assert list(result["best"]) == keys and not result["missing"]
    assert list(result["timelines"]) == [key for key in keys if key != "motion_generation"]
    for entry in result["rows"]:
        assert len(entry["samples"]) == 2
    assert "outputs agree with torchvision's" in result["check"]["text"]
    assert not left_behind()
    text = json.dumps(result)
    assert str(tmp_path) not in text and str(Path.home()) not in text
    assert "[2/" in done.stderr and str(tmp_path / "report.html") in done.stderr


@pytest.mark.few(1)
@pytest.mark.skipif(os.name != "posix", reason="sends signals: run on Linux or macOS")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_however_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--only", "motion_generation"), cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        assert parent.stderr is not None
        for line in parent.stderr:
            if "round 1: " in line:
                break
        family = psutil.Process(parent.pid).children(recursive=True)
        assert family and left_behind()
        parent.send_signal(number)
        rest = parent.stderr.read()
        assert parent.wait(timeout=60) == (-9 if number == signal.SIGKILL else 130), rest
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert "Traceback" not in rest
    assert not left_behind() and not list(tmp_path.iterdir())
