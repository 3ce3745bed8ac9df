"""Profiling when something goes wrong: the script's error is seen, and nothing is left of the profile."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from generated import environment
from scripts import started, wait_until
from torch.utils.data import DataLoader, Dataset

import fastpipe
from fastpipe.tools.loaders import Watch
from fastpipe.tools.loops import Loop


class Killed(Dataset[Any]):
    """Whose worker is killed at a sample."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        if index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def left() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("fastpipe-profile-")}


@pytest.mark.few(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, None])
def test_an_error_of_a_step_or_worker_ends_the_profile(error: type[BaseException] | None) -> None:
    """That of a killed worker is torch's: of its watch over workers, or of what it was just reading."""

    def step(batch: Any) -> None:
        if error is not None:
            raise error("stop")

    begin, text = DataLoader.__iter__, ""
    dataset: Any = Killed() if error is None else range(40)
    try:
        fastpipe.profile(DataLoader(dataset, batch_size=4, num_workers=1), step, seconds=0.5)
    except BaseException as caught:  # its traceback would keep the workers
        text = f"{type(caught).__name__}: {caught}"
    assert text == f"{error.__name__}: stop" if error is not None else text
    gc.collect()
    assert DataLoader.__iter__ is begin and not left()


class Interruption:
    """Raises at one of fastpipe's lines, or calls of its functions, as a signal's handler does."""

    def __init__(self, at: int) -> None:
        self.left = at

    def see(self, frame: FrameType, event: str, _: object) -> Any:
        if "/fastpipe/" not in frame.f_code.co_filename:
            return None
        if event in ("call", "line") and self.left:
            self.left -= 1
            if not self.left:
                raise RuntimeError("a worker was killed")
        return self.see


def profile_of_a_loader(meanwhile: Callable[[], object]) -> None:
    """Calls something when the profile is about to end."""
    watch = Watch(lambda _: Loop(float("inf"), is_replayed=False), also={"not_there": lambda *_: print})
    with contextlib.closing(watch), watch:
        list(DataLoader(range(4)))
        meanwhile()


def test_an_exception_of_a_signals_handler_while_a_profile_ends_leaves_nothing() -> None:
    """Torch's raises for a worker that was killed, wherever the main thread then is."""
    begin, finders = DataLoader.__iter__, list(sys.meta_path)
    for at in itertools.count(1):
        interruption = Interruption(at)
        with contextlib.suppress(RuntimeError):
            profile_of_a_loader(lambda: sys.settrace(interruption.see))
        sys.settrace(None)
        assert DataLoader.__iter__ is begin and sys.meta_path == finders and not left()
        if interruption.left:
            break
    assert at > 30


def test_an_exception_of_a_handler_is_no_error_of_a_folder_that_is_removed(monkeypatch: Any) -> None:
    """By the standard library, which ignores errors on request."""
    lstat, killed = os.lstat, iter([True])

    def interrupted(*args: Any, **kwargs: Any) -> os.stat_result:
        if threading.current_thread() is threading.main_thread() and next(killed, False):
            raise RuntimeError("a worker was killed")
        return lstat(*args, **kwargs)

    with contextlib.suppress(RuntimeError):
        profile_of_a_loader(lambda: monkeypatch.setattr(os, "lstat", interrupted))
    assert next(killed, False) is False and not left()


def test_ctrl_c_ends_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "for number, batch in enumerate(DataLoader(range(10**7), batch_size=1, num_workers=1)):\n"
        "    if number == 5:\n        open('begun', 'w').close()\n"
    )
    command = ["-m", "fastpipe", "profile", "--seconds", "100", "--limit", "100", "train.py"]
    with tempfile.TemporaryDirectory(prefix="o-") as own:  # in a short folder: names of sockets are in it
        with started(*command, cwd=tmp_path, env={**environment(), "TMPDIR": own}) as process:
            wait_until((tmp_path / "begun").exists, process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        assert process.returncode == 130 and "fastpipe profile: interrupted" in errors
        assert not list(Path(own).glob("fastpipe-profile-*"))
