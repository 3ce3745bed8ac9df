"""Locks on bytes of a file: they exclude other files and processes, and end with their holder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fastpipe.core.locks import LockFile, open_file_locks_are_possible

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)

InChild = Callable[[Callable[[], object]], None]
Forked = Callable[[Callable[[], object]], int]


def opened(folder: Path) -> LockFile:
    return LockFile(str(folder / "locks"))


def test_a_byte_is_locked_by_one_file_or_shared(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o600
    assert one.take(7)
    assert not other.take(7) and not other.take(7, shared=True) and not other.is_free(7)
    assert other.take(8)
    one.release(7)
    assert other.is_free(7)
    assert one.take(7, shared=True) and other.take(7, shared=True)
    assert not one.take(7) and not other.is_free(7)
    one.close()
    one.close()
    assert other.take(7)
    with pytest.raises(OSError, match="closed"):
        one.take(7)


def test_links_and_replaced_files_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "locks").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        opened(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "locks").unlink()
    file = opened(tmp_path)
    assert file.is_at_its_path()
    (tmp_path / "locks").unlink()
    assert not file.is_at_its_path()
    other = opened(tmp_path)
    assert other.is_at_its_path() and not file.is_at_its_path()


def test_a_child_has_no_lock_of_its_parent_and_ends_none(tmp_path: Path, in_child: InChild) -> None:
    parent, staying = opened(tmp_path), opened(tmp_path)
    parent.take(7)
    staying.stay(9)

    def child() -> None:
        assert not parent.take(7)
        assert parent.take(8)
        parent.close()
        staying.release(9)
        assert not opened(tmp_path).is_free(9), "the parent shares it"

    in_child(child)
    in_child(parent.close)
    assert [opened(tmp_path).is_free(byte) for byte in (7, 8, 9)] == [False, True, False]


def test_a_child_renews_all_files_though_one_fails(tmp_path: Path, in_child: InChild) -> None:
    files = [LockFile(str(tmp_path / f"locks{number}")) for number in range(9)]
    descriptors = [file.descriptor for file in files]
    os.close(descriptors[4])  # as a program does that closes all descriptors

    def child() -> None:
        assert [file._descriptor for file in files] == [-1] * 9

    in_child(child)
    files[4]._descriptor = -1  # nothing is left to close


def test_locks_of_a_killed_parent_end_while_its_child_lives(tmp_path: Path, forked: Forked) -> None:
    said, say = os.pipe()
    wait, end = os.pipe()

    def parent() -> None:
        file = opened(tmp_path)
        file.take(7)
        if os.fork() == 0:
            os.close(end)
            os.write(say, b"!")
            os.read(wait, 1)
            os._exit(0)
        os.waitpid(-1, 0)

    process = forked(parent)
    os.read(said, 1)
    assert not opened(tmp_path).is_free(7)
    os.kill(process, signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    is_free = opened(tmp_path).is_free(7)
    os.close(say)
    os.write(end, b"!")
    assert os.read(said, 1) == b"", "its child has ended"
    for descriptor in (said, wait, end):
        os.close(descriptor)
    assert is_free
