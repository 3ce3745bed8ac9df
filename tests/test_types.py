"""What type checkers infer of the lines that README and the documents show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_CHECKED = """
from torch.utils.data import DataLoader, Dataset

import fastpipe
from fastpipe import FastImageFolder, FastLoader, accelerate


class Numbers(Dataset[tuple[int, str]]):
    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, str(index)


dataset = FastImageFolder("train")
loader = FastLoader(dataset, batch_size=64, shuffle=True)
for images, labels in loader:
    print(images.shape)
reveal_type(loader)
reveal_type(dataset.targets)
reveal_type(dataset.samples)
reveal_type(FastLoader(Numbers(), batch_size=2))
reveal_type(FastLoader([1.5, 2.5], batch_size=2))
reveal_type(accelerate(DataLoader(Numbers())))
reveal_type(fastpipe.torch.EpochTimer)
reveal_type(fastpipe.tf.image_dataset)
reveal_type(fastpipe.augment.Compose)
"""
_WANTED = [
    "FastLoader[tuple[Any, Any]]", "Sequence[Any]", "Sequence[tuple[str, Any]]", "FastLoader[tuple[int, str]]", "FastLoader[float]",
    "FastLoader[tuple[int, str]]", "EpochTimer", "image_size: int", "Compose",
]  # fmt: skip


@pytest.mark.slow
def test_mypy_infers_what_scripts_write(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_CHECKED)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    revealed = re.findall(r'Revealed type is "(.*)"', ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(revealed) == len(_WANTED)
    for found, wanted in zip(revealed, _WANTED, strict=True):
        plain = re.sub(r"(typing|builtins|fastpipe[\w.]*|collections\.abc)\.", "", found)
        assert wanted in plain, (found, wanted)


@pytest.mark.slow
def test_mypy_accepts_the_snippets_of_readme(tmp_path: Path) -> None:
    text = (_ROOT / "README.md").read_text()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.S)):
        (tmp_path / f"snippet_{number}.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    untyped = re.sub(r".*import-untyped.*\n|.*note: .*\n", "", ran.stdout)
    assert " error: " not in untyped, ran.stdout + ran.stderr
