from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from odd_images import OddImage, odd_images
from PIL import Image


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OddImage]:
    made = odd_images(tmp_path_factory.mktemp("odd"))
    by_name = {case.name: case for case in made}
    assert len(by_name) == len(made) == len({case.path for case in made}), "names or paths repeat"
    return by_name


def _load(path: Path) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with path.open("rb") as file:
            return Image.open(file).convert("RGB")


def test_labels_are_true(cases: dict[str, OddImage]) -> None:
    for case in cases.values():
        if case.expect == "ok":
            assert _load(case.path).mode == "RGB", case
        else:
            with pytest.raises(Exception):  # noqa: B017 - any exception is what the label says
                _load(case.path)


def test_labels_that_do_not_depend_on_pillow(cases: dict[str, OddImage]) -> None:
    good = {
        "jpeg 4:2:0",
        "jpeg 4:4:0",
        "jpeg 4:1:1",
        "jpeg ycck",
        "jpeg rgb",
        "jpeg exif 6",
        "jpeg garbage inside",
    }
    good |= {
        "png 16-bit RGB",
        "png interlaced 16-bit",
        "png named jpg",
        "gif named jpeg",
        "mpo",
        "bmp rle",
        "link",
    }
    bad = {"empty", "one byte", "text", "html", "garbage", "jpeg cut at 50 %", "progressive cut at 50 %"}
    bad |= {
        "png cut at 50 %",
        "png bad data",
        "jpeg bomb",
        "png bomb",
        "dangling link",
        "link loop",
        "folder",
    }
    bad |= {"jpeg markers only", "jpeg huffman length short", "jpeg quantisation length long"}
    assert {name for name in good if cases[name].expect != "ok"} == set()
    assert {name for name in bad if cases[name].expect != "bad"} == set()
    counts = [case.expect for case in cases.values()]
    assert counts.count("ok") > 100 and counts.count("bad") > 35
