"""``fastpipe.torch.EpochTimer`` in Lightning's own loop, with a loader whose waiting is known."""

from __future__ import annotations

import copy
import csv
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import ManualClock
from torch.utils.data import DataLoader, IterableDataset

from fastpipe.errors import OptionError
from fastpipe.torch import EpochTimer
from fastpipe.torch import trainers as epoch_timer

_WHY = "needs the trainer: pip install lightning (make venv installs it)"
pl = pytest.importorskip("lightning.pytorch", reason=_WHY)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]

STEP, WAIT, CHECK, MOVE, SAVE = 0.5, 0.25, 100.0, 3.0, 7.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(epoch_timer, "perf_counter", clock)
    return clock


class Samples(torch.utils.data.Dataset[Any]):
    """Ten samples in batches of four, for each of which a loader takes WAIT."""

    def __init__(self, clock: ManualClock | None, wait: float = WAIT, length: int = 10) -> None:
        self.clock, self.wait, self.length = clock, wait, length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.clock is not None:
            self.clock.now += self.wait
        return [torch.zeros(3) for _ in indices]


class Stream(IterableDataset[Any]):
    """The same without a length: Lightning fetches a batch ahead."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[Any]:
        for number in range(12):
            if number % 4 == 0:
                self.clock.now += WAIT
            yield torch.zeros(3)


class Module(pl.LightningModule):
    """Whatever it does takes a time that is known."""

    def __init__(self, clock: ManualClock | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.clock = clock

    def pass_time(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.now += seconds

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.pass_time(MOVE)
        return batch

    def training_step(self, batch: Any, number: int) -> Any:
        self.pass_time(STEP)
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, number: int) -> None:
        self.pass_time(CHECK)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Saving(pl.Callback):
    """Another callback, which takes long after each step."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.now += SAVE


def trainer_with(folder: Path, *callbacks: Any, **options: Any) -> Any:
    options = {"logger": False, "max_epochs": 2, **options}
    return pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, callbacks=list(callbacks),
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, **options,
    )  # fmt: skip


