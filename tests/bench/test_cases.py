"""The whole command of each case on tiny data: files, tables, peers that are not there, wrong outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from bench_results import Run, checked_result

from benchmarks.cases import augment as full_augment
from benchmarks.cases import generate as full_generate
from benchmarks.cases import hdf5 as full_hdf5
from benchmarks.cases.augment import LOADED, SINGLE
from benchmarks.cases.augment_recipes import RECIPES
from benchmarks.cases.generate import PoolRow
from benchmarks.cases.volume import VOLUME_PEERS, MemoryPatches, specs
from fastpipe import augment
from fastpipe.bench import augment as augment_case
from fastpipe.bench import generate as generate_case
from fastpipe.bench import hdf5 as hdf5_case
from fastpipe.bench import volume as volume_case
from fastpipe.bench.generate import FastRow
from fastpipe.bench.volume import Sizes

Command = Callable[..., Run]
_QUICK = ["--quick", "--rounds", "1"]


@pytest.fixture
def small(
    monkeypatch: pytest.MonkeyPatch, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The options by which each case measures tiny data for an instant, without worker processes."""
    generate_specs, sliced, require = full_generate.specs, volume_case.sliced_loader, volume_case.require
    slices = next(spec for spec in specs() if spec.key == "warm-slices")
    changed: list[tuple[Any, str, Any]] = [
        *((one.Bench, "quick_s", 0.001) for one in (augment_case, generate_case, hdf5_case, volume_case)),
        (full_augment.Bench, "recipes", (RECIPES[0], RECIPES[2])),
        (full_augment, "SINGLE", [one for one in SINGLE if one.label in ("ToDtype", "TimeShift")]),
        (full_augment, "LOADED", LOADED[4:5]), (full_augment, "SINGLE_S", 0.001),
        (torch.cuda, "is_available", lambda: False),
        (full_generate, "PREDICTED", ()), (full_generate, "specs", lambda section, cores: generate_specs(section, 0)),
        (full_hdf5, "QUICK", (3, 8, 20)), (hdf5_case, "best_workers", lambda spec, *others: spec),
        (volume_case, "QUICK", Sizes((32, 64, 64), (16, 32, 32), (10, 20, 20))),
        (volume_case, "require", lambda name, extra: name == "zarr" or require(name, extra=extra)),
        (volume_case, "sliced_loader",
         lambda spec, scroll, size: sliced(slices, scroll, size, MemoryPatches(scroll))),
    ]  # fmt: skip
    for place, name, value in changed:
        monkeypatch.setattr(place, name, value)
    folder = tmp_path_factory.mktemp("made")
    return {
        "augment": ["--batch-size", "2", "--data", str(tree)],
        "generate": ["--section", "quick", "--section", "batch"],
        "hdf5": ["--samples", "70", "--batch-size", "16", "--folder", str(folder)],
        "volume": ["--batch-size", "4", "--folder", str(folder)],
        "scaling": ["--batch-size", "2", "--threads", "2,1", "--data", str(tree)],
    }


@pytest.mark.slow
@pytest.mark.leaks("matplotlib keeps its fonts open, joblib a resource tracker")
@pytest.mark.parametrize(("case", "is_full", "sections", "main", "words"), [
    ("hdf5", False, ["gzip", "lzf", "plain", "contiguous"], "gzip-window", "equal h5py's bit for bit"),
    ("hdf5", True, ["rows", "cells", "files-12"], "gzip-window", "equal h5py's"),
    ("volume", True, ["cold", "warm"], "cold-tour", "equal the source's slices bit for bit"),
    ("augment", True, ["simclr-float32", "specaugment-float32", "files-grey"], "simclr-float32-batch",
     "agree with torchvision's functions"),
    ("generate", True, ["quick", "batch"], "quick-workers", "bit for bit, each in its place"),
    ("scaling", False, ["1", "2"], "threads-2", "outputs agree with torchvision's on 6 photos"),
])  # fmt: skip
def test_a_quick_run_gives_table_json_and_picture(
    case: str, is_full: bool, sections: list[str], main: str, words: str, small: Any, run: Command
) -> None:
    found = run([case, *_QUICK, *small[case]], is_full)
    result = checked_result(found, *(Path(word) for word in small[case] if word.startswith("/")))
    assert set(sections) <= set(result["sections"]) and result["main"] == main
    assert words in found.said and (found.folder / "r.png").exists()
    words = [word for word in small[case] if not word.startswith("/") and word != "2,1"]
    assert all(word in result["command"] for word in words)
    if case == "augment":
        keys = [one["key"] for one in result["single"]["rows"]]
        assert keys == ["op-ToDtype-uint8", "op-TimeShift-float32"]
        assert "not measured: on CUDA: torch finds no CUDA device" in " ".join(found.printed.split())
    elif case == "volume":
        assert set(result["stages"]["seconds"]) >= {"decode", "wait"} and result["amplification"]["tour"]
    elif case == "scaling":
        assert [row["threads"] for row in result["scaling"]["rows"]] == [1, 2]
        assert "of linear" in found.printed


