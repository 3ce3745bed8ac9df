"""Scripts that are profiled as they are: ``fastpipe profile SCRIPT``."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from torch.utils.data import DataLoader

import fastpipe
from fastpipe.errors import OptionError
from fastpipe.tools import loops, profiler
from fastpipe.tools import report as reports
from fastpipe.tools.folders import Scratch
from fastpipe.tools.profiler import ScriptError, profile_script

DATASET = """
import sys
from pathlib import Path
import numpy as np
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    length = 4000
    def __len__(self): return self.length
    def __getitem__(self, index):
        return sum(np.sin(np.arange(20_000.0)).sum() for _ in range(8))
"""
SLOW = f"""{DATASET}
def train(workers, context):
    loader = DataLoader(Slow(), batch_size=4, num_workers=workers, multiprocessing_context=context)
    for batch in loader: batch.sum()
if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    Path(sys.argv[0]).with_name("finished").touch()
"""
SHORT = SLOW.replace("4000", "40")  # samples: it ends before enough is known


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [["0"], ["1"], ["1", "spawn"]], ids="-".join)
def test_a_script_is_ended_when_enough_is_known(script: Any, arguments: list[str], tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path), DataLoader.__iter__, signal.getsignal(signal.SIGALRM)
    report = profile_script(script(SLOW), arguments, seconds=0.4)
    assert (sys.argv, sys.path, DataLoader.__iter__, signal.getsignal(signal.SIGALRM)) == before
    assert not (tmp_path / "finished").exists()
    assert report.is_loader_bound and report.stall[0].name == "transform"
    assert report.loader is not None and report.loader.workers == int(arguments[0])
    assert (report.loader.made_at, report.loader.used_at) == ("train.py:13 train", "train.py:14 train")
    assert report.instant_s is not None and report.seconds > 0
    assert "the script was ended after " in str(report)
    line = report.costs.lines[0][0]
    assert os.path.basename(line.file) == "train.py" and "Slow.__getitem__" in line.function


def test_the_functions_of_a_script_without_a_loader_are_reported(script: Any) -> None:
    path = script("""
import numpy as np
def sample():
    while True:
        np.sin(np.arange(20_000.0)).sum()
sample()
""")
    report = profile_script(path, limit_s=1.5)  # at which it is ended
    assert report.loader is None and report.outside
    name, seconds = report.outside[0]
    assert name.startswith("train.py sample") and 0 < seconds <= report.seconds
    assert "go into train.py sample, outside of any loop" in report.verdict
    assert "fastpipe.generate" in report.advice[0].what
    assert "outside of loops over loaders: train.py sample" in report.html()
    Path(path).with_name("helper.py").write_text("for number in range(40_000_000):\n    last = number\n")
    report = profile_script(script("import helper\n"))  # a slow import is the work of its module
    assert [name for name, _ in report.outside] == ["helper.py <module>"]


ELSEWHERE = """
import multiprocessing, os, signal, sys, time
def train(ignores_terminate):
    if ignores_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    while time.process_time() < float(sys.argv[1]): pass  # of a forked process it begins at 0
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=train, args=(len(sys.argv) > 2,))
    process.start()
    process.join()
"""


def test_a_script_that_trains_in_other_processes_is_reported(script: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_MOST", 0.05)  # also beside tests that take the cores
    report = profile_script(script(ELSEWHERE), ["1.2"])
    assert report.loader is None and report.is_elsewhere and report.elsewhere_s > 1
    assert "no loop was seen" in report.verdict and "torchrun" in report.advice[0].what
    assert "fastpipe.generate" not in str(report)


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [[], ["ignores SIGTERM"]], ids=["terminated", "killed"])
def test_processes_of_a_script_that_is_ended_end(
    script: Any, more: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_END_S", 0.3)
    report = profile_script(script(ELSEWHERE), ["600", *more], limit_s=1.5)
    assert report.is_cut_short
    with pytest.raises(ProcessLookupError):
        os.kill(int(capfd.readouterr().out.split()[0]), 0)


def test_a_loader_of_each_epoch_is_tried_and_its_batches_may_be_taken_apart(script: Any) -> None:
    path = script(f"""{DATASET}
