"""``fastpipe bench`` and ``benchmarks/run.py``: options, help, bad input, progress."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_results import Run
from rich.console import Console
from scripts import ran

from fastpipe.bench import cli
from fastpipe.bench.results import save
from fastpipe.bench.synthetic import photo_tree
from fastpipe.cli import main
from fastpipe.console import Progress

Command = Callable[..., Run]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> Path:
    """Folders and files to name, in the folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    photo_tree(tmp_path / "empty", classes=1, per_class=1, sizes=(8, 8))
    for name in ("plain", "empty/class_1"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain" / "photo.jpg").write_bytes(b"")
    save(result, tmp_path / "old.json")
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), [
    ("images --data none", "is not a folder"),
    ("augment --data none", "is not a folder"),
    ("generate --quick --folder none", "is not a folder"),
    ("images --data plain", "has no class folders"),
    ("images --data empty", "class_1"),
    ("hdf5 --data x.h5", "--data and --key go together"),
    ("hdf5 --data none.h5 --key x", "cannot be read as HDF5"),
    ("--only sounds", "--only: must be some of keras_multimodal, hdf5_mel,"),  # of the case "all"
    *(
        (f"{case} --peers --quick", f"in a clone of fastpipe's repository: python benchmarks/run.py {case}")
        for case in ("s3", "gpu", "images", "hdf5")
    ),
    ("scaling hdf5", "python benchmarks/run.py scaling hdf5"),
    *(
        (f"{case} {option} {path}", f"{option}: '{path}' {words}")
        for case in ("images", "all")
        for option in ("--json", "--html", "--plot")
        for path, words in (("plain", "is a folder"), ("old.json/new", "cannot be written"))
    ),
    ("--compare old.json", "is of the case 'images', and this is 'all'"),
    ("images --compare none.json", "cannot be read"),
    ("table none.json", "cannot be read"),
    ("table --short old.json", "--short needs results"),
])  # fmt: skip
def test_bad_input_is_one_line_before_anything_is_measured(
    arguments: str, message: str, folder: Path, run: Command
) -> None:
    before = sorted(folder.rglob("*"))
    found = run(arguments.split(), files=False)
    assert found.code == 2 and found.printed == ""
    assert message in found.said and len(found.said.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "message"), [
    ("scaling hdf5 --data plain", "leave it out with 'hdf5'"),
    ("scaling --folder plain", "--folder is for 'hdf5' and 'volume'"),
])  # fmt: skip
def test_options_of_another_job_are_refused(arguments: str, message: str, folder: Path, run: Command) -> None:
    found = run(arguments.split(), True, files=False)
    assert found.code == 2 and message in found.said


@pytest.mark.parametrize("arguments", [
    "images --rounds 0", "images --batch-size many", "images --rounds 3 --seconds 60", "sounds", "table",
    "augment --recipe strange", "generate --section strange",
])  # fmt: skip
def test_wrong_options_show_the_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments.split()])
    assert stopped.value.code == 2 and "usage: fastpipe" in capsys.readouterr().err


@pytest.mark.parametrize(("case", "module", "words"), [
    ("generate", "h5py", ".[generation]"), ("volume", "zarr", "pip install"),
    ("tf", "tensorflow", "pip install '.[tf]'"),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_with_the_remedy(
    case: str, module: str, words: str, monkeypatch: pytest.MonkeyPatch, run: Command
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    found = run([case, "--quick"], files=False)
    assert found.code == 2 and words in found.said and len(found.said.splitlines()) == 1


def test_a_table_of_a_result_is_printed(folder: Path, run: Command) -> None:
    found = run(["table", "old.json"], files=False)
    assert found.code == 0 and found.printed.startswith("| loader |")


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.CASES["images"], "run", interrupted)
    found = run(["images"], files=False)
    assert found.code == 130 and "interrupted" in found.said


_HELP = """
import contextlib, io, sys
heavy = {
    "torch", "torchvision", "h5py", "matplotlib", "tensorflow", "keras", "zarr", "tensorstore", "joblib",
    "datasets", "cloudpickle", "kornia", "albumentations", "torchaudio",
}
import fastpipe.bench.samples
assert not {"rich", "h5py", "fastpipe.generation"} & set(sys.modules), "workers load too much"
from fastpipe.bench import cli
from fastpipe.cli import main
sys.path.insert(0, "benchmarks")
import paths
from benchmarks.run import CASES, main as measure
for run, cases in ((main, cli.CASES), (measure, CASES)):
    for case in cases:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:
            run([*(["bench"] if run is main else []), case, "--help"])
        assert "--compare" in text.getvalue(), case
        assert not heavy & set(sys.modules), (case, heavy & set(sys.modules))
print("done")
"""


def test_help_loads_no_framework() -> None:
    done = ran("-c", _HELP, cwd=Path(__file__).resolve().parents[2])
    assert done.stdout == "done\n", done.stderr


_ODD = "[red]:x:.jpg"  # rich would make a colour and a picture of it


def test_steps_are_lines_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    with Progress(Console(file=text, force_terminal=False, width=80)) as progress:
        progress.now("comparing")
        progress.step(f"step {_ODD}")
        progress.stop()
        progress.done(f"done {_ODD}")
    assert text.getvalue() == f"step {_ODD}\ndone {_ODD}\n"


@pytest.mark.parametrize("method", ["now", "step"])
def test_a_line_moves_in_a_terminal_until_it_is_stopped(method: str) -> None:
    text = io.StringIO()
    with Progress(Console(file=text, force_terminal=True, width=80)) as progress:
        assert text.getvalue() == ""  # nothing flashes where nothing takes long
        getattr(progress, method)(f"comparing {_ODD}")
        progress.stop()
        assert f"comparing {_ODD}" in text.getvalue()
        before = len(text.getvalue())
        progress.stop()
        assert len(text.getvalue()) == before
        getattr(progress, method)("again")
    assert "again" in text.getvalue()[before:]