def test_waiting_is_the_time_for_which_the_loader_was_asked_and_nothing_else(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timer = EpochTimer()
    # The sanity check before the first epoch, validation within epochs and after them: none of it counts.
    trainer = trainer_with(tmp_path, timer, Saving(clock), val_check_interval=2, num_sanity_val_steps=1)
    caplog.set_level(logging.INFO, "fastpipe.torch")
    trainer.fit(Module(clock), DataLoader(Samples(clock), 4), DataLoader(Samples(clock), 4))
    assert [times.epoch for times in timer.epochs] == [0, 1]
    for times in timer.epochs:
        step = WAIT + MOVE + STEP
        assert times.steps == 3 and times.step_seconds == pytest.approx(step)
        assert times.seconds == pytest.approx(3 * step + 2 * SAVE)
        assert times.waiting == pytest.approx(3 * WAIT / times.seconds)
        assert times.images_per_second == pytest.approx(10 / times.seconds)
        assert times.first_batch_seconds == pytest.approx(WAIT)
        assert times.wait_seconds == times.wait_seconds_p95 == pytest.approx(WAIT)
    said = [record.getMessage() for record in caplog.records if record.name == "fastpipe.torch"]
    assert said == [str(times) for times in timer.epochs]


def test_a_loader_without_a_length_of_which_lightning_fetches_ahead(
    clock: ManualClock, tmp_path: Path
) -> None:
    timer = EpochTimer()
    trainer_with(tmp_path, timer).fit(Module(clock), DataLoader(Stream(clock), 4))
    first, second = timer.epochs
    assert (first.steps, second.steps) == (3, 3)
    # The first batch of the first epoch is fetched before that begins.
    assert first.waiting == pytest.approx(2 * WAIT / first.seconds)
    assert second.waiting == pytest.approx(3 * WAIT / second.seconds)
    assert second.images_per_second == pytest.approx(12 / second.seconds)


def test_what_goes_to_loggers_and_the_progress_bar(clock: ManualClock, tmp_path: Path) -> None:
    timer = EpochTimer()
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = trainer_with(tmp_path, timer, logger=logger, log_every_n_steps=1)
    trainer.fit(Module(clock), DataLoader(Samples(clock), 4))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    names = {f"fastpipe/{name}" for name in ("epoch_seconds", "step_seconds", "waiting", "images_per_second")}
    assert len(rows) == 2 and names <= rows[0].keys()
    for row, times in zip(rows, timer.epochs, strict=True):
        assert {name: float(row[name]) for name in names} == pytest.approx(times.scalars())
    assert {"fastpipe/waiting", "fastpipe/images_per_second"} <= trainer.progress_bar_metrics.keys()
    assert names <= trainer.callback_metrics.keys()


@pytest.mark.slow
def test_ranks_time_themselves_and_the_first_ones_loggers_are_told(tmp_path: Path) -> None:
    """Two processes, in which any advice or warning of Lightning's about what is logged fails."""
    script = tmp_path / "ranks.py"
    script.write_text(f"""
import json, os, sys, warnings
warnings.filterwarnings("error", message=".*self.log.*")
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from fastpipe.torch import EpochTimer
timer = EpochTimer()
trainer = Trainer(
    max_epochs=2, callbacks=timer, logger=CSVLogger({str(tmp_path)!r}), log_every_n_steps=1, accelerator="cpu",
    devices=2, strategy="ddp", enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    limit_train_batches=3, limit_val_batches=0,
)
trainer.fit(BoringModel())
if trainer.is_global_zero:
    print(json.dumps([trainer.logger.log_dir, [times.scalars() for times in timer.epochs]]))
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log_dir, expected = json.loads(done.stdout.splitlines()[-1])
    with open(Path(log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fastpipe/waiting"]]
    assert [{name: float(row[name]) for name in expected[0]} for row in rows] == [
        pytest.approx(one) for one in expected
    ]
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "2"), ("1", "5")]


def test_warnings(clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timer = EpochTimer(warn_after=0.2, warn_waiting=0.01)
    trainer_with(tmp_path, timer, max_epochs=1).fit(Module(clock), DataLoader(Samples(clock), 4))
    [record] = [record for record in caplog.records if record.name == "fastpipe.torch"]
    assert record.levelno == logging.WARNING
    assert "2 of 3 batches took longer than 0.2 s" in record.getMessage()
    assert "of the time was waiting for data" in record.getMessage()
    with pytest.raises(OptionError, match="warn_waiting"):
        EpochTimer(warn_waiting=20)


def test_batches_of_worker_processes(tmp_path: Path) -> None:
    timer = EpochTimer()
    loader = DataLoader(Samples(None), 4, num_workers=1)
    trainer_with(tmp_path, timer).fit(Module(None), loader)
    for times in timer.epochs:
        assert times.steps == 3 and times.waiting is not None and 0 < times.waiting <= 1
        assert times.images_per_second == pytest.approx(10 / times.seconds)


def test_a_step_that_asks_for_its_batch_itself(clock: ManualClock, tmp_path: Path) -> None:
    class Asking(Module):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            self.pass_time(STEP)
            return self.layer(batch).sum()

    timer = EpochTimer()
    with pytest.warns(UserWarning, match="dataloader_iter"):
        trainer_with(tmp_path, timer, max_epochs=1).fit(Asking(clock), DataLoader(Samples(clock), 4))
    [times] = timer.epochs
    assert times.steps == 3 and times.step_seconds == pytest.approx(WAIT + STEP)
    assert times.waiting == pytest.approx(WAIT / (WAIT + STEP))


def test_fit_begins_anew_and_leaves_the_profiler_as_it_was(clock: ManualClock, tmp_path: Path) -> None:
    timer, other = EpochTimer(), EpochTimer()
    for epochs in (2, 1):
        trainer = trainer_with(tmp_path, timer, other, max_epochs=epochs, profiler="simple")
        before = trainer.profiler.start, trainer.profiler.stop
        trainer.fit(Module(clock), DataLoader(Samples(clock), 4))
        assert (trainer.profiler.start, trainer.profiler.stop) == before
        assert len(timer.epochs) == epochs and other.epochs == timer.epochs
    assert any("train_dataloader_next" in name for name in trainer.profiler.recorded_durations)
    trainer.validate(Module(clock), DataLoader(Samples(clock), 4), verbose=False)
    assert len(timer.epochs) == 1


def test_a_training_that_fails_leaves_nothing(clock: ManualClock, tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: Any, number: int) -> Any:
            if number == 1:
                raise ValueError("the step")
            return super().training_step(batch, number)

    timer = EpochTimer()
    trainer = trainer_with(tmp_path, timer)
    before = trainer.profiler.start
    with pytest.raises(ValueError, match="the step"):
        trainer.fit(Failing(clock), DataLoader(Samples(clock), 4))
    assert timer.epochs == [] and trainer.profiler.start == before


def test_an_epoch_that_is_gone_on_with_after_a_restart(clock: ManualClock, tmp_path: Path) -> None:
    class SaveAfterOne(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    trainer_with(tmp_path, SaveAfterOne(), max_epochs=1).fit(Module(clock), DataLoader(Samples(clock), 4))
    timer = EpochTimer()
    trainer = trainer_with(tmp_path, timer, max_epochs=2)
    with pytest.warns(UserWarning):  # of Lightning, about loaders that cannot go on where they were
        trainer.fit(Module(clock), DataLoader(Samples(clock), 4), ckpt_path=tmp_path / "one.ckpt")
    assert [times.steps for times in timer.epochs] == [2, 3]
    assert timer.epochs[0].waiting == pytest.approx(timer.epochs[1].waiting)


def test_without_the_loops_word_waiting_is_not_known(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(epoch_timer, "_FETCH", ".another_name")
    caplog.set_level(logging.INFO, "fastpipe.torch")
    timer = EpochTimer(warn_waiting=0.01)
    trainer_with(tmp_path, timer).fit(Module(clock), DataLoader(Samples(clock), 4))
    assert len(timer.epochs) == 2
    for times in timer.epochs:
        assert times.waiting is None and times.step_seconds == pytest.approx(STEP)
    assert len([text for text in caplog.messages if "what it waited for data is not known" in text]) == 1


def test_a_barebones_trainer(clock: ManualClock, tmp_path: Path) -> None:
    timer = EpochTimer()
    trainer = pl.Trainer(barebones=True, max_epochs=1, callbacks=timer, accelerator="cpu", devices=1)
    trainer.fit(Module(clock), DataLoader(Samples(clock), 4))
    assert [times.steps for times in timer.epochs] == [3]


def test_copies_and_classes_of_ones_own(clock: ManualClock, tmp_path: Path) -> None:
    timer = EpochTimer(warn_after=3.0)
    trainer_with(tmp_path, timer, max_epochs=1).fit(Module(clock), DataLoader(Samples(clock), 4))
    for again in (copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))):
        assert isinstance(again, EpochTimer) and isinstance(again, pl.Callback)
        assert again.epochs == timer.epochs and type(again) is type(timer)
    assert timer.state_key == "EpochTimer"

    class Own(EpochTimer, pl.Callback):
        pass

    assert type(Own()) is Own


@pytest.mark.slow
def test_it_is_of_whichever_lightning_the_script_uses() -> None:
    code = """
import sys
from fastpipe.torch import EpochTimer, FastLoader
assert not {"lightning", "pytorch_lightning"} & set(sys.modules)
import pytorch_lightning
timer = EpochTimer()
assert isinstance(timer, pytorch_lightning.Callback) and "lightning.pytorch" not in sys.modules
assert pytorch_lightning.Trainer(callbacks=timer, logger=False, accelerator="cpu").callbacks[0] is timer
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_lightning_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install lightning"):
        EpochTimer()