import torch
Slow.length = 40
while True:
    loader = DataLoader(Slow(), 4, collate_fn=lambda samples: {{"x": torch.ones(4), "labels": [0] * 4}})
    for batch in loader:
        batch.pop("labels").pop()
        if not batch["x"].div_(2).max() > 1e-3:
            raise ValueError("smaller and smaller")
""")
    report = profile_script(path, seconds=0.4, try_advice=True)
    assert report.is_loader_bound and report.instant_s is not None and report.alone is not None
    assert report.loader is not None and report.loader.used_at == "train.py:16 <module>"


def test_a_script_that_goes_on_after_its_end_or_fails_by_it_is_ended(script: Any, tmp_path: Path) -> None:
    path = script(f"""{DATASET}
for epoch in range(5):
    try:
        for batch in DataLoader(Slow(), batch_size=4): batch.sum()
    except:
        with Path(__file__).with_name("ended").open("a") as file:
            print(epoch, file=file)
""")
    report = profile_script(path, seconds=0.2)
    assert (tmp_path / "ended").read_text().split() == ["0", "1", "2", "3", "4"]
    assert report.instant_s is not None and report.is_cut_short
    path = script(f"""{DATASET}
try:
    for batch in DataLoader(Slow(), 4): batch.sum()
except BaseException as error:
    raise RuntimeError(f"graph execution error: {{error!r}}") from None
""")
    report = profile_script(path, seconds=0.2)
    assert report.instant_s is not None and report.is_cut_short


@pytest.mark.slow
def test_a_script_that_goes_on_after_every_end_is_left(script: Any, tmp_path: Path) -> None:
    path = script(f"""{DATASET}
while True:
    try:
        for batch in DataLoader(Slow(), batch_size=4, num_workers=1): batch.sum()
    except BaseException:
        pass
""")
    code = f"""
import torch.utils.data
from fastpipe.tools import profiler
profiler._GRACE_S = profiler._AGAIN_S = 0.2
from fastpipe.cli import main
main(["profile", "--seconds", "0.3", "--limit", "3", "--json", "report.json", {path!r}])
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.path.dirname(fastpipe.__path__[0])}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "catches every exception" in ran.stderr, ran.stderr
    assert "train.py:14 <module>" in ran.stdout and json.loads((tmp_path / "report.json").read_text())
    assert not list(tmp_path.glob("fastpipe-profile-*"))


@pytest.mark.slow
def test_the_loop_that_trains_is_reported_instead_of_an_evaluation_before_it(script: Any) -> None:
    path = script(f"""{DATASET}
import time
import torch
with torch.no_grad():
    end = time.monotonic() + 1
    for batch in DataLoader(Slow(), batch_size=2):
        if time.monotonic() > end: break
for batch in DataLoader(Slow(), batch_size=4): batch.sum()
""")
    report = profile_script(path, seconds=0.2)
    assert report.loader is not None and report.loader.batch_size == 4 and report.instant_s is not None


@pytest.mark.parametrize(
    ("content", "grace_s", "reached"),
    [(SLOW, 1000.0, ["later", "done"]), (SLOW, 0.05, ["later"]), (SHORT, 0.05, ["later"])],
    ids=["in time", "too late", "too late after a short script"],
)
def test_a_measurement_may_take_a_little_longer_than_the_time_limit(
    script: Any, monkeypatch: MonkeyPatch, content: str, grace_s: float, reached: list[str]
) -> None:
    found: list[str] = []

    def measured(*_: Any) -> None:
        signal.raise_signal(signal.SIGALRM)  # the time is over
        found.append("later")
        while grace_s < 1:  # until that is over, too
            pass
        found.append("done")

    monkeypatch.setattr(profiler, "_GRACE_S", grace_s)
    monkeypatch.setattr("fastpipe.tools.diagnosis.alone", measured)
    report = profile_script(script(content), ["0"], seconds=0.3 if content is SLOW else 4.0, limit_s=1000.0)
    assert found == reached and report.steps > 2 and report.alone is None
    assert (report.instant_s is not None) == report.is_cut_short == (content is SLOW)


