"""``fastpipe doctor``: the whole examination, its report, and the processes that it asks."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripts import ran

from fastpipe.tools.doctor import DoctorReport, examination, examine
from fastpipe.tools.doctor.child import ask
from fastpipe.tools.doctor.report import ok, problem, warning

FINDINGS = (
    ok("memory", "enough " * 30),
    warning("memory", "little", "more"),
    problem("decoders", "none", "pip"),
)


def test_only_a_problem_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    for state, code in (("ok", 0), ("warning", 0), ("problem", 1)):
        report = DoctorReport(tuple(one for one in FINDINGS if one.state in ("ok", state)))
        monkeypatch.setattr(examination, "examine", lambda *_, **__: report)
        found, output, _ = command("doctor")
        assert found == code and "enough" in output


def test_the_report_is_as_wide_as_the_console_and_has_everything_as_json() -> None:
    report = DoctorReport(FINDINGS, "data", 1.5)
    for width in (80, 160):
        console = Console(file=StringIO(), width=width, color_system=None)
        report.show(console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width
        assert text.count("enough") == 30 and "→ more" in text and "1 problem, 1 warning" in text
    found = json.loads(report.json())
    assert (found["format"], found["problems"], found["warnings"], found["target"]) == (1, 1, 1, "data")
    assert found["findings"][2] == {"topic": "decoders", "state": "problem", "text": "none", "remedy": "pip"}


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: object) -> Any:
        yield ok("cores", "first")
        raise ZeroDivisionError("by nothing")

    def broken(_: object) -> Any:
        raise ImportError("no module named this")

    checks = {**dict.fromkeys(examination.CHECKS, check), "limits": broken}
    monkeypatch.setattr(examination, "CHECKS", checks)
    found = examine().findings
    failed = [one for one in found if "ZeroDivisionError: by nothing" in one.text]
    assert [one.text for one in found].count("first") == len(failed) == 8
    assert {one.state for one in failed} == {"warning"}
    assert [one.topic for one in found if one.state == "problem"] == ["limits"]


def test_wrong_arguments_are_refused(command: Any) -> None:
    for arguments, message in (
        (["/nowhere/at/all"], "No such file or folder"),
        (["s3://key:hush-secret@bucket/train"], "has credentials in it"),
        (["--anon"], "are for the URL of a store"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
    ):
        code, output, errors = command("doctor", *arguments)
        assert code == 2 and message in errors and "hush-secret" not in output + errors


@pytest.mark.slow
def test_a_user_runs_all_of_it_and_no_file_is_written(photo_tree: Path, tmp_path: Path) -> None:
    report = tmp_path / "x.json"
    done = ran("-m", "fastpipe", "doctor", photo_tree, "--json", report)
    found = json.loads(report.read_text())  # it depends on the machine
    assert done.returncode == int(found["problems"] > 0) and "Traceback" not in done.stderr, done.stderr
    topics = {one["topic"] for one in found["findings"]}
    assert {"decoders", "packages", "threads", "cores", "memory", "storage", "cache folder"} <= topics
    texts = " ".join(one["text"] for one in found["findings"])
    for text in ("measured on 24 JPEGs of the folder", "examined 24 files", "the native core", "Pillow"):
        assert text in texts
    assert "not examined" not in texts and found["verdict"] in done.stdout
    assert {path.suffix for path in photo_tree.rglob("*") if path.is_file()} == {".jpg"}


@pytest.mark.slow
def test_no_framework_is_loaded_into_the_process() -> None:
    code = """
import sys
from fastpipe.tools.doctor import examination
del examination.CHECKS["decoders"]
report = examination.examine()
assert any(one.text.startswith("torch ") for one in report.findings), report
print(sorted({"torch", "tensorflow", "torchvision", "PIL"} & set(sys.modules)))
"""
    done = ran("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


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
def test_a_question_to_a_process_has_an_answer_or_a_reason(code: str, value: object, why: str) -> None:
    answer = ask(code, seconds=60)
    assert (answer.value, answer.why) == (value, why)


@pytest.mark.slow
def test_a_process_that_hangs_is_ended() -> None:
    answer = ask("answer('begun')\nimport threading; threading.Event().wait()", seconds=5)
    assert (answer.value, answer.why) == ("begun", "it took more than 5 s")
