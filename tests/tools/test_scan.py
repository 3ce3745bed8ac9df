"""``fastpipe scan``: its verdict on a file is that of the loader or library that is replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from odd_images import odd_images, write_fifo
from PIL import Image
from rich.console import Console
from scripts import ran
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder
from fastpipe.console import Progress
from fastpipe.errors import BadSampleError
from fastpipe.images.reader import ImageReader
from fastpipe.tools import scan_images

Json = dict[str, Any]
ROWS = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")


@pytest.fixture
def scanned(command: Any, tmp_path: Path) -> Callable[..., tuple[int, Json]]:
    """Runs a scan; returns its exit code and its report."""

    def scan(root: Path, *more: object) -> tuple[int, Json]:
        code, _, _ = command("scan", root, "--json", tmp_path / "report.json", *more)
        return code, json.loads((tmp_path / "report.json").read_text())

    return scan


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


def paths(found: Json, *kinds: str) -> set[str]:
    return {one["path"] for kind in kinds for one in found[kind]}


def test_odd_images_get_verdicts_messages_and_notes(tmp_path: Path) -> None:
    root, report = tmp_path / "data", tmp_path / "report.json"
    odd_images(root / "odd")
    (root / "good").mkdir()
    Image.new("RGB", (9, 7)).save(root / "good" / "0.png")
    done = ran("-m", "fastpipe", "scan", root, "--json", report)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    found, bad = json.loads(report.read_text()), bad_for_torchvision(root)
    assert paths(found, "corrupt", "unreadable") == bad and len(bad) > 30
    dataset, messages = FastImageFolder(root), {one["path"]: one["message"] for one in found["corrupt"]}
    assert found["count"] == len(ImageFolder(root).samples)
    for index, (path, _) in enumerate(dataset.samples):
        if (name := os.path.relpath(path, root)) in messages:
            with pytest.raises(BadSampleError) as raised, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dataset[index]
            assert messages[name] == str(raised.value)
    dataset.close()
    assert "(1,232 bytes)" in messages["odd/cut_jpeg_50.jpg"]
    assert "OSError: image file is truncated (… bytes not processed) (12)" in done.stdout
    assert "    odd/cut_jpeg_50.jpg  1,232 bytes" in done.stdout and "49 remain" in done.stdout
    notes = {one["path"]: one["notes"] for one in found["notes"]}
    for name, note in {
        "is_jpeg.png": "the name says .png, the content is JPEG",
        "is_gif.jpeg": "the name says .jpeg, the content is GIF",
        "jpeg_exif_6.jpg": "EXIF orientation 6, which ImageFolder ignores",
        "png_exif.png": "EXIF orientation 6, which ImageFolder ignores",
        "jpeg_trailing.jpg": "12 bytes follow its end",
        "cut_end.png": "it has no end marker: its last bytes may be missing",
    }.items():
        assert note in notes[f"odd/{name}"]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_verdicts_on_damaged_files_are_those_of_torchvision(
    seed: int, scanned: Any, photo_tree: Path, tmp_path: Path
) -> None:
    rng, root = np.random.default_rng(seed), tmp_path / "data" / "a"
    root.mkdir(parents=True)
    source = sorted(photo_tree.rglob("*.jpg"))
    blobs = [source[0].read_bytes(), source[1].read_bytes()]
    for options in ({"format": "PNG"}, {"format": "JPEG", "progressive": True}, {"format": "WEBP"}):
        Image.open(source[2]).resize((60, 50)).save(tmp_path / "one", **options)
        blobs.append((tmp_path / "one").read_bytes())
    for number in range(80):
        blob = bytearray(blobs[number % len(blobs)])
        for _ in range(rng.integers(0, 4)):
            blob[rng.integers(0, len(blob))] = rng.integers(0, 256)
        if rng.random() < 0.5:
            del blob[rng.integers(0, len(blob)) :]
        if rng.random() < 0.2:
            blob += bytes(rng.integers(0, 5000))
        (root / f"{number}.{'jpg' if number % 2 else 'png'}").write_bytes(blob)
    _, found = scanned(root.parent)
    bad = bad_for_torchvision(root.parent)
    assert paths(found, "corrupt", "unreadable") == bad and 10 < len(bad) < 75


def test_zeros_at_the_end_and_many_pixels_are_notes(scanned: Any, tmp_path: Path, monkeypatch: Any) -> None:
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    Image.new("RGB", (60, 60)).save(root / "a" / "zeros.jpg")
    with (root / "a" / "zeros.jpg").open("ab") as file:
        file.write(bytes(5000))
    Image.new("RGB", (120, 120)).save(root / "a" / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    code, found = scanned(root)
    notes = {one["path"]: " ".join(one["notes"]) for one in found["notes"]}
    assert code == 0 and "ends in zeros" in notes["a/zeros.jpg"]
    assert "decompression bomb" in notes["a/large.png"]


def test_classes_without_images_and_twenty_files_of_a_kind_are_named(command: Any, tmp_path: Path) -> None:
    code, _, errors = command("scan", tmp_path)
    assert code == 2 and "class folder" in errors
    (tmp_path / "a").mkdir()
    code, output, _ = command("scan", tmp_path)
    assert code == 0 and "no images found" in output
    assert "1 class folder without an image, for which ImageFolder raises: 'a'" in output
    for number in range(22):
        (tmp_path / "a" / f"{number:02}.jpg").write_bytes(b"no image")
    _, output, _ = command("scan", tmp_path)
    assert "a/19.jpg" in output and "a/20.jpg" not in output
    assert "and 2 more, all of them in --json FILE" in output


def test_images_without_classes_are_scanned_and_moved(command: Any, scanned: Any, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    Image.new("RGB", (9, 7)).save(root / "good.png")
    (root / "bad.JPG").write_bytes(b"text")
    (root / "list.txt").write_text("good.png")
    for _ in range(2):
        code, found = scanned(root)
        assert code == 1 and found["count"] == 2 and paths(found, "corrupt") == {"bad.JPG"}
        assert any("from_samples" in note for note in found["about"])
        (root / ".thumbnails").mkdir(exist_ok=True)  # a folder that is no class
    assert command("scan", root, "--quarantine", tmp_path / "away")[0] == 0
    assert sorted(path.name for path in root.glob("*.*")) == [".thumbnails", "good.png", "list.txt"]
    assert command("scan", "--restore", tmp_path / "away")[0] == 0
    assert (root / "bad.JPG").read_bytes() == b"text"
    (root / "a").mkdir()
    Image.new("RGB", (9, 7)).save(root / "a" / "0.png")
    for name in ("b.heic", "c.HEIC", "notes"):
        (root / "a" / name).write_bytes(b"")
    code, output, _ = command("scan", root)
    assert "3 files are not checked, as ImageFolder ignores such files: .heic (2), notes (1)" in output
    assert code == 0 and "2 images beside the class folders" in output and "all 1 image" in output


def test_wrong_arguments_are_refused(command: Any, photo_tree: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "name a folder"),
        ((tmp_path / "nowhere",), "No such file or folder"),
        (("s3://bucket/train",), "is a URL"),
        ((next(photo_tree.rglob("*.jpg")),), "is an image: name the folder that holds it"),
        ((photo_tree, "--json", tmp_path / "no" / "x.json"), "there is no folder"),
        ((photo_tree, "--quarantine", photo_tree / "bad"), "one inside the other"),
        ((photo_tree, "--quarantine", photo_tree.parent), "one inside the other"),
        (("--restore", tmp_path), "nothing was moved"),
    ):
        code, _, errors = command("scan", *arguments)
        assert code == 2 and message in errors, arguments
    with pytest.raises(SystemExit):
        command("scan", "x", "--fix", "--quarantine", "y")
    assert not (photo_tree / "bad").exists()


def test_files_that_cannot_be_read_are_not_corrupt_and_stay(
    scanned: Any, photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    shutil.copytree(photo_tree, root)
    write_fifo(root / "class_000")
    (root / "class_000" / "gone.jpg").symlink_to("nowhere.jpg")
    read_file, open_image = scan_images.read_file, ImageReader.open

    def read(path: str) -> bytes:
        if path.endswith("0003.jpg"):
            raise PermissionError(13, "Permission denied", path)
        return read_file(path)

    def open_it(self: ImageReader, blob: bytes, path: str) -> Any:
        if path.endswith("0004.jpg"):
            raise MemoryError
        return open_image(self, blob, path)

    monkeypatch.setattr(scan_images, "read_file", read)
    monkeypatch.setattr(ImageReader, "open", open_it)
    code, found = scanned(root, "--quarantine", tmp_path / "bad")
    assert code == 1 and not found["corrupt"] and not found["moved"]
    reasons = {one["path"]: one["reason"] for one in found["unreadable"]}
    assert reasons["class_001/0003.jpg"] == "PermissionError: Permission denied"
    assert reasons["class_001/0004.jpg"].startswith("MemoryError")
    assert reasons["class_000/gone.jpg"].startswith("FileNotFoundError")
    assert reasons["class_000/pipe.jpg"] == "OSError: Not a regular file"


def test_names_with_line_breaks_or_that_are_not_utf8_are_shown(command: Any, tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"data\xff") / "a"
    root.mkdir(parents=True)
    names = [os.fsdecode(b"\xff\xfe.jpg"), "line\nbreak[red].jpg", "ü.jpg"]
    for name in names:
        (root / name).write_bytes(b"no image")
    code, output, _ = command("scan", root.parent, "--json", tmp_path / "x.json")
    assert code == 1 and "data\\xff: 3 images" in output
    assert all(f"a/{name}" in output for name in ("\\xff\\xfe.jpg", "line\\nbreak[red].jpg", "ü.jpg"))
    assert paths(json.loads((tmp_path / "x.json").read_text()), "corrupt") == {f"a/{name}" for name in names}


@pytest.mark.parametrize("where", ["main thread", "decoding thread", "machine"])
def test_ctrl_c_or_an_error_of_the_machine_ends_the_scan_and_moves_nothing(
    where: str, command: Any, tmp_path: Path, photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    shutil.copytree(photo_tree, root)
    (root / "class_000" / "bad.jpg").write_bytes(b"no image")

    def read(path: str) -> bytes:
        if where == "decoding thread":
            raise KeyboardInterrupt
        if where == "machine":
            raise OSError(24, "Too many open files", path)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return b""

    monkeypatch.setattr(scan_images, "read_file", read)
    code, _, errors = command("scan", root, "--threads", 1, "--quarantine", tmp_path / "bad")
    if where == "machine":
        assert code == 2 and "Too many open files" in errors
    else:
        assert (code, errors) == (130, "fastpipe scan: interrupted\n")
    assert not (tmp_path / "bad").exists() and (root / "class_000" / "bad.jpg").exists()


def test_a_terminal_shows_progress(photo_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Progress, "now", lambda self, text: shown.append(text))
    monkeypatch.setattr(scan_images, "_TELL_EVERY_S", 0.0)
    scan_images.scan_images(str(photo_tree), 1, Progress(Console()))
    assert any(text.startswith("24 of 24 images, ") and text.endswith(", 0 bad, 0 s left") for text in shown)


@pytest.fixture
def hdf5(tmp_path: Path) -> Path:
    """Datasets of every kind."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("gzip", data=ROWS, chunks=(16, 30), compression="gzip", shuffle=True)
        file.create_dataset("summed", data=ROWS, chunks=(50, 10), fletcher32=True)
        file.create_dataset("contiguous", data=ROWS)
        file.create_dataset("text", data=[f"text {n}" for n in range(30)], chunks=(10,), compression="gzip")
        file.create_dataset("sparse", (1000,), "i4", chunks=(10,))[:10] = 1
        file.create_dataset("group/scalar", data=3.0)
        file.create_dataset("none", dtype="i4", shape=None)
    return tmp_path / "x.h5"


