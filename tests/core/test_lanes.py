"""Memory that a worker writes and its parent reads."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.lanes import Lane, LaneWriter, lanes_are_possible, stack_signal

pytestmark = [
    pytest.mark.skipif(not lanes_are_possible(), reason="run it on Linux, which has memfd_create"),
    pytest.mark.usefixtures("no_gc"),
]

InChild = Callable[[Callable[[], object]], None]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _sent(writer: LaneWriter, array: Any) -> int:
    segment = writer.send(_address(array))
    assert segment is not None
    return segment


def test_one_batch_in_very_many_messages_stays_the_parents() -> None:
    lane = Lane(1)
    writer = lane.writer()
    batch = writer.take(64)
    segments = [_sent(writer, batch) for _ in range(512)]  # as the samples of a batch, one by one
    del batch
    assert writer.take(64) is None
    received = [lane.receive(segment, 64) for segment in segments]
    assert writer.take(64) is None
    del received
    assert writer.take(64) is not None


def test_only_addresses_of_segments_in_use_are_sent() -> None:
    lane = Lane(2)
    writer = lane.writer()
    assert writer.send(_address(np.zeros(4))) is None
    batch = writer.take(64)
    address = _address(batch)
    del batch
    assert writer.send(address) is None  # the next batch's
    assert Lane(0).writer().take(64) is None


def test_without_memory_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    lane = Lane(1)
    writer = lane.writer()
    assert writer.take(64) is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        assert writer.take(64) is not None  # is there already
        with pytest.raises(MemoryError, match=r"no 2 MiB .* No space left .*smaller batches.*num_workers=0"):
            writer.take(2 << 20)
    assert writer.take(2 << 20) is not None  # and nothing is lost


def test_beyond_a_limit_of_the_system_it_is_a_memory_error(in_child: InChild) -> None:
    lane = Lane(1)

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        writer = lane.writer()
        assert writer.take(1 << 16) is not None
        with pytest.raises(MemoryError, match="File too large"):
            writer.take(1 << 22)

    in_child(child)


def test_the_last_note_of_each_thread_is_kept() -> None:
    lane = Lane(1)
    writer = lane.writer()
    assert lane.notes() == []
    for thread, text in ((11, "a long name of a file"), (22, "b"), (11, "c")):
        writer.note(thread, text)
    assert lane.notes() == ["c", "b"]
    writer.note(11, "ü" * 1000)
    writer.note(22, "\udcff/name")  # a file name that is no UTF-8
    for thread in range(30, 70):  # more threads than lines
        writer.note(thread, "x")
    notes = lane.notes()
    assert len(notes) == 16
    assert notes[0].startswith("ü" * 250)
    assert notes[1].endswith("/name")
    assert writer.take(10) is not None  # the page's other part is as it was


def test_stacks_are_read_from_where_they_begin() -> None:
    lane = Lane(0)
    writer = lane.writer()
    assert lane.stack() == ""
    os.write(writer.stack_fd, b"first\n")
    start = lane.stack_so_far()
    assert lane.stack(start) == ""
    os.write(writer.stack_fd, b"second\n")
    assert (lane.stack(start), lane.stack()) == ("second\n", "first\nsecond\n")
    assert signal.SIGRTMIN < stack_signal() < signal.SIGRTMAX


class _Worker:
    """A forked process at the other end of a lane."""

    def __init__(self, lane: Lane) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ours.close()
                _serve(theirs, lane.writer())
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._pipe = ours

    def __call__(self, *asked: Any) -> Any:
        self._pipe.send(asked)
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.close()
        assert os.waitpid(self.pid, 0)[1] == 0


def _serve(pipe: Connection, writer: LaneWriter) -> None:
    batches: dict[int, Any] = {}
    while True:
        try:
            what, name, value = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        if what == "take":
            batch = writer.take(value)
            if batch is not None:
                batch[:] = name % 251
                batches[name] = batch
            answer = batch is not None
            del batch
        elif what == "send":
            answer = writer.send(_address(batches[name]))
        elif what == "drop":
            del batches[name]
        elif what == "is whole":
            answer = bool((batches[name] == name % 251).all())
        pipe.send(answer)


@contextmanager
def _worker_of(lane: Lane) -> Iterator[_Worker]:
    worker = _Worker(lane)
    yield worker
    worker.end()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "send", "send", "receive", "receive", "drop", "release", "view"]),
        st.integers(0, 1000),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=30)
@given(segments=st.integers(1, 3), steps=STEPS)
def test_no_batch_changes_while_either_side_has_it(segments: int, steps: list[tuple[str, int]]) -> None:
    lane = Lane(segments)
    made: dict[int, int] = {}  # in the worker's hands: their sizes
    messages: list[tuple[int, int, int]] = []  # on their way: batch, segment, size
    held: list[tuple[int, Any]] = []  # in the parent's hands

    def busy() -> set[int]:
        return {*made, *(name for name, _, _ in messages), *(name for name, _ in held)}

    with _worker_of(lane) as worker:
        for name, (step, number) in enumerate(steps):
            if step == "take":
                is_free = len(busy()) < segments
                assert worker("take", name, number + 1) is is_free
                if is_free:
                    made[name] = number + 1
            elif step == "send" and made:
                chosen = list(made)[number % len(made)]
                messages.append((chosen, worker("send", chosen, None), made[chosen]))
            elif step == "receive" and messages:
                chosen, segment, size = messages.pop(0)
                held.append((chosen, lane.receive(segment, size)))
            elif step == "drop" and made:
                chosen = list(made)[number % len(made)]
                worker("drop", chosen, None)
                del made[chosen]
            elif step == "release" and held:
                del held[number % len(held)]
            elif step == "view" and held:
                chosen, array = held.pop(number % len(held))
                held.append((chosen, array[number % array.size :]))
                del array
            assert all((array == name % 251).all() for name, array in held)
            assert all(worker("is whole", name, None) for name in made)


def test_a_killed_worker_leaves_the_batches_that_it_sent() -> None:
    lane = Lane(2)
    worker = _Worker(lane)
    worker("take", 7, 100)
    segment = worker("send", 7, None)
    os.kill(worker.pid, signal.SIGKILL)
    os.waitpid(worker.pid, 0)
    worker._pipe.close()
    assert (lane.receive(segment, 100) == 7).all()


def test_a_batch_that_a_forked_child_sees_stays_as_long_as_the_child(
    forked: Callable[[Callable[[], object]], int],
) -> None:
    lane = Lane(1)
    with _worker_of(lane) as worker:
        worker("take", 7, 100)
        received = [lane.receive(worker("send", 7, None), 100)]
        worker("drop", 7, None)
        ours, theirs = os.pipe()

        def check() -> None:
            os.close(theirs)
            os.read(ours, 1)  # until the parent has gone on
            assert (received[0] == 7).all()
            received.clear()

        child = forked(check)
        os.close(ours)
        received.clear()
        assert not worker("take", 8, 100)
        os.close(theirs)
        assert os.waitpid(child, 0)[1] == 0
        (left,) = lane.unreturned
        assert left.give_back()
        assert worker("take", 9, 100)


def test_a_forked_child_gives_nothing_back(in_child: InChild) -> None:
    lane = Lane(1)
    with _worker_of(lane) as worker:
        worker("take", 7, 100)
        held = [lane.receive(worker("send", 7, None), 100)]
        worker("drop", 7, None)
        in_child(held.clear)
        assert not worker("take", 8, 100)
        held.clear()
        assert worker("take", 8, 100)


def test_lanes_and_forks_leave_no_descriptors(in_child: InChild) -> None:
    before, counts = len(os.listdir("/proc/self/fd")), set()
    lane = Lane(1)
    writer = lane.writer()
    for value in range(3):
        batch = writer.take(64)
        assert batch is not None
        batch[:] = value
        held = [lane.receive(_sent(writer, batch), 64)]
        for _ in range(3):
            in_child(lambda: None)
        del batch
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1
    batch = writer.take(64)
    assert batch is not None
    batch[:] = 9
    received = lane.receive(_sent(writer, batch), 64)
    del lane, writer, batch
    assert (received == 9).all(), "a batch outlives its lane"
    del received
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lane_pickles_only_towards_a_process_that_is_started() -> None:
    with pytest.raises(RuntimeError):
        pickle.dumps(Lane(1))
