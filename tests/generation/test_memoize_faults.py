"""``memoize`` where files are damaged, forged or cannot be written, and where processes are killed."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe import memoize
from fastpipe.core.private_folder import PrivateFolder
from fastpipe.generation import store
from fastpipe.generation.store import Entries, Header

_ROOT = Path(__file__).resolve().parents[2]


def plain() -> Any:
    return {"a": np.arange(3, dtype=np.int16), "b": [1.5, "text"]}


def pickled() -> Any:
    return {"a": np.arange(3, dtype=np.int16), "b": [1.5, "text"], "c": range(3)}


def _is_right(value: Any) -> bool:
    return value["a"].tolist() == [0, 1, 2] and value["b"] == [1.5, "text"]


def _entry(folder: Path) -> Path:
    (found,) = folder.glob("*.memo")
    return found


def _check_made_anew(kept: Any, folder: Path, damaged: bytes, warned: Any) -> None:
    """With the entry damaged: the right value, a warning, the damaged file kept, and a whole one again."""
    entry = _entry(folder)
    whole = entry.read_bytes()
    entry.write_bytes(damaged)
    warned()
    assert _is_right(kept())
    (message,) = warned()
    aside = folder / message.split("it is kept as ")[1].split(",")[0]
    assert "cannot be loaded: " in message and "computed again" in message
    assert aside.read_bytes() == damaged
    aside.unlink()
    assert _is_right(kept()) and warned() == []
    assert len(entry.read_bytes()) >= len(whole) - 60, "the times' digits vary"


# ---- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [plain, pickled])
def test_any_byte_may_change(fn: Any, folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # for time's sake
    kept = memoize(fn, dir=folder, pickle=True)
    kept()
    at = 0
    while at < len(content := bytearray(_entry(folder).read_bytes())):
        content[at] ^= 1 << at % 8
        _check_made_anew(kept, folder, bytes(content), warned)
        at += 1
    assert at > 500


@pytest.mark.parametrize("fn", [plain, pickled])
def test_it_may_be_cut_off_or_longer(fn: Any, folder: Path, warned: Any) -> None:
    kept = memoize(fn, dir=folder, pickle=True)
    kept()
    for length in (0, 1, 15, 16, 50, 79, 80, 81, 300, -33, -32, -1):
        _check_made_anew(kept, folder, _entry(folder).read_bytes()[:length], warned)
    _check_made_anew(kept, folder, _entry(folder).read_bytes() + b"\0", warned)
    _check_made_anew(kept, folder, bytes(_entry(folder).stat().st_size), warned)


def test_sizes_that_lie_ask_for_no_memory(folder: Path, warned: Any) -> None:
    kept = memoize(plain, dir=folder)
    kept()
    for place in (56, 64):
        for size in (2**63, 2**64 - 1, 2**40):
            content = bytearray(_entry(folder).read_bytes())
            content[place : place + 8] = size.to_bytes(8, "little")
            _check_made_anew(kept, folder, bytes(content), warned)


def _sealed_anew(content: bytes) -> bytes:
    return content[:24] + hashlib.sha256(content[16:24] + content[56:]).digest() + content[56:]


def test_another_format_is_not_read(folder: Path, warned: Any) -> None:
    kept = memoize(plain, dir=folder)
    kept()
    content = _entry(folder).read_bytes().replace(b"fastpipe memo 3\n", b"fastpipe memo 2\n")
    _check_made_anew(kept, folder, _sealed_anew(content), warned)
    _entry(folder).write_bytes(_sealed_anew(content))
    kept()
    assert "another version of fastpipe" in warned()[0]


def test_the_entry_of_another_call_is_not_taken(folder: Path, warned: Any) -> None:
    kept = memoize(lambda x: {"a": np.arange(x), "b": [1.5, "text"]}, dir=folder)
    kept(3)
    entry = _entry(folder)
    kept(4)
    (other,) = set(folder.glob("*.memo")) - {entry}
    entry.write_bytes(other.read_bytes())
    assert _is_right(kept(3))
    assert "another call" in warned()[0]


def test_a_valid_value_of_something_else_is_no_error_of_the_caller(folder: Path, warned: Any) -> None:
    kept = memoize(plain, dir=folder)
    kept()
    content = _entry(folder).read_bytes()
    for old, new in ((b"array", b"carry"), (b"<i2", b"<z9"), (b"<i2", b"|O8"), (b"K\x03\x85", b"K\x04\x85")):
        damaged = content.replace(old, new)
        assert damaged != content
        _check_made_anew(kept, folder, _sealed_anew(damaged), warned)


def test_what_is_kept_aside_is_bounded(folder: Path) -> None:
    kept = memoize(plain, dir=folder)
    kept()
    for number in range(15):
        _entry(folder).write_bytes(b"%d" % number)
        kept()
    (aside,) = folder.glob("*.corrupt")
    assert aside.read_bytes() == b"14"
    assert kept.clear() == 1
    assert list(folder.iterdir()) == [aside]


@pytest.mark.parametrize("what", ["fifo", "link", "nowhere", "folder", "closed"])
def test_something_else_in_an_entrys_place(what: str, folder: Path, tmp_path: Path, warned: Any) -> None:
    kept = memoize(plain, dir=folder)
    kept()
    entry = _entry(folder)
    content = entry.read_bytes()
    entry.unlink()
    precious = tmp_path / "precious"
    precious.write_bytes(content)
    if what == "fifo":
        os.mkfifo(entry)
    elif what == "folder":
        entry.mkdir()
    elif what == "closed":
        entry.write_bytes(content)
        entry.chmod(0)
    else:
        entry.symlink_to(precious if what == "link" else tmp_path / "nowhere")
    assert _is_right(kept())
    if what == "closed" and os.geteuid() == 0:
        return  # whom no mode keeps out
    assert "cannot be loaded" in warned()[0]
    assert precious.read_bytes() == content
    assert _is_right(kept())
    assert what == "folder" or stat.S_ISREG(os.lstat(entry).st_mode)


# ---- what was pickled ------------------------------------------------------------------------------


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


def _forge(folder: Path, content: Any, mark: Path) -> None:
    """Put an entry in an entry's place that has all right but the seal."""
    name, key = _entry(folder).name, _entry(folder).name[-37:-5]
    with PrivateFolder(folder) as opened:
        sizes = (folder / name).read_bytes()
        length = int.from_bytes(sizes[56:64], "little")
        header = Header(**store.json.loads(sizes[72 : 72 + length]))
        assert header.key == key
        Entries(opened, header.name).store(header, content, pickled=True)
    assert not mark.exists()


