"""``fastpipe scan --quarantine``, ``--restore`` and ``--fix``: nothing is lost, whenever it is ended."""

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

import pytest
from dying import dying_at
from PIL import Image
from torchvision.datasets import ImageFolder

from fastpipe.cli import main
from fastpipe.core import files as _files
from fastpipe.core.locks import try_to_lock
from fastpipe.tools import quarantine as moving
from fastpipe.tools import quarantine as remedies
from fastpipe.tools.quarantine import LIST

CALLS = ("write", "fsync", "link", "symlink", "rename", "replace", "unlink", "rmdir", "makedirs")
BAD = {"a/bad.jpg", "a/inner/cut.jpg", "b/empty.png", "b/link.jpg"}
Tree = dict[str, bytes | str]


@pytest.fixture
def data(tmp_path: Path, photo_tree: Path) -> Path:
    """Some good files, some corrupt ones, one of them a link to what is elsewhere."""
    root, photo = tmp_path / "data", next(photo_tree.rglob("*.jpg")).read_bytes()
    (root / "a" / "inner").mkdir(parents=True)
    (root / "b").mkdir()
    (tmp_path / "elsewhere.jpg").write_bytes(b"text")
    (root / "a" / "good.jpg").write_bytes(photo)
    (root / "b" / "good.jpg").write_bytes(photo)
    (root / "a" / "bad.jpg").write_bytes(b"no image")
    (root / "a" / "inner" / "cut.jpg").write_bytes(photo[:1000])
    (root / "b" / "empty.png").write_bytes(b"")
    (root / "b" / "link.jpg").symlink_to("../../elsewhere.jpg")
    return root


