"""The case ``gpu``: its time, its check, its rows, and the whole command on the processor with little data."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_results import checked_result, ran, rated

from benchmarks.gpu import check
from benchmarks.gpu.case import Budget
from benchmarks.gpu.check import PixelCheck, apart, check_pixels
from benchmarks.gpu.sections import PATCHED, SECTIONS, loader_specs
from benchmarks.gpu.training import FULL, TINY, figures_of
from benchmarks.lines import training_lines
from benchmarks.run import main
from fastpipe.bench.data import Photos, scan
from fastpipe.bench.images import LoaderSpec
from fastpipe.bench.runner import ContenderError

pytest.importorskip("tensorstore", reason="needs tensorstore: pip install '.[volume]'")


@pytest.fixture(scope="module")
def photos(tree: Path) -> Photos:
    return scan(tree, "six small ones")


def spec_of(key: str, device: str = "cpu") -> LoaderSpec:
    section = key.split("-")[0]
    return next(spec for spec in loader_specs(section, device, 2, "uint8") if spec.key == key)


@pytest.mark.parametrize(
    ("version", "words"), [("13.2", "torch finds no CUDA device"), (None, "this torch is built without CUDA")]
)
def test_without_a_gpu_the_command_says_what_to_do(
    version: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    assert main(["gpu"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and not list(tmp_path.iterdir())
    assert words in error and "run it on a machine with one, or with --device cpu" in error


def test_pixels_of_the_processor_are_pillows(photos: Photos) -> None:
    found = check_pixels([spec_of("decode-cpu")], photos, 4, 3)
    assert found.ok and found.photos == 4
    nothing = {"label": "FastImageFolder + FastLoader", "mean": 0.0, "largest": 0.0}
    assert found.apart["decode-cpu"] == nothing
    assert "0 of 255 on average, 0 at most; labels are the same" in found.sentence()
    elsewhere = check_pixels([spec_of("decode-nvimgcodec")], photos, 2, 2)
    assert elsewhere.problems == {"decode-nvimgcodec": "images are not decoded on the GPU"}


def test_a_crash_of_a_decoder_is_a_problem_of_its_own() -> None:
    assert apart(len, "four") == 4
    with pytest.raises(ContenderError, match="the process in which it was tried has crashed"):
        apart(os.abort)
    with pytest.raises(TypeError, match="has no len"):
        apart(len, 4)


@pytest.mark.parametrize(("key", "mean", "is_enough"), [
    ("decode-cpu", 0.0, True), ("decode-cpu", 0.01, False), ("decode-dali", 0.5, True),
    ("decode-dali", 0.6, False), ("decode-dali", float("nan"), False),
])  # fmt: skip
def test_pixels_of_a_gpu_may_differ_a_little(key: str, mean: float, is_enough: bool) -> None:
    found = PixelCheck(2)
    found.add(spec_of(key), [torch.full((2, 3, 4, 4), mean), torch.full((1, 3, 4, 4), mean)])
    assert found.ok == is_enough and set(found.problems) == (set() if is_enough else {key})


@pytest.mark.parametrize(("spoil", "words"), [
    (
        lambda images, labels: (images ^ 1, labels),
        "pixels are 1 of 255 apart on average, at most 0 asked",
    ),
    (lambda images, labels: (images, labels + 1), "labels or order differ"),
], ids=["pixels", "labels"])  # fmt: skip
def test_wrong_outputs_end_the_command_with_1(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, spoil: Any, words: str
) -> None:
    right = check._decoded
    monkeypatch.setattr(check, "_decoded", lambda *given: [spoil(*batch) for batch in right(*given)])
    files = ["--json", str(tmp_path / "never.json"), "--plot", str(tmp_path / "never.png")]
    assert main(["gpu", "--device", "cpu", "--data", str(tree), *files]) == 1
    captured = capsys.readouterr()
    assert f"decode-cpu: {words}" in captured.err and captured.out == "" and not list(tmp_path.iterdir())


def test_a_steps_loss_is_told_by_the_ceiling_of_its_round() -> None:
    samples = {"slow": rated(50, 90), "ceiling": rated(100, 100)}
    slow, ceiling, gone = (SimpleNamespace(key=key, busy=[]) for key in ("slow", "ceiling", "gone"))
    slow.busy, ceiling.busy = [0.9, 0.4, 0.8], [None, None]  # the first was warming up
    figures = figures_of([slow, ceiling, gone], samples, "ceiling")  # type: ignore[list-item]
    assert figures == [
        {"key": "slow", "stall": {"median": 0.3, "low": 0.1, "high": 0.5, "raw": [0.5, 0.1]},
         "busy": {"median": 0.6, "low": 0.4, "high": 0.8, "raw": [0.4, 0.8]}},
        {"key": "ceiling", "stall": None, "busy": None},
    ]  # fmt: skip
    rows = [{"key": "slow", "label": "a loader"}, {"key": "ceiling", "label": "the ceiling"}]
    assert training_lines({"rows": rows, "training": {"train": figures}}) == [
        "train: a loader: lost for want of data 30.0% (10.0% to 50.0%), GPU busy 60.0% (40.0% to 80.0%)"
    ]


_COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py", "gpu"


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_a_run_on_the_processor_has_all_sections(tree: Path, tmp_path: Path) -> None:
    # One thread: several that wait for each other beside other tests take many times as long.
    command = *_COMMAND, "--device", "cpu", "--data", tree
    run = ran(tmp_path, *command, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(tmp_path))
    result = checked_result(run, tree, rounds=TINY.rounds)
    assert list(result["sections"]) == [section.key for section in SECTIONS]
    keys = {row["key"] for row in result["rows"]}
    assert {"decode-cpu", "decode-torchvision", "train-ceiling", "patches-nnunet-ceiling"} <= keys
    assert result["main"] == "train-cpu" and result["machine"]["gpu"] is None
    missing = {miss["key"]: miss["why"] for miss in result["missing"]}
    assert missing["train-nvimgcodec"] == "decodes on a GPU, and this is the processor"
    assert set(result["training"]) == {"train", *PATCHED}
    for section, rows in result["training"].items():
        stalls = {row["key"]: row["stall"] for row in rows}
        assert stalls.pop(f"{section}-ceiling") is None and all(row["busy"] is None for row in rows)
        assert all(stall["low"] <= stall["median"] <= stall["high"] < 1 for stall in stalls.values())
    assert "lost for want of data" in run.printed and "GPU busy" not in run.printed


def test_without_time_the_command_says_so(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(Budget, "left", lambda self: 0.0)
    monkeypatch.chdir(tmp_path)
    assert main(["gpu", "--device", "cpu", "--data", str(tree), "--seconds", "3", "--json", "x.json"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "nothing could be measured: no time was left for it: give more than --seconds 3" in error


@pytest.mark.gpu
@pytest.mark.hang_after(600)
def test_a_run_on_a_gpu(tree: Path, tmp_path: Path) -> None:
    run = ran(tmp_path, *_COMMAND, "--data", tree, "--batch-size", "16", "--seconds", "240")
    result = checked_result(run, tree, rounds=FULL.rounds)
    expected = {
        "decode-cpu", "decode-nvimgcodec", "train-cpu", "train-nvimgcodec", "train-share", "train-ceiling",
        "augment-images-device", "augment-volumes-device", "patches-elastic-device", "patches-nnunet-device",
    }  # fmt: skip
    assert expected <= {row["key"] for row in result["rows"]}, result["missing"]
    assert result["machine"]["gpu"]["name"] and result["machine"]["gpu"]["driver"] != "unknown"
    for rows in result["training"].values():
        assert all(0 < share <= 1.01 for row in rows for share in row["busy"]["raw"])
    apart = result["check"]["apart"]
    assert apart["decode-cpu"]["mean"] == 0 and apart["decode-nvimgcodec"]["mean"] <= 0.5
    assert "GPU busy" in run.printed
