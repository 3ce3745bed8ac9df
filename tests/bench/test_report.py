"""Table, Markdown and picture."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fastpipe.bench.page import page
from fastpipe.bench.plot import draw
from fastpipe.bench.report import markdown, print_result


def printed(result: dict[str, Any], width: int) -> str:
    text = io.StringIO()
    print_result(result, Console(file=text, width=width))
    return text.getvalue()


def test_markdown_is_one_table_with_every_shown_row(result: dict[str, Any]) -> None:
    text = markdown(result)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 7
    assert len({line.count("|") for line in table}) == 1
    assert "| ImageFolder + DataLoader(num_workers=0) | 75 (50–100) | 0.56 (0.50–0.62) |" in table
    assert "| **FastImageFolder + FastLoader** (threads) | 370 (240–500) | 2.75 (2.50–3.00) |" in table
    assert result["command"] in text
    assert "2030-01-02" in text


def test_markdown_gives_start_up_where_measured(result: dict[str, Any]) -> None:
    result["rows"][0]["first_batch_s"] = {"cold_s": 9.0, "warm_s": 0.5, "warm_raw_s": [0.5]}
    assert "| 0.50 (9.00) |" in markdown(result)


def test_the_terminal_shows_losers_misses_and_warnings(result: dict[str, Any]) -> None:
    text = printed(result, 160)
    assert "ImageFolder + DataLoader(num_workers=0)" in text
    assert "0.56×" in text
    assert "the reference" in text
    assert "not measured: tf.data: not installed; pip install tensorflow-cpu" in text
    assert "warning: a warning" in text
    assert "55% (50%–60%) of the decode floor" in text
    assert "decode 0.80 ms" in text


def test_without_a_floor_nothing_is_said_about_it(result: dict[str, Any]) -> None:
    result["floor_share"] = None
    assert "decode floor" not in printed(result, 160)
    assert "decode floor" not in markdown(result)


def test_versions_of_peers_are_told_once_and_what_they_need_where_it_differs(result: dict[str, Any]) -> None:
    assert "Peers:" not in markdown(result)
    versions = {"ffcv": "1.0.2", "torch": "2.15.0", "numpy": "1.26.4"}
    for entry in result["rows"][-2:]:
        entry["versions"] = versions
    for text in (markdown(result), printed(result, 160)):
        assert text.count("ffcv") == 1
        assert "Peers: ffcv 1.0.2 (with numpy 1.26.4)." in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal(result: dict[str, Any], width: int) -> None:
    assert max(map(len, printed(result, width).splitlines())) <= width


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_the_picture_has_nothing_at_its_edges(result: dict[str, Any], tmp_path: Path) -> None:
    result["machine"]["cpu"] = "A Processor With Quite a Long Name Indeed 9999X 128-Core Processor"
    path = tmp_path / "new" / "picture.png"
    draw(result, path)
    pixels = np.asarray(Image.open(path).convert("L"))
    edges = np.concatenate(
        [pixels[:3].ravel(), pixels[-3:].ravel(), pixels[:, :3].ravel(), pixels[:, -3:].ravel()]
    )
    assert edges.min() == 255
    assert pixels.min() < 100


def test_labels_are_text_in_pictures_and_tables(result: dict[str, Any], tmp_path: Path) -> None:
    """No formula, which may be a wrong one, no column of a table, no HTML, no markup."""
    name = "$\\frac$|<b>[/red]\x1b[31m"
    for entry in result["rows"]:
        entry["label"] = name
    result["job"] |= {"short": name, "text": name}
    draw(result, tmp_path / "picture.png")
    assert printed(result, 120).count(name.replace("\x1b", "\\x1b")) > 2
    made = markdown(result)
    assert "\x1b" not in made
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in made.split("\n") if line.startswith("|"))
    assert "<b>" not in page(result)
