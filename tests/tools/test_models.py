"""Other ways to compute a model: done to it in place, measured on a loop, and undone."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastpipe
from fastpipe.tools import steps as models
from fastpipe.tools.diagnosis import Diagnosis
from fastpipe.tools.loaders import Watch
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line
from fastpipe.tools.steps import ModelChanges, SeenModels, bfloat16_is_fast


class Waiting(nn.Linear):
    """A model that takes its time, whatever else the machine does."""

    def forward(self, rows: Any) -> Any:
        select.select([], [], [], 0.02)
        return super().forward(rows)


ROWS: Any = torch.rand(64, 3)
LOOP: Any = SimpleNamespace(used_at=Line("train.py", 7, "main"))


class Net(nn.Module):
    """A small one, of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.last = nn.Linear(8, 2)
        self.inputs: list[Any] = []

    def forward(self, images: Any) -> Any:
        self.inputs.append(images)
        return self.last(self.second(self.first(images).relu()).mean((2, 3)))


def state(model: nn.Module) -> list[Any]:
    """What must be as it was."""
    weights = [(weight.stride(), weight.detach().clone()) for weight in model.parameters()]
    return [weights, sorted(vars(model)), model._forward_pre_hooks, model._compiled_call_impl]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two states are the same, to the bit."""
    pairs = zip(one[0], other[0], strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs) and one[1:] == other[1:]


def changed(model: nn.Module, step: Callable[[Any], object]) -> tuple[ModelChanges, list[str]]:
    """Changes of which all have been tried, one step each, and what each was."""
    changes, tried = ModelChanges(torch.rand(2, 3, 16, 16)), []
    for batches in changes.phases(lambda: 1.0 if len(tried) == 1 else 0.5):
        step(next(batches))
        tried.append("as it is" if changes._now is None else changes._now.what.partition(":")[0])
    return changes, tried


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has it."""
    monkeypatch.setattr(models, "_processor_flags", lambda: ["avx512_bf16"])


def trained(model: nn.Module) -> Callable[[Any], object]:
    def step(batch: Any) -> None:
        nn.CrossEntropyLoss()(model(batch).float(), torch.tensor([0, 1])).backward()  # type: ignore[no-untyped-call]

    return step


@pytest.mark.usefixtures("bfloat16")
def test_each_way_is_tried_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    model.zero_grad()
    before, outputs = state(model), []

    def step(batch: Any) -> None:
        outputs.append(model(batch))
        assert torch.allclose(outputs[-1].float(), outputs[0], atol=0.05)

    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    changes, tried = changed(model, step)
    assert tried == ["as it is", "channels-last", "mixed precision", "compile"]
    assert compiled == [model] and same(before, state(model))
    formats = [one.is_contiguous(memory_format=torch.channels_last) for one in model.inputs]
    assert formats == [False, True, False, False]
    assert [one.dtype for one in outputs] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    advice = list(changes.advice(LOOP, lambda seconds: seconds + 0.25))
    assert [one.what.partition(":")[0] for one in advice] == tried[1:]
    assert {(one.predicted_s, one.tried_s) for one in advice} == {(0.75, 0.5)}
    assert all("takes 1 s as it is, and 500 ms so" in one.why for one in advice)
    assert "train.py:7 main" in advice[0].what


def test_a_loop_of_another_thread_ends_while_one_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis, watch = Diagnosis(0.1, tries=True), Watch(lambda _: Loop(1.0, True))
    found: list[Any] = []
    monkeypatch.setattr(watch, "of", lambda loader: loader)
    monkeypatch.setattr(diagnosis, "look", lambda _: found.append(diagnosis.next_phase(watch, "other")))
    monkeypatch.setattr(diagnosis, "_predictions", dict)
    monkeypatch.setattr(diagnosis, "_step_changes", lambda _: iter(()))
    watched: Any = SimpleNamespace(is_opaque=False, loop=Loop(1.0, True))
    assert diagnosis.next_phase(watch, watched) is None
    assert found == [None]


def test_what_brings_little_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    model = Net()
    changes, seconds = ModelChanges(torch.rand(2, 3, 16, 16)), iter([1.0, *[0.95] * 3])
    for batches in changes.phases(lambda: next(seconds)):
        model(next(batches))
    assert not list(changes.advice(LOOP, float))


