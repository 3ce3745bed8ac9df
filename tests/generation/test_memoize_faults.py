"""``memoize`` where files are damaged, forged or cannot be written, and where processes are killed."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure import raising
from scripts import started

from fastpipe import memoize
from fastpipe.core.private_folder import PrivateFolder
from fastpipe.generation import store
from fastpipe.generation.store import Entries, Header


def plain() -> Any:
    return {"a": np.arange(3, dtype=np.int16), "b": [1.5, "text"]}


def pickled() -> Any:
    return {**plain(), "c": range(3)}


def is_right(value: Any) -> bool:
    return bool(value["a"].tolist() == [0, 1, 2] and value["b"] == [1.5, "text"])


def entry_of(folder: Path) -> Path:
    (found,) = folder.glob("*.memo")
    return found


def made(fn: Any, folder: Path, **options: Any) -> tuple[Any, bytes]:
    """A memoized function, and the content of its entry."""
    kept = memoize(fn, dir=folder, **options)
    kept()
    return kept, entry_of(folder).read_bytes()


def sealed_anew(content: bytes) -> bytes:
    return content[:24] + hashlib.sha256(content[16:24] + content[56:]).digest() + content[56:]


def check_made_anew(kept: Any, folder: Path, damaged: bytes, warned: Any) -> None:
    """With the entry damaged: the right value, a warning, the damaged file kept, and a whole one again."""
    entry = entry_of(folder)
    whole = entry.read_bytes()
    entry.write_bytes(damaged)
    warned()
    assert is_right(kept())
    (message,) = warned()
    aside = folder / message.split("it is kept as ")[1].split(",")[0]
    assert "cannot be loaded: " in message and "computed again" in message
    assert aside.read_bytes() == damaged
    aside.unlink()
    assert is_right(kept()) and warned() == []
    assert len(entry.read_bytes()) >= len(whole) - 60, "the times' digits vary"


@pytest.mark.parametrize("fn", [plain, pickled])
def test_any_byte_may_be_another(fn: Any, folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # for time's sake
    kept, content = made(fn, folder, pickle=True)
    at = 0
    while at < len(content):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        check_made_anew(kept, folder, bytes(damaged), warned)
        content = entry_of(folder).read_bytes()
        at += 1 if at < 100 else 3
    assert at > 500


def test_an_entry_may_be_cut_off_or_longer_or_have_sizes_that_are_wrong(folder: Path, warned: Any) -> None:
    kept, content = made(plain, folder)
    for length in (0, 1, 15, 16, 50, 79, 80, 81, 300, -33, -32, -1):
        check_made_anew(kept, folder, content[:length], warned)
    for damaged in (content + b"\0", bytes(len(content))):
        check_made_anew(kept, folder, damaged, warned)
    for place in (56, 64):
        for size in (2**63, 2**64 - 1, 2**40):  # no memory is asked for
            damaged = content[:place] + size.to_bytes(8, "little") + content[place + 8 :]
            check_made_anew(kept, folder, damaged, warned)


def test_an_entry_of_another_format_call_or_type_is_not_taken(folder: Path, warned: Any) -> None:
    kept, content = made(plain, folder)
    older = sealed_anew(content.replace(b"memo 3\n", b"memo 2\n"))
    check_made_anew(kept, folder, older, warned)
    entry_of(folder).write_bytes(older)
    kept()
    assert "another version of fastpipe" in warned()[0]
    for old, new in ((b"array", b"carry"), (b"<i2", b"<z9"), (b"<i2", b"|O8"), (b"K\x03\x85", b"K\x04\x85")):
        damaged = content.replace(old, new)
        assert damaged != content
        check_made_anew(kept, folder, sealed_anew(damaged), warned)
    other = folder.with_name("other")
    of_number = memoize(lambda x: {"a": np.arange(x), "b": [1.5, "text"]}, dir=other)
    of_number(3)
    entry = entry_of(other)
    of_number(4)
    (wrong,) = set(other.glob("*.memo")) - {entry}
    entry.write_bytes(wrong.read_bytes())
    assert is_right(of_number(3)) and "another call" in warned()[0]


def test_one_damaged_entry_is_kept(folder: Path) -> None:
    kept, content = made(plain, folder)
    for number in range(5):
        entry_of(folder).write_bytes(b"%d" % number)
        kept()
    (aside,) = folder.glob("*.corrupt")
    assert aside.read_bytes() == b"4"
    entry_of(folder).rename(folder / f"{entry_of(folder).name}.1.unfinished")
    assert is_right(kept()), "an unfinished file is no entry"
    kept.clear()
    assert aside.exists()


@pytest.mark.parametrize("kind", ["fifo", "link", "nowhere", "folder", "closed"])
def test_an_entry_that_is_no_file_is_replaced(kind: str, folder: Path, tmp_path: Path, warned: Any) -> None:
    kept, content = made(plain, folder)
    entry, precious = entry_of(folder), tmp_path / "precious"
    entry.unlink()
    precious.write_bytes(content)
    if kind == "fifo":
        os.mkfifo(entry)
    elif kind == "folder":
        entry.mkdir()
    elif kind == "closed":
        entry.write_bytes(content)
        entry.chmod(0)
    else:
        entry.symlink_to(precious if kind == "link" else tmp_path / "nowhere")
    assert is_right(kept())
    if kind == "closed" and os.geteuid() == 0:
        return  # whom no mode keeps out
    assert "cannot be loaded" in warned()[0]
    assert precious.read_bytes() == content
    assert is_right(kept())
    assert kind == "folder" or stat.S_ISREG(os.lstat(entry).st_mode)


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


def forge(folder: Path, content: Any, mark: Path) -> None:
    """Replace an entry by one that is right but for the seal."""
    name = entry_of(folder).name
    with PrivateFolder(folder) as opened:
        found = (folder / name).read_bytes()
        length = int.from_bytes(found[56:64], "little")
        header = Header(**store.json.loads(found[72 : 72 + length]))
        assert header.key == name[-37:-5]
        Entries(opened, header.name).store(header, content, pickled=True)
    assert not mark.exists()


@pytest.mark.parametrize("seal", ["another user's", "none", "a checksum's", "as if plain", "the user's own"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_forged_pickle_is_never_loaded(
    seal: str, allowed: bool, folder: Path, tmp_path: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    kept, _ = made(plain, folder, pickle=allowed)
    with monkeypatch.context() as patch:
        if seal != "the user's own":
            patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other user"))
        forge(folder, [Touch(mark), {"a": np.arange(3)}], mark)
    entry = entry_of(folder)
    content = entry.read_bytes()
    if seal == "the user's own" and allowed:  # so that the forgery would work
        os.close(kept()[0])
        assert mark.exists()
        return
    if seal == "none":
        content = content[:24] + bytes(32) + content[56:]
    elif seal == "a checksum's":
        content = sealed_anew(content)
    elif seal == "as if plain":
        content = sealed_anew(content.replace(b"sealed..", b"plain..."))
    entry.write_bytes(content)
    assert is_right(kept()) and is_right(kept())
    assert not mark.exists()
    warning = warned()[0]
    if allowed or seal == "as if plain":
        assert "signature is" in warning and "kept as" in warning
        assert (folder / f"{entry.name}.corrupt").read_bytes() == content
    else:
        assert "pass pickle=True" in warning


def test_without_a_key_of_the_user_nothing_is_unpickled(folder: Path, warned: Any, tmp_path: Path) -> None:
    kept, content = made(pickled, folder, pickle=True)
    key = store.key_path()
    secret = key.read_bytes()
    assert key == tmp_path / "config" / "fastpipe" / "memoize.key" and len(secret) == 32

    def check(words: str) -> None:
        assert is_right(kept())
        assert words in " ".join(warned())
        assert entry_of(folder).read_bytes() == content, "it stays for when the key is usable again"

    key.chmod(0o644)
    check("must be a file of user")
    key.chmod(0o600)
    key.rename(tmp_path / "elsewhere")
    key.symlink_to(tmp_path / "elsewhere")
    check("cannot be used")
    key.unlink()
    os.mkfifo(key, 0o600)
    check("cannot be used: Not a regular file")
    key.unlink()
    key.parent.chmod(0o755)
    check("chmod 700")
    key.parent.chmod(0o700)
    key.write_bytes(secret)
    key.chmod(0o600)
    assert is_right(kept()) and warned() == []
    key.write_bytes(secret[:20])  # as of a process that ended while writing it
    assert is_right(kept())
    assert "its signature is wrong" in warned()[0] and len(key.read_bytes()) == 32


def test_all_processes_have_one_key(forked: Any) -> None:
    begin, end = os.pipe()
    pids = [forked(lambda: os.write(end, store.sealing_key()) and None) for _ in range(8)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 8
    assert os.read(begin, 1000) == store.sealing_key() * 8
    for descriptor in (begin, end):
        os.close(descriptor)


def test_a_result_whose_package_is_gone_is_computed_again(
    folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone.py").write_text("class Model:\n    value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept = memoize(lambda: getattr(sys.modules.get("gone"), "Model", dict)(), dir=folder, pickle=True)
    __import__("gone")
    assert (kept().value, kept().value) == (1, 1)
    monkeypatch.delitem(sys.modules, "gone")
    assert kept().value == 1 and warned() == [], "it is imported again"
    monkeypatch.delitem(sys.modules, "gone")
    (tmp_path / "gone.py").unlink()
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert kept() == {}
    (message,) = warned()
    assert "ModuleNotFoundError" in message and ".corrupt" in message


def test_tensors_where_torch_is_gone_are_computed_again(
    folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
    kept = memoize(lambda: getattr(sys.modules.get("torch"), "ones", list)(()), dir=folder)
    assert torch.equal(kept(), kept())
    monkeypatch.setitem(sys.modules, "torch", None)
    assert kept() == [] and "pip install '.[torch]'" in warned()[0]
    assert len(list(folder.glob("*.corrupt"))) == 1


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError(), RuntimeError("a bug")]
)
def test_a_result_that_cannot_be_written_is_returned(
    error: Exception, folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = memoize(plain, dir=folder)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateFolder, "write", raising(error))
        assert is_right(kept())
    (message,) = warned()
    assert f"not kept: {type(error).__name__}" in message and os.listdir(folder) == []
    assert is_right(kept()) and is_right(kept())
    assert warned() == [] and len(os.listdir(folder)) == 1


def test_a_write_that_the_kernel_cuts_off_keeps_nothing(folder: Path, in_child: Any) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        found = memoize(lambda: np.arange(1 << 20), dir=folder)()
        assert len(found) == 1 << 20 and os.listdir(folder) == []

    in_child(work)


def test_a_folder_that_goes_or_has_no_locks_is_only_warned_of(
    folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def f() -> int:
        (lock,) = folder.iterdir()
        lock.unlink()
        folder.rmdir()
        return 1

    assert memoize(f, dir=folder)() == 1
    assert "FileNotFoundError" in warned()[0]

    no_locks = raising(OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr("fastpipe.generation.store.fcntl.flock", no_locks)
    kept = memoize(plain, dir=folder)
    assert is_right(kept()) and is_right(kept())
    assert "two processes may compute the same" in warned()[0]


_SCRIPT = """
import logging, os, sys
from fastpipe import memoize
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
def say(text):
    print(text, flush=True)