def test_a_loader_that_gives_no_batch_is_not_acquitted(script: Any) -> None:
    path = script("""
import threading
from torch.utils.data import DataLoader, Dataset
class Stuck(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): threading.Event().wait()
list(DataLoader(Stuck()))
""")
    report = profile_script(path, limit_s=1.0)
    assert report.verdict.startswith("no step was measured in ") and not report.is_loader_bound
    assert "DataLoader over Stuck gave no batch; if it is only slow, use a longer --limit" in str(report)
    assert "not the problem" not in str(report)


def test_a_step_that_outlasts_the_limit_is_reported_with_a_longer_one(script: Any) -> None:
    path = script("""
import threading
from torch.utils.data import DataLoader
for batch in DataLoader(range(8)):
    threading.Event().wait()
""")
    report = profile_script(path, limit_s=1.0)
    assert report.verdict.startswith("not known: only the first step was seen in 1.0 s") and not report.advice
    assert report.first_step_s is not None and min(report.first_step_s) > 0
    assert re.search(r"waited .* for its batch and worked for .* such as --limit \d+$", report.verdict)
    path = script("from torch.utils.data import DataLoader\nfor batch in DataLoader(range(1)): pass")
    report = profile_script(path)
    assert report.verdict.startswith("not known: only the first step was seen")
    assert report.verdict.endswith(": its loop needs more batches")


def test_few_steps_are_reported_with_a_longer_limit(script: Any) -> None:
    path = script("""
import threading
from torch.utils.data import DataLoader
for number, batch in enumerate(DataLoader(range(8))):
    threading.Event().wait(0.1 if number < 4 else None)
""")
    report = profile_script(path, limit_s=2.0)
    assert (
        0 < report.steps < 5
        and report.instant_s is None
        and "your loader is not the problem" in report.verdict
    )
    assert "ended before a step with data ready was measured: use a longer --limit, such as --limit " in str(
        report
    )


