"""``fastpipe.watch``: the loader's own batches, and times that are known because the test moves the clock."""

from __future__ import annotations

import gc
import io
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
from fastpipe.tools.recorder import GPUSampler, GPUUse

Messages = pytest.LogCaptureFixture


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(epochs, "perf_counter", clock)
    return clock


class Loader:  # batches of four samples, each of which takes a time that is given
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


def train(loader: Any, clock: ManualClock, step: float, steps: int = 1000) -> None:
    for number, _ in enumerate(loader, start=1):
        if number > steps:
            break
        clock.now += step


def test_times_of_epochs_are_kept_and_logged(clock: ManualClock, caplog: Messages) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5, 0.1, 0.1, 0.3], start=2.0))
    with caplog.at_level(logging.INFO, "fastpipe"):
        for _ in range(2):
            train(loader, clock, 0.5)
            clock.now += 1000  # validation
    assert [times.epoch for times in loader.epochs] == [0, 1]
    for times in loader.epochs:
        assert times.seconds == pytest.approx(2.0 + 1.0 + 4 * 0.5) and times.steps == 4
        assert times.step_seconds == pytest.approx(0.7)  # of 1.0, 0.6, 0.6, 0.8
        assert times.step_seconds_p95 == pytest.approx(0.97)
        assert times.wait_seconds == pytest.approx(0.2) and times.waiting == pytest.approx(1.0 / 5.0)
        assert times.images_per_second == pytest.approx(16 / 5.0)
        assert times.first_batch_seconds == pytest.approx(2.5)
        assert times.is_complete and not times.late_batches
    assert caplog.messages == [str(times) for times in loader.epochs]
    assert str(loader.epochs[1]) == "epoch 1: 5.00 s, 4 steps of 700.0 ms, 20% waiting for data, 3 images/s"


def test_batches_length_attributes_and_iterators_are_the_loaders() -> None:
    plain = DataLoader(torch.arange(10.0), batch_size=3)
    watched = fastpipe.watch(plain)
    assert len(watched) == 4 and watched.batch_size == 3 and watched.dataset is plain.dataset
    assert all(torch.equal(*pair) for pair in zip(watched, plain, strict=True))
    assert "num_workers" in dir(watched) and repr(watched).startswith("watch(<torch")
    with pytest.raises(AttributeError, match="no_such"):
        watched.no_such
    iterator: Any = iter(watched)
    assert len(iterator) == 4 and iterator._num_yielded == 0 and iter(iterator) is iterator
    assert len(list(iterator)) == 4 and list(iterator) == [] and len(watched.epochs) == 2
    watched.timeout = 5
    assert plain.timeout == 5 and "timeout" not in vars(watched)
    batches = [object(), object()]
    assert all(got is batch for got, batch in zip(fastpipe.watch(batches), batches, strict=True))


def test_loaders_without_length_or_batches_are_watched(clock: ManualClock) -> None:
    stream: Any = type("Stream", (), {"__iter__": lambda self: iter([1, 2, 3])})
    loader = fastpipe.watch(stream(), log_every=1)
    assert list(loader) == [1, 2, 3] and bool(loader) and bool(iter(loader))
    with pytest.raises(TypeError, match="Stream"):
        len(loader)
    assert loader.epochs[0].images_per_second is None
    assert list(fastpipe.watch(iter([1, 2]))) == [1, 2]
    empty = fastpipe.watch([])
    assert list(empty) == [] and not empty
    assert empty.epochs[0].steps == 0 and empty.epochs[0].waiting in (None, pytest.approx(0))


def test_a_loop_that_is_left_counts_the_steps_that_it_finished(clock: ManualClock, no_gc: None) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5] * 4))
    assert next(iter(loader)).shape == (4, 2) and loader.epochs == [], "a look at a batch is no epoch"
    train(loader, clock, 0.5, steps=2)
    [times] = loader.epochs
    assert (times.steps, times.is_complete) == (2, False)
    assert times.seconds == pytest.approx(2.0) and times.waiting == pytest.approx(0.5)
    assert times.images_per_second == pytest.approx(8 / 2.0) and str(times).endswith("left early")

    def failing() -> None:
        for number, _ in enumerate(loader):
            if number == 2:
                raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        failing()
    assert [times.steps for times in loader.epochs] == [2, 2]


def test_a_loader_that_fails_may_go_on(clock: ManualClock) -> None:
    class Failing(Iterator[int]):
        number = 0

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


