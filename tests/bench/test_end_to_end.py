"""The whole command on a small folder, as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import psutil
import pytest

from benchmarks.studies.first import first_batch_seconds
from fastpipe.bench.images import LoaderSpec
from fastpipe.bench.results import load
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.synthetic import photo_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("photos"), classes=2, per_class=8, sizes=(120, 160))


def test_a_quick_run_gives_table_json_and_picture(tree: Path, tmp_path: Path) -> None:
    json_file, picture = tmp_path / "result.json", tmp_path / "result.png"
    command = [sys.executable, "-m", "fastpipe.bench", "images", "--quick", "--data", str(tree)]
    command += ["--batch-size", "4", "--json", str(json_file), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check: outputs agree with torchvision's on 16 photos" in done.stderr
    assert "FastImageFolder + FastLoader" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    result = load(json_file)
    assert result["verdict"] in " ".join(done.stdout.split())
    assert {len(row["samples"]) for row in result["rows"]} == {2}
    assert {row["group"] for row in result["rows"]} == {"replaced", "stock", "fastpipe"}
    assert result["check"]["ok"] and result["check"]["photos"] == 16
    assert set(result["stages"]["seconds"]) >= {"read", "decode", "transform", "wait"}
    text = json_file.read_text()
    assert str(tree) not in text and str(tmp_path) not in text and str(Path.home()) not in text


@pytest.mark.slow
@pytest.mark.parametrize("group", ["replaced", pytest.param("fastpipe", marks=pytest.mark.slow)])
def test_start_up_is_measured_in_new_processes(
    tree: Path, group: Literal["replaced", "fastpipe"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = first_batch_seconds(LoaderSpec("key", "label", group), tree, batch_size=4, warm_runs=1)
    assert first["cold_s"] > 0
    assert first["warm_raw_s"] == [first["warm_s"]]
    assert not list(tmp_path.iterdir())  # a user's cache folder is neither used nor written


@pytest.mark.slow
def test_start_up_of_a_loader_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match="ended with code 1: FileNotFoundError"):
        first_batch_seconds(LoaderSpec("key", "label", "replaced"), tmp_path, batch_size=4)


@pytest.mark.slow  # all loaders are warmed up before there is anything to interrupt
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a process group: run on Linux or macOS")
def test_ctrl_c_leaves_no_process(tree: Path) -> None:
    command = [sys.executable, "-m", "fastpipe.bench", "images", "--quick", "--rounds", "1000"]
    command += ["--data", str(tree), "--batch-size", "4"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stderr is not None
        lines = []
        for line in child.stderr:
            lines.append(line)
            # Python loses an interrupt that comes while it forks; by now all workers are there.
            if line.startswith("round 2: "):
                break
        family = psutil.Process(child.pid).children(recursive=True)
        assert family, "".join(lines)  # the workers of the replaced loader
        os.killpg(child.pid, signal.SIGINT)
        rest = child.stderr.read()
        assert child.wait(timeout=60) == 130, rest
    assert "interrupted" in rest
    assert "Traceback" not in rest
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
