"""``fastpipe scan --quarantine``, ``--restore`` and ``--fix``: no file is lost, whenever it is ended."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from dying import dying_at, half_of_it
from PIL import Image
from pytest import MonkeyPatch
from torchvision.datasets import ImageFolder

from fastpipe.cli import main
from fastpipe.core import files
from fastpipe.core.locks import try_to_lock
from fastpipe.tools import quarantine as moving
from fastpipe.tools.quarantine import LIST

CALLS = ("write", "fsync", "link", "symlink", "rename", "replace", "unlink", "rmdir", "makedirs")
BAD = {"a/bad.jpg", "a/inner/cut.jpg", "b/empty.png", "b/link.jpg"}


@pytest.fixture
def data(tmp_path: Path, photo_tree: Path) -> Path:
    """Some good files, some corrupt ones, one of them a link to a file elsewhere."""
    root, photo = tmp_path / "data", next(photo_tree.rglob("*.jpg")).read_bytes()
    (tmp_path / "elsewhere.jpg").write_bytes(b"text")
    for name, content in {
        "a/good.jpg": photo, "b/good.jpg": photo, "a/bad.jpg": b"no image", "a/inner/cut.jpg": photo[:1000],
        "b/empty.png": b"",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "b" / "link.jpg").symlink_to("../../elsewhere.jpg")
    return root


@pytest.fixture
def place(data: Path) -> Path:
    return data.parent / "quarantine"


@pytest.fixture(params=["here", "old", "other disk", "no links"])
def disk(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> str:
    """The file system of the quarantine: the same one, on a new system or an old one that renames only by hard
    links; another one; or one without hard links."""
    kind: str = request.param
    real_link, real_rename = os.link, files._renameat2

    def link(source: str, target: str, **options: Any) -> None:
        if kind == "no links":
            raise OSError(errno.EPERM, "Operation not permitted", source)
        if kind == "other disk" and is_apart(source, target):
            raise OSError(errno.EXDEV, "Invalid cross-device link", source)
        real_link(source, target, **options)

    def rename(here: int, source: bytes, there: int, target: bytes, flags: int) -> int:
        if kind == "other disk" and not is_apart(os.fsdecode(source), os.fsdecode(target)):
            return int(real_rename(here, source, there, target, flags))
        ctypes.set_errno(errno.EXDEV if kind == "other disk" else errno.EINVAL)
        return -1

    if kind != "here":
        monkeypatch.setattr(os, "link", link)
        monkeypatch.setattr(files, "_renameat2", None if real_rename is None else rename)
    return kind


def is_apart(source: str, target: str) -> bool:
    """Whether one of two paths is in the quarantine."""
    folders = [os.path.realpath(os.path.dirname(path)) for path in (source, target)]
    return ("quarantine" in folders[0]) != ("quarantine" in folders[1])


def tree(root: Path) -> dict[str, bytes | str]:
    """The files of a folder: their contents, or where links lead."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def quarantine(data: Path, *more: object) -> int:
    return main(["scan", str(data), "--quarantine", str(data.parent / "quarantine"), *map(str, more)])


def restore(data: Path, *more: object) -> int:
    return main(["scan", "--restore", str(data.parent / "quarantine"), *map(str, more)])


def test_corrupt_files_are_moved_and_restored_as_they_were(data: Path, place: Path, disk: str) -> None:
    os.utime(data / "a" / "bad.jpg", ns=(10**18, 10**18))
    (data / "a" / "bad.jpg").chmod(0o640)
    before = tree(data)
    assert quarantine(data) == 0
    moved = tree(place)
    records = [json.loads(line) for line in str(moved.pop(LIST), "ascii").splitlines()]
    assert moved == {name: before[name] for name in BAD}
    assert tree(data) == {name: before[name] for name in set(before) - BAD}
    assert {(record["path"], record["root"]) for record in records} == {(name, str(data)) for name in BAD}
    assert records[0]["reason"] == "UnidentifiedImageError: cannot identify image file"
    assert all(ImageFolder(data)[index] for index in range(2))
    assert (data.parent / "elsewhere.jpg").read_bytes() == b"text"
    assert restore(data) == 0
    assert tree(data) == before and not place.exists()
    status = (data / "a" / "bad.jpg").stat()
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (10**18, 0o640)


def test_no_file_is_overwritten(data: Path, place: Path, disk: str, capsys: Any) -> None:
    (place / "a").mkdir(parents=True)
    (place / "a" / "bad.jpg").write_bytes(b"another one")
    assert quarantine(data) == 1
    output = capsys.readouterr().out
    assert "left as it is: a/bad.jpg: " in output and "is there already" in output
    assert (place / "a" / "bad.jpg").read_bytes() == b"another one"
    assert (data / "a" / "bad.jpg").read_bytes() == b"no image"
    (data / "b" / "empty.png").write_bytes(b"new")
    report = data.parent / "report.json"
    assert restore(data, "--json", data / "none" / "report.json") == 2
    assert restore(data, "--json", report) == 1
    assert "not put back" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert str(data / "a" / "inner" / "cut.jpg") in found["back"]
    assert [one["path"] for one in found["left"]] == [str(data / "b" / "empty.png")]
    assert (data / "b" / "empty.png").read_bytes() == b"new"
    assert (place / "b" / "empty.png").read_bytes() == b""


