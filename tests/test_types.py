"""What type checkers infer of the lines that README and the documents show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
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
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_the_snippets_of_the_documents(tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker, reason="pip install mypy 'pyright[nodejs]'")
    for page in (_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")):
        blocks = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M)
        name = re.sub(r"\W", "_", str(page.relative_to(_ROOT).with_suffix("")))
        (tmp_path / f"{name}.py").write_text("\n".join(textwrap.dedent(code) for _, code in blocks))
    command = ["mypy", "--allow-redefinition", "--cache-dir", str(tmp_path), "."]
    if checker == "pyright":
        config = {
            "include": ["."],
            "reportMissingImports": False,
            "reportPossiblyUnboundVariable": False,
        }
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
        command = ["pyright", "--pythonpath", sys.executable]
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert re.search(r"checked \d+ source files|\d+ errors,", ran.stdout), ran
    found = []
    for line in ran.stdout.splitlines():
        place = re.search(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error: ", line)
        if place is None or "import-untyped" in line:
            continue
        code = (tmp_path / place[1]).read_text().splitlines()[int(place[2]) - 1]
        if 'file["' not in code:  # pyright's stubs of h5py: an element of a file may be a group
            found.append(f"{line}: {code}")
    assert not found, "\n".join(found)
