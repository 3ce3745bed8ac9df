"""The case ``tf``: its data, its rows, their check, its figures, and the whole command on tiny photos."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from bench_results import Run, checked_result, rated
from PIL import Image

from benchmarks.cases import tf as full
from benchmarks.cases.tf import SECTIONS, ArrayLengths, targets
from benchmarks.run import main as measure
from fastpipe.bench import tf as case
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.synthetic import photo_tree
from fastpipe.bench.tf import EpochRow, Photos, SampleCheck, Setting, check_rows
from fastpipe.bench.tf import spec_of as tf_spec
from fastpipe.errors import OptionError

_SPECS = {spec.key: spec for spec in full.specs()}


@pytest.fixture
def setting(tree: Path, tmp_path: Path) -> Setting:
    return Setting(Photos.of(tree, "photos", 100), ArrayLengths(8, 6, 5, 2, 9, 5), 4, tmp_path)


@pytest.fixture
def rows(setting: Setting) -> Iterator[Any]:
    """Makes rows by their keys, and closes them."""
    with ExitStack() as stack:
        yield lambda *keys: [stack.enter_context(closing(EpochRow(_SPECS[key], setting))) for key in keys]


def test_photos_are_the_jpegs_of_class_folders_spread_evenly(tmp_path: Path, capsys: Any) -> None:
    photo_tree(tmp_path, classes=2, per_class=3, sizes=(30, 40))
    first, last = sorted(tmp_path.iterdir())
    for name in ("notes.jpg", f"{first.name}/notes.txt", f"{first.name}/aaa.jpg"):
        (tmp_path / name).write_bytes(b"")
    Image.new("RGB", (9, 9)).save(first / "png.jpg", "PNG")
    found = Photos.of(tmp_path, "mine", 100)
    assert (len(found.files), found.total) == (6, 8) and found.classes == (first.name, last.name)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1] and found.labels.dtype == np.int32
    assert found.sizes.tolist() == [[40, 30]] * 6  # photo_tree's are height and width
    half = Photos.of(tmp_path, "mine", 4)
    assert {Path(path).parent for path in half.files} == {first, last} and len(half.files) < 5
    copies = sorted(found.copied(tmp_path / "copies", 8).rglob("*.jpg"))
    assert len(copies) == len({path.stat().st_ino for path in copies}) == 8
    assert {path.read_bytes() for path in copies} == {Path(path).read_bytes() for path in found.files}
    (tmp_path / "other" / "empty").mkdir(parents=True)
    with pytest.raises(OptionError, match="has no JPEGs in its class folders"):
        Photos.of(tmp_path / "other", "none", 9)
    assert measure(["tf", "--data", str(tmp_path / "none")]) == 2
    assert measure(["tf", "--data", str(tmp_path / "other" / "empty")]) == 2
    assert "has no class folders" in capsys.readouterr().err.splitlines()[1]


@pytest.mark.few(9)
@pytest.mark.parametrize("key", list(_SPECS))
def test_a_row_goes_through_whole_epochs(key: str, rows: Any, setting: Setting) -> None:
    (row,) = rows(key)
    lengths = {"crop": 8, "augment": 8, "folder": 6, "modalities": 5, "hdf5": 9, "patches": 5}
    assert row.chunk == lengths[row.spec.section] and row.measure(2 * row.chunk) > 0
    if row.spec.section == "augment":  # batches in memory are changed and stay images
        first = next(iter(row.dataset)).numpy()
        assert first.shape == (4, 128, 128, 3) and first.dtype == np.float32 and np.isfinite(first).all()
        assert not np.array_equal(first, case.images_of(setting).numpy())
    elif row.spec.group == "fastpipe" and not key.endswith("graph"):
        assert row.stage_seconds()["decode"] > 0 and row.spec.most_apart is not None


def test_a_row_that_fails_leaves_the_run_and_one_that_gives_too_few_is_an_error(rows: Any) -> None:
    (row,) = rows("crop-hand")
    row.dataset = row.dataset.take(1)
    with pytest.raises(RuntimeError, match="gave 4 samples of 8"):
        row.measure(8)
    row.dataset = row.dataset.map(lambda images, labels: tf.io.decode_jpeg(tf.constant(b"none")))
    with pytest.raises(ContenderError, match="it failed: "):
        row.measure(8)


def test_the_check_sees_all_samples_of_fastpipes_rows(rows: Any, setting: Setting) -> None:
    fast = [key for key, one in _SPECS.items() if one.group == "fastpipe" and one.section != "augment"]
    check = check_rows(setting, rows(*fast), every=full.own_specs)
    assert check.ok, check.problems
    assert check.epochs == 2 * (4 + 2 + 2 + 2 + 2)
    assert check.samples == 2 * (4 * 8 + 2 * 6 + 2 * 5 + 2 * 9 + 2 * 5)
    assert check.largest <= 1 and check.over_one == 0
    assert "samples in 24 epochs equal those of the replaced datasets bit for bit" in check.sentence()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda made: made.map(lambda images, labels: (images + tf.one_hot(0, 3) * 2.0, labels)),
         "images: values differ by up to 2 of 255, where 1 is the most allowed"),
        (lambda made: made.map(lambda images, labels: (images, labels + 1)), "labels differ"),
        (lambda made: made.take(1).repeat(2), ""),
        (lambda made: made.take(1), "a batch has , expected images, labels"),
        (lambda made: made.map(lambda images, labels: (tf.cast(images, tf.float16), labels)), "images are float16"),
        (lambda made: tf.data.Dataset.from_tensors(b"none").map(tf.io.decode_jpeg), "crop: "),
    ],
    ids=["value", "label", "double", "short", "type", "broken"],
)  # fmt: skip
def test_the_check_finds_a_wrong_row(spoil: Any, words: str, setting: Setting) -> None:
    def spoilt(setting: Setting, *, is_shuffled: bool) -> Any:
        return spoil(case.crops(setting, is_shuffled=is_shuffled))

    row = EpochRow(tf_spec("crop", "threads", "mine", "fastpipe", spoilt, most_apart=1), setting)
    check = check_rows(setting, [row], every=full.own_specs)
    row.close()
    assert not check.ok and check.problems[0].startswith("crop: ") and words in check.problems[0]
    found, right = SampleCheck(), np.zeros((1, 2, 2, 3), np.float32)
    found.add_batch("row", {"images": right}, {"images": right + np.float32(np.nan)}, 1)
    assert not found.ok and found.over_one == found.differing == 12


def test_targets_are_judged_by_the_median() -> None:
    found = targets({
        "crop-threads": rated(250, 180, 240), "crop-replaced": rated(100, 100, 100),
        "crop-hand": rated(200, 200, 200), "crop-ram": rated(1900, 2100, 2000), "folder-threads": rated(20, 20, 20),
    })  # fmt: skip
    assert [one["is_met"] for one in found] == [True, False, True, None, None]
    assert [one["got"] and one["got"]["median"] for one in found] == [2.4, 1.2, 20.0, None, None]
    assert [one["is_met"] for one in targets({})] == [None] * 5


@pytest.mark.parametrize("is_wrong", [False, True])
def test_some_rows_are_measured_unless_pixels_differ(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, is_wrong: bool
) -> None:
    # Rows with a process of their own run in a thread of this one, where TensorFlow is imported.  The other
    # rows are of this process too: it does not freeze.
    monkeypatch.setattr(
        case, "ProcessPoolExecutor", lambda count, context, begin, given: ThreadPoolExecutor(count, "", begin, given)
    )  # fmt: skip
    monkeypatch.setattr(case.gc, "freeze", lambda: None)
    kept = ["crop-replaced", "crop-threads", "crop-hand"]
    for kind in (case.Bench, full.Bench):
        monkeypatch.setattr(kind, "specs", staticmethod(lambda: [_SPECS[key] for key in kept]))
        monkeypatch.setattr(kind, "quick", ArrayLengths(8, 6, 5, 2, 9, 5))
        monkeypatch.setattr(kind, "labels", {"crop": "crops"})
    if is_wrong:
        resize = Image.Image.resize
        monkeypatch.setattr(
            Image.Image, "resize", lambda self, *given: resize(self, *given).point(lambda value: value ^ 1)
        )
    command = ["tf", "--quick", "--rounds", "1", "--data", str(tree), "--json", str(tmp_path / "r.json")]
    run = Run(measure(command), *capsys.readouterr(), tmp_path)
    if is_wrong:
        assert run.code == 1 and run.printed == "" and not list(tmp_path.iterdir())
        assert "crop: image_dataset: images: values differ by up to 1 of 255, where 0 is" in run.said
    else:
        assert [row["key"] for row in checked_result(run, tree)["rows"]] == kept


@pytest.mark.slow
def test_a_quick_run_measures_everything_without_torch(tree: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, 'benchmarks')
import paths
from benchmarks.run import main
code = main(sys.argv[1:])
assert 'torch' not in sys.modules, 'the case goes without'
sys.exit(code)
"""
    words = f"tf --quick --rounds 1 --batch-size 4 --data {tree} --peers"
    words += f" --json {tmp_path}/r.json --plot {tmp_path}/r.png"
    command, root = [sys.executable, "-c", code, *words.split()], Path(full.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    result = checked_result(Run(done.returncode, done.stdout, done.stderr, tmp_path), tree)
    assert "AutoGraph" not in done.stderr and "belonging to" not in done.stdout, "TensorFlow is quiet"
    assert list(result["sections"]) == list(SECTIONS) and result["missing"] == []
    assert [row["key"] for row in result["rows"]] == list(_SPECS) and result["main"] == "crop-threads"
    assert "best replaced dataset" in result["verdict"] and result["check"]["epochs"] == 24
