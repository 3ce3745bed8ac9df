"""Files with other bytes than they should have: read as h5py reads them, or an error that says so."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mutation_script.py")


def wrong(folder: Path, seed: int, count: int) -> list[str]:
    """What is wrong with so many files; see the script."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(seed), str(count)], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, check=True, text=True,
    )  # fmt: skip
    found: list[str] = json.loads(run.stdout)
    return found


def test_changed_files_are_as_h5py_reads_them(tmp_path: Path) -> None:
    assert wrong(tmp_path, 1, 60) == []


@pytest.mark.slow
def test_many_changed_files_are_as_h5py_reads_them(tmp_path: Path) -> None:
    seed = int(os.environ.get("FASTPIPE_SEED", random.SystemRandom().randrange(1 << 30)))
    assert wrong(tmp_path, seed, 3000) == [], f"FASTPIPE_SEED={seed} makes these files again"
