"""The case ``tf``: its data, its rows, their check, its figures, and the whole command on tiny photos."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from rich.console import Console

from benchmarks.cases import tf as full
from benchmarks.cases.tf import ASKED, SECTIONS, ArrayLengths, targets
from benchmarks.lines import markdown
from benchmarks.run import main as measure
from fastpipe.bench import tf as case
from fastpipe.bench.overview import outcome_apart
from fastpipe.bench.report import print_result, short_markdown
from fastpipe.bench.results import load, validate
from fastpipe.bench.runner import ContenderError, Sample, Session
from fastpipe.bench.synthetic import photo_tree
from fastpipe.bench.tf import (
    MODALITIES,
    NUMBERS,
    EpochRow,
    Photos,
    SampleCheck,
    Setting,
    Spec,
    check_rows,
    tensorflow,
)
from fastpipe.bench.tf import spec_of as tf_spec
from fastpipe.cli import main
from fastpipe.errors import CacheError, FastpipeError, OptionError

_LENGTHS = ArrayLengths(8, 6, 5, 2, 9, 5)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small photographs in two classes."""
    return photo_tree(tmp_path_factory.mktemp("photos"), classes=2, per_class=3, sizes=(60, 90))


@pytest.fixture(scope="module")
def photos(tree: Path) -> Photos:
    return Photos.of(tree, "photos", 100)


@pytest.fixture
def setting(photos: Photos, tmp_path: Path) -> Setting:
    return Setting(photos, _LENGTHS, 4, tmp_path)


def spec_of(key: str) -> Spec:
    return next(spec for spec in full.specs() if spec.key == key)


@pytest.fixture
def rows(setting: Setting) -> Iterator[Any]:
    """Makes rows by their keys, and closes them."""
    made: list[EpochRow] = []

    def make(*keys: str) -> list[EpochRow]:
        made.extend(EpochRow(spec_of(key), setting) for key in keys)
        return made[-len(keys) :]

    yield make
    for row in made:
        row.close()
        row.close()


# ---- data --------------------------------------------------------------------------------------


def test_photos_are_the_jpegs_of_class_folders_spread_evenly(tmp_path: Path) -> None:
    photo_tree(tmp_path, classes=2, per_class=3, sizes=(30, 40))
    first, last = sorted(path for path in tmp_path.iterdir())
    (tmp_path / "notes.jpg").write_bytes(b"")
    (first / "notes.txt").write_bytes(b"")
    (first / "aaa.jpg").write_bytes(b"this is none")
    Image.new("RGB", (9, 9)).save(first / "png.jpg", "PNG")
    found = Photos.of(tmp_path, "mine", 100)
    assert (len(found.files), found.total) == (6, 8) and found.classes == (first.name, last.name)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1] and found.labels.dtype == np.int32
    assert found.sizes.tolist() == [[40, 30]] * 6  # photo_tree's are height and width
    assert found.text.startswith("6 of 8 photos in 2 classes, ") and found.text.endswith(" kB each (mine)")
    half = Photos.of(tmp_path, "mine", 4)
    assert {Path(path).parent for path in half.files} == {first, last} and len(half.files) < 5


def test_a_folder_without_photos_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no class folders"):
        Photos.of(tmp_path, "none", 9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="has no JPEGs in its class folders"):
        Photos.of(tmp_path, "none", 9)


def test_boxes_have_a_third_to_two_thirds_of_each_image_and_are_inside() -> None:
    sizes = np.array([[640, 480], [480, 640]])
    photos = Photos("made up", ("a.jpg", "b.jpg"), np.array([0, 1], np.int32), ("a", "b"), sizes, 2)
    table = photos.table(500)
    boxes, size = table.boxes["image"], sizes[np.arange(500) % 2]
    assert boxes.dtype == np.int32 and table.is_single and len(table) == 500
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= size).all() and (boxes[:, 2:] > boxes[:, :2]).all()
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1) / size.prod(1)
    assert area.min() > 0.298 and area.max() < 0.602 and area.std() > 0.05
    forms = np.divide(*(boxes[:, 2:] - boxes[:, :2]).T)
    assert forms.min() < 0.6 and forms.max() > 1.7
    assert np.array_equal(boxes, photos.table(500).boxes["image"])
    assert len(np.unique(boxes, axis=0)) > 490  # a photo that comes again has another box
    several = photos.table(20, MODALITIES)
    assert list(several.boxes) == list(MODALITIES) and not several.is_single
    assert len({boxes.tobytes() for boxes in several.boxes.values()}) == 4
    assert set(several.columns) == {"file", "label", NUMBERS, *MODALITIES}


