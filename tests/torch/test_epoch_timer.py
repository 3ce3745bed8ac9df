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
from trainer_ranks import trainer_of

from fastpipe.errors import OptionError
from fastpipe.torch import EpochTimer
from fastpipe.torch import trainers as epoch_timer

_WHY = "needs the trainer: pip install lightning (make venv installs it)"
pl = pytest.importorskip("lightning.pytorch", reason=_WHY)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*consider setting `persistent_workers=True`", "ignore:You defined a `validation_step` but have no",
)  # fmt: skip

STEP, WAIT, CHECK, MOVE, SAVE = 0.5, 0.25, 100.0, 3.0, 7.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(epoch_timer, "perf_counter", clock)
    return clock


class Samples(torch.utils.data.Dataset[Any]):
    """Ten samples in batches of four, for each of which a loader takes WAIT."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.clock.now += WAIT
        return [torch.zeros(3) for _ in indices]


class Stream(IterableDataset[Any]):
    """Twelve samples, without a length: Lightning fetches a batch ahead."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[Any]:
        for number in range(12):
            self.clock.now += WAIT if number % 4 == 0 else 0
            yield torch.zeros(3)


class Module(pl.LightningModule):
    """Each of its methods takes a time that is known."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.clock = clock

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.clock.now += MOVE
        return batch

    def training_step(self, batch: Any, number: int) -> Any:
        self.clock.now += STEP
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, number: int) -> None:
        self.clock.now += CHECK

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Asking(Module):
    """Its step asks for its batch itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


class Failing(Module):
    def training_step(self, batch: Any, number: int) -> Any:
        if number == 1:
            raise ValueError("the step")
        return super().training_step(batch, number)


class Saving(pl.Callback):
    """Another callback, which takes long after each step, and saves after the first."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.clock.now += SAVE
        if trainer.global_step == 1:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/one.ckpt")


def samples(clock: ManualClock, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Samples(clock), 4, num_workers=workers)


def logged(folder: str) -> list[dict[str, str]]:
    """The lines of metrics that have those of a timer."""
    with open(Path(folder) / "metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["fastpipe/waiting"]]


def test_waiting_is_the_time_of_requests_to_the_loader_alone(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timer, logger = EpochTimer(), pl.loggers.CSVLogger(tmp_path)
    # The sanity check before the first epoch, validation within epochs and after them do not count.
    options = {"val_check_interval": 2, "num_sanity_val_steps": 1, "logger": logger, "log_every_n_steps": 1}
    trainer = trainer_of(tmp_path, timer, Saving(), **options)
    caplog.set_level(logging.INFO, "fastpipe.torch")
    trainer.fit(Module(clock), samples(clock), samples(clock))
    assert [times.epoch for times in timer.epochs] == [0, 1]
    for times in timer.epochs:
        assert times.steps == 3 and times.step_seconds == pytest.approx(WAIT + MOVE + STEP)
        assert times.seconds == pytest.approx(3 * (WAIT + MOVE + STEP) + 2 * SAVE)
        assert times.waiting == pytest.approx(3 * WAIT / times.seconds)
        assert times.images_per_second == pytest.approx(10 / times.seconds)
        assert times.first_batch_seconds == pytest.approx(WAIT)
        assert times.wait_seconds == times.wait_seconds_p95 == pytest.approx(WAIT)
    said = [record.getMessage() for record in caplog.records if record.name == "fastpipe.torch"]
    assert said == [str(times) for times in timer.epochs]
    names = {f"fastpipe/{name}" for name in ("epoch_seconds", "step_seconds", "waiting", "images_per_second")}
    for row, times in zip(logged(logger.log_dir), timer.epochs, strict=True):
        assert {name: float(row[name]) for name in names} == pytest.approx(times.scalars())
    assert {"fastpipe/waiting", "fastpipe/images_per_second"} <= trainer.progress_bar_metrics.keys()
    assert names <= trainer.callback_metrics.keys()


def test_batches_count_where_lightning_fetches_them(clock: ManualClock, tmp_path: Path) -> None:
    timer = EpochTimer()
    trainer_of(tmp_path, timer).fit(Module(clock), DataLoader(Stream(clock), 4))
    first, second = timer.epochs
    assert (first.steps, second.steps) == (3, 3)
    # The first batch of the first epoch is fetched before that begins.
    assert first.waiting == pytest.approx(2 * WAIT / first.seconds)
    assert second.waiting == pytest.approx(3 * WAIT / second.seconds)
    assert second.images_per_second == pytest.approx(12 / second.seconds)
    with pytest.warns(UserWarning, match="dataloader_iter"):
        trainer_of(tmp_path, timer, max_epochs=1).fit(Asking(clock), samples(clock))
    [times] = timer.epochs
    assert times.steps == 3 and times.step_seconds == pytest.approx(WAIT + STEP)
    assert times.waiting == pytest.approx(WAIT / (WAIT + STEP))


def test_batches_of_worker_processes_and_a_barebones_trainer_are_timed(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = EpochTimer()
    barebones = pl.Trainer(barebones=True, max_epochs=1, callbacks=timer, accelerator="cpu", devices=1)
    barebones.fit(Module(clock), samples(clock))
    assert [times.steps for times in timer.epochs] == [3]
    monkeypatch.undo()  # the real clock
    trainer_of(tmp_path, timer).fit(Module(clock), samples(clock, workers=1))
    for times in timer.epochs:
        assert times.steps == 3 and times.waiting is not None and 0 < times.waiting <= 1
        assert times.images_per_second == pytest.approx(10 / times.seconds)


RANKS = """
import json, sys, warnings
import pytorch_lightning  # EpochTimer is of whichever Lightning the script uses
from fastpipe.torch import EpochTimer
timer = EpochTimer()
assert isinstance(timer, pytorch_lightning.Callback) and "lightning.pytorch" not in sys.modules
warnings.filterwarnings("error", message=".*self.log.*")  # advice about what is logged
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loggers import CSVLogger
trainer = Trainer(
    max_epochs=2, callbacks=timer, logger=CSVLogger(sys.argv[1]), log_every_n_steps=1, accelerator="cpu",
    devices=2, strategy="ddp", enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    limit_train_batches=3, limit_val_batches=0,
)
trainer.fit(BoringModel())
if trainer.is_global_zero:
    print(json.dumps([trainer.logger.log_dir, [times.scalars() for times in timer.epochs]]))
