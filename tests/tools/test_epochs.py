"""``fastpipe.watch``: the loader's own batches, and times that are known because the test moves the clock."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clock import ManualClock
from rich.console import Console
from torch.utils.data import DataLoader

import fastpipe
from fastpipe import FastLoader
from fastpipe.errors import OptionError
from fastpipe.tools import WatchedLoader, epochs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(epochs, "perf_counter", clock)
    return clock


class Loader:
    """Batches of four samples, each of which takes a time that is given."""

    def __init__(self, clock: ManualClock, waits: list[float], start: float = 0.0) -> None:
        self.clock, self.waits, self.start = clock, waits, start

    def __len__(self) -> int:
        return len(self.waits)

    def __iter__(self) -> Iterator[Any]:
        self.clock.now += self.start  # workers that start
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for number, wait in enumerate(self.waits):
            self.clock.now += wait
            yield np.full((4, 2), number)


def train(loader: Any, clock: ManualClock, step: float) -> None:
    for _ in loader:
        clock.now += step


def test_what_an_epoch_took(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5, 0.1, 0.1, 0.3], start=2.0))
    with caplog.at_level(logging.INFO, "fastpipe"):
        for _ in range(2):
            train(loader, clock, 0.5)
            clock.now += 1000  # validation
    assert [times.epoch for times in loader.epochs] == [0, 1]
    for times in loader.epochs:
        assert times.seconds == pytest.approx(2.0 + 1.0 + 4 * 0.5)
        assert times.steps == 4
        assert times.step_seconds == pytest.approx(0.7)  # of 1.0, 0.6, 0.6, 0.8
        assert times.step_seconds_p95 == pytest.approx(0.97)
        assert times.wait_seconds == pytest.approx(0.2)
        assert times.waiting == pytest.approx(1.0 / 5.0)
        assert times.images_per_second == pytest.approx(16 / 5.0)
        assert times.first_batch_seconds == pytest.approx(2.5)
        assert times.is_complete and not times.late_batches
    assert [record.getMessage() for record in caplog.records] == [str(times) for times in loader.epochs]
    assert str(loader.epochs[1]) == "epoch 1: 5.00 s, 4 steps of 700.0 ms, 20% waiting for data, 3 images/s"


def test_batches_length_and_attributes_are_the_loaders() -> None:
    plain = DataLoader(torch.arange(10.0), batch_size=3)
    watched = fastpipe.watch(plain)
    assert len(watched) == 4 and watched.batch_size == 3 and watched.dataset is plain.dataset
    for got, expected in zip(watched, plain, strict=True):
        assert torch.equal(got, expected)
    watched.timeout = 5
    assert plain.timeout == 5 and "timeout" not in vars(watched)
    assert "num_workers" in dir(watched) and repr(watched).startswith("watch(<torch")
    with pytest.raises(AttributeError, match="no_such"):
        watched.no_such
    batches = [object(), object()]
    assert all(got is batch for got, batch in zip(fastpipe.watch(batches), batches, strict=True))


def test_an_iterators_own_attributes_are_there() -> None:
    iterator: Any = iter(fastpipe.watch(DataLoader(range(10), batch_size=3)))
    assert len(iterator) == 4 and iterator._num_yielded == 0 and iter(iterator) is iterator
    assert len(list(iterator)) == 4
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_fast_loader_keeps_its_state(photo_tree: Path) -> None:
    loader = fastpipe.watch(FastLoader(list(range(6)), batch_size=2, shuffle=True, seed=0))
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict(state)
    assert len(list(loader)) == 2


def test_a_loader_whose_length_nobody_knows(clock: ManualClock) -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    loader = fastpipe.watch(Stream(), log_every=1)
    assert list(loader) == [1, 2, 3] and bool(loader) and bool(iter(loader))
    with pytest.raises(TypeError, match="Stream"):
        len(loader)
    assert loader.epochs[0].images_per_second is None
    assert list(fastpipe.watch(iter([1, 2]))) == [1, 2]


def test_an_empty_loader_has_an_epoch_without_steps() -> None:
    loader = fastpipe.watch([])
    assert list(loader) == [] and not loader
    assert loader.epochs[0].steps == 0 and loader.epochs[0].waiting in (None, pytest.approx(0))


# ---- loops that do not go to their end -----------------------------------------------------------


def test_a_loop_that_is_left_counts_the_steps_that_it_finished(clock: ManualClock, no_gc: None) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5, 0.5, 0.5, 0.5]))
    for number, _ in enumerate(loader):
        if number == 2:
            break
        clock.now += 0.5
    [times] = loader.epochs
    assert (times.steps, times.is_complete) == (2, False)
    assert times.seconds == pytest.approx(2.0) and times.waiting == pytest.approx(0.5)
    assert times.images_per_second == pytest.approx(8 / 2.0)
    assert str(times).endswith("left early")


def test_a_look_at_a_batch_is_no_epoch() -> None:
    loader = fastpipe.watch([[1], [2]])
    assert next(iter(loader)) == [1]
    assert loader.epochs == []
    iter(loader)
    assert loader.epochs == []


def test_an_error_of_the_step_is_the_scripts_to_see(clock: ManualClock, no_gc: None) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5] * 4))

    def failing() -> None:
        for number, _ in enumerate(loader):
            if number == 2:
                raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        failing()
    assert [times.steps for times in loader.epochs] == [2]


def test_a_loader_that_fails_may_go_on(clock: ManualClock) -> None:
    class Failing(Iterator[int]):
        def __init__(self) -> None:
            self.number = 0

        def __next__(self) -> int:
            self.number += 1
            if self.number == 2:
                raise OSError("the disk")
            if self.number == 5:
                raise StopIteration
            return self.number

    loader = fastpipe.watch(Failing())
    iterator = iter(loader)
    assert next(iterator) == 1
    with pytest.raises(OSError, match="the disk"):
        next(iterator)
    assert list(iterator) == [3, 4]
    assert [(times.steps, times.is_complete) for times in loader.epochs] == [(3, True)]


def test_a_loader_that_cannot_begin_leaves_nothing() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no workers")

    loader = fastpipe.watch(Broken())
    with pytest.raises(OSError, match="no workers"):
        iter(loader)
    assert loader.epochs == []


def test_several_iterators_at_once_and_one_within_another(clock: ManualClock) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5, 0.5]))
    for _ in zip(loader, loader, strict=True):
        clock.now += 1.0
    assert [times.steps for times in loader.epochs] == [2, 2]
    for _ in loader:
        assert len(list(loader)) == 2
    assert [times.epoch for times in loader.epochs] == [0, 1, 2, 3, 4]
    assert [times.steps for times in loader.epochs] == [2] * 5
    assert loader.epochs[-1].seconds > loader.epochs[-2].seconds


def test_an_iterator_is_let_go_of_with_its_batches(no_gc: None) -> None:
    class Batch:
        pass

    loader = fastpipe.watch([Batch(), Batch()])
    kept = loader.loader
    iterator: Any = iter(loader)
    batch = weakref.ref(next(iterator))
    loader.loader = []
    del kept
    gone = weakref.ref(iterator)
    assert batch() is not None  # the list's iterator has it
    del iterator
    assert gone() is None and batch() is None


def test_an_epoch_leaves_nothing(grown_in_epochs: Any) -> None:
    class Quiet(WatchedLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            self.epochs.clear()
            return super().__iter__()

    loader = Quiet(range(4), fastpipe.watch([])._options)
    assert grown_in_epochs(loader) == {}


def test_a_copy_has_the_epochs_so_far(clock: ManualClock) -> None:
    loader = fastpipe.watch([[1], [2]], warn_after=1.0)
    list(loader)
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert isinstance(again, WatchedLoader) and again.epochs == loader.epochs
        list(again)
        assert len(again.epochs) == 2 and len(loader.epochs) == 1


def test_a_forked_process_says_nothing_of_its_parents_epoch(in_child: Any) -> None:
    loader = fastpipe.watch(range(8))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)

    def work() -> None:
        nonlocal iterator
        del iterator
        gc.collect()
        assert loader.epochs == []

    in_child(work)


def test_iterating_in_another_thread() -> None:
    loader = fastpipe.watch(range(50))
    threads = [threading.Thread(target=lambda: list(loader)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [times.steps for times in loader.epochs] == [50] * 4


# ---- what is said --------------------------------------------------------------------------------


def test_one_warning_an_epoch_with_the_count(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    loader = fastpipe.watch(Loader(clock, [5.0, 0.1, 1.5, 0.1, 2.5]), warn_after=1.0)
    train(loader, clock, 1.0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.name == "fastpipe"
    assert record.getMessage().startswith("epoch 0: 2 of 5 batches took longer than 1 s (median 1.5 s")
    assert loader.epochs[0].late_batches == 2


def test_a_warning_of_a_fast_loader_says_what_its_threads_were_at(
    photo_tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = fastpipe.FastImageFolder(photo_tree)
    loader = fastpipe.watch(FastLoader(dataset, batch_size=4, collate_fn=list), warn_waiting=1e-9)
    for _ in range(2):
        list(loader)
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert "The loader's threads were at " in message and "decode " in message and "wait " not in message
        assert "`fastpipe profile your_script.py`" in message


def test_lines_within_an_epoch(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe")
    loader = fastpipe.watch(Loader(clock, [3.0, 1.0, 1.0, 1.0, 1.0]), log_every=2)
    train(loader, clock, 1.0)
    assert caplog.messages[:2] == [
        "epoch 0, step 2 of 5, 2 images/s, 80% waiting for data, 0:00:06 left",
        "epoch 0, step 4 of 5, 2 images/s, 67% waiting for data, 0:00:02 left",
    ]
    assert len(caplog.messages) == 3


def test_loaders_may_have_names(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe")
    loader = fastpipe.watch(Loader(clock, [1.0, 1.0]), name="validation", log_every=2, warn_waiting=0.1)
    train(loader, clock, 1.0)
    assert len(caplog.messages) == 3
    assert all(message.startswith("validation epoch 0") for message in caplog.messages)


def test_how_many_samples_a_batch_has_may_be_told(clock: ManualClock) -> None:
    loader = fastpipe.watch(Loader(clock, [1.0, 1.0]), samples=lambda batch: 10 * len(batch))
    train(loader, clock, 1.0)
    assert loader.epochs[0].images_per_second == pytest.approx(80 / 4.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warn_after": 0}, "warn_after must be seconds above 0, got 0"),
        ({"warn_waiting": 30}, "warn_waiting must be a part of an epoch"),
        ({"log_every": 0}, "log_every must be a number of steps from 1, got 0"),
        ({"log_every": 2.5}, "log_every must be a number of steps from 1, got 2.5"),
        ({"samples": 4}, "samples must be a function of a batch"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        fastpipe.watch([], **options)


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(OptionError, match="needs an iterable of batches, got a int"):
        fastpipe.watch(3)  # type: ignore[type-var]


# ---- the bar -------------------------------------------------------------------------------------


class Screen:
    """A terminal, or a file, to which bars are drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=is_terminal, width=100, color_system=None)
        monkeypatch.setattr(epochs, "_BARS", epochs.Bars(console))

    @property
    def text(self) -> str:
        return self.file.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    return Screen(monkeypatch, True)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(monkeypatch, False)