def test_a_copied_folder_has_so_many_files_in_the_same_classes(photos: Photos, tmp_path: Path) -> None:
    folder = photos.copied(tmp_path / "copies", 8)
    copies = sorted(folder.rglob("*.jpg"))
    assert len(copies) == len({path.stat().st_ino for path in copies}) == 8
    assert {path.parent.name for path in copies} == set(photos.classes)
    assert {path.read_bytes() for path in copies} == {Path(path).read_bytes() for path in photos.files}


# ---- datasets and rows -------------------------------------------------------------------------


def test_every_row_has_its_own_key_and_is_asked_for_by_it() -> None:
    keys = [spec.key for spec in full.specs()]
    assert len(set(keys)) == len(keys) == 25
    assert list(dict.fromkeys(spec.section for spec in full.specs())) == list(SECTIONS)
    for section in SECTIONS:
        of_it = [spec for spec in full.specs() if spec.section == section]
        assert of_it[0].key == f"{section}-replaced" and of_it[0].group == "replaced"
        assert {spec.group for spec in of_it} >= {"replaced", "fastpipe"}
    named = {name for one in ASKED for name in (one.row, one.against)}
    assert named <= {spec.key for spec in full.specs()}
    assert all(
        spec.most_apart is not None
        for spec in full.specs()
        if spec.group == "fastpipe" and spec.section != "augment"
    )


def test_scripts_give_boxes_at_one_size_each_once_in_an_epoch(setting: Setting) -> None:
    table = setting.crops
    (images, labels), *_ = case.by_pillow(table, 8, is_shuffled=False)
    box = tuple(table.boxes["image"][3].tolist())
    with Image.open(table.files[3]) as opened:
        wanted = opened.convert("RGB").crop(box).resize((128, 128), Image.Resampling.BILINEAR)
    assert np.array_equal(images[3], np.asarray(wanted, np.float32))
    assert labels.numpy().tolist() == table.labels.tolist() and labels.dtype == tf.int32
    for make, most in ((full.by_hand, 12.0), (full.by_hand_antialiased, 4.0)):
        ((other, same),) = make(table, 8, is_shuffled=False)
        assert other.shape == images.shape and same.numpy().tolist() == labels.numpy().tolist()
        assert 0 < np.abs(other - images).mean() < most
    epochs = [
        [one.numpy().tobytes() for images, _ in case.by_pillow(table, 3, is_shuffled=True, kept=kept)
         for one in images]
        for kept in (None, "")
    ]  # fmt: skip
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(one.numpy().tobytes() for one in images)
    assert len({tuple(one) for one in (*epochs, [one.numpy().tobytes() for one in images])}) > 1


@pytest.mark.parametrize("key", [spec.key for spec in full.specs() if spec.section != "augment"])
def test_a_row_goes_through_whole_epochs(key: str, rows: Any) -> None:
    (row,) = rows(key)
    lengths = {"crop": 8, "folder": 6, "modalities": 5, "hdf5": 9, "patches": 5}
    assert row.chunk == lengths[row.spec.section]
    assert row.measure(2 * row.chunk) > 0
    if row.spec.group == "fastpipe" and not key.endswith("graph"):
        assert row.stage_seconds()["decode"] > 0
    units = {"modalities": "samples", "hdf5": "rows", "patches": "patches"}
    assert row.spec.unit == units.get(row.spec.section, "images")


@pytest.mark.parametrize("key", ["augment-replaced", "augment-images", "augment-stateless"])
def test_batches_in_memory_are_changed_and_stay_images(key: str, rows: Any, setting: Setting) -> None:
    (row,) = rows(key)
    assert row.chunk == 8 and row.measure(8) > 0
    first, second = (images.numpy() for images in row.dataset)
    assert first.shape == (4, 128, 128, 3) and first.dtype == np.float32 and np.isfinite(first).all()
    plain = case.images_of(setting).numpy()
    assert not np.array_equal(first, plain) and not np.array_equal(second, plain)
    # Keras's layers count their seeds in a variable, of which calls side by side may read the same number.
    assert key == "augment-replaced" or not np.array_equal(first, second)


