"""Table, Markdown, picture and page of a result."""

from __future__ import annotations

import html.parser
import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import fastpipe.bench
from fastpipe.bench.page import page
from fastpipe.bench.plot import draw
from fastpipe.bench.report import markdown, print_result
from fastpipe.bench.results import load

_RESULTS = sorted(Path(fastpipe.bench.__file__).parents[2].glob("benchmarks/results/*/*.json"))
_BROWSERS = filter(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
_BROWSER = next(_BROWSERS, None)


def printed(result: dict[str, Any], width: int = 160) -> str:
    text = io.StringIO()
    print_result(result, Console(file=text, width=width))
    return text.getvalue()


def test_markdown_is_one_table_with_every_shown_row(result: dict[str, Any]) -> None:
    text = markdown(result)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 7 and len({line.count("|") for line in table}) == 1
    assert "| ImageFolder + DataLoader(num_workers=0) | 75 (50–100) | 0.56 (0.50–0.62) |" in table
    assert "| **FastImageFolder + FastLoader** (threads) | 370 (240–500) | 2.75 (2.50–3.00) |" in table
    assert result["command"] in text and "2030-01-02" in text and "Peers:" not in text
    result["rows"][0]["first_batch_s"] = {"cold_s": 9.0, "warm_s": 0.5, "warm_raw_s": [0.5]}
    assert "| 0.50 (9.00) |" in markdown(result)


def test_the_terminal_shows_losers_misses_and_warnings(result: dict[str, Any]) -> None:
    text = printed(result)
    expected = (
        "ImageFolder + DataLoader(num_workers=0)", "0.56×", "the reference", "warning: a warning",
        "not measured: tf.data: not installed; pip install tensorflow-cpu", "decode 0.80 ms",
        "55% (50%–60%) of the decode floor",
    )  # fmt: skip
    assert [words for words in expected if words not in text] == []
    for width in (80, 100, 160):
        assert max(map(len, printed(result, width).splitlines())) <= width
    result["floor_share"] = None
    assert "decode floor" not in printed(result) + markdown(result)


def test_versions_of_peers_are_told_once_and_their_needs_where_they_differ(result: dict[str, Any]) -> None:
    for entry in result["rows"][-2:]:
        entry["versions"] = {"ffcv": "1.0.2", "torch": "2.15.0", "numpy": "1.26.4"}
    for text in (markdown(result), printed(result)):
        assert text.count("ffcv") == 1 and "Peers: ffcv 1.0.2 (with numpy 1.26.4)." in text


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_the_picture_has_nothing_at_its_edges(result: dict[str, Any], tmp_path: Path) -> None:
    result["machine"]["cpu"] = "A Processor With Quite a Long Name Indeed 9999X 128-Core Processor"
    draw(result, path := tmp_path / "new" / "picture.png")
    pixels = np.asarray(Image.open(path).convert("L"))
    inner = pixels[3:-3, 3:-3]
    assert inner.min() < 100
    assert (pixels == 255).sum() - (inner == 255).sum() == pixels.size - inner.size


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


class Balanced(html.parser.HTMLParser):
    """Notes tags that are not closed, and what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        names = ("src", "href", "srcset", "xlink:href")
        self.loaded += [str(value) for name, value in attrs if name in names]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "line")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def stepped(result: dict[str, Any]) -> dict[str, Any]:
    """A result with a section, what its steps waited, and another that failed."""
    for entry in result["rows"]:
        entry.update(section="photos", unit="images")
    rows = [
        {"key": "replaced-workers2", "label": "Image<Folder>", "wait_s": [0.2, 0.1], "busy_s": [0.1, 0.1],
         "total_s": 0.5, "share": 0.6},
        {"key": "fastloader-float32", "label": "Fast & good", "wait_s": [0.1, 0.0], "busy_s": [0.1, 0.1],
         "total_s": 0.3, "share": 1 / 3},
    ]  # fmt: skip
    return {
        **result, "case": "all", "best": {"photos": "replaced-workers2"},
        "sections": {"photos": {"label": "photos <of> a folder", "data": "6 photos"}, "sounds": {"label": "s"}},
        "missing": [{"key": "sounds", "label": "s", "why": "no <ears>; pip install ears"}],
        "timelines": {"photos": {"busy_s": 0.1, "rows": rows}},
    }  # fmt: skip


@pytest.mark.parametrize("path", _RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_is_a_page_by_itself(path: Path) -> None:
    result = load(path)
    text = page(result)
    found = Balanced(text)
    assert found.loaded == ["data:,"]
    assert "url(" not in text and "@import" not in text and "<script" not in text
    expected = [result["verdict"], *(entry[name] for entry in result["rows"] for name in ("label", "note"))]
    assert [words for words in expected if words not in found.text] == []


def test_texts_are_not_taken_for_html_and_nothing_is_left_out(stepped: dict[str, Any]) -> None:
    stepped["rows"][0]["label"] = '<b onload="x">'
    stepped["rows"][1]["note"] = "</table><script>"
    stepped["verdict"] = "<i>faster</i>"
    text = page(stepped)
    assert "<script" not in text and "<b onload" not in text and "<i>" not in text
    found = Balanced(text).text
    expected = (
        '<b onload="x">', "</table><script>", "<i>faster</i>", "photos <of> a folder", "0.56×", "a warning",
        "Some(R) CPU", stepped["command"],
    )  # fmt: skip
    assert [words for words in expected if words not in found] == []
    assert found.count("no <ears>; pip install ears") == 2  # in its section, and in the table


def test_steps_are_drawn_over_the_same_time(stepped: dict[str, Any]) -> None:
    text = page(stepped)
    before, after = re.findall(r'<svg class="steps".*?</svg>', text, re.S)
    pieces = re.findall(r'x="([\d.]+)%".*?width="([\d.]+)%".*?var\(--(\w+)\)', before)
    assert [(float(x), float(width), colour) for x, width, colour in pieces] == [
        (0, 40, "wait"), (40, 20, "busy"), (60, 20, "wait"), (80, 20, "busy")
    ]  # fmt: skip
    assert re.findall(r'width="([\d.]+)%"', after) == ["20.00", "20.00", "0.00", "20.00"]
    said = Balanced(text).text
    assert "before: Image<Folder>0.50 s, 60% of it waiting" in said
    assert "2 steps that keep a device busy for 100 ms each" in said


@pytest.mark.skipif(_BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_a_browser_shows_it_without_a_complaint_or_a_request(
    stepped: dict[str, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "page.png"
    file.write_text(page(stepped), encoding="utf-8")
    command = [
        str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1600",
        # Whatever a page asks a network for fails, and is complained of on the console.
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--screenshot={picture}",
        *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []), file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels.shape[:2] == (1600, width)
    assert (pixels[0, 0].mean() > 128) == (scheme == "light")
    assert len(np.unique(pixels.reshape(-1, 3)[::7], axis=0)) > 50
    assert (pixels[..., 0] - pixels[..., 1:].max(-1) > 80).sum() > 1000  # the red of waiting
