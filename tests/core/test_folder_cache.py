"""Scans that are kept on disk: the same samples, with less listing; and never an error."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import folder as reference

from fastpipe import FastImageFolder
from fastpipe.core import array_cache as kept
from fastpipe.core.class_folders import (
    TORCHVISION_EXTENSIONS,
    IndexCache,
    default_index_cache,
    find_classes,
    scan_folder,
)
from fastpipe.core.file_identity import FileSystems
from fastpipe.core.private_folder import PrivateFolder

LATER = 10**20  # nanoseconds since 1970: all times in this file are long past
CLASSES = {"cat": 0, "dog": 1, "elk": 2}
EVERYTHING = ["cat", "deep", "er", "dog", "elk"]


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders may be on any file system."""
    monkeypatch.setattr(FileSystems, "is_local", lambda *_: True)
    monkeypatch.setattr(FileSystems, "is_remote", lambda *_: False)
    monkeypatch.setattr(kept, "_warned", set())


@pytest.fixture(autouse=True)
def nothing_in_the_real_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in (
        "cat/1.jpg",
        "cat/2.JPG",
        "cat/deep/er/3.png",
        "dog/é\udcff.jpg",
        "dog/notes.txt",
        "elk/5.webp",
    ):
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "xb").close()
    return root


@pytest.fixture
def cache(tmp_path: Path) -> IndexCache:
    return IndexCache(tmp_path / "cache", keep_from_s=-1, now=lambda: LATER)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are listed, by their names."""
    names: list[str] = []
    real = os.scandir

    def scandir(path: Any) -> Any:
        if not isinstance(path, int):  # rmtree's
            names.append(os.path.basename(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return names


def tick(folder: Path) -> None:
    """Come back once the file systems' clock has gone on, so that the next change has another time."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.chmod(0o600)
    probe.unlink()


def scan(root: Any, cache: IndexCache | None, classes: Any = CLASSES, **options: Any) -> Any:
    options = {"extensions": TORCHVISION_EXTENSIONS, "allow_empty": True, **options}
    return scan_folder(root, classes, cache=cache, **options)


def expected(root: Any, classes: Any = CLASSES, **options: Any) -> Any:
    options = {"extensions": TORCHVISION_EXTENSIONS, "allow_empty": True, **options}
    return reference.make_dataset(root, classes, **options)


def the_file(cache: IndexCache) -> Path:
    (path,) = cache.path.iterdir()
    return path