@pytest.mark.parametrize("seal", ["another user's", "none", "a checksum's", "as if plain"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_forged_pickle_is_never_loaded(
    seal: str, allowed: bool, folder: Path, tmp_path: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, mark = memoize(plain, dir=folder, pickle=allowed), tmp_path / "mark"
    kept()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other user"))
        _forge(folder, [Touch(mark), {"a": np.arange(3)}], mark)
    entry = _entry(folder)
    content = entry.read_bytes()
    if seal == "none":
        content = content[:24] + bytes(32) + content[56:]
    elif seal == "a checksum's":
        content = _sealed_anew(content)
    elif seal == "as if plain":
        content = _sealed_anew(content.replace(b"sealed..", b"plain..."))
    entry.write_bytes(content)
    assert _is_right(kept()) and _is_right(kept())
    assert not mark.exists()
    warning = warned()[0]
    if allowed or seal == "as if plain":
        assert "seal is" in warning and "kept as" in warning
        assert (folder / f"{entry.name}.corrupt").read_bytes() == content
    else:
        assert "pass pickle=True" in warning


def test_the_forgery_would_have_worked(folder: Path, tmp_path: Path) -> None:
    kept, mark = memoize(plain, dir=folder, pickle=True), tmp_path / "mark"
    kept()
    _forge(folder, [Touch(mark)], mark)
    (descriptor,) = kept()
    os.close(descriptor)
    assert mark.exists()


def test_without_a_key_of_the_users_own_nothing_is_unpickled(
    folder: Path, warned: Any, tmp_path: Path
) -> None:
    kept = memoize(pickled, dir=folder, pickle=True)
    kept()
    content = _entry(folder).read_bytes()
    key = store.key_path()
    secret = key.read_bytes()
    assert key == tmp_path / "config" / "fastpipe" / "memoize.key" and len(secret) == 32

    def check(words: str) -> None:
        assert _is_right(kept())
        assert words in " ".join(warned())
        assert _entry(folder).read_bytes() == content, "it stays for when the key is usable again"

    key.chmod(0o644)
    check("must be a file of user")
    key.chmod(0o600)
    (tmp_path / "elsewhere").write_bytes(secret)
    key.unlink()
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
    assert _is_right(kept()) and warned() == []
    key.write_bytes(secret[:20])  # as of somebody who ended while writing it
    assert _is_right(kept())
    assert "its seal is wrong" in warned()[0] and len(key.read_bytes()) == 32


def test_all_processes_have_one_key(forked: Any) -> None:
    begin, end = os.pipe()
    pids = [forked(lambda: os.write(end, store.sealing_key()) and None) for _ in range(8)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    found = os.read(begin, 1000)
    os.close(begin)
    os.close(end)
    assert codes == [0] * 8
    assert found == store.sealing_key() * 8


def test_a_package_that_is_gone(
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


@pytest.mark.slow
def test_torch_is_gone(tmp_path: Path, folder: Path) -> None:
    """In a process that has none, the entry is kept aside; what computes it anew needs none."""
    pytest.importorskip("torch", reason="needs torch: pip install fastpipe[torch]")
    script = tmp_path / "script.py"
    script.write_text("""
import logging, sys
from fastpipe import memoize
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
if sys.argv[1] == "gone":
    sys.modules["torch"] = None
def train():
    return getattr(sys.modules.get("torch"), "ones", list)(())
if sys.argv[1] == "there":
    import torch as _
print(memoize(train, dir="kept")())
""")
    said = []
    for state in ("there", "there", "gone"):
        run = subprocess.run(
            [sys.executable, str(script), state], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        said.append(run.stdout.splitlines())
    assert said[0] == said[1] == ["tensor(1.)"]
    assert "pip install 'fastpipe[torch]'" in said[2][0] and said[2][1:] == ["[]"]
    assert len(list(folder.glob("*.corrupt"))) == 1


# ---- what cannot be written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError(), RuntimeError("a bug")]
)
def test_what_cannot_be_written_is_returned(
    error: Exception, folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = memoize(plain, dir=folder)

    def fail(self: Any, name: str, fill: Any, **options: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PrivateFolder, "write", fail)
        assert _is_right(kept())
    (message,) = warned()
    assert f"not kept: {type(error).__name__}" in message
    assert os.listdir(folder) == []
    assert _is_right(kept()) and _is_right(kept())
    assert warned() == [] and len(os.listdir(folder)) == 1


def test_a_file_of_limited_size(folder: Path, in_child: Any) -> None:
    """The kernel's own refusal, in the middle of an array."""
    import resource

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        found = memoize(lambda: np.arange(1 << 20), dir=folder)()
        assert len(found) == 1 << 20
        assert os.listdir(folder) == []

    in_child(work)


def test_the_folder_goes_while_it_computes(folder: Path, warned: Any) -> None:
    def f() -> int:
        (lock,) = folder.iterdir()
        lock.unlink()
        folder.rmdir()
        return 1

    assert memoize(f, dir=folder)() == 1
    assert "FileNotFoundError" in warned()[0]


def test_a_file_system_without_locks(folder: Path, warned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fastpipe.generation.store.fcntl.flock", fail)
    kept = memoize(plain, dir=folder)
    assert _is_right(kept()) and _is_right(kept())
    assert "two processes may compute the same" in warned()[0]


def test_an_unfinished_file_is_no_entry(folder: Path) -> None:
    kept = memoize(plain, dir=folder)
    kept()
    entry = _entry(folder)
    entry.rename(f"{entry}.1.unfinished")
    assert _is_right(kept())
    assert pickle.loads(pickle.dumps(kept())) is not None


# ---- processes that are killed ---------------------------------------------------------------------

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
say("ready")
say("found " + kept(1))
"""


class Other:
    """Another process, which computes until it is told to go on."""

    def __init__(self, place: Path, *arguments: str) -> None:
        script = place / "script.py"
        if not script.exists():  # else one that was started before may be reading it
            script.write_text(_SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, script.name, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=place, env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )  # fmt: skip

    def hear(self, words: str) -> str:
        """The next line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return line.strip()
        raise AssertionError(f"it never said {words!r}")

    def answer(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    made = []

    def start(*arguments: str) -> Other:
        made.append(Other(tmp_path, *arguments))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.communicate()


def test_two_processes_compute_once(other: Any, folder: Path) -> None:
    one = other()
    one.hear("begun")
    waiting = [other(), other()]
    for process in waiting:
        process.hear("is waited for")
    one.answer("the one")
    for process in (one, *waiting):
        assert process.hear("found") == "found the one"
        assert process.process.wait() == 0
    assert [path.suffix for path in folder.iterdir()] == [".memo"]


@pytest.mark.parametrize("forks", [False, True])
def test_the_next_one_computes_when_the_first_is_killed(other: Any, folder: Path, forks: bool) -> None:
    one = other(*["forks"] * forks)
    begun = one.hear("begun")
    child = int(begun.split()[-1]) if forks else 0
    waiting = [other(), other()]
    for process in waiting:
        process.hear("is waited for")
    one.kill()
    with _ending(child):
        # Whichever of the two is next, the other one goes on waiting.
        for process in waiting:
            process.answer("the next")
        found = [process.hear("found") for process in waiting]
        assert found == ["found the next"] * 2
        for process in waiting:
            assert process.process.wait() == 0
    assert [path.suffix for path in folder.iterdir()] == [".memo"]


@contextmanager
def _ending(pid: int) -> Iterator[None]:
    """A child of a child, which has lost its parent, ends afterwards."""
    try:
        yield
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
