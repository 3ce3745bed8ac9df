"""The case ``scaling``: its figures, and the whole command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.run import main as measure
from fastpipe.bench.report import changes, markdown, scaling_lines
from fastpipe.bench.results import load
from fastpipe.bench.runner import Sample
from fastpipe.bench.scaling import scaling_of
from fastpipe.cli import main

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"


def rated(*rates: float) -> list[Sample]:
    return [Sample(number, 1000, 1000 / rate) for number, rate in enumerate(rates)]


def test_ratios_are_within_a_round_and_to_the_best_of_all_loaders() -> None:
    samples = {
        "replaced-1": rated(100, 50), "threads-1": rated(300, 150), "floor-1": rated(400, 200),
        "replaced-4": rated(80, 40), "threads-4": rated(900, 450), "floor-4": rated(1600, 800),
    }  # fmt: skip
    one, four = scaling_of((1, 4), samples)["rows"]
    assert (one["threads"], four["threads"]) == (1, 4)
    assert four["times_best"] == {"median": 9.0, "low": 9.0, "high": 9.0}
    assert four["linear"]["median"] == 0.75 and one["linear"]["median"] == 1
    assert four["floor_share"]["median"] == 0.5625 and four["floor_linear"]["median"] == 1
    del samples["floor-4"]
    (line,) = scaling_lines({"scaling": {"rows": scaling_of((1, 4), samples)["rows"][1:]}})
    assert line == (
        "4 threads: 9.00× (9.00 to 9.00) the best replaced loader of any number of workers, 75% of linear"
    )


def test_a_quick_run_gives_table_json_page_and_picture(tree: Path, tmp_path: Path) -> None:
    json_file, picture, page = (tmp_path / f"result.{end}" for end in ("json", "png", "html"))
    command = [sys.executable, "-m", "fastpipe.bench", "scaling", "--quick", "--data", str(tree)]
    command += ["--batch-size", "2", "--threads", "2,1"]
    command += ["--json", str(json_file), "--plot", str(picture), "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FastImageFolder(threads=2) + FastLoader" in done.stdout and "of linear" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG" and "threads=2" in page.read_text()
    result = load(json_file)
    assert result["main"] == "threads-2" and result["best"] == {"1": "replaced-1", "2": "replaced-2"}
    assert [row["threads"] for row in result["scaling"]["rows"]] == [1, 2]
    assert {row["group"] for row in result["rows"]} == {"replaced", "fastpipe"}
    assert "--threads 1,2" in markdown(result)
    assert str(tree) not in json_file.read_text()


@pytest.mark.parametrize(
    ("job", "replaced", "ours", "unit"),
    [
        ("hdf5", "row by row + DataLoader", "FastHDF5Dataset(threads=2) + FastLoader, windows", "samples"),
        pytest.param(
            "volume", "zarr-python + DataLoader", 'FastPatchDataset(threads=2) + FastLoader', "patches",
            marks=pytest.mark.slow,  # workers that import zarr-python
        ),
    ],
)  # fmt: skip
def test_rows_and_patches_by_the_number_of_threads(
    job: str, replaced: str, ours: str, unit: str, tmp_path: Path
) -> None:
    pytest.importorskip("h5py" if job == "hdf5" else "zarr")
    json_file, picture = tmp_path / "result.json", tmp_path / "result.png"
    command = [sys.executable, str(RUN), "scaling", job, "--quick", "--rounds", "1"]
    command += ["--threads", "1,2", "--folder", str(tmp_path / "made")]
    command += ["--json", str(json_file), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ours in done.stdout and "bit for bit" in done.stderr and picture.read_bytes()[:4] == b"\x89PNG"
    result = load(json_file)
    assert result["command"].startswith(f"python benchmarks/run.py scaling {job} --threads 1,2")
    assert [row["threads"] for row in result["scaling"]["rows"]] == [1, 2] and result["floor_share"] is None
    rows = {row["key"]: row for row in result["rows"]}
    assert set(rows) == {"replaced-1", "threads-1", "replaced-2", "threads-2"}
    assert rows["replaced-2"]["label"] == f"{replaced}(num_workers=2)"
    assert all(row[f"{unit}_per_s"]["median"] > 0 for row in rows.values())
    assert str(tmp_path) not in json_file.read_text()
    images = json.loads(json_file.read_text().replace(f'"{unit}"', '"images"'))
    assert len(changes(result, result)) == 2 and changes(images, result) == []


def test_options_of_another_job_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "hdf5"]) == 2
    assert "python benchmarks/run.py scaling hdf5" in capsys.readouterr().err
    assert measure(["scaling", "hdf5", "--data", str(tmp_path)]) == 2
    assert "leave it out with 'hdf5'" in capsys.readouterr().err
    assert measure(["scaling", "--folder", str(tmp_path)]) == 2
    assert "--folder is for 'hdf5' and 'volume'" in capsys.readouterr().err
