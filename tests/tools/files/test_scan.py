"""``fastpipe scan``: its verdict is that of the loader that is replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_images import odd_images, write_fifo
from PIL import Image
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder
from fastpipe.cli import main
from fastpipe.console import Progress
from fastpipe.errors import BadSampleError
from fastpipe.tools import scan_images as judging
from fastpipe.tools.scan_images import Judge, in_threads, scan_images

Scan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def scan(capsys: pytest.CaptureFixture[str]) -> Scan:
    """Runs ``fastpipe scan``; its exit code, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["scan", *map(str, arguments)])
        captured = capsys.readouterr()
        print(*captured)
        return code, *captured

    return run


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A class of odd images, and one of good ones."""
    odd_images(tmp_path / "data" / "odd")
    (tmp_path / "data" / "good").mkdir()
    Image.new("RGB", (9, 7)).save(tmp_path / "data" / "good" / "0.png")
    return tmp_path / "data"


def report(scan: Scan, root: Path, tmp_path: Path, *more: object) -> tuple[int, dict[str, Any]]:
    """Of a scan: its exit code, and what it writes as JSON."""
    code, _, _ = scan(root, "--json", tmp_path / "report.json", *more)
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return code, found


def bad_for_torchvision(root: Path) -> set[str]:
    """The files on which the replaced loader raises."""
    dataset, found = ImageFolder(root, allow_empty=True), set()
    for path, _ in dataset.samples:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dataset.loader(path)
        except Exception:
            found.add(os.path.relpath(path, root))
    return found


def bad_of(found: dict[str, Any]) -> set[str]:
    return {one["path"] for one in (*found["corrupt"], *found["unreadable"])}


def test_the_verdict_is_torchvisions_for_every_odd_image(scan: Scan, odd: Path, tmp_path: Path) -> None:
    code, found = report(scan, odd, tmp_path)
    theirs = bad_for_torchvision(odd)
    assert bad_of(found) == theirs and len(theirs) > 30
    assert code == 1 and found["count"] == len(ImageFolder(odd).samples)


@pytest.mark.parametrize("seed", range(3))
def test_the_verdict_is_torchvisions_for_files_that_are_cut_and_spoilt(
    seed: int, scan: Scan, photo_tree: Path, tmp_path: Path
) -> None:
    rng, root = np.random.default_rng(seed), tmp_path / "data" / "a"
    root.mkdir(parents=True)
    source = sorted(photo_tree.rglob("*.jpg"))
    blobs = [source[0].read_bytes(), source[1].read_bytes()]
    for options in ({"format": "PNG"}, {"format": "JPEG", "progressive": True}, {"format": "WEBP"}):
        path = tmp_path / "one"
        Image.open(source[2]).resize((60, 50)).save(path, **options)
        blobs.append(path.read_bytes())
    for number in range(80):
        blob = bytearray(blobs[number % len(blobs)])
        for _ in range(rng.integers(0, 4)):
            blob[rng.integers(0, len(blob))] = rng.integers(0, 256)
        if rng.random() < 0.5:
            del blob[rng.integers(0, len(blob)) :]
        if rng.random() < 0.2:
            blob += bytes(rng.integers(0, 5000))
        (root / f"{number}.{'jpg' if number % 2 else 'png'}").write_bytes(blob)
    _, found = report(scan, root.parent, tmp_path)
    theirs = bad_for_torchvision(root.parent)
    assert bad_of(found) == theirs and 10 < len(theirs) < 75


def test_messages_are_those_of_the_dataset(scan: Scan, odd: Path, tmp_path: Path) -> None:
    _, found = report(scan, odd, tmp_path)
    messages = {one["path"]: one["message"] for one in found["corrupt"]}
    dataset = FastImageFolder(odd)
    for index, (path, _) in enumerate(dataset.samples):
        name = os.path.relpath(path, odd)
        if name in messages:
            with pytest.raises(BadSampleError) as raised, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dataset[index]
            assert messages[name] == str(raised.value)
    assert "(1,232 bytes)" in messages["odd/cut_jpeg_50.jpg"]
    dataset.close()


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("is_jpeg.png", "the name says .png, the content is JPEG"),
        ("is_gif.jpeg", "the name says .jpeg, the content is GIF"),
        ("jpeg_exif_6.jpg", "EXIF orientation 6, which ImageFolder ignores"),
        ("png_exif.png", "EXIF orientation 6, which ImageFolder ignores"),
        ("jpeg_trailing.jpg", "12 bytes follow its end"),
        ("cut_end.png", "it has no end marker: its last bytes may be missing"),
    ],
)
def test_what_is_odd_is_a_note(name: str, note: str, scan: Scan, odd: Path, tmp_path: Path) -> None:
    _, found = report(scan, odd, tmp_path)
    notes = {one["path"]: one["notes"] for one in found["notes"]}
    assert note in notes[f"odd/{name}"]


def test_zeros_at_the_end_and_many_pixels_are_notes(
    scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    Image.new("RGB", (60, 60)).save(root / "a" / "zeros.jpg")
    with (root / "a" / "zeros.jpg").open("ab") as file:
        file.write(bytes(5000))
    Image.new("RGB", (120, 120)).save(root / "a" / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    code, found = report(scan, root, tmp_path)
    notes = {one["path"]: " ".join(one["notes"]) for one in found["notes"]}
    assert code == 0
    assert "ends in zeros" in notes["a/zeros.jpg"] and "decompression bomb" in notes["a/large.png"]


def test_a_clean_folder(scan: Scan, photo_tree: Path) -> None:
    code, out, _ = scan(photo_tree, "--threads", 2)
    assert code == 0 and "all 24 images can be read" in out and "24 images," in out


def test_the_report_groups_by_reason(scan: Scan, odd: Path) -> None:
    code, out, _ = scan(odd)
    assert code == 1
    assert "OSError: image file is truncated (… bytes not processed) (12)" in out
    assert "    odd/cut_jpeg_50.jpg  1,232 bytes" in out and "42 remain" in out


def test_without_classes_or_images(scan: Scan, tmp_path: Path) -> None:
    code, _, err = scan(tmp_path)
    assert code == 2 and "class folder" in err
    (tmp_path / "a").mkdir()
    code, out, _ = scan(tmp_path)
    assert (
        code == 0
        and "no images found" in out
        and "1 class folder without an image, for which ImageFolder raises: 'a'" in out
    )


def test_images_without_class_folders(scan: Scan, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    Image.new("RGB", (9, 7)).save(root / "good.png")
    (root / "bad.JPG").write_bytes(b"text")
    (root / "list.txt").write_text("good.png")
    for _ in range(2):
        code, found = report(scan, root, tmp_path)
        assert code == 1 and found["count"] == 2 and [one["path"] for one in found["corrupt"]] == ["bad.JPG"]
        assert any("from_samples" in note for note in found["about"])
        (root / ".thumbnails").mkdir(exist_ok=True)  # a folder that is no class
    assert scan(root, "--quarantine", tmp_path / "away")[0] == 0
    assert sorted(path.name for path in root.glob("*.*")) == [".thumbnails", "good.png", "list.txt"]
    assert scan("--restore", tmp_path / "away")[0] == 0 and (root / "bad.JPG").read_bytes() == b"text"
    (root / "a").mkdir()
    Image.new("RGB", (9, 7)).save(root / "a" / "0.png")
    code, out, _ = scan(root)
    assert code == 0 and "2 images beside the class folders" in out and "all 1 image" in out


def test_bad_input(scan: Scan, photo_tree: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ((), "name a folder"),
        ((tmp_path / "nowhere",), "No such file or folder"),
        (("s3://bucket/train",), "is a URL"),
        ((photo_tree, "--json", tmp_path / "no" / "x.json"), "there is no folder"),
        ((photo_tree, "--quarantine", photo_tree / "bad"), "one inside the other"),
        ((photo_tree, "--quarantine", photo_tree.parent), "one inside the other"),
        (("--restore", tmp_path), "nothing was moved"),
    ):
        code, _, err = scan(*arguments)
        assert code == 2 and said in err, arguments
    assert not (photo_tree / "bad").exists()


def test_what_cannot_be_read_is_told_apart_and_stays(
    scan: Scan, photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    shutil.copytree(photo_tree, root)
    write_fifo(root / "class_000")
    (root / "class_000" / "gone.jpg").symlink_to("nowhere.jpg")
    real = judging.read_file

    def read(path: str) -> bytes:
        if path.endswith("0003.jpg"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(judging, "read_file", read)
    code, found = report(scan, root, tmp_path, "--quarantine", tmp_path / "bad")
    assert code == 1 and not found["corrupt"] and not found["moved"]
    reasons = {one["path"]: one["reason"] for one in found["unreadable"]}
    assert reasons["class_001/0003.jpg"] == "PermissionError: Permission denied"
    assert reasons["class_000/gone.jpg"].startswith("FileNotFoundError")
    assert reasons["class_000/pipe.jpg"] == "OSError: Not a regular file"


def test_names_that_are_no_utf8_or_have_line_breaks(scan: Scan, tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"data\xff") / "a"
    root.mkdir(parents=True)
    names = [os.fsdecode(b"\xff\xfe.jpg"), "line\nbreak[red].jpg", "ü.jpg"]
    for name in names:
        (root / name).write_bytes(b"no image")
    code, out, _ = scan(root.parent, "--json", tmp_path / "x.json")
    assert "data\\xff: 3 images" in out
    assert code == 1 and "a/\\xff\\xfe.jpg" in out and "a/line\\nbreak[red].jpg" in out and "a/ü.jpg" in out
    found = json.loads((tmp_path / "x.json").read_text())
    assert {one["path"] for one in found["corrupt"]} == {f"a/{name}" for name in names}
    code, _, _ = scan(root.parent, "--quarantine", tmp_path / "bad")
    assert code == 0 and os.listdir(root) == []
    scan("--restore", tmp_path / "bad")
    assert set(os.listdir(root)) == set(names) and not (tmp_path / "bad").exists()


def test_an_error_of_the_machine_ends_the_scan(
    scan: Scan, photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: str) -> bytes:
        raise OSError(24, "Too many open files", path)

    monkeypatch.setattr(judging, "read_file", read)
    code, _, err = scan(photo_tree)
    assert code == 2 and "Too many open files" in err


def test_without_memory_for_a_file_nothing_is_known_of_it(
    photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, path = Judge(), str(next(photo_tree.rglob("*.jpg")))

    def open_it(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(judge._reader, "open", open_it)
    assert judge.judge(0, path).state == "unreadable"


def test_an_interrupt_ends_the_threads() -> None:
    def task(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_threads(task, 100, 2)


def test_progress_is_shown_in_a_terminal(photo_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    said: list[str] = []
    monkeypatch.setattr(Progress, "now", lambda self, text: said.append(text))
    monkeypatch.setattr("fastpipe.tools.scan_images._TELL_EVERY_S", 0.0)
    scan_images(str(photo_tree), 1, Progress(Console()))
    assert any(text.startswith("24 of 24 images, ") and text.endswith(", 0 bad, 0 s left") for text in said)


def test_as_a_user_runs_it(odd: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastpipe", "scan", str(odd)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr and "truncated" in done.stdout


def test_ctrl_c(tmp_path: Path, photo_tree: Path) -> None:
    """A scan that waits for a file is interrupted: nothing was moved, and it says so in one line."""
    root = tmp_path / "data"
    shutil.copytree(photo_tree, root)
    (root / "class_000" / "bad.jpg").write_bytes(b"no image")
    code = f"""
import os, signal
from fastpipe.tools import scan_images as judging
def read(path):
    os.kill(os.getpid(), signal.SIGINT)
    return b""
judging.read_file = read
from fastpipe.cli import main
raise SystemExit(main(["scan", {str(root)!r}, "--quarantine", {str(tmp_path / "bad")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "fastpipe scan: interrupted\n")
    assert not (tmp_path / "bad").exists() and (root / "class_000" / "bad.jpg").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["scan", "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    for word in ("--fix", "--quarantine DIR", "--restore DIR", "--json FILE", "--threads N", "exit codes: 0"):
        assert word in out
    with pytest.raises(SystemExit):
        main(["scan", "x", "--fix", "--quarantine", "y"])
    assert "not allowed with" in capsys.readouterr().err
