"""The whole examination, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastpipe.cli import main
from fastpipe.tools.doctor import DoctorReport, examine
from fastpipe.tools.doctor import examination as examining
from fastpipe.tools.doctor.child import ask
from fastpipe.tools.doctor.report import ok, problem, warning

FINDINGS = (
    ok("memory", "enough " * 30),
    warning("memory", "little", "more"),
    problem("decoders", "none", "pip"),
)


def report_of(state: str) -> DoctorReport:
    return DoctorReport(tuple(one for one in FINDINGS if one.state in ("ok", state)))


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_only_a_problem_is_an_exit_code(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examining, "examine", lambda *_, **__: report_of(state))
    assert main(["doctor"]) == code
    assert "enough" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 160])
def test_lines_are_as_wide_as_the_console(width: int) -> None:
    console = Console(file=StringIO(), width=width, color_system=None)
    DoctorReport(FINDINGS).show(console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert text.count("enough") == 30 and "→ more" in text and "1 problem, 1 warning" in text


def test_json_has_everything() -> None:
    found = json.loads(DoctorReport(FINDINGS, "data", 1.5).json())
    assert (found["format"], found["problems"], found["warnings"], found["target"]) == (1, 1, 1, "data")
    assert found["findings"][2] == {"topic": "decoders", "state": "problem", "text": "none", "remedy": "pip"}


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: object) -> Any:
        yield ok("cores", "first")
        raise ZeroDivisionError("by nothing")

    def broken(_: object) -> Any:
        raise ImportError("no module named this")

    checks = {**dict.fromkeys(examining.CHECKS, check), "limits": broken}
    monkeypatch.setattr(examining, "CHECKS", checks)
    report = examine()
    assert [one.text for one in report.findings].count("first") == 8
    failed = [one for one in report.findings if "ZeroDivisionError: by nothing" in one.text]
    assert len(failed) == 8 and {one.state for one in failed} == {"warning"}
    assert [one.topic for one in report.findings if one.state == "problem"] == ["limits"]
    assert report.count("problem") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere/at/all"], "No such file or folder"),
        (["s3://key:hush-secret@bucket/train"], "has credentials in it"),
        (["--anon"], "are for the URL of a store"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err and "hush-secret" not in out + err


@pytest.mark.slow
def test_as_a_user_runs_it(photo_tree: Path, tmp_path: Path) -> None:
    """All of it, once; what it finds depends on the machine."""
    command = [
        sys.executable,
        "-m",
        "fastpipe",
        "doctor",
        str(photo_tree),
        "--json",
        str(tmp_path / "x.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads((tmp_path / "x.json").read_text())
    assert done.returncode == int(found["problems"] > 0), done.stderr
    assert "Traceback" not in done.stderr
    topics = {one["topic"] for one in found["findings"]}
    assert {"decoders", "packages", "threads", "cores", "memory", "storage", "cache folder"} <= topics
    texts = " ".join(one["text"] for one in found["findings"])
    assert "measured on 24 JPEGs of the folder" in texts and "looked at 24 files" in texts
    assert "not looked at" not in texts and found["verdict"] in done.stdout
    for decoder in ("libjpeg-turbo", "Pillow"):
        assert decoder in texts
    # Nothing was written to the folder.
    assert {path.suffix for path in photo_tree.rglob("*") if path.is_file()} == {".jpg"}


@pytest.mark.slow
def test_no_framework_is_loaded_into_the_process() -> None:
    code = """
import sys
from fastpipe.tools.doctor import examination as examining
del examining.CHECKS["decoders"]
report = examining.examine()
assert any(one.text.startswith("torch ") for one in report.findings), report
print(sorted({"torch", "tensorflow", "torchvision", "PIL"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and "whether this machine and environment are" in out
    for word in ("FOLDER|URL", "--json FILE", "--endpoint-url URL", "--anon", "exit codes: 0"):
        assert word in out


# ---- other processes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value", "why"),
    [
        ("print('noise'); answer({'a': 1}); print('more')", {"a": 1}, ""),
        ("answer(1); answer(2)", 2, ""),
        ("answer(1); import os; os.kill(os.getpid(), 11)", 1, "it crashed with SIGSEGV"),
        ("import no_such_module", None, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", None, "it ended with exit code 3"),
        ("pass", None, "it ended with exit code 0"),
    ],
)
def test_what_becomes_of_a_question(code: str, value: object, why: str) -> None:
    answer = ask(code, seconds=60)
    assert (answer.value, answer.why) == (value, why)


def test_a_process_that_hangs_is_ended() -> None:
    answer = ask("answer('begun')\nimport threading; threading.Event().wait()", seconds=10)
    assert (answer.value, answer.why) == ("begun", "it took more than 10 s")