@pytest.mark.slow
@pytest.mark.leaks("joblib keeps a resource tracker")
@pytest.mark.parametrize(
    ("case", "count"), [("volume", len(VOLUME_PEERS)), ("augment", 4), ("generate", 2), ("hdf5", 8)]
)  # fmt: skip
def test_peers_that_are_not_there_are_rows_that_say_how_to_install_them(
    case: str, count: int, small: Any, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.lines.interpreter", lambda peer: None)
    monkeypatch.setattr(full_augment, "interpreter", lambda peer: None)
    if case == "generate":
        monkeypatch.setattr(full_generate.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(PoolRow, "stored", lambda self, count: {})
    found = run([case, *_QUICK, "--peers", *small[case]], True, files=False)
    assert found.code == 0, found.said
    out = " ".join(found.printed.split())
    assert out.count("not installed: pip install") + out.count("not installed: make peers") >= count
    if case == "generate":
        assert "rows differ from what the function returns: columns are []" in out


def _wrong_hdf5(patch: pytest.MonkeyPatch) -> None:
    made = hdf5_case.loader_of

    def spoilt(spec: Any, *others: Any) -> Any:
        loader = made(spec, *others)
        if spec.kind != "window":
            return loader
        return ((batch + (torch.arange(len(batch)) == 0)[:, None, None] * 1e-3) for batch in loader)

    patch.setattr(hdf5_case, "loader_of", spoilt)


def _wrong_volume(patch: pytest.MonkeyPatch) -> None:
    made = volume_case.patch_loader

    def spoilt(dataset: Any, size: int, kind: str) -> Any:
        loader = made(dataset, size, kind)
        if kind == "uniform":
            return loader
        return ((torch.from_numpy(values.numpy() + np.uint16(1)), labels) for values, labels in loader)

    patch.setattr(volume_case, "patch_loader", spoilt)


def _wrong_augment(patch: pytest.MonkeyPatch) -> None:
    apply = augment.Compose.apply
    patch.setattr(augment.Compose, "apply", lambda self, *given: apply(self, *given) + 1)


def _wrong_generate(patch: pytest.MonkeyPatch) -> None:
    stored = FastRow.stored

    def spoilt(self: FastRow, count: int) -> Any:
        found = stored(self, count)
        if "x" in found:
            found["x"][2, 2] += 1
        return found

    patch.setattr(FastRow, "stored", spoilt)


@pytest.mark.few(1)
@pytest.mark.parametrize(("case", "spoil", "words"), [
    ("hdf5", _wrong_hdf5, "samples are not in the file"),
    ("volume", _wrong_volume, "cold: FastPatchDataset"),
    ("augment", _wrong_augment, "SimCLR, float32: augment.Compose: 100.00% of the values differ"),
    ("generate", _wrong_generate, "quick: fastpipe.generate(workers=0): x differs in 1 of 300 rows, row 2"),
], ids=["hdf5", "volume", "augment", "generate"])  # fmt: skip
def test_a_wrong_output_ends_the_command_with_1_and_writes_nothing(
    case: str, spoil: Callable[..., None], words: str, small: Any, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    spoil(monkeypatch)
    found = run([case, *_QUICK, *small[case]], case in ("augment", "generate"))
    assert found.code == 1 and found.printed == ""
    assert words in found.said and not list(found.folder.iterdir())


@pytest.mark.slow
@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_file_of_the_users_own_has_one_section(small: Any, run: Command, tmp_path: Path) -> None:
    own = tmp_path / "own.h5"
    with h5py.File(own, "w") as file:
        values = np.arange(40 * 6, dtype=np.int32).reshape(40, 6)
        file.create_dataset("deep/x", data=values, chunks=(4, 6), compression="lzf")
    result = checked_result(run(["hdf5", *_QUICK, "--data", own, "--key", "deep/x", "--batch-size", "8"]))
    assert list(result["sections"]) == ["file"] and "targets" not in result
    assert result["data"]["name"] == "own.h5" and result["main"] == "file-window"
    assert {row["group"] for row in result["rows"]} == {"replaced", "stock", "fastpipe"}


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_some_recipes_are_measured_alone(small: Any, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_augment.Bench, "recipes", RECIPES)
    monkeypatch.setattr("benchmarks.cases.augment_recipes.SIZE", (12, 16, 16))
    kept = [one for one in SINGLE if one.label in ("GaussianBlur3D", "ToDtype")]
    monkeypatch.setattr(full_augment, "SINGLE", kept)
    command = ["augment", *_QUICK, *small["augment"], "--recipe", "volume", "--recipe", "motion"]
    result = checked_result(run(command, True))
    kinds = ("replaced", "worker", "batch")
    keys = [f"{key}-float32-{kind}" for key in ("volume", "motion") for kind in kinds]
    assert [row["key"] for row in result["rows"]] == keys and result["main"] == "volume-float32-batch"
    assert [row["batch_size"] for row in result["single"]["rows"]] == [2]  # of volumes only
    assert "--recipe volume --recipe motion" in result["command"] and len(result["targets"]) == 4
