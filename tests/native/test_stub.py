"""The committed stub says what the module has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fastpipe import native


def test_the_stub_is_that_of_the_module(tmp_path: Path) -> None:
    made = tmp_path / "_native.pyi"
    options = "-m nanobind.stubgen -q -m fastpipe.native._native -o"
    command = [sys.executable, *options.split(), str(made)]
    subprocess.run(command, check=True)
    committed = Path(native.__file__).with_name("_native.pyi")
    assert made.read_text() == committed.read_text(), f"make it anew: {' '.join(command[:-1])} {committed}"