def test_a_short_script_is_reported_and_its_loader_measured_afterwards(
    script: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    clock = itertools.count()
    alone = fastpipe.tools.diagnosis.alone
    monkeypatch.setattr(profiler, "perf_counter", clock.__next__)
    monkeypatch.setattr("fastpipe.tools.diagnosis.alone", lambda *some: (next(clock), alone(*some))[1])
    report = profile_script(script(SHORT.replace("range(8)", "range(80)")), ["0"], seconds=4)
    assert (tmp_path / "finished").exists()
    assert report.steps > 0 and report.instant_s is None and report.wait_s > 0
    assert report.costs.stages["transform"].wall > 0
    assert report.alone is not None and report.seconds == 1, "which is none of the script's time"
    assert not [name for name, _ in report.outside if "__getitem__" in name], "nor of its own work"
    assert "the script was ended" not in str(report)
    assert "ended before a step with data ready was measured" in str(report)


def test_a_loader_that_cannot_be_measured_afterwards_is_logged(script: Any, caplog: Any) -> None:
    gone = SHORT.replace("return sum(", "open(FILE).close()\n        return sum(")
    gone = gone.replace("import sys\n", "import sys\nFILE = __file__ + '.data'\n", 1)
    path = script(gone.replace("    Path(sys.argv[0])", "    Path(FILE).unlink()\n    Path(sys.argv[0])"))
    Path(f"{path}.data").touch()
    report = profile_script(path, ["0"], seconds=4)
    assert report.steps > 0 and report.alone is None and not report.advice
    assert "the loader alone is not measured: FileNotFoundError" in caplog.text


def test_a_short_script_that_exits_is_measured_unless_it_failed(script: Any) -> None:
    report = profile_script(script(f"{SHORT}\n    sys.exit()\n"), ["0"], seconds=4)
    assert report.steps > 0 and report.alone is not None
    with pytest.raises(ScriptError, match="SystemExit: 3") as failed:
        profile_script(script(f"{SHORT}\n    sys.exit(3)\n"), ["0"], seconds=4)
    assert failed.value.report.steps > 0 and failed.value.report.alone is None


def test_workers_of_a_script_that_fails_end_before_garbage_is_collected(
    script: Any, command: Any, monkeypatch: MonkeyPatch
) -> None:
    """The collector frees a loader's queues first, and each worker then ends after five seconds."""
    path = script(f"""{DATASET}
class Fails(Slow):
    def __getitem__(self, index): return 1 // (index != 500)
for batch in DataLoader(Fails(), 4, num_workers=2): pass
""")
    left: list[Any] = []
    collect = gc.collect
    monkeypatch.setattr(
        profiler.gc, "collect", lambda: (left.extend(multiprocessing.active_children()), collect())
    )
    gc.disable()
    try:
        code, output, errors = command("profile", path)
    finally:
        gc.enable()
    assert code == 1 and "ZeroDivisionError" in errors and "no advice: the script ended before" in output
    assert not left


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("def main():\n    open('nowhere/x')\nmain()", FileNotFoundError, "No such file"),
        ("from fastpipe import Decode\nDecode(backend='none')", OptionError, "fastpipe.errors.OptionError: "),
        ("raise ValueError('data')", ValueError, "ValueError: data"),
        ("this is no Python", SyntaxError, "SyntaxError: invalid syntax"),
    ],
)
def test_errors_of_a_script_are_raised_and_shown_as_by_python(
    script: Any, command: Any, content: str, error: type[Exception], message: str
) -> None:
    path = script(content)
    with pytest.raises(error):
        profile_script(path)
    code, output, errors = command("profile", path)
    assert (code, output) == (1, "")
    assert f'File "{path}", line ' in errors.splitlines()[0 if error is SyntaxError else 1]
    assert message in errors and "runpy" not in errors and "profile_cli" not in errors


@pytest.mark.slow
def test_a_script_whose_batches_a_thread_takes_is_ended(script: Any, capfd: Any) -> None:
    path = script(f"""{DATASET}
import queue, threading
batches = queue.Queue(2)
def take():
    for batch in DataLoader(Slow(), 4): batches.put(batch)
threading.Thread(target=take, daemon=True).start()
while True: batches.get().sum()
""")
    before = threading.excepthook
    report = profile_script(path, seconds=0.3)
    assert report.is_cut_short and report.seconds < 45 and report.steps
    assert threading.excepthook is before and capfd.readouterr().err == ""


@pytest.mark.slow
def test_spawned_workers_send_classes_of_the_script(script: Any) -> None:
    path = script("""
from collections import namedtuple
from torch.utils.data import DataLoader
Batch = namedtuple("Batch", "x")
def collate(samples): return Batch(samples)
if __name__ == "__main__":
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": collate}
    for batch in DataLoader(range(16), 8, **options):
        assert type(batch) is Batch
""")
    before = sys.modules["__main__"], sys.modules.get("__mp_main__")
    assert profile_script(path).loader is not None
    assert (sys.modules["__main__"], sys.modules.get("__mp_main__")) == before


