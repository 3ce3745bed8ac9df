"""Memory that a worker writes and its parent reads."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from answering import Answering
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.lanes import Lane, lanes_are_possible

pytestmark = [
    pytest.mark.skipif(not lanes_are_possible(), reason="run it on Linux, which has memfd_create"),
    pytest.mark.usefixtures("no_gc"),
]

InChild = Callable[[Callable[[], object]], None]
Forked = Callable[[Callable[[], object]], int]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_one_batch_in_very_many_messages_stays_the_parents() -> None:
    lane = Lane(1)
    writer = lane.writer()
    batch = writer.take(64)
    segments: Any = [
        writer.send(_address(batch)) for _ in range(512)
    ]  # as the samples of a batch, one by one
    del batch
    assert writer.take(64) is None
    received = [lane.receive(segment, 64) for segment in segments]
    assert writer.take(64) is None
    del received
    assert writer.take(64) is not None


def test_tensors_of_several_sizes_need_no_more_segments_than_are_in_use_at_once() -> None:
    lane = Lane(8)
    writer = lane.writer()
    for _ in range(20):  # an image, a mask and a short last batch
        batch = [writer.take(size) for size in (1 << 20, 1 << 16, 1 << 18)]
        assert len({_address(array) for array in batch}) == 3
        del batch
    sizes = sorted(os.fstat(fd).st_size for fd in lane._fds[2:])
    assert sizes == [0] * 5 + [1 << 16, 1 << 18, 1 << 20]


def test_without_memory_the_error_says_what_to_do_and_nothing_is_lost(in_child: InChild) -> None:
    lane = Lane(1)

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        writer = lane.writer()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
        for _ in range(2):  # of memory that is there already
            assert writer.take(1 << 16) is not None
        with pytest.raises(MemoryError, match=r"no 4 MiB .* File too large.*smaller batches.*num_workers=0"):
            writer.take(1 << 22)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert writer.take(1 << 22) is not None

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


def _answers(lane: Lane) -> dict[str, Callable[..., Any]]:
    """Run the worker's part at the other end of a lane."""
    writer, batches = lane.writer(), dict[int, Any]()

    def take(name: int, size: int) -> bool:
        batch = writer.take(size)
        if batch is not None:
            batch[:] = name % 251
            batches[name] = batch
        return batch is not None

    return {
        "take": take,
        "send": lambda name: writer.send(_address(batches[name])),
        "drop": lambda name: batches.__delitem__(name),
        "is whole": lambda name: bool((batches[name] == name % 251).all()),
    }


@contextmanager
def _worker_of(lane: Lane) -> Iterator[Answering]:
    worker = Answering(lambda: _answers(lane))
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
@given(segments=st.integers(0, 3), steps=STEPS)
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
                messages.append((chosen, worker("send", chosen), made[chosen]))
            elif step == "receive" and messages:
                chosen, segment, size = messages.pop(0)
                held.append((chosen, lane.receive(segment, size)))
            elif step == "drop" and made:
                chosen = list(made)[number % len(made)]
                worker("drop", chosen)
                del made[chosen]
            elif step == "release" and held:
                del held[number % len(held)]
            elif step == "view" and held:
                chosen, array = held.pop(number % len(held))
                held.append((chosen, array[number % array.size :]))
                del array
            assert all((array == name % 251).all() for name, array in held)
            assert all(worker("is whole", name) for name in made)


def test_a_killed_worker_leaves_the_batches_that_it_sent() -> None:
    lane = Lane(2)
    worker = Answering(lambda: _answers(lane))
    worker("take", 7, 100)
    segment = worker("send", 7)
    worker.end(kill=True)
    assert (lane.receive(segment, 100) == 7).all()


def test_a_batch_that_a_forked_child_sees_stays_as_long_as_the_child(forked: Forked) -> None:
    lane = Lane(1)
    with _worker_of(lane) as worker:
        worker("take", 7, 100)
        received = [lane.receive(worker("send", 7), 100)]
        worker("drop", 7)
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
        held = [lane.receive(worker("send", 7), 100)]
        worker("drop", 7)
        in_child(held.clear)
        assert not worker("take", 8, 100)
        held.clear()
        assert worker("take", 8, 100)
