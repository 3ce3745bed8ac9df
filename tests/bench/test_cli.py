"""``fastpipe bench``: help, cases, bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastpipe.bench import cli
from fastpipe.bench.results import save
from fastpipe.bench.synthetic import photo_tree
from fastpipe.cli import main


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "images", "--data", str(tmp_path / "none")]) == 2
    assert "is not a folder" in one_line(capsys)


def test_a_folder_without_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"")
    assert main(["bench", "images", "--data", str(tmp_path)]) == 2
    assert "has no class folders" in one_line(capsys)


def test_a_class_without_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo_tree(tmp_path, classes=1, per_class=1, sizes=(8, 8))
    (tmp_path / "empty").mkdir()
    assert main(["bench", "images", "--data", str(tmp_path)]) == 2
    assert "empty" in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "images", "--rounds", "0"],
        ["bench", "images", "--batch-size", "many"],
        ["bench", "images", "--rounds", "3", "--seconds", "60"],
        ["bench", "sounds"],
        ["bench", "table"],
    ],
)
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: fastpipe" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["s3", "gpu", "images", "hdf5"])
def test_what_is_not_in_the_package_is_named_with_the_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", case, "--peers", "--quick"]) == 2
    assert f"in a clone of fastpipe's repository: python benchmarks/run.py {case}" in one_line(capsys)


def test_without_a_case_it_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "sounds"]) == 2
    assert "--only: must be some of keras_multimodal, hdf5_mel," in one_line(capsys)


@pytest.mark.parametrize("option", ["--json", "--html", "--plot"])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "new", "is not a folder that you may write to"),
    ):
        for case in ("images", "all"):
            assert main(["bench", case, option, str(path)]) == 2
            assert f"{option}: {str(path)!r}" in (line := one_line(capsys)) and words in line


def test_what_is_compared_with_is_read_before_anything_is_measured(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(result, tmp_path / "old.json")
    assert main(["bench", "--compare", str(tmp_path / "old.json")]) == 2
    assert "is of the case 'images', and this is 'all'" in one_line(capsys)
    assert main(["bench", "images", "--compare", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in one_line(capsys)


def test_table(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(result, tmp_path / "result.json")
    assert main(["bench", "table", str(tmp_path / "result.json")]) == 0
    assert capsys.readouterr().out.startswith("| loader |")
    assert main(["bench", "table", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in one_line(capsys)
    assert main(["bench", "table", "--short", str(tmp_path / "result.json")]) == 2
    assert "leave --short out" in one_line(capsys)


def test_an_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.CASES["images"], "run", interrupted)
    assert main(["bench", "images"]) == 130
    assert "interrupted" in one_line(capsys)


@pytest.mark.parametrize("case", ["all", "images", "scaling", "hdf5"])
def test_help_loads_no_framework(case: str) -> None:
    code = (
        "import sys, contextlib\n"
        "from fastpipe.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main(['bench', {case!r}, '--help'])\n"
        "assert not {'torch', 'torchvision', 'h5py', 'matplotlib', 'tensorflow'} & set(sys.modules), 'loaded too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout
