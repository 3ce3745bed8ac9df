"""What docs/ say of TensorFlow runs, and the swap gives the same samples."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import zarr
from PIL import Image

import fastpipe

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "cases" / "tensorflow.md"


@pytest.fixture
def table(photo_table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """The table that the pages speak of, and its photos in two folders, in the folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("photo", "thermal"):
        Path(folder).mkdir()
        for number, path in enumerate(photo_table.paths[:12]):
            os.symlink(path, f"{folder}/{number}.jpg")
    table = pd.DataFrame(photo_table.boxes[:12], columns=["x0", "y0", "x1", "y1"])
    table["file"], table["grade"] = [f"{number}.jpg" for number in range(12)], np.arange(12) % 3
    table["age"], table["area"] = np.arange(12) + 30.0, np.linspace(0, 1, 12)
    table.to_csv("wounds.csv", index=False)
    with h5py.File("speech.h5", "w") as file:
        file["mels"], file["words"] = np.ones((40, 8, 4), "f4"), np.arange(40)
    zarr.create_array("scan.zarr/image", data=np.ones((10, 20, 20), np.uint16), chunks=(5, 10, 10))
    return table


def _blocks(page: Path, kind: str) -> list[str]:
    """The pieces of code that are about TensorFlow."""
    found = re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.S)
    return [code for code in found if "fastpipe.tf" in code]


def _side(diff: str, sign: str, table: pd.DataFrame) -> list[tuple[int, bytes]]:
    """The rows of one side, sorted.  In a frame of its own: TensorFlow keeps those that its warnings came
    through."""
    code = "\n".join(line[1:] for line in diff.splitlines() if line.startswith((sign, " ")))
    scope = {"tf": tf, "np": np, "Image": Image, "fastpipe": fastpipe, "table": table}
    exec(compile(code, "tensorflow.md", "exec"), scope)
    return sorted((int(label), image.numpy().tobytes()) for image, label in scope["dataset"].unbatch())


def test_both_sides_of_the_swap_give_the_same(table: pd.DataFrame) -> None:
    diff = _blocks(_PAGE, "diff")[0]
    assert "In short:" in _PAGE.read_text().partition(diff)[0]
    table = table.assign(file=[str(Path("photo", name).absolute()) for name in table["file"]])
    before, after = (_side(diff, sign, table) for sign in ("-", "+"))
    assert before == after and len(before) == len(table)


_PAGES = {path.relative_to(_ROOT): _blocks(path, "python") for path in sorted((_ROOT / "docs").rglob("*.md"))}


@pytest.mark.parametrize("page", [page for page, blocks in _PAGES.items() if blocks], ids=str)
def test_the_code_of_a_page_runs(page: Path, table: pd.DataFrame) -> None:
    for code in _PAGES[page]:
        scope: dict[str, Any] = {}
        exec(compile(code, str(page), "exec"), scope)
        if "thermal" not in code:
            expected = (4, 32, 32, 3) if "masks" in scope else (12, 128, 128, 3)
            assert scope["images"].shape == expected
            continue
        assert scope["photo"].shape == (12, 128, 128, 3)
        assert scope["thermal"].shape == (12, 128, 128, 1)
        assert scope["patient"].shape == (12, 2)
        assert next(iter(scope["mels"]))[0]["mel"].shape == (40, 8, 4)
        assert next(iter(scope["patches"])).shape[1:] == (16, 64, 64, 1)