def test_files_are_restored_to_a_folder_that_was_moved(data: Path, tmp_path: Path, capsys: Any) -> None:
    (data / "b" / "good.jpg").unlink()
    before, moved = tree(data), data.with_name("moved")
    assert quarantine(data) == 0
    emptied = "1 class folder without an image any more, for which ImageFolder raises: 'b'"
    assert emptied in capsys.readouterr().out
    assert restore(data, tmp_path / "mistyped") == 2
    assert "there is no folder" in capsys.readouterr().err and not (tmp_path / "mistyped").exists()
    shutil.move(data, moved)
    assert restore(data, moved) == 0 and tree(moved) == before


@pytest.mark.parametrize(("name", "code"), [("z/bad.jpg", 0), ("a/bad.jpg", 1)])
def test_two_folders_share_a_quarantine(data: Path, tmp_path: Path, name: str, code: int) -> None:
    other = tmp_path / "other"
    (other / name).parent.mkdir(parents=True)
    shutil.copy(data / "a" / "bad.jpg", other / name)
    before, before_other = tree(data), tree(other)
    assert quarantine(data) == 0
    assert quarantine(other) == code
    assert (tree(other) == before_other) == (code == 1)
    assert restore(data) == 0
    assert (tree(data), tree(other)) == (before, before_other)


def test_all_hard_links_to_a_file_are_moved(data: Path) -> None:
    shutil.move(data / "a" / "bad.jpg", data.parent)
    for name in ("a/bad.jpg", "b/same.jpg"):
        os.link(data.parent / "bad.jpg", data / name)
    before = tree(data)
    assert quarantine(data) == 0 and not (data / "b" / "same.jpg").exists()
    assert restore(data) == 0 and tree(data) == before


def test_a_file_that_is_replaced_meanwhile_stays(data: Path, monkeypatch: MonkeyPatch, capsys: Any) -> None:
    real = moving.check_apart

    def repaired(*arguments: str) -> None:
        shutil.copy(data / "a" / "good.jpg", data / "a" / "bad.jpg")
        real(*arguments)

    monkeypatch.setattr(moving, "check_apart", repaired)
    assert quarantine(data) == 1
    assert "a/bad.jpg: it has changed" in capsys.readouterr().out
    assert (data / "a" / "bad.jpg").read_bytes() == (data / "a" / "good.jpg").read_bytes()


def test_a_file_behind_a_link_out_of_the_folder_stays(data: Path, capsys: Any) -> None:
    outside = data.parent / "outside"
    outside.mkdir()
    (outside / "bad.jpg").write_bytes(b"no image")
    (data / "c").symlink_to(outside)
    (data / "d").symlink_to(data / "a")  # and within: the same files by another name
    assert quarantine(data) == 1
    assert "c/bad.jpg: it is outside" in capsys.readouterr().out
    assert (outside / "bad.jpg").exists() and not (data / "a" / "bad.jpg").exists()


def test_a_quarantine_that_cannot_be_used_is_an_error_after_findings(
    data: Path, place: Path, capsys: Any
) -> None:
    place.write_bytes(b"a file")
    assert quarantine(data) == 2
    output, errors = capsys.readouterr()
    assert not output and "this is no folder" in errors  # before anything is looked at
    place.unlink()
    (place / LIST).mkdir(parents=True)
    assert quarantine(data) == 2
    output, errors = capsys.readouterr()
    assert "corrupt: 4" in output and "4 remain" in output and "Is a directory" in errors


def test_one_process_at_a_time_uses_a_quarantine(data: Path, place: Path, forked: Any, capsys: Any) -> None:
    place.mkdir()
    ready, done = os.pipe(), os.pipe()
    with (place / LIST).open("ab") as file:

        def hold() -> None:
            assert try_to_lock(file.fileno())
            os.write(ready[1], b"x")
            os.read(done[0], 1)

        pid = forked(hold)
        os.read(ready[0], 1)
        assert quarantine(data) == 2
        assert "another process" in capsys.readouterr().err
        os.write(done[1], b"x")
        os.waitpid(pid, 0)
    for descriptor in (*ready, *done):
        os.close(descriptor)
    assert (data / "a" / "bad.jpg").exists()


def test_a_line_of_the_list_is_whole_where_the_system_writes_less_at_a_time(
    data: Path, place: Path, monkeypatch: MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:7]))
        assert quarantine(data) == 0
    assert {json.loads(line)["path"] for line in (place / LIST).read_text().splitlines()} == BAD


def test_lines_of_the_list_that_are_cut_off_or_lead_outside_are_ignored(data: Path, place: Path) -> None:
    before = tree(data)
    place.mkdir()
    (place / LIST).write_text('{"path": "../../etc/passwd", "root": "/"}\n{"path": "a/bad')
    assert quarantine(data) == 0 and restore(data) == 0
    assert tree(data) == before and not place.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("disk", ["here", "other disk"], indirect=True)