def test_a_file_gets_a_line_every_ten_seconds(clock: ManualClock, file: Screen) -> None:
    loader = fastpipe.watch(Loader(clock, [2.0] * 8), progress=True)
    train(loader, clock, 2.0)
    assert file.text.splitlines() == [
        "epoch 0: 4/8, 1 images/s, 57% waiting for data, 0:00:16 left",
        "epoch 0: 7/8, 1 images/s, 54% waiting for data, 0:00:04 left",
        "epoch 0: 32.00 s, 8 steps of 4000.0 ms, 50% waiting for data, 1 images/s",
    ]


def test_a_terminal_is_drawn_on_five_times_a_second_at_most(clock: ManualClock, terminal: Screen) -> None:
    loader = fastpipe.watch(Loader(clock, [0.01] * 100), progress=True)
    drawn = []
    for _ in loader:
        clock.now += 0.01
        drawn.append(terminal.text.count("waiting for data"))
    assert drawn[0] == 1 and drawn[-1] <= 11  # in two seconds
    assert "/100, " in terminal.text and "left" in terminal.text
    assert terminal.text.rstrip().endswith(str(loader.epochs[0]))
    assert terminal.text.count("\x1b[?25h") == terminal.text.count("\x1b[?25l")  # the cursor


def test_loops_within_loops_have_a_bar_each(clock: ManualClock, terminal: Screen) -> None:
    training = fastpipe.watch(Loader(clock, [1.0] * 3), progress=True)
    validation = fastpipe.watch(Loader(clock, [1.0] * 2), name="validation", progress=True)
    for _ in training:
        train(validation, clock, 1.0)
    assert [times.steps for times in validation.epochs] == [2, 2, 2]
    assert f"validation {validation.epochs[-1]}" in terminal.text
    assert terminal.text.rstrip().endswith(str(training.epochs[0]))
    assert not epochs._BARS._open and epochs._BARS._progress is None