def test_folders_that_have_not_changed_are_not_listed(
    root: Path, cache: IndexCache, listed: list[str]
) -> None:
    assert scan(root, cache) == expected(root)
    listed.clear()
    again = scan(root, cache)
    assert listed == []
    assert again == expected(root)


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a new file": (lambda root: (root / "cat/0.jpg").touch(), ["cat"]),
    "a file less": (lambda root: (root / "cat/deep/er/3.png").unlink(), ["er"]),
    "another name": (lambda root: (root / "elk/5.webp").rename(root / "elk/6.webp"), ["elk"]),
    "a new folder": (lambda root: shutil.copytree(root / "dog", root / "elk/dog"), ["elk", "dog"]),
    "a folder less": (lambda root: shutil.rmtree(root / "cat/deep"), ["cat"]),
    "a moved folder": (lambda root: (root / "cat/deep").rename(root / "elk/d"), ["cat", "elk", "d", "er"]),
    "content only": (lambda root: (root / "cat/1.jpg").write_bytes(b"more"), []),
    "a class less": (lambda root: shutil.rmtree(root / "cat"), []),
    "a class in its place": (lambda root: shutil.copytree(root / "dog", root / "cat", dirs_exist_ok=True), ["cat"]),
    "another mode": (lambda root: (root / "dog").chmod(0o700), ["dog"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_whose_time_is_set_back_is_seen(root: Path, cache: IndexCache, name: str) -> None:
    change, _ = CHANGES[name]
    scan(root, cache)
    tick(root.parent)
    folders = [root, *filter(Path.is_dir, root.rglob("*"))]
    times = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in folders}
    change(root)
    for path, before in times.items():
        if path.is_dir():
            os.utime(path, ns=before)
    assert scan(root, cache) == expected(root)


@pytest.mark.parametrize("name", CHANGES)
def test_only_what_changed_is_listed_again(
    root: Path, cache: IndexCache, listed: list[str], name: str
) -> None:
    change, again = CHANGES[name]
    scan(root, cache)
    tick(root.parent)
    change(root)
    listed.clear()
    found = scan(root, cache)
    assert sorted(listed) == sorted(again)
    listed.clear()
    assert scan(root, cache) == found
    assert listed == []
    assert found == expected(root)


def test_links_are_followed_anew(tmp_path: Path, root: Path, cache: IndexCache, listed: list[str]) -> None:
    store = tmp_path / "store"
    for name in ("a", "b"):
        (store / name).mkdir(parents=True)
        (store / name / f"{name}.jpg").touch()
    (store / "current.jpg").symlink_to("a")
    (root / "elk" / "link.jpg").symlink_to(store / "current.jpg")
    (root / "cat" / "file.jpg").symlink_to(store / "a" / "a.jpg")
    for target in ("a", "b", "a/a.jpg", "nowhere", "b"):
        (store / "current.jpg").unlink()
        (store / "current.jpg").symlink_to(target)
        assert scan(root, cache) == expected(root)
    listed.clear()
    scan(root, cache)
    assert listed == ["cat"]  # what a link leads to may become a folder, without any change of "cat"
    (store / "a" / "a.jpg").unlink()
    (store / "a" / "a.jpg").mkdir()
    (store / "a" / "a.jpg" / "inner.jpg").touch()
    found = scan(root, cache)
    assert found == expected(root)
    assert str(root / "cat/file.jpg/inner.jpg") in [path for path, _ in found]


def test_times_close_to_the_scan_are_not_trusted(root: Path, tmp_path: Path, listed: list[str]) -> None:
    changed = max(os.stat(root / "cat").st_ctime_ns, os.stat(root / "dog").st_ctime_ns)
    soon = IndexCache(tmp_path / "cache", keep_from_s=-1, now=lambda: changed + 1_000_000_000)
    for _ in range(2):
        listed.clear()
        scan(root, soon)
        assert sorted(listed) == sorted(EVERYTHING)
    assert not soon.path.exists()


def test_other_file_systems_are_scanned_each_time(
    root: Path, cache: IndexCache, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan(root, cache)
    monkeypatch.setattr(FileSystems, "is_local", lambda *_: False)
    listed.clear()
    assert scan(root, cache) == expected(root)
    assert sorted(listed[:5]) == sorted(EVERYTHING)


def test_a_short_scan_is_not_kept(root: Path, tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache", keep_from_s=1e9, now=lambda: LATER)
    scan(root, cache)
    assert not cache.path.exists()


@pytest.mark.parametrize(
    "options",
    [{"extensions": None, "is_valid_file": lambda path: True}, {"extensions": ("cat/1.jpg",)}],
    ids=["is_valid_file", "an ending with a separator"],
)
def test_what_depends_on_more_than_names_is_not_kept(
    root: Path, cache: IndexCache, listed: list[str], options: Any
) -> None:
    for _ in range(2):
        listed.clear()
        found = scan(root, cache, **options)
        assert sorted(listed) == sorted(EVERYTHING)
        assert found == expected(root, **options)
    assert not cache.path.exists()


def test_each_choice_of_extensions_is_kept_for_itself(root: Path, cache: IndexCache) -> None:
    choices: list[Any] = [".jpg", (".png", ".webp"), TORCHVISION_EXTENSIONS, ".JPG", ""]
    for extensions in choices * 2:
        assert scan(root, cache, extensions=extensions) == expected(root, extensions=extensions)
    assert len(list(cache.path.iterdir())) == len(choices)


def test_classes_that_are_left_out_stay_known(root: Path, cache: IndexCache, listed: list[str]) -> None:
    scan(root, cache)
    tick(root.parent)
    (root / "dog" / "new.jpg").touch()
    for classes in ({"dog": 0}, {"elk": 5, "cat": 3}, CLASSES):
        assert scan(root, cache, classes) == expected(root, classes)
    assert listed.count("cat") == 1 + 2  # ours once, torchvision's twice
    key = json.loads(np.load(the_file(cache))["about"].tobytes())
    assert sorted(folder[0] for folder in key["folders"]) == ["cat", "cat/deep", "cat/deep/er", "dog", "elk"]
    shutil.rmtree(root / "elk")
    (root / "dog" / "new.jpg").unlink()
    scan(root, cache, {"dog": 0})
    key = json.loads(np.load(the_file(cache))["about"].tobytes())
    assert sorted(folder[0] for folder in key["folders"]) == ["cat", "cat/deep", "cat/deep/er", "dog"]


def test_a_moved_or_differently_spelled_root_is_known(
    root: Path, cache: IndexCache, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan(root, cache)
    moved = root.parent / "somewhere else" / "with a longer name"
    moved.parent.mkdir()
    root.rename(moved)
    (root.parent / "link").symlink_to(moved)
    monkeypatch.chdir(moved.parent)
    monkeypatch.setenv("HOME", str(moved))
    spellings: list[Any] = [
        moved, f"{moved}/", f"{moved}//", moved.name, f"./{moved.name}", "../link", root.parent / "link", "~", "~/."
    ]  # fmt: skip
    for spelling in spellings:
        listed.clear()
        found = scan(spelling, cache)
        assert listed == []
        assert found == expected(spelling)


def test_another_root_in_the_same_place_is_not_known(root: Path, cache: IndexCache) -> None:
    scan(root, cache)
    root.rename(root.parent / "before")
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "other.jpg").touch()
    assert scan(root, cache) == expected(root)
    assert scan(root.parent / "before", cache) == expected(root.parent / "before")


@pytest.mark.parametrize("name", ["", "..", "absolute", "cat/deep", "cat/", "cat\0dog", "\ud800"])
def test_odd_class_names(root: Path, cache: IndexCache, name: str) -> None:
    classes = {str(root / "dog") if name == "absolute" else name: 0, "elk": 1}
    for _ in range(2):
        assert scan(root, cache, classes) == expected(root, classes)


def test_a_class_below_another_is_kept_once(root: Path, cache: IndexCache) -> None:
    scan(root, cache)
    tick(root.parent)
    (root / "cat" / "deep" / "new.jpg").touch()
    for classes in ({"cat/deep": 0}, CLASSES):
        assert scan(root, cache, classes) == expected(root, classes)
        folders = json.loads(np.load(the_file(cache))["about"].tobytes())["folders"]
        assert sorted(folder[0] for folder in folders) == ["cat", "cat/deep", "cat/deep/er", "dog", "elk"]


def test_errors_stay_as_they_are(root: Path, cache: IndexCache) -> None:
    (root / "elk" / "5.webp").unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError) as ours:
            scan_folder(root, CLASSES, extensions=TORCHVISION_EXTENSIONS, cache=cache)
        with pytest.raises(FileNotFoundError) as theirs:
            reference.make_dataset(root, CLASSES, extensions=TORCHVISION_EXTENSIONS)
        assert str(ours.value) == str(theirs.value)
    assert list(scan(root / "none", cache)) == []


# ---- the file ----------------------------------------------------------------------------------


def rewritten(path: Path, **members: Any) -> None:
    """Put other arrays into a kept file, with checksums that fit."""
    with np.load(path) as file:
        arrays = {**file, **members}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def with_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(np.load(path)["about"].tobytes())
    change(content)
    rewritten(path, about=np.frombuffer(json.dumps(content).encode(), dtype=np.uint8))


def described(change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    return lambda path: with_json(path, lambda content: change(content["folders"]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "the first half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path: path.write_text("not a zip file"),
    "another zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "an array alone": lambda path: path.write_bytes(array_file(np.arange(3))),
    "no arena": lambda path: rewritten(path, arena=None),
    "no JSON": lambda path: rewritten(path, about=np.frombuffer(b"{", dtype=np.uint8)),
    "other JSON": lambda path: rewritten(path, about=np.frombuffer(b"[1]", dtype=np.uint8)),
    "deep JSON": lambda path: rewritten(path, about=np.frombuffer(b"[" * 100_000, dtype=np.uint8)),
    "a short arena": lambda path: rewritten(path, arena=np.zeros(3, dtype=np.uint8)),
    "an arena of numbers": lambda path: rewritten(path, arena=np.zeros(200, dtype=np.int64)),
    "an arena that is not UTF-8": lambda path: rewritten(path, arena=np.load(path)["arena"] | 0x80),
    "negative lengths": lambda path: rewritten(path, lengths=-np.load(path)["lengths"]),
    "a length more": lambda path: rewritten(path, lengths=np.append(np.load(path)["lengths"], [0]).astype(np.int32)),
    "lengths in rows": lambda path: rewritten(path, lengths=np.load(path)["lengths"][None]),
    "lengths that are floats": lambda path: rewritten(path, lengths=np.load(path)["lengths"].astype(np.float32)),
    "objects": lambda path: rewritten(path, lengths=np.array([{}, []], dtype=object)),
    "another version": lambda path: with_json(path, lambda content: content["key"].__setitem__(0, 0)),
    "another root": lambda path: with_json(path, lambda content: content["key"].__setitem__(2, 1)),
    "a folder less": described(lambda folders: folders.pop()),
    "a folder twice": described(lambda folders: folders.append(folders[0])),
    "a count too high": described(lambda folders: folders[0].__setitem__(3, 100)),
    "a negative count": described(lambda folders: folders[0].__setitem__(3, -1)),
    "a count that is none": described(lambda folders: folders[0].__setitem__(3, "1")),
    "a path that is none": described(lambda folders: folders[0].__setitem__(0, 7)),
    "a short stamp": described(lambda folders: folders[0][1].pop()),
    "a stamp of floats": described(lambda folders: folders[0][1].__setitem__(2, 0.5)),
    "no stamp": described(lambda folders: folders[0].__setitem__(1, None)),
    "folders that are numbers": described(lambda folders: folders[0].__setitem__(2, [1])),
}  # fmt: skip


def array_file(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_made_anew(
    root: Path, cache: IndexCache, listed: list[str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    scan(root, cache)
    DAMAGE[name](the_file(cache))
    listed.clear()
    assert scan(root, cache) == expected(root)
    assert sorted(listed[:5]) == sorted(EVERYTHING)
    listed.clear()
    scan(root, cache)
    assert listed == []
    assert caplog.messages == []


def test_any_bit_may_flip(root: Path, cache: IndexCache) -> None:
    found = list(scan(root, cache))
    path = the_file(cache)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert list(scan(root, IndexCache(cache.path, keep_from_s=1e9, now=cache.now))) == found
    for end in range(0, len(whole), 31):
        path.write_bytes(whole[:end])
        assert list(scan(root, IndexCache(cache.path, keep_from_s=1e9, now=cache.now))) == found


def test_nothing_is_unpickled(root: Path, cache: IndexCache) -> None:
    scan(root, cache)
    rewritten(the_file(cache), arena=np.array([Trap()], dtype=object))
    assert scan(root, cache) == expected(root)
    assert not Trap.sprung


class Trap:
    sprung = False

    def __reduce__(self) -> Any:
        return Trap.spring, ()

    @staticmethod
    def spring() -> None:
        Trap.sprung = True


def test_the_folder_is_private_and_holds_one_file(root: Path, cache: IndexCache) -> None:
    before = set(root.parent.rglob("*"))
    scan(root, cache)
    new = set(root.parent.rglob("*")) - before
    assert new == {cache.path, the_file(cache)}
    assert cache.path.stat().st_mode & 0o777 == 0o700
    assert the_file(cache).stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_files_place_is_not_followed(root: Path, cache: IndexCache, caplog: Any) -> None:
    scan(root, cache)
    path, secret = the_file(cache), root.parent / "secret"
    path.rename(secret)
    content = secret.read_bytes()
    path.symlink_to(secret)
    assert scan(root, cache) == expected(root)
    assert not path.is_symlink()
    assert secret.read_bytes() == content


def broken(kind: str, cache: IndexCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache's folder in which nothing can be kept."""
    if kind == "a file":
        cache.path.write_bytes(b"")
    elif kind == "open to others":
        cache.path.mkdir()
        cache.path.chmod(0o755)
    elif kind == "a dangling link":
        cache.path.symlink_to("nowhere")
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(PrivateFolder, "write", full)


@pytest.mark.parametrize("kind", ["a file", "open to others", "a dangling link", "full"])
def test_a_folder_that_cannot_be_used_costs_one_warning(
    root: Path,
    cache: IndexCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    broken(kind, cache, monkeypatch)
    for _ in range(3):
        assert scan(root, cache) == expected(root)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fastpipe.index", logging.WARNING)
    assert "scanned each time" in record.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere: run it as another user")
def test_a_folder_that_is_read_only_is_still_read(
    root: Path, cache: IndexCache, listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    scan(root, cache)
    cache.path.chmod(0o500)
    try:
        listed.clear()
        scan(root, cache)
        assert listed == []
        tick(root.parent)
        (root / "cat" / "new.jpg").touch()
        for _ in range(2):
            assert scan(root, cache) == expected(root)
        assert len(caplog.records) == 1
    finally:
        cache.path.chmod(0o700)


def test_files_that_nobody_uses_are_removed_and_others_are_not(root: Path, cache: IndexCache) -> None:
    day = 86400
    scan(root, cache)
    used = the_file(cache)
    for name, age in (("old.npz", 91 * day), ("new.npz", 89 * day), ("other", 91 * day)):
        (cache.path / name).write_bytes(b"")
        os.utime(cache.path / name, (time.time() - age,) * 2)
    (cache.path / "fifo.npz").unlink(missing_ok=True)
    os.mkfifo(cache.path / "fifo.npz")
    os.utime(used, (time.time() - 91 * day,) * 2)
    scan(root, cache)  # only read: nothing is removed, and it is in use again
    assert len(list(cache.path.iterdir())) == 5
    scan(root, cache, extensions=".jpg")
    assert {path.name for path in cache.path.iterdir()} >= {used.name, "new.npz", "other", "fifo.npz"}
    assert not (cache.path / "old.npz").exists()


SCRIPT = """if True:
    import os, signal, sys
    from pathlib import Path
    from fastpipe.core import array_cache
    from fastpipe.core.class_folders import IndexCache
    from fastpipe.core.file_identity import FileSystems
    from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, find_classes, scan_folder
    FileSystems.is_local = lambda *_: True
    root, where, action = sys.argv[1:]
    kept = IndexCache(where, keep_from_s=-1, now=lambda: 10**20)
    def scan():
        return scan_folder(root, find_classes(root)[1], extensions=TORCHVISION_EXTENSIONS, cache=kept)
    if action == "killed":
        real = array_cache.np.savez
        def write(file, **arrays):
            real(file, **arrays)
            file.seek(0)
            file.truncate(100)
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        array_cache.np.savez = write
        scan()
    for number in range(40):
        Path(where).mkdir(mode=0o700, exist_ok=True)
        for name in os.listdir(where):
            if name.endswith(".npz") and number % 4 == 0:
                Path(where, name).unlink(missing_ok=True)
        print(len(scan()))
"""


def child(root: Path, cache: IndexCache, action: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(root), str(cache.path), action]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_what_was_there(root: Path, cache: IndexCache, listed: list[str]) -> None:
    with child(root, cache, "killed") as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.suffix for path in cache.path.iterdir()] == [".unfinished"]
    assert scan(root, cache) == expected(root)
    tick(root.parent)
    (root / "cat" / "new.jpg").touch()
    with child(root, cache, "killed") as process:
        process.communicate()
    listed.clear()
    found = scan(root, cache)
    assert listed == ["cat"]
    assert found == expected(root)


def test_processes_that_write_at_once_do_not_disturb_each_other(root: Path, cache: IndexCache) -> None:
    processes = [child(root, cache, "write") for _ in range(2)]
    for process in processes:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert set(out.split()) == {str(len(expected(root)))}
    assert scan(root, cache) == expected(root)
    assert [path.suffix for path in cache.path.iterdir()] == [".npz"]


# ---- the dataset -------------------------------------------------------------------------------


def test_the_dataset_keeps_its_scan(
    root: Path, tmp_path: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(IndexCache.__init__, "__kwdefaults__", {"keep_from_s": -1, "now": lambda: LATER})
    first = FastImageFolder(root)
    listed.clear()
    again = FastImageFolder(root)
    assert listed == [root.name]  # the classes are looked up each time
    assert again.samples == first.samples == expected(root)
    assert again.targets == first.targets
    assert (tmp_path / "home" / "fastpipe" / "index").is_dir()

    class Without(FastImageFolder):
        def _index_cache(self) -> None:
            return None

    listed.clear()
    assert Without(root).samples == first.samples
    assert sorted(listed) == sorted([root.name, *EVERYTHING])


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "user_cache_folder", lambda: Path("~/.cache/fastpipe"))
    assert default_index_cache() is None


@pytest.mark.parametrize("names", [*itertools.permutations(["cat", "dog", "elk"], 2)])
def test_selected_classes_share_what_is_kept(
    root: Path, cache: IndexCache, listed: list[str], names: tuple[str, ...]
) -> None:
    scan(root, cache)
    classes = find_classes(root, names)[1]
    listed.clear()
    found = scan(root, cache, classes)
    assert listed == []
    assert found == expected(root, classes)


def test_the_dataset_says_how_far_a_long_scan_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    monkeypatch.setattr(sys, "stderr", None)
    FastImageFolder(root)
    assert caplog.messages == []
    monkeypatch.setattr("fastpipe.core.class_folders._SILENT_S", 0.0)
    monkeypatch.setattr("fastpipe.core.class_folders._TELL_EVERY_S", 0.0)
    FastImageFolder(root)
    first, last = caplog.messages
    assert first == f"Scanning {root}: 2 files in 1 folders so far, 0 s"
    assert last.startswith(f"Scanned {root} in ")