def test_the_command_writes_its_files_also_where_the_script_changes_the_folder(
    script: Any, command: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "beside_it.py").write_text("SIZE = 4")
    script(f"""{DATASET}
import os
from beside_it import SIZE
assert sys.argv == ["train.py", "runs", "--b"]
os.chdir(sys.argv[1])
for batch in DataLoader(Slow(), SIZE * Path(__file__).is_absolute()): batch.sum()
""")
    monkeypatch.chdir(tmp_path)
    files = [Path(name) for name in ("r.json", "r.html", "t.json")]
    options = [f"--{name}={path}" for name, path in zip(("json", "html", "trace"), files, strict=True)]
    try:
        code, output, errors = command("profile", "--seconds", "0.3", *options, "train.py", "runs", "--b")
    finally:
        sys.modules.pop("beside_it", None)
    assert code == 0 and Path.cwd() == tmp_path
    assert output.startswith("stall ") and "transform" in output and "wrote" in errors
    report = json.loads(files[0].read_text())
    assert report["verdict"] in output and report["loader"]["made_at"].startswith("train.py:")
    assert files[1].read_text().startswith("<!doctype html>")
    assert json.loads(files[2].read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_modules_run_as_by_python(name: str, tmp_path: Path, monkeypatch: MonkeyPatch, command: Any) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "data.py").write_text(f"{DATASET}\nNAME = __name__\n")
    (package / ("train.py" if "." in name else "__main__.py")).write_text("""
import sys
from torch.utils.data import DataLoader
from .data import NAME, Slow
assert __name__ == "__main__" and __package__ == "package" and NAME == "package.data"
assert sys.argv == [__file__, "--epochs", "3"]
if __name__ == "__main__":
    for batch in DataLoader(Slow(), 4): batch.sum()
""")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        code, output, _ = command("profile", "--seconds", "0.2", "-m", name, "--epochs", "3")
    finally:
        for one in [one for one in sys.modules if one.partition(".")[0] == "package"]:
            del sys.modules[one]
    assert code == 0 and sys.path == before and "DataLoader over Slow" in output


def test_wrong_arguments_are_refused_before_the_script_runs(
    script: Any, command: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    path = script("raise AssertionError('it has run')")
    modules = ("no_such_module", "email.no_such", "email")
    for arguments, message in (
        ((tmp_path / "none.py",), f"there is no script '{tmp_path}/none.py'"),
        ((tmp_path,), f"'{tmp_path}' is a folder: name a Python file"),
        (("--html", tmp_path / "none" / "r.html", path), "there is no folder"),
        *((("-m", name), f"there is no module {name!r} to run") for name in modules),
    ):
        code, _, errors = command("profile", *arguments)
        assert code == 2 and errors.startswith("fastpipe profile: ") and message in errors
    with pytest.raises(OptionError, match="profile takes a loader, got the path 'train'"):
        fastpipe.profile("train", print)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"one of 2 processes .*torchrun --nproc_per_node 1 --no-python"):
        profile_script(path)
    with pytest.raises(OptionError, match="ended before it iterated a loader: usage"):
        monkeypatch.setenv("WORLD_SIZE", "1")
        profile_script(script("import sys; sys.exit('usage: train FOLDER')"))
    assert profile_script(script("pass")).verdict == "no loader was iterated"


@pytest.mark.few(1)
@pytest.mark.parametrize(("slow", "step_s"), [("First", 0.041), ("Second", 0.001)])
def test_loaders_that_one_function_makes_and_another_uses_are_two(
    script: Any, monkeypatch: MonkeyPatch, slow: str, step_s: float
) -> None:
    """Time passes only where the script says so: 1 ms in a step, and 10 ms in a sample of one of the loaders."""
    now = itertools.count(1_000_000, 1)
    clock = type("Clock", (), {"passed": 0, "__call__": lambda self: next(now) + self.passed})()
    monkeypatch.setattr(loops, "perf_counter_ns", clock)
    path = script(f"""{DATASET}
from fastpipe.tools import loops
class First(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        loops.perf_counter_ns.passed += 10_000_000 * (type(self).__name__ == {slow!r})
        return index
class Second(First): pass
def make(dataset): return DataLoader(dataset, 4)
def run(loader):
    for at, batch in enumerate(loader):
        loops.perf_counter_ns.passed += 1_000_000
        if at == 5: break
first, second = make(First()), make(Second())
for epoch in range(1000): run(first), run(second)
""")
    report = profile_script(path, seconds=0.3)
    assert report.loader is not None and report.loader.kind == "DataLoader over First"
    assert report.step_s == pytest.approx(step_s, rel=1e-2), "none of the other's steps is among them"
    assert report.costs.batches and report.costs.samples == 4 * report.costs.batches


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["fast, slow", "slow, fast"])
def test_the_loader_that_is_waited_for_is_reported_where_two_take_turns(script: Any, order: str) -> None:
    path = script(f"""{DATASET}
class Fast(Slow):
    length = 1_000_000
    def __getitem__(self, index): return index
fast, slow = DataLoader(Fast(), 4), DataLoader(Slow(), 4)
for one, other in zip({order}):
    one.sum(), other.sum()
""")
    report = profile_script(path, seconds=0.3)
    assert report.loader is not None and report.loader.kind == "DataLoader over Slow"
    assert report.is_loader_bound and report.stall[0].name == "transform"