@pytest.mark.parametrize("screen", ["terminal", "file"])
def test_a_loop_that_is_left_takes_its_bar_away(
    clock: ManualClock, screen: str, request: pytest.FixtureRequest
) -> None:
    shown: Screen = request.getfixturevalue(screen)
    loader = fastpipe.watch(Loader(clock, [1.0] * 5), progress=True)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert not epochs._BARS._open and epochs._BARS._progress is None
    assert shown.text.rstrip().endswith("left early")


def test_a_loader_that_fails_takes_its_bar_away_until_it_goes_on(
    clock: ManualClock, terminal: Screen
) -> None:
    def batches() -> Iterator[Any]:
        yield [1]
        raise OSError("the disk")

    iterator = iter(fastpipe.watch(batches(), progress=True))
    next(iterator)
    assert epochs._BARS._open
    with pytest.raises(OSError, match="the disk"):
        next(iterator)
    assert not epochs._BARS._open and epochs._BARS._progress is None


@pytest.mark.parametrize("error", [BrokenPipeError, OSError, ValueError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_gone_at", [0, 1, 5])
def test_a_terminal_that_is_gone_ends_no_training(
    clock: ManualClock, is_terminal: bool, is_gone_at: int, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        writes = 0

        def isatty(self) -> bool:
            return is_terminal

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes > is_gone_at:
                raise error("gone")
            return super().write(text)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(epochs, "_BARS", epochs.Bars())
    loader = fastpipe.watch(Loader(clock, [6.0] * 4), progress=True)
    for _ in range(2):
        train(loader, clock, 6.0)
    assert [times.steps for times in loader.epochs] == [4, 4] and not epochs._BARS._open
    assert bool(sys.stderr.getvalue()) == (is_gone_at > 0)  # type: ignore[attr-defined]


def test_without_standard_error_nothing_is_shown(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(epochs, "_BARS", epochs.Bars())
    loader = fastpipe.watch(Loader(clock, [6.0] * 4), progress=True)
    train(loader, clock, 6.0)
    assert loader.epochs[0].steps == 4


def test_bars_go_to_standard_error_as_it_is_then(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    train(fastpipe.watch(Loader(clock, [6.0] * 4), progress=True), clock, 6.0)
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 4 and not shown.out


def test_a_script_that_fails_gives_the_terminal_its_cursor_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import sys
from rich.console import Console
import fastpipe
from fastpipe.tools import epochs
epochs._BARS = epochs.Bars(Console(force_terminal=True, color_system=None))
kept = iter(fastpipe.watch(range(9), progress=True))
next(kept); next(kept); next(kept)
sys.excepthook = lambda *_: print("failed", flush=True)
raise ValueError
""")
    environment = {"TERM": "xterm", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stderr == "" and "failed" in done.stdout
    assert done.stdout.count("\x1b[?25h") == done.stdout.count("\x1b[?25l") == 1
