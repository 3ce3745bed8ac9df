"""Scripts that are profiled as they are: ``fastpipe profile SCRIPT``."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import fastpipe
from fastpipe.cli import main
from fastpipe.errors import OptionError
from fastpipe.tools import profiler as script_module
from fastpipe.tools import report as findings
from fastpipe.tools.profiler import profile_script

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


@pytest.mark.few(1)
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
    assert "the script was ended after " in str(report)
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


ELSEWHERE = """
import multiprocessing, os, signal, sys, time

def train(deaf):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    while time.process_time() < float(sys.argv[1]):  # of a forked process it begins at 0
        pass

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=train, args=(len(sys.argv) > 2,))
    process.start()
    process.join()
"""


def test_a_script_that_trains_in_processes_of_its_own_is_told(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "_MOST", 0.05)  # also beside tests that take the cores
    report = profile_script(script(ELSEWHERE), ["2"])
    assert report.loader is None and report.is_elsewhere and report.elsewhere_s > 1
    assert "no loop was seen" in report.verdict and "torchrun" in report.advice[0].what
    assert "fastpipe.generate" not in str(report)


@pytest.mark.parametrize("deaf", [[], ["deaf"]], ids=["polite", "deaf"])
def test_processes_of_a_script_that_is_ended_end(
    script: Callable[[str], str], deaf: list[str], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(script_module, "_END_S", 0.3)
    report = profile_script(script(ELSEWHERE), ["600", *deaf], limit_s=2)
    assert report.is_cut_short
    with pytest.raises(ProcessLookupError):
        os.kill(int(capfd.readouterr().out.split()[0]), 0)


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


def test_an_end_that_a_script_goes_on_after_comes_again(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(f"""{DATASET}
for epoch in range(5):
    try:
        for batch in DataLoader(Slow(), batch_size=4):
            batch.sum()
    except:
        with Path(__file__).with_name("ended").open("a") as file:
            print(epoch, file=file)
""")
    report = profile_script(path, seconds=0.3)
    assert (tmp_path / "ended").read_text().split() == ["0", "1", "2", "3", "4"]
    assert report.instant_s is not None and report.is_cut_short


@pytest.mark.slow
def test_a_script_that_goes_on_after_every_end_is_left(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(f"""{DATASET}
while True:
    try:
        for batch in DataLoader(Slow(), batch_size=4, num_workers=1):
            batch.sum()
    except BaseException:
        pass
""")
    code = f"""
import torch.utils.data
from fastpipe.tools import profiler as script
script._GRACE_S = script._AGAIN_S = 0.2
from fastpipe.cli import main
main(["profile", "--seconds", "0.3", "--limit", "3", "--json", "report.json", {path!r}])
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.path.dirname(fastpipe.__path__[0])}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and "goes on whatever ends it" in ran.stderr, ran.stderr
    assert "train.py:20 <module>" in ran.stdout and json.loads((tmp_path / "report.json").read_text())
    assert not list(tmp_path.glob("fastpipe-profile-*"))


def test_the_loop_that_trains_is_looked_at_not_the_one_that_judges_before_it(
    script: Callable[[str], str],
) -> None:
    path = script(f"""{DATASET}
import time
import torch

with torch.no_grad():
    end = time.monotonic() + 1.5
    for batch in DataLoader(Slow(), batch_size=2):
        if time.monotonic() > end:
            break
for batch in DataLoader(Slow(), batch_size=4):
    batch.sum()
""")
    report = profile_script(path, seconds=0.3)
    assert report.loader is not None and report.loader.batch_size == 4 and report.instant_s is not None


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

    monkeypatch.setattr("fastpipe.tools.profiler._GRACE_S", grace_s)
    monkeypatch.setattr("fastpipe.tools.diagnosis.alone", measured)
    report = profile_script(script(SLOW), ["0"], seconds=0.3, limit_s=1000.0)
    assert found == reached and report.instant_s is not None and report.steps > 2


def test_the_time_may_be_over_while_a_short_script_is_looked_at(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any) -> None:
        signal.raise_signal(signal.SIGALRM)
        while True:
            pass

    monkeypatch.setattr("fastpipe.tools.profiler._GRACE_S", 0.1)
    monkeypatch.setattr("fastpipe.tools.diagnosis.alone", measured)
    report = profile_script(script(SLOW.replace("4000", "40")), ["0"], seconds=4, limit_s=1000.0)
    assert report.steps > 0 and report.alone is None and not report.is_cut_short


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
    slower = SLOW.replace("4000", "40").replace("range(8)", "range(80)")
    report = profile_script(script(slower), ["0"], seconds=4)
    assert (tmp_path / "finished").exists()
    assert report.steps > 0 and report.instant_s is None and report.wait_s > 0
    assert report.costs.stages["transform"].wall > 0
    assert report.alone is not None, "measured when the script was over"
    assert not [name for name, _ in report.outside if "__getitem__" in name], "that is none of its own work"
    assert "the script was ended" not in str(report)
    assert "over before a step with data at once was measured" in str(report)


