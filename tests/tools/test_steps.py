"""Other ways to compute a model: done to it in place, measured on a loop, and undone."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastpipe
from fastpipe.tools import steps
from fastpipe.tools.diagnosis import Diagnosis
from fastpipe.tools.loaders import Watch
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line
from fastpipe.tools.steps import ModelChanges, SeenModels

IMAGES = torch.rand(2, 3, 16, 16)
LOADER: Any = DataLoader(torch.rand(64, 3), batch_size=8)  # type: ignore[arg-type]
LOOP: Any = SimpleNamespace(used_at=Line("train.py", 7, "main"))


class Waiting(nn.Linear):  # a model that takes its time, whatever else the machine does
    def forward(self, rows: Any) -> Any:
        select.select([], [], [], 0.04)
        return super().forward(rows)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 2)
        self.inputs: list[Any] = []

    def forward(self, images: Any) -> Any:
        self.inputs.append(images)
        return self.last(self.second(self.first(images).relu()).mean((2, 3)))


def state(model: nn.Module) -> str:
    """All that must be as it was, to the bit."""
    weights = [(weight.stride(), weight.detach().numpy().tobytes()) for weight in model.parameters()]
    return repr((weights, sorted(vars(model)), model._forward_pre_hooks, model._compiled_call_impl))


def tried(changes: ModelChanges, step: Callable[[Any], object], seconds: Callable[[int], float]) -> list[str]:
    """The names of the changes, of each of which one step is tried."""
    names: list[str] = []
    for batches in changes.phases(lambda: seconds(len(names))):
        step(next(batches))
        names.append("as it is" if changes._now is None else changes._now.what.partition(":")[0])
    return names


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models that were compiled, on a processor that has bfloat16."""
    models: list[Any] = []
    monkeypatch.setattr(steps, "_processor_flags", lambda: ["avx512_bf16"])
    monkeypatch.setattr(steps.shutil, "which", lambda name: name)
    monkeypatch.setattr(nn.Module, "compile", lambda self: models.append(self))
    return models


def test_each_way_is_tried_and_undone(compiled: list[Any]) -> None:
    model, outputs = Net(), []
    model.zero_grad()
    before = state(model)

    def step(batch: Any) -> None:
        outputs.append(model(batch))
        assert torch.allclose(outputs[-1].float(), outputs[0], atol=0.05)

    changes = ModelChanges(IMAGES)
    names = tried(changes, step, lambda count: 1.0 if count == 1 else 0.5)
    assert names == ["as it is", "channels-last", "mixed precision", "compile"]
    assert compiled == [model] and before == state(model)
    formats = [one.is_contiguous(memory_format=torch.channels_last) for one in model.inputs]
    assert formats == [False, True, False, False]
    assert [one.dtype for one in outputs] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    advice = list(changes.advice(LOOP, lambda seconds: seconds + 0.25))
    assert [one.what.partition(":")[0] for one in advice] == names[1:]
    assert {(one.predicted_s, one.tried_s) for one in advice} == {(0.75, None)}
    assert all("takes 1 s unchanged, and 500 ms with this change" in one.why for one in advice)
    assert "train.py:7 main" in advice[0].what
    changes = ModelChanges(IMAGES)
    tried(changes, model, lambda count: 1.0 if count == 1 else 0.95)
    assert not list(changes.advice(LOOP, float)), "a little is no advice"


def test_ways_that_a_model_has_or_cannot_have_are_not_tried(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net().to(memory_format=torch.channels_last)
    monkeypatch.setattr(model, "_compiled_call_impl", model._call_impl)

    def mixed(batch: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch)

    assert tried(ModelChanges(IMAGES), mixed, lambda _: 1.0) == ["as it is"]
    assert model.first.weight.is_contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(nn.Module, "compile", Mock(side_effect=RuntimeError("no compiler")))
    with caplog.at_level(logging.WARNING, "fastpipe"):
        assert "compile" not in tried(ModelChanges(IMAGES), Net(), lambda _: 1.0)
    assert "no compiler" in caplog.text
    monkeypatch.setattr(steps, "_processor_flags", lambda: ["avx2"])
    monkeypatch.setattr(steps.shutil, "which", lambda name: None)
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    assert tried(ModelChanges(IMAGES), lazy, lambda _: 1.0) == ["as it is"]


def test_bfloat16_is_fast_where_torch_or_the_processor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    is_supported: Any = lambda *, including_emulation: not including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert steps.bfloat16_is_fast("cuda")
    for line in ("flags : fpu amx_bf16", "Features : fp bf16", "flags : avx2"):
        monkeypatch.setattr(steps.Path, "read_text", lambda path, line=line: f"processor : 0\n{line}\n")
        assert steps.bfloat16_is_fast("cpu") == ("bf16" in line)


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
    nn.Linear(1, 1)(torch.rand(1))  # of another step, which is not observed
    assert seen.outermost() == [whole, other]


@pytest.mark.parametrize("at", range(3))
def test_models_are_as_before_whenever_it_is_ended(at: int, compiled: list[Any]) -> None:
    model = Net()
    before = state(model)
    phases: Any = ModelChanges(IMAGES).phases(lambda: 1.0)
    for _ in range(at + 1):
        model(next(next(phases)))
    next(phases)
    phases.close()
    model.inputs.clear()
    model(IMAGES)
    assert before == state(model) and model.inputs[0].is_contiguous()


def test_a_loop_whose_step_takes_the_time_is_tried_with_changed_models(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Waiting(3, 2)
    monkeypatch.setattr(nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", len))
    before = state(model)
    report = fastpipe.profile(LOADER, lambda rows: model(rows), seconds=0.4, try_advice=True)
    assert not report.is_loader_bound
    found = next(one for one in report.advice if one.what.startswith("compile"))
    assert (
        found.predicted_s is not None and found.predicted_s < report.step_s and "test_steps.py" in found.what
    )
    assert before == state(model) and not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.slow
def test_a_step_that_fails_is_excused_only_where_its_model_was_changed(
    compiled: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun, phases = Waiting(3, 2), [], ModelChanges.phases
    monkeypatch.setattr(ModelChanges, "phases", lambda *some: (begun.append(1), phases(*some))[1])

    def step(rows: Any) -> None:
        model(rows)
        if begun if fails_as_it_is else compiled:
            raise ValueError("no more")

    fails_as_it_is = False
    with caplog.at_level(logging.WARNING, "fastpipe"):
        report = fastpipe.profile(LOADER, step, seconds=0.3, try_advice=True)
    assert report.instant_s is not None and "not tried to the end: compile" in caplog.text
    fails_as_it_is = True
    begun.clear()
    with pytest.raises(ValueError, match="no more"):
        fastpipe.profile(LOADER, step, seconds=0.3, try_advice=True)
    assert "_compiled_call_impl" not in vars(model) and "forward" not in vars(model)


def test_a_loop_of_another_thread_ends_while_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis, watch, found = Diagnosis(0.1, tries=True), Watch(lambda _: Loop(1.0, True)), []
    monkeypatch.setattr(watch, "of", lambda loader: loader)
    monkeypatch.setattr(diagnosis, "look", lambda _: found.append(diagnosis.next_phase(watch, "other")))
    monkeypatch.setattr(diagnosis, "_predictions", dict)
    monkeypatch.setattr(diagnosis, "_step_changes", lambda _: iter(()))
    watched: Any = SimpleNamespace(is_opaque=False, loop=Loop(1.0, True))
    assert diagnosis.next_phase(watch, watched) is None and found == [None]