def test_a_forked_child_trains_to_its_end(script: Any, tmp_path: Path) -> None:
    path = script(f"""{DATASET}
import multiprocessing
def train():
    for batch in DataLoader(Slow(), 4): batch.sum()
if __name__ == "__main__":
    Slow.length = 100
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    Path(__file__).with_name("code").write_text(str(child.exitcode))
""")
    profile_script(path, seconds=0.1)
    assert (tmp_path / "code").read_text() == "0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux or macOS, where folders can be locked")
def test_a_folder_that_a_killed_profile_left_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: MonkeyPatch, forked: Any
) -> None:
    def make_old(folder: Any) -> None:
        before = time.time() - 3600
        os.utime(Path(folder) / ".lock", (before, before))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader, writer = os.pipe()

    def work() -> None:
        scratch = Scratch()
        (Path(scratch.path) / "inner").mkdir()
        make_old(scratch.path)
        os.write(writer, scratch.path.encode() + b"\n")
        signal.pause()

    pid = forked(work)
    left = Path(os.read(reader, 4096).decode().strip())
    prefix, elsewhere = "fastpipe-profile-", tmp_path / "elsewhere"
    (tmp_path / f"{prefix}is-a-file").touch()
    for path in (elsewhere, tmp_path / f"{prefix}young"):
        path.mkdir()
        (path / ".lock").touch()
    (tmp_path / f"{prefix}without").mkdir()
    (tmp_path / f"{prefix}link").symlink_to(elsewhere)
    make_old(elsewhere)
    kept = {path.name for path in tmp_path.iterdir()} - {left.name}
    scratches = [Scratch()]
    make_old(scratches[0].path)
    assert left.is_dir(), "its process is alive"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    scratches.append(Scratch())
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *(Path(one.path).name for one in scratches)}
    for scratch in scratches:
        scratch.close()
        scratch.close()
    os.close(reader), os.close(writer)
    assert {path.name for path in tmp_path.iterdir()} == kept


COUNTED = f"""{DATASET}
Slow.length = 240
seen = []
for epoch in range(50):
    seen.append(0)
    for batch in DataLoader(Slow(), batch_size=4):
        seen[-1] += 1
        if seen[-1] > 60:
            raise ValueError("more batches than the loader has")
"""


def test_an_epoch_of_a_script_has_as_many_batches_as_its_loader(script: Any) -> None:
    report = profile_script(script(COUNTED), seconds=0.4, try_advice=True)
    assert report.instant_s is not None and report.alone is not None and not report.ended_by


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("sys.exit('no more')", 1, "no more"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_what_was_measured_is_reported_when_a_script_fails(
    script: Any, command: Any, end: str, code: int, said: str
) -> None:
    path = script(f"{SHORT}\n    {end}\n")
    found, output, errors = command("profile", "--seconds", "4", path, "0")
    assert found == code and said in output + errors
    assert output.startswith("stall ") and f"the script ended with {said.split(':')[0]}" in output.replace(
        "SystemExit: no more", "no more"
    )


def test_an_option_after_the_script_is_asked_about(script: Any, command: Any) -> None:
    code, _, errors = command("profile", script("print(1)"), "--try")
    assert code == 0 and "did you mean: fastpipe profile --try" in errors
    code, _, errors = command("profile", script("import sys\nassert '--limit' in sys.argv"), "--limit")
    assert code == 0 and "did you mean" not in errors, "the script has such an option itself"
