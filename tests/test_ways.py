"""Which folders of the package a batch crosses: docs/design/ways.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scripts import ran

import fastpipe

_TREE = Path(fastpipe.__file__).parents[1]
_PAGE = Path(__file__).resolve().parents[1] / "docs" / "design" / "ways.md"
_TITLES = {
    "image": "A JPEG or PNG", "row": "A row of an HDF5 file", "patch": "A patch of a volume",
    "tensorflow": "An image for TensorFlow", "profile": "A profile", "bench": "A benchmark's case",
}  # fmt: skip
_SLOW = ("tensorflow", "profile", "bench")


@pytest.mark.hang_after(400)
@pytest.mark.parametrize(
    "way", ["image", "row", "patch", *(pytest.param(way, marks=pytest.mark.slow) for way in _SLOW)]
)
def test_a_way_crosses_the_folders_that_its_page_names(way: str) -> None:
    text = _PAGE.read_text().split(f"## {_TITLES[way]}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", text.split("Folders: ")[1].split("\n")[0]))
    crossed = _crossed(way)
    assert {module.split("/")[0] for module in crossed if "/" in module} == named
    assert len(named) <= 4
    # Modules that the page names exist; those in the first column's calls may run for other batches only.
    for folder, module in re.findall(r"\b(\w+)/(\w+\.py)", text):
        assert (_TREE / "fastpipe" / folder / module).exists()


def _crossed(way: str) -> list[str]:
    done = ran(Path(__file__).parent / "support" / "ways.py", way, timeout=360)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