def test_all_chunks_of_a_good_hdf5_file_are_read(hdf5: Path, odd_hdf5: Path, scanned: Any) -> None:
    code, found = scanned(hdf5)
    assert code == 0 and not found["corrupt"] and found["what"] == "chunks"
    assert found["count"] == 25 + 8 * 3 + 1 + 3 + 1 + 1
    assert found["nbytes"] > 3 * ROWS.nbytes
    code, found = scanned(odd_hdf5, "--threads", 2)
    assert code == 0 and not found["corrupt"]


def test_damaged_chunks_are_those_that_h5py_cannot_read(hdf5: Path, scanned: Any) -> None:
    for name, number in (("gzip", 3), ("gzip", 17), ("summed", 5)):
        with h5py.File(hdf5) as file, hdf5.open("r+b") as raw:
            raw.seek(file[name].id.get_chunk_info(number).byte_offset)
            raw.write(b"\xff" * 20)
    code, found = scanned(hdf5, "--threads", 2)
    bad = set()
    with h5py.File(hdf5) as file:
        for name in ("gzip", "summed", "text"):
            for box in file[name].iter_chunks():
                try:
                    file[name][box]
                except OSError:
                    bad.add(f"/{name}[{', '.join(f'{one.start}:{one.stop}' for one in box)}]")
    assert code == 1 and len(found["corrupt"]) == 3 and "/gzip[48:64, 0:30]" in bad
    assert paths(found, "corrupt") == bad
    assert all(one["reason"].startswith("OSError") for one in found["corrupt"])


def test_hdf5_files_that_cannot_be_scanned_are_refused(hdf5: Path, command: Any) -> None:
    content = hdf5.read_bytes()
    for option in (["--fix"], ["--quarantine", "q"]):
        code, _, errors = command("scan", hdf5, *option)
        assert code == 2 and "folders of images" in errors and hdf5.read_bytes() == content
    for damaged, message in ((content[: len(content) // 2], "cut off"), (b"text", "not an HDF5 file")):
        hdf5.write_bytes(damaged)
        code, _, errors = command("scan", hdf5)
        assert code == 2 and message in errors