def test_several_iterators_at_once_and_one_within_another(clock: ManualClock) -> None:
    loader = fastpipe.watch(Loader(clock, [0.5, 0.5]))
    for _ in zip(loader, loader, strict=True):
        clock.now += 1.0
    assert [times.steps for times in loader.epochs] == [2, 2]
    for _ in loader:
        assert len(list(loader)) == 2
    assert [(times.epoch, times.steps) for times in loader.epochs] == [(number, 2) for number in range(5)]
    assert loader.epochs[-1].seconds > loader.epochs[-2].seconds
    loader = fastpipe.watch(range(50))
    threads = [threading.Thread(target=lambda: list(loader)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [times.steps for times in loader.epochs] == [50] * 4


def test_an_iterator_is_freed_with_its_batches(no_gc: None, grown_in_epochs: Any) -> None:
    batch: Any = type("Batch", (), {})
    loader = fastpipe.watch([batch(), batch()])
    kept = loader.loader
    iterator: Any = iter(loader)
    references = weakref.ref(next(iterator)), weakref.ref(iterator)
    loader.loader = []
    del kept
    assert references[0]() is not None  # the list's iterator has it
    del iterator
    assert [reference() for reference in references] == [None, None]

    class Quiet(WatchedLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            self.epochs.clear()
            return super().__iter__()

    assert grown_in_epochs(Quiet(range(4), fastpipe.watch([])._options)) == {}


def test_a_forked_process_does_not_report_the_epoch_of_its_parent(in_child: Any) -> None:
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


def test_a_warning_of_a_fast_loader_has_the_stages_of_its_threads(photo_tree: Path, caplog: Messages) -> None:
    dataset = fastpipe.FastImageFolder(photo_tree)
    loader = fastpipe.watch(FastLoader(dataset, batch_size=4, collate_fn=list), warn_waiting=1e-9)
    for _ in range(2):
        list(loader)
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert "The loader's threads were at " in message and "decode " in message and "wait " not in message
        assert "`fastpipe profile your_script.py`" in message


def test_lines_and_late_batches_are_logged_within_an_epoch(clock: ManualClock, caplog: Messages) -> None:
    loader = fastpipe.watch(Loader(clock, [5.0, 0.1, 1.5, 0.1, 2.5]), warn_after=1.0)
    train(loader, clock, 1.0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.name == "fastpipe"
    assert record.getMessage().startswith("epoch 0: 2 of 5 batches took longer than 1 s (median 1.5 s")
    assert loader.epochs[0].late_batches == 2
    caplog.clear()
    caplog.set_level(logging.INFO, "fastpipe")
    train(fastpipe.watch(Loader(clock, [3.0, 1.0, 1.0, 1.0, 1.0]), log_every=2), clock, 1.0)
    assert caplog.messages[:2] == [
        "epoch 0, step 2 of 5, 2 images/s, 80% waiting for data, 0:00:06 left",
        "epoch 0, step 4 of 5, 2 images/s, 67% waiting for data, 0:00:02 left",
    ]
    assert len(caplog.messages) == 3
    caplog.clear()
    options: Any = {"name": "validation", "log_every": 2, "samples": lambda batch: 10 * len(batch)}
    loader = fastpipe.watch(Loader(clock, [1.0, 1.0]), **options, warn_waiting=0.1)
    train(loader, clock, 1.0)
    assert [message.partition(",")[0][:18] for message in caplog.messages] == ["validation epoch 0"] * 3
    assert loader.epochs[0].images_per_second == pytest.approx(80 / 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warn_after": 0}, "warn_after must be a number of seconds above 0, got 0"),
        ({"warn_waiting": 30}, "warn_waiting must be a fraction of an epoch"),
        ({"log_every": 0}, "log_every must be a number of steps from 1, got 0"),
        ({"log_every": 2.5}, "log_every must be a number of steps from 1, got 2.5"),
        ({"samples": 4}, "samples must be a function of a batch"),
        ({"loader": "train"}, "watch takes a loader, got the path 'train': .*FastImageFolder"),
        ({"loader": 3}, "needs an iterable of batches, got a int"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.watch(**{"loader": [], **options})


def screen(patch: pytest.MonkeyPatch, is_terminal: bool) -> io.StringIO:
    """A terminal, or a file, to which bars are drawn."""
    file = io.StringIO()
    patch.setenv("TERM", "xterm")
    console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
    patch.setattr(epochs, "_BARS", epochs.Bars(console))
    return file


def has_bars() -> bool:
    return bool(epochs._BARS._open) or epochs._BARS._progress is not None


def test_a_file_gets_a_line_every_ten_seconds_and_a_terminal_is_drawn_five_times_a_second_at_most(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = screen(monkeypatch, False)
    train(fastpipe.watch(Loader(clock, [2.0] * 8), progress=True), clock, 2.0)
    assert file.getvalue().splitlines() == [
        "epoch 0: 4/8, 1 images/s, 57% waiting for data, 0:00:16 left",
        "epoch 0: 7/8, 1 images/s, 54% waiting for data, 0:00:04 left",
        "epoch 0: 32.00 s, 8 steps of 4000.0 ms, 50% waiting for data, 1 images/s",
    ]
    terminal = screen(monkeypatch, True)
    loader = fastpipe.watch(Loader(clock, [0.01] * 100), progress=True)
    drawn = []
    for _ in loader:
        clock.now += 0.01
        drawn.append(terminal.getvalue().count("waiting for data"))
    text = terminal.getvalue()
    assert drawn[0] == 1 and drawn[-1] <= 11  # in two seconds
    assert "/100, " in text and "left" in text and text.rstrip().endswith(str(loader.epochs[0]))
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l")  # the cursor


def test_loops_within_loops_have_a_bar_each(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = screen(monkeypatch, True)
    training = fastpipe.watch(Loader(clock, [1.0] * 3), progress=True)
    validation = fastpipe.watch(Loader(clock, [1.0] * 2), name="validation", progress=True)
    for _ in training:
        train(validation, clock, 1.0)
    assert [times.steps for times in validation.epochs] == [2, 2, 2]
    assert f"validation {validation.epochs[-1]}" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith(str(training.epochs[0])) and not has_bars()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_loop_that_is_left_or_fails_removes_its_bar(
    clock: ManualClock, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = screen(monkeypatch, is_terminal)
    train(fastpipe.watch(Loader(clock, [1.0] * 5), progress=True), clock, 0, steps=3)
    assert not has_bars() and shown.getvalue().rstrip().endswith("left early")

    def batches() -> Iterator[Any]:
        yield [1]
        raise OSError("the disk")

    iterator = iter(fastpipe.watch(batches(), progress=True))
    next(iterator)
    assert epochs._BARS._open
    with pytest.raises(OSError, match="the disk"):
        next(iterator)
    assert not has_bars()


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("gone_at", [0, 1, 5])
def test_a_terminal_that_is_gone_ends_no_training(
    clock: ManualClock, is_terminal: bool, gone_at: int, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        writes = 0

        def isatty(self) -> bool:
            return is_terminal

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes > gone_at:
                raise error("gone")
            return super().write(text)

    monkeypatch.setenv("TERM", "xterm")
    for file in (Gone(), None):
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setattr(epochs, "_BARS", epochs.Bars())
        loader = fastpipe.watch(Loader(clock, [6.0] * 4), progress=True)
        for _ in range(2):
            train(loader, clock, 6.0)
        assert [times.steps for times in loader.epochs] == [4, 4] and not epochs._BARS._open
        assert file is None or bool(file.getvalue()) == (gone_at > 0)


NVML = """
import sys
from types import SimpleNamespace
sys.modules["pynvml"] = SimpleNamespace(
    NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=lambda: print("closed", flush=True),
    NVML_PCIE_UTIL_RX_BYTES=1, nvmlDeviceGetPcieThroughput=lambda handle, kind: 1,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=1, memory=1),
)
from rich.console import Console
import fastpipe
from fastpipe.tools import epochs
epochs._BARS = epochs.Bars(Console(force_terminal=True, color_system=None))
kept = iter(fastpipe.watch(range(9), progress=True))
next(kept); next(kept); next(kept)
sys.excepthook = lambda *_: print("failed", flush=True)
raise ValueError
"""


def test_a_script_that_fails_restores_the_cursor_and_closes_the_library_of_the_gpu() -> None:
    environment = {"TERM": "xterm", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", NVML]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stderr == "" and "failed" in done.stdout and done.stdout.count("closed\n") == 1
    assert done.stdout.count("\x1b[?25h") == done.stdout.count("\x1b[?25l") == 1


class Nvml:  # the functions of nvidia-ml-py that are used, as its documentation has them
    NVML_PCIE_UTIL_RX_BYTES, NVMLError = 1, type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.handles: list[Any] = []
        self.rates, self.missing = [(80, 40)], ""

    def _fail_without(self, name: str) -> None:
        if self.missing == name:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._fail_without("driver")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetHandleByIndex(self, index: Any) -> object:
        self._fail_without("device")
        self.handles.append(index)
        return ("handle", index)

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex  # noqa: N815

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        assert handle[0] == "handle" and self.opened > self.closed
        self._fail_without("rates")
        gpu, memory = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        return SimpleNamespace(gpu=gpu, memory=memory)

    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: int) -> int:
        assert (handle[0], counter) == ("handle", self.NVML_PCIE_UTIL_RX_BYTES)
        self._fail_without("throughput")
        return 2000


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


def test_an_epoch_has_the_means_of_what_was_sampled_of_the_gpu(nvml: Nvml) -> None:
    loader = fastpipe.watch(range(3))
    list(loader)
    [times] = loader.epochs
    # An epoch that is over at once has the look at its end.
    assert (times.gpu_utilisation, times.gpu_memory_utilisation) == (0.8, 0.4)
    assert times.pcie_bytes_per_second == 2000 * 1024
    assert "GPU 80% busy" in str(times) and times.scalars()["fastpipe/gpu_utilisation"] == 0.8
    assert (nvml.opened, nvml.closed, nvml.handles) == (1, 1, [0])
    nvml.rates = [(80, 40), (60, 20)]
    sampler = GPUSampler(nvml, ("handle", 0))
    nvml.opened += 2
    sampler._sample(is_last=False)
    sampler._sample(is_last=False)
    sampler._thread.start()
    assert sampler.stop() == GPUUse(pytest.approx((0.8 + 0.6 + 0.6) / 3), pytest.approx(0.8 / 3), 2000 * 1024)
    assert sampler.stop() == sampler.stop()


def test_the_library_of_the_gpu_is_closed_whatever_ends_the_loop(nvml: Nvml, no_gc: None) -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no workers")

    loader = fastpipe.watch(Broken())
    with pytest.raises(OSError, match="no workers"):
        iter(loader)
    assert (nvml.opened, nvml.closed, loader.epochs) == (0, 0, [])  # workers come first
    for _ in fastpipe.watch(range(9)):  # left early
        break
    list(fastpipe.watch(range(9)))
    assert (nvml.opened, nvml.closed) == (2, 2)
    kept = [iter(fastpipe.watch(range(9))) for _ in range(2)]
    kept.append(kept)  # type: ignore[arg-type]
    del kept
    gc.collect()
    assert (nvml.opened, nvml.closed) == (4, 4)
    list(fastpipe.watch(range(3), gpu=False))
    assert (nvml.opened, nvml.closed) == (4, 4)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastpipe-gpu"]


@pytest.mark.parametrize("missing", ["driver", "device", "rates", "throughput"])
def test_numbers_that_a_gpu_does_not_tell_are_none(nvml: Nvml, missing: str, monkeypatch: Any) -> None:
    nvml.missing = missing
    loader = fastpipe.watch(range(3))
    assert list(loader) == [0, 1, 2] and nvml.opened == nvml.closed
    assert loader.epochs[0].gpu_utilisation == (0.8 if missing == "throughput" else None)
    assert missing == "rates" or loader.epochs[0].pcie_bytes_per_second is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GPUSampler.begin() is None


@pytest.mark.parametrize(
    ("visible", "uuid", "handle"),
    [(None, None, 0), ("", None, 0), ("3", None, 3), ("2,1", None, 2), ("GPU-8932f937", None, "GPU-8932f937"),
     ("MIG-1", None, "MIG-1"), ("4,5", {"uuid": "b1c2"}, "GPU-b1c2"), ("4,5", {}, 5)],
    ids=str,
)  # fmt: skip
def test_the_device_is_that_of_torch_or_the_first_that_is_visible(
    nvml: Nvml, visible: str | None, uuid: Any, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if uuid is not None:
        cuda = SimpleNamespace(
            is_initialized=lambda: True, current_device=lambda: 1,
            get_device_properties=lambda device: SimpleNamespace(**uuid),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    list(fastpipe.watch(range(3)))
    assert nvml.handles == [handle]