def test_a_row_that_fails_leaves_the_run_and_one_that_gives_too_few_is_an_error(
    rows: Any, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = rows("crop-hand")
    row.dataset = row.dataset.take(1)
    with pytest.raises(RuntimeError, match="gave 4 samples of 8"):
        row.measure(8)
    row.dataset = row.dataset.map(lambda images, labels: tf.io.decode_jpeg(tf.constant(b"none")))
    with pytest.raises(ContenderError, match="it failed: "):
        row.measure(8)

    def full(*arguments: Any, **options: Any) -> Any:
        raise CacheError("no room")

    with pytest.raises(ContenderError, match="no room"):
        EpochRow(tf_spec("crop", "ram", "", "fastpipe", full), setting)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a process of its own runs in a thread of this one, where TensorFlow is imported."""

    def here(count: int, context: Any, initializer: Any, arguments: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count, initializer=initializer, initargs=arguments)

    monkeypatch.setattr(case, "ProcessPoolExecutor", here)
    # The other rows are of this process too: it does not freeze.
    monkeypatch.setattr(case.gc, "freeze", lambda: None)


def test_rows_apart_answer_until_their_process_ends(setting: Setting, in_this_process: None) -> None:
    process = case.Apart(setting)
    row = case.ApartRow(spec_of("crop-replaced"), setting, process)
    assert (row.key, row.chunk) == ("crop-replaced", 8) and row.measure(16) > 0
    row.close()
    broken = Path(setting.crops.files[0])
    content = broken.read_bytes()
    broken.write_bytes(b"none")
    with pytest.raises(ContenderError, match="it failed: "):
        row.measure(8)
    broken.write_bytes(content)
    assert row.measure(8) > 0  # a row that cannot go on does not end the others
    process.close()
    process.close()


def test_a_process_that_ends_is_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    process = case.Apart(setting)
    future: Future[float] = Future()
    future.set_exception(BrokenProcessPool())
    monkeypatch.setattr(process._pool, "submit", lambda *given: future)
    with pytest.raises(ContenderError, match="its process ended"):
        case.ApartRow(spec_of("crop-replaced"), setting, process).measure(8)
    process.close()


# ---- the check ---------------------------------------------------------------------------------


def test_the_check_sees_all_samples_of_fastpipes_rows(rows: Any, setting: Setting) -> None:
    made = rows(
        *(spec.key for spec in full.specs() if spec.group == "fastpipe" and spec.section != "augment")
    )
    said: list[str] = []
    check = check_rows(setting, made, said.append, full.own_specs)
    assert check.ok, check.problems
    assert said == [f"comparing: {one}" for one in ("crop", "folder", "modalities", "hdf5", "patches")]
    assert check.epochs == 2 * (4 + 2 + 2 + 2 + 2)
    assert check.samples == 2 * (4 * 8 + 2 * 6 + 2 * 5 + 2 * 9 + 2 * 5)
    assert check.values == 128 * 128 * 3 * (4 * 8 + 2 * 4 * 5) + 256 * 256 * 3 * 2 * 6
    assert check.largest <= 1 and check.over_one == 0
    assert "samples in 24 epochs equal those of the replaced datasets bit for bit" in check.sentence()
    assert check.as_json()["ok"] and check.as_json()["text"] == check.sentence()


@pytest.mark.parametrize("spoil", ["value", "label", "double", "short", "type"])
def test_the_check_finds_what_is_wrong(spoil: str, setting: Setting) -> None:
    def spoilt(setting: Setting, *, is_shuffled: bool) -> Any:
        made = case.crops(setting, is_shuffled=is_shuffled)
        if spoil == "value":
            return made.map(lambda images, labels: (images + tf.one_hot(0, 3) * 2.0, labels))
        if spoil == "label":
            return made.map(lambda images, labels: (images, labels + 1))
        if spoil == "double" and is_shuffled:
            return made.take(1).repeat(2)
        if spoil == "short":
            return made.take(1)
        return (
            made.map(lambda images, labels: (tf.cast(images, tf.float16), labels))
            if spoil == "type"
            else made
        )

    row = EpochRow(tf_spec("crop", "threads", "mine", "fastpipe", spoilt, most_apart=1), setting)
    check = check_rows(setting, [row], every=full.own_specs)
    row.close()
    assert not check.ok and "outputs differ from those of the replaced datasets" in check.sentence()
    assert check.problems[0].startswith("crop: mine")
    wanted = {
        "value": "images: values differ by up to 2 of 255, where 1 is the most allowed",
        "label": "labels differ", "double": "samples of a shuffled epoch are none of the others or come too often",
        "short": "a batch has , expected images, labels", "type": "images are float16",
    }  # fmt: skip
    assert wanted[spoil] in check.problems[0] and len(check.problems) == 1


def test_a_photo_that_cannot_be_read_fails_the_check(setting: Setting) -> None:
    def broken(setting: Setting, *, is_shuffled: bool) -> Any:
        return tf.data.Dataset.from_tensors(b"none").map(tf.io.decode_jpeg)

    row = EpochRow(tf_spec("crop", "threads", "mine", "fastpipe", broken), setting)
    check = check_rows(setting, [row], every=full.own_specs)
    assert not check.ok and check.problems[0].startswith("crop: ")


def test_what_is_no_number_is_far_from_everything() -> None:
    check, right = SampleCheck(), np.zeros((1, 2, 2, 3), np.float32)
    check.add_batch("row", {"images": right}, {"images": right + np.float32(np.nan)}, 1)
    assert not check.ok and check.over_one == check.differing == 12


# ---- figures -----------------------------------------------------------------------------------


def test_what_was_asked_is_judged_by_the_median() -> None:
    def at(*rates: float) -> list[Sample]:
        return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]

    samples = {
        "crop-threads": at(250, 180, 240), "crop-replaced": at(100, 100, 100), "crop-hand": at(200, 200, 200),
        "crop-ram": at(1900, 2100, 2000), "folder-threads": at(20, 20, 20),
    }  # fmt: skip
    pillow, hand, ram, disk, folder = targets(samples)
    assert (pillow["is_met"], pillow["got"]["median"], pillow["row"]) == (True, 2.4, "crop-threads")
    assert (hand["is_met"], hand["got"]["median"], hand["row"]) == (False, 1.2, None)
    assert (ram["is_met"], ram["got"]["median"]) == (True, 20.0)
    assert disk["got"] is None and disk["is_met"] is None and folder["got"] is None
    assert [one["is_met"] for one in targets({})] == [None] * 5


# ---- the whole command -------------------------------------------------------------------------


def few(monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """Only these rows, and few samples."""

    kept = [spec_of(key) for key in keys]

    def chosen() -> list[Spec]:
        return kept

    for kind in (case.Bench, full.Bench):
        monkeypatch.setattr(kind, "specs", staticmethod(chosen))
        monkeypatch.setattr(kind, "quick", _LENGTHS)


@pytest.fixture(scope="module")
def result(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run in a process of its own wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(full.__file__).parents[1])!r})\n"
        "import paths\n"
        "from benchmarks.run import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'the case goes without'\n"
        "sys.exit(code)\n"
    )
    command = ["tf", "--quick", "--rounds", "1", "--batch-size", "4", "--data", str(tree), "--peers"]
    command += ["--json", str(folder / "r.json"), "--plot", str(folder / "r.png")]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check: " in done.stderr and "equal those of the replaced datasets bit for bit" in done.stderr
    assert "AutoGraph" not in done.stderr and "belonging to" not in done.stdout, "TensorFlow is quiet"
    assert (folder / "r.png").read_bytes()[:4] == b"\x89PNG"
    text = (folder / "r.json").read_text()
    assert str(folder) not in text and str(tree) not in text and str(Path.home()) not in text
    return {**load(folder / "r.json"), "printed": done.stdout}


@pytest.mark.slow
def test_a_quick_run_gives_table_json_and_picture(result: dict[str, Any]) -> None:
    printed = " ".join(result["printed"].split())
    assert result["verdict"] in printed and result["main"] == "crop-threads"
    assert "best replaced dataset" in result["verdict"] and "num_workers" not in result["verdict"]
    assert printed.count("asked: ") == len(result["targets"]) == len(ASKED)
    assert list(result["sections"]) == list(SECTIONS) and result["missing"] == []
    assert [row["key"] for row in result["rows"]] == [spec.key for spec in full.specs()]
    assert all(
        row[f"{row['unit']}_per_s"]["median"] > 0 and len(row["samples"]) == 1 for row in result["rows"]
    )
    assert set(result["best"]) == set(SECTIONS) and result["best"]["crop"] == "crop-replaced"
    main_row = next(row for row in result["rows"] if row["key"] == "crop-threads")
    assert main_row["note"].startswith("ms an image in its threads: ") and "decode" in main_row["note"]
    assert result["check"]["ok"] and result["check"]["epochs"] == 24
    assert "threads of this process" in result["plan"]
    assert "--data photos0 --batch-size 4 --peers" in result["command"]


def test_a_result_is_printed_and_written(result: dict[str, Any]) -> None:
    result = {name: value for name, value in result.items() if name != "printed"}
    text = markdown(result)
    assert text.count("× best replaced dataset") == 6 and "| modalities" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    assert short_markdown(result).count("| image_dataset") == 8 and "fastpipe.tf.Augment" in short_markdown(
        result
    )
    for width in (80, 160):
        output = io.StringIO()
        print_result(result, Console(file=output, width=width))
        assert max(map(len, output.getvalue().splitlines()[:24])) <= width


def test_peers_are_measured_where_they_are_asked_for(
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_this_process: None,
) -> None:
    few(monkeypatch, "crop-replaced", "crop-threads", "crop-hand")
    arguments = ["--quick", "--rounds", "1", "--data", str(tree), "--json", str(tmp_path / "r.json")]
    assert measure(["tf", *arguments]) == 0
    rows = load(tmp_path / "r.json")["rows"]
    assert [row["key"] for row in rows] == ["crop-replaced", "crop-threads", "crop-hand"]
    assert "asked: folder, × image_dataset_from_directory" in capsys.readouterr().out


def test_other_pixels_end_the_command_with_1(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch, "crop-replaced", "crop-threads")
    draw = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, *given: draw(self, *given).point(lambda value: value ^ 1)
    )
    json_file = tmp_path / "never.json"
    assert main(["bench", "tf", "--quick", "--data", str(tree), "--json", str(json_file)]) == 1
    captured = capsys.readouterr()
    assert "crop: image_dataset: images: values differ by up to 1 of 255, where 0 is" in captured.err
    assert captured.out == "" and not json_file.exists()


def test_without_tensorflow_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert main(["bench", "tf", "--quick"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'fastpipe[tf]'" in error and len(error.splitlines()) == 1


def test_tensorflow_says_what_a_user_wants_it_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert tensorflow() is tf and os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    assert tensorflow() is tf and os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tf", "--data", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_help_loads_no_framework() -> None:
    code = (
        "import sys, contextlib\n"
        "from fastpipe.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['bench', 'tf', '--help'])\n"
        "heavy = {'torch', 'torchvision', 'tensorflow', 'keras', 'PIL'}\n"
        "assert not heavy & set(sys.modules), 'loaded too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--peers" in done.stdout


def test_without_what_is_replaced_there_are_no_figures() -> None:
    samples = {spec.key: [Sample(0, 10, 1.0)] for spec in full.specs()}
    bench: Any = SimpleNamespace(labels=SECTIONS, specs=full.specs)
    full.Bench._require_replaced(bench, Session(samples, rounds=1))
    gone = {key: some for key, some in samples.items() if key != "folder-replaced"}
    with pytest.raises(FastpipeError, match="its process ended"):
        failed = {"folder-replaced": "its process ended"}
        full.Bench._require_replaced(bench, Session(gone, rounds=1, failures=failed))


@pytest.mark.slow
def test_the_pipeline_of_the_case_all(tmp_path: Path) -> None:
    # In a process of its own, as the case has it: here TensorFlow has been used.
    found = outcome_apart("keras_multimodal", tmp_path, True, 170.0, lambda text: None)
    result = validate(found["result"])
    assert result["check"]["ok"] and "bit for bit" in result["check"]["text"]
    assert [entry["key"] for entry in result["rows"]] == ["modalities-replaced", "modalities-threads"]
    for row in result["timelines"]["keras_multimodal"]["rows"]:
        assert len(row["wait_s"]) == len(row["busy_s"]) >= 4
