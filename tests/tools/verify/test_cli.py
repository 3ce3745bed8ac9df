"""``fastpipe verify`` as a user runs it: exit codes, output, bad input, Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastpipe.cli import main

# Sends Ctrl-C to its own process when it is called for the third time.
INTERRUPTS = """
import os, signal
calls = []
def transform(image):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return image
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that says why the command did not even begin."""
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("fastpipe verify: ")
    return line


def test_equal(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "outcome.json"
    assert main(["verify", str(tree), "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].endswith("to the last bit, for 6 images.")
    assert captured.err == f"wrote {file}\n"
    written = json.loads(file.read_text())
    assert written["equal"] is True
    assert written["images"] == {"total": 6, "chosen": 6, "compared": 6, "differing": 0}
    assert "CenterCrop" in written["plan"] and "torchvision" in written["versions"]


def test_different(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil_decoder: Callable[[Path, int], None]
) -> None:
    spoil_decoder(tree / "class_001" / "0002.jpg", 3)
    file = tmp_path / "outcome.json"
    assert main(["verify", str(tree), "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert f"  {Path('class_001', '0002.jpg')} (sample 5): 3 of 255" in out
    assert out.splitlines()[-1] == "Different: 1 of 6 images differs by up to 3 of 255."
    written = json.loads(file.read_text())
    assert written["equal"] is False
    assert [(one["index"], one["largest"]) for one in written["worst"]] == [(5, 3)]


def test_an_unreadable_file_is_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "class_000" / "0001.jpg").write_bytes(b"no image")
    assert main(["verify", str(tree), "--transform", "none"]) == 0
    captured = capsys.readouterr()
    assert "1 file that neither can read" in captured.out
    assert f"  {Path('class_000', '0001.jpg')} (sample 1): UnidentifiedImageError: cannot" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(("value", "compared"), [("4", "4 of 6"), ("all", "6"), ("0", "6"), ("99", "6")])
def test_how_many(tree: Path, capsys: pytest.CaptureFixture[str], value: str, compared: str) -> None:
    assert main(["verify", str(tree), "--images", value]) == 0
    assert f"{compared} in 2 classes\n" in capsys.readouterr().out


def test_folders_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a folder; give one with a sub-folder per class" in refused(capsys, str(tmp_path / "none"))
    assert "has no class folders" in refused(capsys, str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert "no valid file for the classes empty" in refused(capsys, str(tmp_path))
    (tmp_path / "empty" / "a.jpg").write_bytes(b"")
    assert "none of the 1 images can be read" in refused(capsys, str(tmp_path))


def test_a_transform_that_cannot_be_used(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be eval, train, none" in refused(capsys, str(tree), "--transform", "evaluation")


def test_a_transform_of_the_user(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def transform(image):\n    return image.rotate(90)\n")
    command = [sys.executable, "-m", "fastpipe", "verify", str(tree), "--transform", "mine:transform"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ntransform               mine:transform: <function transform" in done.stdout


@pytest.mark.parametrize(
    "options", [["--images", "few"], ["--images", "-3"], ["--seed", "-1"], ["--seed", "x"], ["--json"]]
)
def test_wrong_options(tree: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", str(tree), *options])
    assert stopped.value.code == 2
    assert "usage: fastpipe verify" in capsys.readouterr().err


def test_ctrl_c(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "interrupts.py").write_text(INTERRUPTS)
    command = [sys.executable, "-m", "fastpipe", "verify", str(tree), "--transform", "interrupts:transform"]
    command += ["--json", str(tmp_path / "outcome.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fastpipe verify: interrupted\n")
    assert not (tmp_path / "outcome.json").exists()
