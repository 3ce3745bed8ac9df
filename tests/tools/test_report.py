"""Reports: what they say of known numbers, and their files."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from pytest import MonkeyPatch
from scripts import ran
from torch.utils.data import DataLoader

import fastpipe
from fastpipe import tools
from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.tools import Advice, Report
from fastpipe.tools import report as reports
from fastpipe.tools.costs import Alone, LoaderCosts
from fastpipe.tools.report import Alternative, LoaderNote, Part
from fastpipe.tools.thread_times import Spent

REPORT = Report(
    LoaderNote("DataLoader over Photos", workers=2), 40, 0.5, 0.2, 0.3, instant_s=0.3,
    alone=Alone(0.4, 0.7, 40), device_wait_s=0.1, device_busy_s=0.4,
    costs=LoaderCosts({"read": Spent(10**8, 0, 0), "decode": Spent(3 * 10**8, 0, 0)}, batches=40),
    stall=(Part("decode", 0.15), Part("read", 0.05)),
    cases=(Part("with data ready", 0.3), Part("as it is", 0.5)),
    advice=(Advice("let fastpipe make them", "measured", 0.31, 0.32), Advice("num_workers=4", "", 0.4)),
)  # fmt: skip
SCALARS = {
    "step_seconds": 0.5, "wait_seconds": 0.2, "busy_seconds": 0.3, "device_wait_seconds": 0.1,
    "device_busy_seconds": 0.4, "stall_share": 0.4, "loader_alone/batch_seconds": 0.4,
    "stall_seconds/decode": 0.15, "stall_seconds/read": 0.05, "batch_seconds/read": 0.1,
    "batch_seconds/decode": 0.3, "case_seconds/with_data_ready": 0.3, "case_seconds/as_it_is": 0.5, "predicted_seconds/1": 0.31,
    "tried_seconds/1": 0.32, "predicted_seconds/2": 0.4,
}  # fmt: skip


@pytest.mark.parametrize(("delay_s", "lost_s"), [(None, 0.030), (0.005, 0.030), (0.035, 0.045), (9.0, 0.050)])
def test_a_step_has_lost_what_the_loader_takes_or_what_its_threads_wait_for_cores(
    delay_s: float | None, lost_s: float
) -> None:
    report = Report(
        LoaderNote("x", workers=2, ahead=4), 100, 0.070, 0.010, 0.060, instant_s=0.010, step_delay_s=delay_s,
        alone=Alone(0.020, 0.040, 100), cores=2,
    )  # fmt: skip
    assert report.lost_s == pytest.approx(lost_s) and report.base_s == pytest.approx(0.070 - lost_s)
    assert replace(report, instant_s=0.055).lost_s == pytest.approx(0.015)  # that it is slower, at most
    little = replace(
        report, loader=LoaderNote("x", ahead=2), alone=Alone(0.0001, 0.0001, 100), wait_s=0.0, busy_s=0.070,
        instant_s=0.050, step_delay_s=0.030,
    )  # fmt: skip  # other processes take the cores, not the loader
    assert little.lost_s == pytest.approx(0.0001) and not little.is_loader_bound


def test_a_report_is_text_json_a_page_and_a_trace() -> None:
    loader = DataLoader(range(4000), batch_size=4, num_workers=0)  # type: ignore[arg-type]
    report = fastpipe.profile(loader, lambda batch: None, seconds=0.3)
    assert repr(report) == str(report) and report.verdict in str(report)
    assert max(map(len, str(report).splitlines())) < 200
    content = json.loads(report.json())
    assert (content["format"], content["verdict"], content["step_s"]) == (1, report.verdict, report.step_s)
    assert set(content["costs"]["stages"]) == set(report.costs.stages)
    trace = json.loads(report.trace())["traceEvents"]
    names = {event["name"] for event in trace}
    assert {"wait for the batch", "step", "fetch", "collate", "thread_name"} <= names
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")
    page = re.sub("<(!doctype|meta|link|br)[^>]*>", "", report.html())  # which need not be closed
    assert len(list(ElementTree.fromstring(page).iter())) > 20 and "<script" not in page
    assert "http://" not in report.html()
    text = "the GPU takes 400 ms for a step and is idle for 100 ms before it"
    assert text in str(REPORT) and REPORT.as_json()["device_wait_s"] == 0.1
    assert "GPU" not in str(replace(REPORT, device_wait_s=None, device_busy_s=None))


@pytest.mark.parametrize(
    ("alternatives", "said"),
    [
        ((), "no replacement of DataLoader over Photos is known, so nothing was tried"),
        ((Alternative("num_workers=4", 0.49),), "no alternative that was measured is clearly faster: "
         "num_workers=4: 490 ms a step"),
        ((Alternative("num_workers=4", None),), "batches are too slow to measure num_workers=4 in this time: use a "
         "longer time, such as --seconds 12 --limit 120"),
        ((Alternative("a", 0.49), Alternative("b", None)), "is clearly faster: a: 490 ms a step. batches are too slow "
         "to measure b in this time"),
    ],
    ids=["none known", "none faster", "none measured", "some measured"],
)  # fmt: skip
def test_a_report_without_advice_says_why(alternatives: tuple[Alternative, ...], said: str) -> None:
    report = replace(REPORT, advice=(), alternatives=alternatives, hint="Try image_dataset")
    text = re.sub(r"\s+", " ", str(report))
    assert "no advice: " in text and said in text and text.endswith("Try image_dataset")
    assert "Try image_dataset" in report.html() and "no advice: " in report.html()
    assert "no advice" not in str(REPORT)
    ended = replace(report, ended_by="ValueError: broken")
    assert "no advice: the script ended before alternatives were measured" in str(ended)
    ready = replace(report, wait_s=0.0, instant_s=0.5)
    assert not ready.is_loader_bound and "no advice" not in str(ready) and "Try" not in str(ready)


def test_alternatives_in_vain_and_the_loaders_work_beside_a_step_are_reported() -> None:
    advised, vain = REPORT.advice[0].what, Alternative("accelerate", 0.4, 0.52)
    report = replace(REPORT, alternatives=(Alternative(advised, 0.3), vain, Alternative("slow", None)))
    assert "not clearly faster: accelerate: 400 ms a step (tried: 520 ms)" in str(report)
    assert "slow: " not in str(report) and "not clearly faster: accelerate" in report.html()
    assert "because the loader works on the same cores" not in str(report)
    together = LoaderNote("DataLoader", workers=2, ahead=4)
    report = Report(together, 9, 0.2, 0.01, 0.19, 0.12, alone=Alone(0.1, 0.16, 9), cores=2)
    assert "waits 10 ms, is busy 190 ms, 70 ms of it because the loader works on the same cores" in str(
        report
    )


def test_a_report_has_the_script_its_end_its_other_work_and_diffs() -> None:
    diff = "--- train.py\n+++ train.py\n@@ -1 +1 @@\n-DataLoader(x)\n+accelerate(DataLoader(x))\n"
    report = replace(
        REPORT, script="train<1>.py", date="2026-11-29T08:00:00+00:00", ended_by="ValueError: broken",
        asides=(Part("2 passes over the loader at train.py:9", 3.0),), advice=(Advice("a", "b", 0.3, None, diff),),
    )  # fmt: skip
    assert "not counted as steps: 3 s in 2 passes over the loader at train.py:9" in str(report)
    assert "the script ended with ValueError: broken; these are the measurements until then" in str(report)
    page = report.html()
    assert "<title>fastpipe profile train&lt;1&gt;.py</title>" in page and "2026-11-29T08:00" in page
    assert "\n-DataLoader(x)\n+accelerate(DataLoader(x))</pre>" in page
    assert report.as_json()["advice"][0]["diff"] == diff


def test_a_profile_without_steps_has_an_empty_report(tmp_path: Path) -> None:
    with fastpipe.profile() as profiling:
        pass
    assert str(profiling.report) == "no loader was iterated" and isinstance(profiling.report, Report)
    assert "no loader was iterated" in profiling.report.html()
    with pytest.raises(OptionError, match=r"nothing to write to .*no loader was iterated"):
        profiling.report.to_tensorboard(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["tensorflow", "torch.utils.tensorboard"])
def test_a_report_written_for_tensorboard_is_read_back(
    tmp_path: Path, library: str, monkeypatch: MonkeyPatch
) -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install tensorflow-cpu")
    if library != "tensorflow":
        pytest.importorskip("tensorboard", reason="needs TensorBoard's writer: pip install tensorboard")
        pytest.importorskip(library)
        monkeypatch.delitem(sys.modules, "tensorflow")
    REPORT.to_tensorboard(tmp_path, step=3)
    points, texts = {}, {}
    for path in tmp_path.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    texts[value.tag] = tf.make_ndarray(value.tensor).reshape(-1)[0].decode()
                elif value.HasField("simple_value"):
                    points[value.tag, event.step] = value.simple_value
                else:
                    points[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    expected = {(f"fastpipe/profile/{name}", 3): value for name, value in SCALARS.items()}
    assert points == pytest.approx(expected)
    lines = "\n".join(f"    {line}" for line in str(REPORT).splitlines())  # as code, so that its columns stay
    assert texts == {"fastpipe/profile/text_summary": lines}


def test_the_library_that_is_installed_or_loaded_writes(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    def import_module(name: str) -> ModuleType:
        if name not in installed:
            raise ImportError(name)
        return ModuleType(name)

    monkeypatch.setattr(reports.importlib, "import_module", import_module)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    installed: set[str] = set()
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        REPORT.to_tensorboard(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name, writer in (("tensorflow", "tensorflow"), ("torch.utils.tensorboard", "torch")):
        installed.add(name)
        assert reports._writer().func.__name__ == f"_write_with_{writer}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    assert reports._writer().func.__name__ == "_write_with_tensorflow"  # type: ignore[attr-defined]
    assert "fastpipe/profile/wait_seconds" not in reports._scalars_of(replace(REPORT, is_opaque=True))


@pytest.mark.slow
def test_a_profile_beside_torch_is_written(script: Any, tmp_path: Path) -> None:
    """In a process of its own: TensorFlow and torch in one, in the order in which a script has them."""
    if not find_spec("tensorflow") and not find_spec("tensorboard"):
        pytest.skip("needs a writer: pip install tensorboard")
    path = script(f"""
import fastpipe
from torch.utils.data import DataLoader
report = fastpipe.profile(DataLoader(range(64), batch_size=4), lambda batch: None, seconds=0.05)
report.to_tensorboard({str(tmp_path / "runs")!r})
import torchvision, torch._dynamo
""")
    done = ran(path)
    assert done.returncode == 0, done.stderr
    assert [path.name.startswith("events.out.tfevents") for path in (tmp_path / "runs").iterdir()] == [True]


def test_the_former_module_has_the_same_names_and_warns() -> None:
    old = importlib.import_module("fastpipe.profiling")
    assert set(old.__all__) == set(tools.__all__) - {"BatchSizes", "Tuning"}
    for name in old.__all__:
        with pytest.warns(DeprecationWarning, match=f"is now fastpipe.tools.{name}"):
            assert getattr(old, name) is getattr(tools, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        old.nothing
