from __future__ import annotations

from pathlib import Path

from odd_images import odd_images

_GOOD = {
    "jpeg 4:2:0", "jpeg 4:4:0", "jpeg 4:1:1", "jpeg ycck", "jpeg rgb", "jpeg exif 6", "jpeg garbage inside",
    "png 16-bit RGB", "png interlaced 16-bit", "png named jpg", "gif named jpeg", "mpo", "bmp rle", "link",
}  # fmt: skip
_BAD = {
    "empty", "one byte", "text", "html", "garbage", "jpeg cut at 50 %", "progressive cut at 50 %", "folder",
    "png cut at 50 %", "png bad data", "jpeg bomb", "png bomb", "dangling link", "link loop", "jpeg markers only",
    "jpeg huffman length short", "jpeg quantisation length long",
}  # fmt: skip


def test_labels_that_do_not_depend_on_pillow(tmp_path: Path) -> None:
    made = odd_images(tmp_path)
    labels = {case.name: case.expect for case in made}
    assert len(labels) == len(made) == len({case.path for case in made}), "names or paths repeat"
    assert {name for name in _GOOD if labels[name] != "ok"} == set()
    assert {name for name in _BAD if labels[name] != "bad"} == set()
    counts = list(labels.values())
    assert counts.count("ok") > 100 and counts.count("bad") > 35