"""


@pytest.mark.slow
def test_ranks_time_themselves_and_the_first_one_logs(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "ranks.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log_dir, expected = json.loads(done.stdout.splitlines()[-1])
    for row, one in zip(rows := logged(log_dir), expected, strict=True):
        assert {name: float(row[name]) for name in one} == pytest.approx(one)
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "2"), ("1", "5")]


def test_long_waits_are_warned_of(clock: ManualClock, tmp_path: Path, caplog: Any) -> None:
    timer = EpochTimer(warn_after=0.2, warn_waiting=0.01)
    trainer_of(tmp_path, timer, max_epochs=1).fit(Module(clock), samples(clock))
    [record] = [record for record in caplog.records if record.name == "fastpipe.torch"]
    assert record.levelno == logging.WARNING
    for words in ("2 of 3 batches took longer than 0.2 s", "of the time was waiting for data"):
        assert words in record.getMessage()
    with pytest.raises(OptionError, match="warn_waiting"):
        EpochTimer(warn_waiting=20)


def test_fit_begins_anew_and_leaves_the_profiler_as_it_was(clock: ManualClock, tmp_path: Path) -> None:
    timer, other = EpochTimer(), EpochTimer()
    for epochs in (2, 1):
        trainer = trainer_of(tmp_path, timer, other, max_epochs=epochs, profiler="simple")
        before = trainer.profiler.start, trainer.profiler.stop
        trainer.fit(Module(clock), samples(clock))
        assert (trainer.profiler.start, trainer.profiler.stop) == before
        assert len(timer.epochs) == epochs and other.epochs == timer.epochs
    assert any("train_dataloader_next" in name for name in trainer.profiler.recorded_durations)
    trainer.validate(Module(clock), samples(clock), verbose=False)
    assert len(timer.epochs) == 1
    failing = trainer_of(tmp_path, timer)
    before = failing.profiler.start
    with pytest.raises(ValueError, match="the step"):
        failing.fit(Failing(clock), samples(clock))
    assert timer.epochs == [] and failing.profiler.start == before


def test_waiting_is_unknown_if_the_loop_does_not_report_it(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(epoch_timer, "_FETCH", ".another_name")
    caplog.set_level(logging.INFO, "fastpipe.torch")
    timer = EpochTimer(warn_waiting=0.01)
    trainer_of(tmp_path, timer).fit(Module(clock), samples(clock))
    assert [times.waiting for times in timer.epochs] == [None, None]
    assert timer.epochs[0].step_seconds == pytest.approx(STEP)
    assert len([text for text in caplog.messages if "what it waited for data is not known" in text]) == 1


def test_timers_can_be_copied_and_derived_from(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = EpochTimer(warn_after=3.0)
    trainer_of(tmp_path, timer, max_epochs=1).fit(Module(clock), samples(clock))
    for again in (copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))):
        assert isinstance(again, EpochTimer) and isinstance(again, pl.Callback)
        assert again.epochs == timer.epochs and type(again) is type(timer)
    assert timer.state_key == "EpochTimer"
    own = type("Own", (EpochTimer, pl.Callback), {})
    assert type(own()) is own
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install lightning"):
        EpochTimer()
