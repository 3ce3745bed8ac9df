"""Suggested changes as diffs that ``patch`` applies."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastpipe.tools.edits import Edit
from fastpipe.tools.stacks import Line

SCRIPT = '''"""Trains – on photos."""

import torch
from torch.utils.data import DataLoader

loader = DataLoader(data, 64, num_workers=2)
other = make("ä", DataLoader(
    data,
    batch_size=64,
))
first, second = DataLoader(data), DataLoader(data)
print(loader)
last = DataLoader(
    data,  # photos
)
full = DataLoader(data, 64, True, None, None, 2)
spread = DataLoader(data, **options)
inner = DataLoader((data))
'''


@pytest.mark.parametrize(
    ("line", "edit", "wanted"),
    [
        (6, Edit("accelerate"), "loader = accelerate(DataLoader(data, 64, num_workers=2))"),
        (6, Edit("accelerate", {"augment": "auto"}), "accelerate(DataLoader(data, 64, num_workers=2), augment='auto')"),
        (6, Edit(arguments={"num_workers": 8}), "loader = DataLoader(data, 64, num_workers=8)"),
        (6, Edit(arguments={"pin_memory": True}), "loader = DataLoader(data, 64, num_workers=2, pin_memory=True)"),
        (7, Edit("accelerate"), 'other = make("ä", accelerate(DataLoader('),
        (9, Edit(arguments={"num_workers": 8}), "    batch_size=64, num_workers=8,\n))"),
        (13, Edit(arguments={"num_workers": 8}), "    data, num_workers=8,  # photos\n)"),
        (16, Edit("accelerate"), "full = accelerate(DataLoader(data, 64, True, None, None, 2))"),
    ],
)  # fmt: skip
def test_patch_applies_the_change(
    tmp_path: Path, monkeypatch: Any, line: int, edit: Edit, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    diff = edit.diff(Line(str(path), line, "main"))
    subprocess.run(["patch", "-p0"], input=diff, text=True, check=True, capture_output=True)
    after = path.read_text()
    assert wanted in after
    assert ("from fastpipe import accelerate\n" in after) == bool(edit.function)
    compile(after, "train.py", "exec")


@pytest.mark.parametrize(
    ("line", "edit"),
    [
        (11, Edit("accelerate")), (12, Edit("accelerate")), (99, Edit("accelerate")),
        (16, Edit(arguments={"num_workers": 8})), (17, Edit(arguments={"num_workers": 8})), (18, Edit(arguments={"num_workers": 8})),
    ],
    ids=["two loaders", "no loader", "no line", "positional", "spread", "parentheses"],
)  # fmt: skip
def test_an_unclear_call_has_no_diff(tmp_path: Path, line: int, edit: Edit) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert edit.diff(Line(str(path), line, "main")) == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            '"""Trains."""\nloader = DataLoader(data)\n',
            '"""Trains."""\nfrom fastpipe import accelerate\nloader',
        ),
        (
            "import a\nloader = DataLoader(data)\nimport b\n",
            "import a\nfrom fastpipe import accelerate\nloader",
        ),
        ("loader = DataLoader(data)\n", "from fastpipe import accelerate\nloader"),
    ],
)
def test_the_import_comes_before_the_call(tmp_path: Path, monkeypatch: Any, before: str, after: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(before)
    line = 1 + before[: before.index("loader")].count("\n")
    diff = Edit("accelerate").diff(Line(str(path), line, "<module>"))
    subprocess.run(["patch", "-p0"], input=diff, text=True, check=True, capture_output=True)
    assert path.read_text().startswith(after)


@pytest.mark.parametrize(
    "content", [None, b"loader = DataLoader(", b"\xff\xfe"], ids=["gone", "no Python", "bytes"]
)
def test_a_file_that_cannot_be_parsed_has_no_diff(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "train.py"
    if content is not None:
        path.write_bytes(content)
    assert Edit("accelerate").diff(Line(str(path), 1, "main")) == ""
    assert Edit("accelerate").diff(None) == Edit("accelerate").diff(Line("", 1, "main")) == ""
