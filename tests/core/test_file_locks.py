"""Locks on bytes of a file: whom they keep out, and that they end with whoever holds them."""

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

Forked = Callable[[Callable[[], object]], int]


def code_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def opened(folder: Path) -> LockFile:
    return LockFile(str(folder / "locks"))


def test_a_byte_is_one_file_s_and_others_are_free(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.take(7)
    assert not other.take(7)
    assert not other.take(7, shared=True)
    assert not other.is_free(7)
    assert other.take(8)
    one.release(7)
    assert other.is_free(7)
    assert other.take(7)
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o600


def test_who_share_a_byte_keep_out_who_wants_it_alone(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.take(7, shared=True)
    assert other.take(7, shared=True)
    assert not one.take(7)
    assert not other.is_free(7)
    one.close()
    assert other.take(7)


def test_what_is_closed_locks_nothing(tmp_path: Path) -> None:
    one = opened(tmp_path)
    one.take(7)
    one.close()
    one.close()
    assert opened(tmp_path).take(7)
    with pytest.raises(OSError, match="closed"):
        one.take(7)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "locks").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        opened(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_it_shows_when_a_file_was_replaced(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.is_at_its_path()
    (tmp_path / "locks").unlink()
    assert not file.is_at_its_path()
    other = opened(tmp_path)
    assert not file.is_at_its_path()
    assert other.is_at_its_path()


def test_a_child_has_no_lock_of_its_parent_and_ends_none(tmp_path: Path, forked: Forked) -> None:
    parent = opened(tmp_path)
    parent.take(7)

    def child() -> None:
        assert not parent.take(7)
        assert parent.take(8)
        parent.close()

    assert code_of(forked(child)) == 0
    assert not opened(tmp_path).is_free(7)
    assert opened(tmp_path).is_free(8)


def test_a_child_that_only_ends_unlocks_nothing(tmp_path: Path, forked: Forked) -> None:
    parent = opened(tmp_path)
    parent.take(7)
    assert code_of(forked(parent.close)) == 0
    assert not opened(tmp_path).is_free(7)


def test_a_child_renews_all_objects_though_one_fails(tmp_path: Path, forked: Forked) -> None:
    files = [LockFile(str(tmp_path / f"locks{number}")) for number in range(9)]
    before = [file.descriptor for file in files]
    os.close(before[4])  # as a program does that closes all descriptors

    def child() -> None:
        assert [file._descriptor for file in files] == [-1] * 9

    assert code_of(forked(child)) == 0
    files[4]._descriptor = -1  # nothing is left to close


def test_what_stays_is_the_child_s_as_well(tmp_path: Path, forked: Forked) -> None:
    parent = opened(tmp_path)
    parent.stay(7)

    def child() -> None:
        assert parent.take(8)
        assert not opened(tmp_path).is_free(7)
        parent.release(7)
        assert not opened(tmp_path).is_free(7), "the parent shares it"

    assert code_of(forked(child)) == 0


def test_locks_of_a_killed_parent_end_while_its_child_lives(tmp_path: Path, forked: Forked) -> None:
    said, say = os.pipe()
    wait, go_on = os.pipe()

    def parent() -> None:
        file = opened(tmp_path)
        file.take(7)
        if os.fork() == 0:
            os.close(go_on)
            os.write(say, b"!")
            os.read(wait, 1)
            os._exit(0)
        os.waitpid(-1, 0)

    process = forked(parent)
    os.read(said, 1)
    assert not opened(tmp_path).is_free(7)
    os.kill(process, signal.SIGKILL)
    assert code_of(process) == -signal.SIGKILL
    is_free = opened(tmp_path).is_free(7)
    os.close(say)
    os.write(go_on, b"!")
    assert os.read(said, 1) == b"", "its child has ended"
    for descriptor in (said, wait, go_on):
        os.close(descriptor)
    assert is_free