def test_files_stay_where_they_cannot_be_moved(data: Path, disk: str, monkeypatch: MonkeyPatch) -> None:
    fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    if disk == "other disk":
        monkeypatch.setattr(moving.shutil, "copyfileobj", fail)
        (data / "b" / "link.jpg").unlink()  # for which there is always room
    else:
        monkeypatch.setattr(moving, "rename_anew", fail)
    before = tree(data)
    assert quarantine(data) == 1
    assert tree(data) == before
    monkeypatch.undo()
    (data / "a" / "bad.jpg").unlink()  # a file that was not moved is not restored later
    other = data.with_name("other")
    shutil.copytree(data, other, symlinks=True)
    (other / "a" / "bad.jpg").write_bytes(b"the other's")
    assert quarantine(other) == 0
    assert restore(data) == 0 and not (data / "a" / "bad.jpg").exists()


def runs_to_its_end(work: Callable[[], object], die_at: int, forked: Any) -> bool:
    """Whether work in a forked process ends before its call number ``die_at`` that changes files, at which it
    is killed with half of a write done."""

    def mortal() -> None:
        renames = [] if files._renameat2 is None else [(files, "_renameat2")]
        with dying_at(die_at, [*((os, name) for name in CALLS), *renames], half_of_it):
            work()

    code = os.waitstatus_to_exitcode(os.waitpid(forked(mortal), 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("back", [False, True])
def test_no_file_is_lost_when_it_is_killed_at_any_call(
    data: Path, place: Path, disk: str, back: bool, forked: Any
) -> None:
    before, work = tree(data), restore if back else quarantine
    for die_at in range(1, 200, 1 if disk in ("here", "other disk") else 3):
        if back and not (place / LIST).exists():
            assert quarantine(data) == 0
        is_over = runs_to_its_end(lambda: work(data), die_at, forked)
        now, there = tree(data), tree(place) if place.exists() else {}
        for name, content in before.items():
            assert content in (now.get(name), there.get(name)), (die_at, name)
        if is_over:
            break
        if not back:
            assert quarantine(data) == 0
        if (place / LIST).exists():  # else the last file was restored before the kill
            assert restore(data) == 0
        assert tree(data) == before, die_at
    assert is_over and die_at > 15


@pytest.fixture
def misnamed(tmp_path: Path) -> Path:
    """Images with the endings of other kinds."""
    root = tmp_path / "data" / "a"
    root.mkdir(parents=True)
    image = Image.new("RGB", (9, 7), (200, 30, 40))
    for name, kind in (
        ("x.png", "JPEG"), ("y.jpg", "PNG"), ("z.JPG", "JPEG"), ("taken.png", "JPEG"), ("taken.jpg", "JPEG"),
        ("anim.jpg", "GIF"), ("target.png", "JPEG"), ("w.bmp", "WEBP"), ("both.png", "JPEG"),
    ):  # fmt: skip
        image.save(root / name, kind)
    (root / "bad.png").write_bytes(b"\xff\xd8\xff\xe0 cut")
    os.link(root / "both.png", root / "both.jpg")  # two samples, which stay two
    (root / "link.jpg").symlink_to("target.png")
    (root / "named.tif").symlink_to("z.JPG")
    return root


def test_names_get_the_endings_of_their_contents(misnamed: Path, tmp_path: Path, command: Any) -> None:
    before = tree(misnamed)
    arguments = ("scan", misnamed.parent, "--fix", "--json", tmp_path / "x.json")
    code, output, _ = command(*arguments)
    found = json.loads((tmp_path / "x.json").read_text())
    renamed = {one["from"]: one["to"] for one in found["renamed"]}
    assert renamed == {
        "a/x.png": "a/x.jpg", "a/y.jpg": "a/y.png", "a/w.bmp": "a/w.webp", "a/named.tif": "a/named.jpg",
    }  # fmt: skip
    left = {one["path"]: one["why"] for one in found["left"]}
    assert set(left) == {"a/taken.png", "a/both.png", "a/anim.jpg", "a/target.png"}
    assert left["a/taken.png"] == "taken.jpg is there already" and "would lose it" in left["a/anim.jpg"]
    assert code == 1 and "not repaired: 1 corrupt file." in output
    now = tree(misnamed)
    assert now == {renamed.get(f"a/{name}", f"a/{name}")[2:]: content for name, content in before.items()}
    command(*arguments)
    assert json.loads((tmp_path / "x.json").read_text())["renamed"] == [] and tree(misnamed) == now


def test_no_file_is_lost_when_renaming_is_killed(misnamed: Path, forked: Any) -> None:
    contents = sorted(map(repr, tree(misnamed).values()))
    for die_at in range(1, 40):
        is_over = runs_to_its_end(lambda: main(["scan", str(misnamed.parent), "--fix"]), die_at, forked)
        assert set(map(repr, tree(misnamed).values())) == set(contents)
        if is_over:
            break
    assert is_over and die_at > 4 and sorted(map(repr, tree(misnamed).values())) == contents
