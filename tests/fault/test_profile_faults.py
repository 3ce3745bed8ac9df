"""Profiling when something goes wrong: the script's error is seen, and nothing is left of the profile."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

import fastpipe


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


def error_of(*arguments: Any, **options: Any) -> str:
    """Its text, without what a traceback refers to."""
    try:
        fastpipe.profile(*arguments, **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_worker_that_is_killed_ends_the_profile_with_torchs_error() -> None:
    """Which is one of its watch over workers, or of what it was just reading from this one."""
    begin = DataLoader.__iter__
    told = error_of(DataLoader(Killed(), batch_size=4, num_workers=1), lambda batch: None, seconds=0.5)
    gc.collect()
    assert told
    assert DataLoader.__iter__ is begin and not left()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_a_step_raises_ends_the_profile(error: type[BaseException]) -> None:
    def step(batch: Any) -> None:
        raise error("stop")

    begin = DataLoader.__iter__
    assert error_of(DataLoader(range(40), batch_size=4, num_workers=1), step) == f"{error.__name__}: stop"
    gc.collect()
    assert DataLoader.__iter__ is begin and not left()


def test_ctrl_c_ends_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom torch.utils.data import DataLoader\n"
        "for number, batch in enumerate(DataLoader(range(10**7), batch_size=1, num_workers=1)):\n"
        "    if number == 5:\n        open('begun', 'w').close()\n"
    )
    own = tempfile.TemporaryDirectory(prefix="o-")  # in a short folder: names of sockets are in it
    process = subprocess.Popen(
        [sys.executable, "-m", "fastpipe", "profile", "--seconds", "100", "--limit", "100", str(script)],
        cwd=tmp_path, env={**os.environ, "TMPDIR": own.name}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with own, process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
        assert process.returncode == 130 and "fastpipe profile: interrupted" in told
        assert not list(Path(own.name).glob("fastpipe-profile-*"))
