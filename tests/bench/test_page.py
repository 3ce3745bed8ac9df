"""The page of a result: whole, by itself, and the same in a browser."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fastpipe.bench
from fastpipe.bench.page import page
from fastpipe.bench.results import load

_RESULTS = sorted(Path(fastpipe.bench.__file__).parents[2].glob("benchmarks/results/*/*.json"))
_BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
_NO_BROWSER = "needs a browser: apt-get install chromium"


class Balanced(html.parser.HTMLParser):
    """Notes tags that are not closed, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.loaded += [
            str(value) for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "line")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Balanced:
    found = Balanced()
    found.feed(text)
    found.close()
    assert not found.open
    return found


@pytest.fixture
def stepped(result: dict[str, Any]) -> dict[str, Any]:
    """A result with a section, what its steps waited, and another that failed."""
    for entry in result["rows"]:
        entry.update(section="photos", unit="images")
    before = {"wait_s": [0.2, 0.1], "busy_s": [0.1, 0.1], "total_s": 0.5, "share": 0.6}
    after = {"wait_s": [0.1, 0.0], "busy_s": [0.1, 0.1], "total_s": 0.3, "share": 1 / 3}
    rows = [
        {"key": "replaced-workers2", "label": "Image<Folder>", **before},
        {"key": "fastloader-float32", "label": "Fast & good", **after},
    ]
    return {
        **result,
        "case": "all",
        "sections": {
            "photos": {"label": "photos <of> a folder", "data": "6 photos"},
            "sounds": {"label": "s"},
        },
        "best": {"photos": "replaced-workers2"},
        "missing": [{"key": "sounds", "label": "s", "why": "no <ears>; pip install ears"}],
        "timelines": {"photos": {"busy_s": 0.1, "rows": rows}},
    }


@pytest.mark.parametrize("path", _RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_is_a_page_by_itself(path: Path) -> None:
    result = load(path)
    text = page(result)
    found = parsed(text)
    assert found.loaded == ["data:,"]
    assert "url(" not in text and "@import" not in text and "<script" not in text
    assert result["verdict"] in found.text
    for entry in result["rows"]:
        assert entry["label"] in found.text and entry["note"] in found.text


def test_what_is_said_is_not_taken_for_html(stepped: dict[str, Any]) -> None:
    stepped["rows"][0]["label"] = '<b onload="x">'
    stepped["rows"][1]["note"] = "</table><script>"
    stepped["verdict"] = "<i>faster</i>"
    text = page(stepped)
    assert "<script" not in text and "<b onload" not in text and "<i>" not in text
    found = parsed(text)
    for words in ('<b onload="x">', "</table><script>", "<i>faster</i>", "photos <of> a folder", "no <ears>"):
        assert words in found.text


def test_steps_are_drawn_over_the_same_time(stepped: dict[str, Any]) -> None:
    text = page(stepped)
    before, after = re.findall(r'<svg class="steps".*?</svg>', text, re.S)
    pieces = [
        (float(x), float(width), colour)
        for x, width, colour in re.findall(r'x="([\d.]+)%".*?width="([\d.]+)%".*?var\(--(\w+)\)', before)
    ]
    assert pieces == [(0, 40, "wait"), (40, 20, "busy"), (60, 20, "wait"), (80, 20, "busy")]
    assert re.findall(r'width="([\d.]+)%"', after) == ["20.00", "20.00", "0.00", "20.00"]
    said = parsed(text).text
    assert "before: Image<Folder>0.50 s, 60% of it waiting" in said
    assert "2 steps that keep a device busy for 100 ms each" in said


def test_losers_and_what_is_missing_are_shown(stepped: dict[str, Any]) -> None:
    said = parsed(page(stepped)).text
    assert "0.56×" in said
    assert said.count("no <ears>; pip install ears") == 2  # in its section, and in the table
    assert "a warning" in said and "Some(R) CPU" in said and stepped["command"] in said


@pytest.mark.skipif(_BROWSER is None, reason=_NO_BROWSER)
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_a_browser_shows_it_without_a_complaint_or_a_request(
    stepped: dict[str, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "page.png"
    file.write_text(page(stepped), encoding="utf-8")
    assert _BROWSER is not None
    command = [
        _BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1600",
        # Whatever a page asks a network for fails, and is complained of on the console.
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--screenshot={picture}",
        *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []), file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels.shape[:2] == (1600, width)
    assert (pixels[0, 0].mean() > 128) == (scheme == "light")
    colours = {tuple(one) for one in pixels.reshape(-1, 3)[::7].tolist()}
    assert len(colours) > 50
    red = (pixels[..., 0] - pixels[..., 1:].max(-1) > 80).sum()
    assert red > 1000  # what was waited
