"""The case ``swap``: the scripts of ``examples/swapped`` before and after the exchange of their marked lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_results import Run, checked_result

from fastpipe.bench import swap
from fastpipe.bench.swap import module_of, same, scripts, swapped

Command = Callable[..., Run]


def test_each_script_exchanges_at_most_three_lines() -> None:
    assert len(scripts()) >= 10
    for path in scripts():
        source = path.read_text()
        before, after = source.split("\n"), swapped(source).split("\n")
        changed = [line for line, old in zip(after, before, strict=True) if line != old]
        assert 1 <= len(changed) <= 3 and any("fastpipe" in line for line in changed), path


@pytest.mark.leaks("matplotlib keeps its fonts open")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # in Lightning
def test_the_scripts_are_compared_and_measured(
    run: Command, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_LEAST_PHOTOS", 1)
    monkeypatch.setattr(swap.Bench, "quick_s", 0.001)
    result = checked_result(run(["swap", "--quick", "--rounds", "1", "--data", str(tree)]), tree)
    measured = {row["section"] for row in result["rows"]}
    assert measured | {miss["key"] for miss in result["missing"]} == {path.stem for path in scripts()}
    assert all("is not installed" in miss["why"] for miss in result["missing"])
    assert result["check"]["scripts"] == len(measured)


def test_photos_may_have_any_ending_and_equal_names_in_a_class(
    run: Command, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_LEAST_PHOTOS", 1)
    monkeypatch.setattr(swap.Bench, "quick_s", 0.001)
    for number, photo in enumerate(sorted(tree.rglob("*.jpg"))[:4]):
        place = tmp_path / "photos" / "cat" / str(number)
        place.mkdir(parents=True)
        (place / "1.JPEG").write_bytes(photo.read_bytes())
    arguments = ["swap", "--quick", "--rounds", "1", "--only", "own_dataset", "--data", tmp_path / "photos"]
    assert run(arguments, files=False).code == 0


def test_a_script_whose_batches_differ_is_named(
    run: Command, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        '"""A script."""\nimport torch\nfrom torch.utils.data import DataLoader\n\n\ndef make_loader(folder):\n'
        "    values = torch.zeros(4)\n    values = torch.ones(4)\n    return DataLoader(values)\n"
    )
    (tmp_path / "odd.py").write_text(text.replace("zeros(4)\n", "zeros(4)  # becomes:     pass\n").replace(
        "    values = torch.ones(4)\n", "    values = torch.ones(4)  # becomes:     values = torch.full((4,), 2.0)\n"
    ))  # fmt: skip
    monkeypatch.setattr(swap, "SCRIPTS", tmp_path)
    done = run(["swap", "--quick", "--data", str(tree)])
    assert done.code == 1 and "odd: batch 0 differs" in done.said


def test_a_name_that_no_script_has_is_an_error(run: Command, tree: Path) -> None:
    done = run(["swap", "--only", "nothing", "--data", str(tree)])
    assert done.code != 0 and "there is no script nothing" in done.said


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ([torch.ones(2), {"a": 1}], True), ([torch.ones(2, dtype=torch.float64), {"a": 1}], False),
        ((torch.ones(2), {"a": 1}), False), ([torch.zeros(2), {"a": 1}], False), ([torch.ones(2), {"b": 1}], False),
        ([torch.ones(2)], False),
    ],
)  # fmt: skip
def test_batches_are_compared_to_the_last_bit(other: object, is_same: bool) -> None:
    assert same([torch.ones(2), {"a": 1}], other) is is_same


def test_workers_find_the_classes_of_a_script(tmp_path: Path) -> None:
    module = module_of(tmp_path / "x.py", "class Own:\n    pass\n", "fastpipe_swapped_x")
    assert module.Own.__module__ == "fastpipe_swapped_x"


def test_scripts_that_need_other_packages_are_named(
    run: Command, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '"""A script."""\nimport no_such_package  # becomes: import no_such_package\n'
    (tmp_path / "odd.py").write_text(text)
    monkeypatch.setattr(swap, "SCRIPTS", tmp_path)
    done = run(["swap", "--quick", "--data", str(tree)])
    assert done.code == 2 and "A script: no_such_package is not installed: pip install" in done.said


@pytest.mark.parametrize("turned", [False, True])
def test_samples_may_be_compared_in_any_order(
    run: Command, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    text = (
        '"""A script."""\nimport torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n'
        f"IN_ANY_ORDER = {turned}\n\n\ndef make_loader(folder):\n    values = torch.arange(4.0)\n"
        "    values = values.clone()  # becomes:     values = values.flip(0)\n"
        "    return DataLoader(TensorDataset(values, -values), batch_size=2)\n"
    )
    (tmp_path / "odd.py").write_text(text)
    monkeypatch.setattr(swap, "SCRIPTS", tmp_path)
    monkeypatch.setattr(swap.Bench, "quick_s", 0.001)
    done = run(["swap", "--quick", "--rounds", "1", "--data", str(tree)])
    assert (done.code == 0) == turned
