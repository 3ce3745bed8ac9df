"""A report in TensorBoard's files, read back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.tools import Advice, Report
from fastpipe.tools import report as board
from fastpipe.tools.costs import Alone, LoaderCosts
from fastpipe.tools.report import LoaderNote, Part
from fastpipe.tools.thread_times import Spent

REPORT = Report(
    LoaderNote("DataLoader over Photos", workers=2),
    steps=40,
    step_s=0.5,
    wait_s=0.2,
    busy_s=0.3,
    instant_s=0.3,
    alone=Alone(0.4, 0.7, 40),
    device_wait_s=0.1,
    device_busy_s=0.4,
    costs=LoaderCosts({"read": Spent(10**8, 0, 0), "decode": Spent(3 * 10**8, 0, 0)}, batches=40),
    stall=(Part("decode", 0.15), Part("read", 0.05)),
    cases=(Part("with data at once", 0.3), Part("as it is", 0.5)),
    advice=(
        Advice("let fastpipe make the batches", "measured", 0.31, 0.32),
        Advice("num_workers=4", "", 0.4),
    ),
)
EXPECTED = {
    "step_seconds": 0.5,
    "wait_seconds": 0.2,
    "busy_seconds": 0.3,
    "device_wait_seconds": 0.1,
    "device_busy_seconds": 0.4,
    "stall_share": 0.4,
    "loader_alone/batch_seconds": 0.4,
    "stall_seconds/decode": 0.15,
    "stall_seconds/read": 0.05,
    "batch_seconds/read": 0.1,
    "batch_seconds/decode": 0.3,
    "case_seconds/with_data_at_once": 0.3,
    "case_seconds/as_it_is": 0.5,
    "predicted_seconds/1": 0.31,
    "tried_seconds/1": 0.32,
    "predicted_seconds/2": 0.4,
}


def test_the_numbers_of_a_report() -> None:
    expected = {f"fastpipe/profile/{name}": value for name, value in EXPECTED.items()}
    assert board._scalars_of(REPORT) == pytest.approx(expected)
    opaque = dataclasses.replace(REPORT, is_opaque=True)
    assert "fastpipe/profile/wait_seconds" not in board._scalars_of(opaque)


def test_what_tensorflow_writes_is_read_back(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install tensorflow-cpu")
    board._write_with_tensorflow(tf, str(tmp_path), board._scalars_of(REPORT), str(REPORT), 3)
    points, texts = read_back(tf, tmp_path)
    assert points == pytest.approx(
        {(f"fastpipe/profile/{name}", 3): value for name, value in EXPECTED.items()}
    )
    assert texts == {"fastpipe/profile/text_summary": str(REPORT)}


def test_what_torch_writes_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard's writer: pip install tensorboard")
    writer = pytest.importorskip("torch.utils.tensorboard")
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install tensorflow-cpu")
    board._write_with_torch(writer, str(tmp_path), board._scalars_of(REPORT), str(REPORT), 3)
    points, texts = read_back(tf, tmp_path)
    assert points == pytest.approx(
        {(f"fastpipe/profile/{name}", 3): value for name, value in EXPECTED.items()}
    )
    assert texts == {"fastpipe/profile/text_summary": str(REPORT)}


def read_back(tf: Any, folder: Path) -> tuple[dict[tuple[str, int], float], dict[str, str]]:
    """What TensorBoard finds in a folder: scalars by tag and step, and texts."""
    points, texts = {}, {}
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    texts[value.tag] = tf.make_ndarray(value.tensor).reshape(-1)[0].decode()
                elif value.HasField("simple_value"):
                    points[value.tag, event.step] = value.simple_value
                else:
                    points[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return points, texts


class Writer:
    """What stands in for a writer, and notes what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> None:
        self.calls.append(given)


def test_a_report_is_written_as_code_so_that_its_columns_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Writer()
    monkeypatch.setattr(board, "_writer", lambda: written)
    REPORT.to_tensorboard(tmp_path, step=7)
    [(folder, scalars, text, step)] = written.calls
    assert (folder, step) == (str(tmp_path), 7) and scalars == board._scalars_of(REPORT)
    assert [line[4:] for line in text.splitlines()] == str(REPORT).splitlines()
    assert {line[:4] for line in text.splitlines()} == {"    "}


@pytest.mark.parametrize(
    ("installed", "is_loaded", "expected"),
    [
        ({"torch.utils.tensorboard"}, False, "_write_with_torch"),
        ({"torch.utils.tensorboard", "tensorflow"}, False, "_write_with_torch"),
        ({"torch.utils.tensorboard", "tensorflow"}, True, "_write_with_tensorflow"),
        ({"tensorflow"}, False, "_write_with_tensorflow"),
    ],
    ids=["torch", "torch beside TensorFlow", "torch, TensorFlow is loaded", "TensorFlow"],
)
def test_it_is_written_with_what_is_there(
    installed: set[str], is_loaded: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    if is_loaded:
        monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    monkeypatch.setattr(board.importlib, "import_module", lambda name: by_hand(name, installed))
    assert board._writer().func.__name__ == expected


def by_hand(name: str, installed: set[str]) -> ModuleType:
    if name not in installed:
        raise ImportError(name)
    return ModuleType(name)


def test_without_a_writer_the_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(board.importlib, "import_module", lambda name: by_hand(name, set()))
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        REPORT.to_tensorboard(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_without_steps_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nothing to write to .*no loader was iterated"):
        Report(None).to_tensorboard(tmp_path)


@pytest.mark.slow
def test_a_profile_beside_torch_is_written(tmp_path: Path) -> None:
    """In a process of its own: TensorFlow and torch in one, in the order in which a script has them."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import fastpipe
from torch.utils.data import DataLoader
report = fastpipe.profile(DataLoader(range(64), batch_size=4), lambda batch: None, seconds=0.05)
report.to_tensorboard({str(tmp_path / "runs")!r})
import torchvision, torch._dynamo
""")
    if not find_spec("tensorflow") and not find_spec("tensorboard"):
        pytest.skip("needs a writer: pip install tensorboard")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name.startswith("events.out.tfevents") for path in (tmp_path / "runs").iterdir()] == [True]