def test_models_that_are_called_are_found_without_their_parts() -> None:
    whole, other, frozen = Net(), nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    seen = SeenModels()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole(torch.rand(1, 3, 8, 8))
        for one in (other, frozen):
            one(torch.rand(3))
        nn.CrossEntropyLoss()(torch.rand(2, 2), torch.tensor([0, 1]))
    assert seen.outermost() == [whole, other] and seen.is_mixed
    after = nn.Linear(1, 1)  # of another step: nobody looks any more
    after(torch.rand(1))
    assert seen.outermost() == [whole, other]


@pytest.mark.usefixtures("bfloat16")
def test_what_a_model_has_already_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().to(memory_format=torch.channels_last)
    monkeypatch.setattr(model, "_compiled_call_impl", model._call_impl)

    def step(batch: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch)

    _, tried = changed(model, step)
    assert tried == ["as it is"]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in (model.first.weight,))


def test_what_cannot_be_of_use_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_processor_flags", lambda: ["avx2"])
    monkeypatch.setattr(models.shutil, "which", lambda name: None)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    _, tried = changed(model, model)
    assert tried == ["as it is"]


@pytest.mark.parametrize("at", range(3))
@pytest.mark.usefixtures("bfloat16")
def test_whatever_ends_it_models_are_as_before(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    model = Net()
    before = state(model)
    phases: Any = ModelChanges(torch.rand(2, 3, 16, 16)).phases(lambda: 1.0)
    for _ in range(at + 1):
        model(next(next(phases)))
    next(phases)
    phases.close()
    model.inputs.clear()
    model(torch.rand(2, 3, 16, 16))
    assert same(before, state(model)) and model.inputs[0].is_contiguous()


def test_a_way_that_fails_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(nn.Module, "compile", fail)
    model = Net()
    with caplog.at_level(logging.WARNING, "fastpipe"):
        _, tried = changed(model, model)
    assert "compile" not in tried and "no compiler" in caplog.text
    assert model._compiled_call_impl is None  # type: ignore[unreachable]


def test_a_loop_whose_step_takes_the_time_is_tried_with_other_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Waiting(3, 2)

    def compiled(self: Any) -> None:
        self._compiled_call_impl = len  # of a batch, and nothing else

    monkeypatch.setattr(nn.Module, "compile", compiled)
    monkeypatch.setattr(models.shutil, "which", lambda name: name)

    def step(rows: Any) -> None:
        model(rows)

    before = state(model)
    report = fastpipe.profile(DataLoader(ROWS, batch_size=8), step, seconds=0.6, try_advice=True)
    assert not report.is_loader_bound
    found = next(one for one in report.advice if one.what.startswith("compile"))
    assert found.tried_s is not None and found.tried_s < report.step_s
    assert "test_models.py" in found.what
    assert (
        same(before, state(model))
        and not models.sys.modules["torch"].nn.modules.module._global_forward_pre_hooks
    )


@pytest.mark.parametrize("fails", ["as it is", "compile"])
def test_a_step_that_fails_is_excused_only_where_its_model_was_changed(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, is_compiled, phases = Waiting(3, 2), False, []

    def compiled(self: Any) -> None:
        nonlocal is_compiled
        is_compiled = True

    monkeypatch.setattr(nn.Module, "compile", compiled)
    monkeypatch.setattr(models.shutil, "which", lambda name: name)
    begin = ModelChanges.phases

    def noted(self: ModelChanges, measured: Any) -> Any:
        phases.append("begun")
        return begin(self, measured)

    monkeypatch.setattr(ModelChanges, "phases", noted)

    def step(rows: Any) -> None:
        model(rows)
        if (fails == "as it is" and phases) or is_compiled:
            raise ValueError("no more")

    loader = DataLoader(ROWS, batch_size=8)
    if fails == "as it is":
        with pytest.raises(ValueError, match="no more"):
            fastpipe.profile(loader, step, seconds=0.3, try_advice=True)
    else:
        with caplog.at_level(logging.WARNING, "fastpipe"):
            report = fastpipe.profile(loader, step, seconds=0.3, try_advice=True)
        assert report.instant_s is not None and "not tried to the end: compile" in caplog.text
    assert "_compiled_call_impl" not in vars(model) and "forward" not in vars(model)


def test_bfloat16_of_a_gpu_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: asked.append(options) or True)
    assert bfloat16_is_fast("cuda") and asked == [{"including_emulation": False}]