@pytest.fixture(params=["here", "old", "other disk", "no links"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system of the quarantine is: the same, on a new system or an old one that renames only by
    hard links; another one; or one without hard links."""
    kind: str = request.param
    real_link, real_rename = os.link, _files._renameat2

    def link(source: str, target: str, **options: Any) -> None:
        if kind == "no links":
            raise OSError(errno.EPERM, "Operation not permitted", source)
        if kind == "other disk" and is_apart(source, target):
            raise OSError(errno.EXDEV, "Invalid cross-device link", source)
        real_link(source, target, **options)

    def rename(here: int, source: bytes, there: int, target: bytes, flags: int) -> int:
        if kind == "other disk" and is_apart(os.fsdecode(source), os.fsdecode(target)):
            ctypes.set_errno(errno.EXDEV)
            return -1
        if kind != "other disk":
            ctypes.set_errno(errno.EINVAL)
            return -1
        result: int = real_rename(here, source, there, target, flags)
        return result

    if kind != "here":
        monkeypatch.setattr(os, "link", link)
        monkeypatch.setattr(_files, "_renameat2", None if real_rename is None else rename)
    return kind


def is_apart(source: str, target: str) -> bool:
    """Whether one of two paths is in the quarantine."""
    folders = [os.path.realpath(os.path.dirname(path)) for path in (source, target)]
    return ("quarantine" in folders[0]) != ("quarantine" in folders[1])


def tree(root: Path) -> Tree:
    """The files of a folder: their contents, or where links lead."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def quarantine(data: Path, *more: object) -> int:
    return main(["scan", str(data), "--quarantine", str(data.parent / "quarantine"), *map(str, more)])


def test_files_are_not_put_back_into_a_folder_that_is_not_there(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quarantine(data) == 0
    assert restore(data, tmp_path / "mistyped") == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()
    assert restore(data) == 0


def restore(data: Path, *more: object) -> int:
    return main(["scan", "--restore", str(data.parent / "quarantine"), *map(str, more)])


def test_corrupt_files_are_moved_and_put_back(data: Path, disk: str) -> None:
    before, place = tree(data), data.parent / "quarantine"
    assert quarantine(data) == 0
    moved = tree(place)
    records = [json.loads(line) for line in str(moved.pop(LIST), "ascii").splitlines()]
    assert moved == {name: before[name] for name in BAD}
    assert tree(data) == {name: before[name] for name in set(before) - BAD}
    assert {record["path"] for record in records} == BAD and {record["root"] for record in records} == {
        str(data)
    }
    assert records[0]["reason"] == "UnidentifiedImageError: cannot identify image file"
    assert all(ImageFolder(data)[index] for index in range(2))
    assert (data.parent / "elsewhere.jpg").read_bytes() == b"text"
    assert restore(data) == 0
    assert tree(data) == before and not place.exists()


def test_a_class_that_loses_all_its_images_is_named(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "b" / "good.jpg").unlink()
    assert quarantine(data) == 0
    assert (
        "1 class folder without an image any more, for which ImageFolder raises: 'b'"
        in capsys.readouterr().out
    )


def test_times_and_modes_stay_across_disks(data: Path, disk: str) -> None:
    path = data / "a" / "bad.jpg"
    os.utime(path, ns=(10**18, 10**18))
    path.chmod(0o640)
    assert quarantine(data) == 0 and restore(data) == 0
    status = path.stat()
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (10**18, 0o640)


def test_nothing_is_overwritten(data: Path, disk: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = data.parent / "quarantine" / "a"
    place.mkdir(parents=True)
    (place / "bad.jpg").write_bytes(b"another one")
    assert quarantine(data) == 1
    assert "left as it is: a/bad.jpg: " in (out := capsys.readouterr().out) and "is there already" in out
    assert (place / "bad.jpg").read_bytes() == b"another one"
    assert (data / "a" / "bad.jpg").read_bytes() == b"no image"
    (data / "b" / "empty.png").write_bytes(b"new")
    assert restore(data) == 1
    assert "not put back" in capsys.readouterr().out
    assert (data / "b" / "empty.png").read_bytes() == b"new"
    assert (data.parent / "quarantine" / "b" / "empty.png").read_bytes() == b""


def test_it_is_put_back_where_the_folder_is_now(data: Path) -> None:
    before = tree(data)
    assert quarantine(data) == 0
    shutil.move(data, data.with_name("moved"))
    assert restore(data, data.with_name("moved")) == 0
    assert tree(data.with_name("moved")) == before


def test_two_folders_may_have_one_quarantine(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "z").mkdir(parents=True)
    (other / "z" / "bad.jpg").write_bytes(b"other")
    before, before_other = tree(data), tree(other)
    assert quarantine(data) == 0
    assert main(["scan", str(other), "--quarantine", str(tmp_path / "quarantine")]) == 0
    assert restore(data) == 0
    assert (tree(data), tree(other)) == (before, before_other)


def test_the_same_file_in_two_folders_is_not_one(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "a").mkdir(parents=True)
    shutil.copy(data / "a" / "bad.jpg", other / "a")
    before, before_other = tree(data), tree(other)
    assert quarantine(data) == 0
    assert main(["scan", str(other), "--quarantine", str(tmp_path / "quarantine")]) == 1
    assert tree(other) == before_other
    assert restore(data) == 0
    assert (tree(data), tree(other)) == (before, before_other)


def test_hard_links_to_one_file_are_all_moved(data: Path) -> None:
    shutil.copy(data / "a" / "bad.jpg", data.parent)
    (data / "a" / "bad.jpg").unlink()
    os.link(data.parent / "bad.jpg", data / "a" / "bad.jpg")
    os.link(data.parent / "bad.jpg", data / "b" / "same.jpg")
    before = tree(data)
    assert quarantine(data) == 0 and not (data / "b" / "same.jpg").exists()
    assert restore(data) == 0 and tree(data) == before


def test_what_changes_after_it_was_looked_at_stays(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = remedies.check_apart

    def repaired(*arguments: str) -> None:
        shutil.copy(data / "a" / "good.jpg", data / "a" / "bad.jpg")
        real(*arguments)

    monkeypatch.setattr(remedies, "check_apart", repaired)
    assert quarantine(data) == 1
    assert "a/bad.jpg: it has changed" in capsys.readouterr().out
    assert (data / "a" / "bad.jpg").read_bytes() == (data / "a" / "good.jpg").read_bytes()


def test_what_a_link_leads_out_to_stays(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = data.parent / "outside"
    outside.mkdir()
    (outside / "bad.jpg").write_bytes(b"no image")
    (data / "c").symlink_to(outside)
    (data / "d").symlink_to(data / "a")  # and within: the same files by another name
    assert quarantine(data) == 1
    assert "c/bad.jpg: it is outside" in capsys.readouterr().out
    assert (outside / "bad.jpg").exists() and not (data / "a" / "bad.jpg").exists()


def test_what_was_found_is_said_where_the_quarantine_cannot_be_used(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "quarantine" / LIST).mkdir(parents=True)
    assert quarantine(data) == 2
    out, err = capsys.readouterr()
    assert "corrupt: 4" in out and "4 remain" in out and "Is a directory" in err


def test_a_file_is_no_quarantine_which_is_said_at_once(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "quarantine").write_bytes(b"a file")
    assert quarantine(data) == 2
    out, err = capsys.readouterr()
    assert not out and "this is no folder" in err


def test_what_is_put_back_is_written_as_json(data: Path) -> None:
    place, report = data.parent / "quarantine", data.parent / "report.json"
    assert quarantine(data) == 0
    (data / "a" / "bad.jpg").write_bytes(b"another one")
    assert main(["scan", "--restore", str(place), "--json", str(report)]) == 1
    found = json.loads(report.read_text())
    assert str(data / "a" / "inner" / "cut.jpg") in found["back"]
    assert [one["path"] for one in found["left"]] == [str(data / "a" / "bad.jpg")]
    assert main(["scan", "--restore", str(place), "--json", str(data / "none" / "report.json")]) == 2


def test_one_process_at_a_time(
    data: Path, forked: Callable[[Callable[[], object]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    place = data.parent / "quarantine"
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


def test_a_line_that_was_cut_off_is_no_record(data: Path) -> None:
    before, place = tree(data), data.parent / "quarantine"
    place.mkdir()
    (place / LIST).write_text('{"path": "../../etc/passwd", "root": "/"}\n{"path": "a/bad')
    assert quarantine(data) == 0 and restore(data) == 0
    assert tree(data) == before and not place.exists()


def test_without_a_place_files_stay(data: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(data)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if disk == "other disk":
        monkeypatch.setattr(moving.shutil, "copyfileobj", full)
        (data / "b" / "link.jpg").unlink()  # for which there is always room
        before = tree(data)
    else:
        monkeypatch.setattr(moving, "rename_anew", full)
    assert quarantine(data) == 1
    assert tree(data) == before
    monkeypatch.undo()
    (data / "a" / "bad.jpg").unlink()  # what did not come is not awaited
    shutil.copytree(data, data.with_name("other"), symlinks=True)
    (data.with_name("other") / "a" / "bad.jpg").write_bytes(b"the other's")
    assert main(["scan", str(data.with_name("other")), "--quarantine", str(data.parent / "quarantine")]) == 0
    assert restore(data) == 0 and not (data / "a" / "bad.jpg").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("back", [False, True])
def test_killed_at_any_call(
    data: Path, disk: str, back: bool, forked: Callable[[Callable[[], object]], int]
) -> None:
    before, place = tree(data), data.parent / "quarantine"
    work = restore if back else quarantine
    kills = 0
    for die_at in range(1, 200, 1 if disk in ("here", "other disk") else 3):
        if back and not (place / LIST).exists():
            assert quarantine(data) == 0
        pid = forked(lambda: counted(lambda: work(data), die_at))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        now, there = tree(data), tree(place) if place.exists() else {}
        for name, content in before.items():
            assert content in (now.get(name), there.get(name)), (die_at, name)
        if code != -signal.SIGKILL:
            break
        kills += 1
        if not back:
            assert quarantine(data) == 0
        if (place / LIST).exists():  # else it was put back to the last file
            assert restore(data) == 0
        assert tree(data) == before, die_at
    assert code == 0 and kills > 5


def counted(work: Callable[[], object], die_at: int) -> None:
    """Do some work, and be killed at one of the calls that change files, half of what it writes done."""

    def half(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "write":
            real(arguments[0], arguments[1][: len(arguments[1]) // 2])

    functions = [(os, name) for name in CALLS]
    if _files._renameat2 is not None:
        functions.append((_files, "_renameat2"))
    with dying_at(die_at, functions, half):
        work()


# ---- names ------------------------------------------------------------------------------------


@pytest.fixture
def misnamed(tmp_path: Path) -> Path:
    """Images with the endings of other kinds."""
    root = tmp_path / "data" / "a"
    root.mkdir(parents=True)
    image = Image.new("RGB", (9, 7), (200, 30, 40))
    for name, kind in (
        ("x.png", "JPEG"), ("y.jpg", "PNG"), ("z.JPG", "JPEG"), ("taken.png", "JPEG"), ("taken.jpg", "JPEG"),
        ("anim.jpg", "GIF"), ("target.png", "JPEG"), ("w.bmp", "WEBP"),
    ):  # fmt: skip
        image.save(root / name, kind)
    (root / "bad.png").write_bytes(b"\xff\xd8\xff\xe0 cut")
    image.save(root / "both.png", "JPEG")
    os.link(root / "both.png", root / "both.jpg")  # two samples, which stay two
    (root / "link.jpg").symlink_to("target.png")
    (root / "named.tif").symlink_to("z.JPG")
    return root


def test_names_are_put_right(misnamed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(misnamed)
    code = main(["scan", str(misnamed.parent), "--fix", "--json", str(tmp_path / "x.json")])
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    renamed = {one["from"]: one["to"] for one in found["renamed"]}
    assert renamed == {
        "a/x.png": "a/x.jpg", "a/y.jpg": "a/y.png", "a/w.bmp": "a/w.webp", "a/named.tif": "a/named.jpg",
    }  # fmt: skip
    left = {one["path"]: one["why"] for one in found["left"]}
    assert set(left) == {"a/taken.png", "a/both.png", "a/anim.jpg", "a/target.png"}
    assert left["a/taken.png"] == "taken.jpg is there already" and "would lose it" in left["a/anim.jpg"]
    assert code == 1 and "not repaired: 1 corrupt file." in out
    now = tree(misnamed)
    for name, content in before.items():
        new = renamed.get(f"a/{name}", f"a/{name}")[2:]
        assert now[new] == content
    assert len(now) == len(before)


def test_a_second_time_there_is_nothing_to_rename(misnamed: Path, tmp_path: Path) -> None:
    main(["scan", str(misnamed.parent), "--fix"])
    before = tree(misnamed)
    main(["scan", str(misnamed.parent), "--fix", "--json", str(tmp_path / "x.json")])
    assert json.loads((tmp_path / "x.json").read_text())["renamed"] == [] and tree(misnamed) == before


def test_killed_while_renaming(misnamed: Path, forked: Callable[[Callable[[], object]], int]) -> None:
    contents = sorted(map(repr, tree(misnamed).values()))
    kills = 0
    for die_at in range(1, 40):
        pid = forked(lambda: counted(lambda: main(["scan", str(misnamed.parent), "--fix"]), die_at))
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
            break
        kills += 1
        assert set(map(repr, tree(misnamed).values())) == set(contents)
    assert kills > 3 and sorted(map(repr, tree(misnamed).values())) == contents
