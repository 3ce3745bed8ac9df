"""Scripts that are profiled as they are: ``fastpipe profile SCRIPT``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from fastpipe.cli import main
from fastpipe.errors import OptionError
from fastpipe.profiling.script import profile_script

DATASET = """
import sys
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    length = 4000

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return sum(np.sin(np.arange(20_000.0)).sum() for _ in range(8))
"""
SLOW = f"""{DATASET}

def train(workers, context):
    loader = DataLoader(Slow(), batch_size=4, num_workers=workers, multiprocessing_context=context)
    for batch in loader:
        batch.sum()


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    Path(sys.argv[0]).with_name("finished").touch()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(content: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(content)
        return str(path)

    return write


@pytest.mark.parametrize("arguments", [["0"], ["1"], ["1", "spawn"]], ids="-".join)
def test_a_script_runs_until_enough_is_known_of_its_loop(
    script: Callable[[str], str], arguments: list[str], tmp_path: Path
) -> None:
    before = list(sys.argv), list(sys.path), DataLoader.__iter__, signal.getsignal(signal.SIGALRM)
    report = profile_script(script(SLOW), arguments, seconds=0.5)
    assert (sys.argv, sys.path, DataLoader.__iter__, signal.getsignal(signal.SIGALRM)) == before
    assert not (tmp_path / "finished").exists()
    assert report.stall_share > 0.5 and report.stall[0].name == "transform"
    assert report.loader is not None and report.loader.workers == int(arguments[0])
    assert (report.loader.made_at, report.loader.used_at) == ("train.py:20 train", "train.py:21 train")
    assert report.instant_s is not None and report.seconds > 0
    line = report.costs.lines[0][0]
    assert os.path.basename(line.file) == "train.py" and "Slow.__getitem__" in line.function


def test_a_script_without_a_loader_is_told_where_its_time_went(script: Callable[[str], str]) -> None:
    path = script("""
import numpy as np

def sample():
    return sum(np.sin(np.arange(20_000.0)).sum() for _ in range(5000))

sample()
""")
    report = profile_script(path)
    assert report.loader is None and report.outside
    name, seconds = report.outside[0]
    assert name.startswith("train.py sample") and 0 < seconds <= report.seconds
    assert "go into train.py sample, outside of any loop" in report.verdict
    assert "fastpipe.generate" in report.advice[0].what
    assert "outside of loops over loaders: train.py sample" in report.html()


def test_what_is_imported_is_no_work_of_the_script(script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("total = 0\nfor number in range(20_000_000):\n    total += number\n")
    report = profile_script(script("import helper\n"))
    assert [name for name, _ in report.outside] == ["helper.py <module>"]


def test_a_loader_that_is_made_for_each_epoch_is_tried_like_another(script: Callable[[str], str]) -> None:
    path = script(f"""{DATASET}
Slow.length = 40
while True:
    loader = DataLoader(Slow(), batch_size=4)
    for batch in loader:
        batch.sum()
""")
    report = profile_script(path, seconds=0.5, try_advice=True)
    assert report.stall_share > 0.5 and report.instant_s is not None
    assert report.alone is not None and report.loader is not None
    assert report.loader.used_at == "train.py:21 <module>"


def test_a_script_that_does_not_end_is_ended(script: Callable[[str], str]) -> None:
    path = script("while True:\n    sum(range(1000))\n")
    report = profile_script(path, limit_s=1.0)
    assert report.loader is None and report.outside[0][0].startswith("train.py <module>")


@pytest.mark.parametrize(("grace_s", "reached"), [(1000.0, ["later", "done"]), (0.05, ["later"])])
def test_what_is_measured_when_the_time_is_over_may_take_a_little_more(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, grace_s: float, reached: list[str]
) -> None:
    found: list[str] = []

    def measured(*_: Any) -> None:
        signal.raise_signal(signal.SIGALRM)  # the time is over
        found.append("later")
        while grace_s < 1:  # until that is over, too
            pass
        found.append("done")

    monkeypatch.setattr("fastpipe.profiling.script._GRACE_S", grace_s)
    monkeypatch.setattr("fastpipe.profiling.diagnosis.alone", measured)
    report = profile_script(script(SLOW), ["0"], seconds=0.3, limit_s=1000.0)
    assert found == reached and report.instant_s is not None and report.steps > 2


def test_a_loader_that_gives_nothing_is_not_acquitted(script: Callable[[str], str]) -> None:
    path = script("""
import threading
from torch.utils.data import DataLoader, Dataset

class Stuck(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        threading.Event().wait()

list(DataLoader(Stuck()))
""")
    report = profile_script(path, limit_s=1.0)
    assert report.verdict.startswith("no step was measured in ") and not report.is_loader_bound
    assert "DataLoader over Stuck gave too few batches" in str(report) and "not the problem" not in str(
        report
    )


def test_a_loop_that_is_too_short_is_reported_as_far_as_it_went(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    report = profile_script(script(SLOW.replace("4000", "40")), ["0"], seconds=60)
    assert (tmp_path / "finished").exists()
    assert report.steps > 0 and report.instant_s is None and report.wait_s > 0


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("raise KeyError('data')", KeyError, "data"),
        (
            "import sys; sys.exit('usage: train FOLDER')",
            OptionError,
            "ended before it iterated a loader: usage",
        ),
        ("import nothing_of_that_name", ModuleNotFoundError, "nothing_of_that_name"),
        ("this is no Python", SyntaxError, "invalid syntax"),
    ],
)
def test_errors_of_a_script_are_its_own(
    script: Callable[[str], str], content: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        profile_script(script(content))


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"there is no script .*none\.py"):
        profile_script(tmp_path / "none.py")


def test_a_script_imports_what_lies_beside_it(script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 3")
    path = script(
        "import sys\nfrom beside_it import VALUE\nsys.exit(0 if sys.argv[1:] == ['a', '--b'] else 1)"
    )
    try:
        assert profile_script(path, ["a", "--b"]).loader is None
    finally:
        sys.modules.pop("beside_it", None)


def test_the_command_writes_its_files(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("r.json", "r.html", "t.json")]
    options = [f"--{name}={path}" for name, path in zip(("json", "html", "trace"), files, strict=True)]
    assert main(["profile", "--seconds", "0.4", *options, script(SLOW), "0"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("stall ") and "transform" in shown.out and "wrote" in shown.err
    assert json.loads(files[0].read_text())["verdict"] in shown.out
    assert (
        files[1].read_text().startswith("<!doctype html>") and json.loads(files[2].read_text())["traceEvents"]
    )


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "nothing.py"]) == 2
    assert "fastpipe profile: there is no script 'nothing.py'" in capsys.readouterr().err