def test_what_is_measured_when_a_short_script_is_over_is_none_of_its_time(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("fastpipe.tools.profiler.perf_counter", clock.__next__)
    monkeypatch.setattr("fastpipe.tools.diagnosis.alone", lambda *_: next(clock) and None)
    report = profile_script(script(SLOW.replace("4000", "40")), ["0"], seconds=4)
    assert report.steps > 0 and report.seconds == 1
    assert next(clock) > 2, "that was measured"


def test_what_is_gone_when_a_short_script_is_over_is_told(
    script: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    gone = SLOW.replace("4000", "40").replace("return sum(", "open(FILE).close()\n        return sum(")
    path = script(gone.replace("import sys\n", "import sys\nFILE = __file__ + '.data'\n", 1).replace(
        "    Path(sys.argv[0])", "    Path(FILE).unlink()\n    Path(sys.argv[0])"
    ))  # fmt: skip
    Path(f"{path}.data").touch()
    report = profile_script(path, ["0"], seconds=4)
    assert report.steps > 0 and report.alone is None and not report.advice
    assert "the loader alone is not measured: FileNotFoundError" in caplog.text


@pytest.mark.parametrize("end", ["sys.exit()", "raise SystemExit(0)", "sys.exit(3)"])
def test_a_short_script_that_says_it_is_over(script: Callable[[str], str], end: str) -> None:
    report = profile_script(script(f"{SLOW.replace('4000', '40')}\n    {end}\n"), ["0"], seconds=4)
    assert report.steps > 0 and (report.alone is not None) is ("3" not in end)


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


@pytest.mark.parametrize(
    ("content", "last"),
    [
        ("def main():\n    open('nowhere/x')\nmain()", "FileNotFoundError: [Errno 2] No such file"),
        ("from fastpipe import Decode\nDecode(backend='none')", "fastpipe.errors.OptionError: "),
        ("raise ValueError('data')", "ValueError: data"),
        ("this is no Python", "SyntaxError: invalid syntax"),
    ],
)
def test_the_command_shows_an_error_of_a_script_as_python_does(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str], content: str, last: str
) -> None:
    path = script(content)
    assert main(["profile", path]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f'File "{path}", line ' in said.err.splitlines()[0 if "Syntax" in last else 1]
    assert last in said.err and "runpy" not in said.err and "profile_cli" not in said.err


def test_a_step_may_take_its_batch_apart(script: Callable[[str], str]) -> None:
    path = script(f"""{DATASET}
import torch
for batch in DataLoader(Slow(), 4, collate_fn=lambda samples: {{"x": torch.ones(4), "labels": [0] * 4}}):
    batch.pop("labels").pop()
    if not batch["x"].div_(2).max() > 1e-3:
        raise ValueError("smaller and smaller")
""")
    report = profile_script(path, seconds=0.3, try_advice=True)
    assert report.instant_s is not None and report.steps > 2


def test_an_end_that_others_make_an_error_of_their_own_is_the_end(script: Callable[[str], str]) -> None:
    path = script(f"""{DATASET}
try:
    for batch in DataLoader(Slow(), 4):
        batch.sum()
except BaseException as error:
    raise RuntimeError(f"graph execution error: {{error!r}}") from None
""")
    report = profile_script(path, seconds=0.3)
    assert report.instant_s is not None and report.is_cut_short


@pytest.mark.slow
def test_a_script_whose_batches_a_thread_takes_is_ended(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(f"""{DATASET}
import queue, threading
batches = queue.Queue(2)
def take():
    for batch in DataLoader(Slow(), 4):
        batches.put(batch)
threading.Thread(target=take, daemon=True).start()
while True:
    batches.get().sum()
""")
    before = threading.excepthook
    report = profile_script(path, seconds=0.3)
    assert report.is_cut_short and report.seconds < 45 and report.steps
    assert threading.excepthook is before and capfd.readouterr().err == ""


_SPAWNED = """
from collections import namedtuple
from torch.utils.data import DataLoader
Batch = namedtuple("Batch", "x")
def collate(samples):
    return Batch(samples)
if __name__ == "__main__":
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": collate}
    for batch in DataLoader(range(16), 8, **options):
        assert type(batch) is Batch
"""


def test_spawned_workers_send_classes_of_the_script(script: Callable[[str], str]) -> None:
    before = sys.modules["__main__"], sys.modules.get("__mp_main__")
    assert profile_script(script(_SPAWNED)).loader is not None
    assert (sys.modules["__main__"], sys.modules.get("__mp_main__")) == before


def test_a_script_may_go_to_another_folder(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "config").write_text("4")
    script("""
import os, sys
from pathlib import Path
from torch.utils.data import DataLoader
assert sys.argv == ["train.py", "runs"]
os.chdir(sys.argv[1])
for batch in DataLoader(range(400), int((Path(__file__).parent / "config").read_text())):
    batch.sum()
""")
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--seconds", "0.2", "--json", "report.json", "train.py", "runs"]) == 0
    assert Path.cwd() == tmp_path and (tmp_path / "report.json").exists()
    assert json.loads(Path("report.json").read_text())["loader"]["made_at"].startswith("train.py:")


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_runs_as_by_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "data.py").write_text(f"{DATASET}\nNAME = __name__\n")
    code = """
import sys
from torch.utils.data import DataLoader
from .data import NAME, Slow
assert __name__ == "__main__" and __package__ == "package" and NAME == "package.data"
assert sys.argv == [__file__, "--epochs", "3"]
if __name__ == "__main__":
    for batch in DataLoader(Slow(), 4):
        batch.sum()
"""
    (package / ("train.py" if "." in name else "__main__.py")).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "package", raising=False)
    before = list(sys.path)
    try:
        assert main(["profile", "--seconds", "0.3", "-m", name, "--epochs", "3"]) == 0
    finally:
        for one in [one for one in sys.modules if one.partition(".")[0] == "package"]:
            del sys.modules[one]
    assert sys.path == before
    assert "DataLoader over Slow" in capsys.readouterr().out


def test_a_module_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("no_such_module", "email.no_such", "email"):
        assert main(["profile", "-m", name]) == 2
        assert f"there is no module {name!r} to run" in capsys.readouterr().err


def test_a_report_is_not_made_for_a_folder_that_is_not_there(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("raise ValueError('it has run')")
    assert main(["profile", "--html", str(tmp_path / "none" / "r.html"), path]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_loaders_that_one_function_makes_and_another_uses_are_two(script: Callable[[str], str]) -> None:
    path = script(f"""{DATASET}
class Fast(Slow):
    def __getitem__(self, index):
        return index
def make(dataset):
    return DataLoader(dataset, 4)
def run(loader):
    for at, batch in enumerate(loader):
        if at == 20:
            break
train, judge = make(Slow()), make(Fast())
for epoch in range(1000):
    run(train)
    run(judge)
""")
    report = profile_script(path, seconds=0.3)  # of the one of which enough is known first
    assert report.loader is not None
    is_slow = "Slow" in report.loader.kind
    assert (report.step_s > 1e-3) == is_slow
    assert any("Slow" in line.function for line, _, _ in report.costs.lines) == is_slow
    assert report.costs.batches and report.costs.samples == 4 * report.costs.batches


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["fast, slow", "slow, fast"])
def test_of_loaders_that_take_turns_the_one_that_is_waited_for_is_looked_at(
    script: Callable[[str], str], order: str
) -> None:
    path = script(f"""{DATASET}
class Fast(Slow):
    length = 1_000_000
    def __getitem__(self, index):
        return index
fast, slow = DataLoader(Fast(), 4), DataLoader(Slow(), 4)
for one, other in zip({order}):
    one.sum(), other.sum()
""")
    report = profile_script(path, seconds=0.3)
    assert report.loader is not None and report.loader.kind == "DataLoader over Slow"
    assert report.stall_share > 0.8 and report.stall[0].name == "transform"


def test_a_forked_child_trains_to_its_end(script: Callable[[str], str], tmp_path: Path) -> None:
    script(f"""{DATASET}
import multiprocessing
def train():
    for batch in DataLoader(Slow(), 4):
        batch.sum()
if __name__ == "__main__":
    Slow.length = 400
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    Path(__file__).with_name("code").write_text(str(child.exitcode))
""")
    profile_script(tmp_path / "train.py", seconds=0.1)
    assert (tmp_path / "code").read_text() == "0"


def test_of_processes_that_train_together_one_is_to_be_profiled(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"one of 2 processes .*torchrun --nproc_per_node 1 --no-python"):
        profile_script(script("raise AssertionError"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert profile_script(script("pass")).verdict == "no loader was iterated"


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