class Console:
    def __reduce__(self):
        return Console, ()
    def ask(self):
        if sys.argv[1:] == ["forks"] and os.fork() == 0:
            say(f"begun, with child {os.getpid()}")
            os.read(0, 1)
            os._exit(0)
        if not sys.argv[1:]:
            say("begun")
        return sys.stdin.readline().strip()
console = Console()
def train(x):
    return console.ask() or "made without an answer"
kept = memoize(train, dir="kept")
say("found " + kept(1))
"""


class Other:
    """Another process, which computes until it gets an answer."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.process: Any = started("-c", _SCRIPT, *arguments, stdin=subprocess.PIPE, stderr=None, cwd=place)

    def line_with(self, words: str) -> str:
        return next(line.strip() for line in self.process.stdout if words in line)

    def answer(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    made: list[Other] = []
    yield lambda *arguments: made.append(Other(tmp_path, *arguments)) or made[-1]
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("end", ["returns", "is killed", "is killed and has a child"])
def test_processes_wait_for_the_one_that_computes(other: Any, folder: Path, end: str) -> None:
    """If it is killed, one of those that wait computes; a child that has its lock does not matter."""
    one = other(*["forks"] * end.endswith("child"))
    begun = one.line_with("begun")
    waiting = [other(), other()]
    for process in waiting:
        process.line_with("waiting for it")
    try:
        if end == "returns":
            one.answer("an answer")
            waiting.append(one)
        else:
            one.process.kill()
            one.process.wait()
            for process in waiting:  # whichever of the two is next, the other goes on waiting
                process.answer("an answer")
        assert {process.line_with("found") for process in waiting} == {"found an answer"}
        assert [process.process.wait() for process in waiting] == [0] * len(waiting)
    finally:
        if end.endswith("child"):
            os.kill(int(begun.split()[-1]), signal.SIGKILL)
    assert [path.suffix for path in folder.iterdir()] == [".memo"]
