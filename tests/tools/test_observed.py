"""Functions of other packages that are looked at: in any order, and whatever goes wrong."""

from __future__ import annotations

import itertools
import logging
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from fastpipe.tools import witness as images_read
from fastpipe.tools.witness import Reads, observe


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_it_is_put_back_in_whatever_order_they_end(order: tuple[int, ...]) -> None:
    owner, seen = SimpleNamespace(double=lambda number: 2 * number), []
    before = owner.double
    ends = [observe(owner, "double", lambda value, number, by=by: seen.append(by)) for by in range(3)]
    for left, at in zip((3, 2, 1), order, strict=True):
        seen.clear()
        assert owner.double(4) == 8 and len(seen) == left
        ends[at]()
        ends[at]()
    assert owner.double is before


def test_what_somebody_else_put_there_stays() -> None:
    owner = SimpleNamespace(double=lambda number: 2 * number)
    seen: list[Any] = []
    end = observe(owner, "double", lambda value, number: seen.append(value))
    inner = owner.double
    owner.double = other = lambda number: inner(number) + 1
    end()
    assert owner.double is other and owner.double(4) == 9 and not seen


def test_an_error_of_who_looks_is_no_error_of_who_calls(caplog: pytest.LogCaptureFixture) -> None:
    owner, seen = SimpleNamespace(double=lambda number: 2 * number), []

    def fail(value: int, number: int) -> None:
        seen.append(value)
        raise ValueError("not today")

    end = observe(owner, "double", fail)
    with caplog.at_level(logging.WARNING, "fastpipe"):
        assert [owner.double(4), owner.double(5)] == [8, 10]
    assert seen == [8] and "not today" in caplog.text
    end()
    assert "_fastpipe_observers" not in vars(owner.double)


def test_images_are_seen_however_they_are_asked_for(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    with closing(Reads().begin()) as reads:
        small = Image.open(fp=tmp_path / "x.png").crop(box=(0, 0, 4, 4)).resize(size=(2, 2))
    assert small.size == (2, 2)
    assert [(read.box, read.size) for read in reads.images] == [((0, 0, 4, 4), (2, 2))]


@pytest.mark.parametrize("calls_before", list(itertools.combinations_with_replacement(range(4), 3)))
@pytest.mark.parametrize("moment", ["begin", "end"])
def test_an_image_that_is_being_read_when_looking_begins_or_ends_is_seen_whole_or_not_at_all(
    moment: str, calls_before: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    images: list[Image.Image] = []
    calls = (
        lambda: Image.open(tmp_path / "x.png"),
        lambda: images[-1].crop((0, 0, 4, 4)),
        lambda: images[-1].resize((2, 2)),
    )

    def read_on(wanted: int) -> None:
        """As another thread would, between any two functions that are looked at."""
        while len(images) < wanted:
            images.append(calls[len(images)]())

    reads, steps = Reads(), iter([*calls_before, 3])

    def observe_and_read(*args: Any) -> Any:
        if args[0] not in (Image, Image.Image):
            return observe(*args)
        if moment == "begin":
            read_on(next(steps))
        end = observe(*args)
        return (lambda: (read_on(next(steps)), end())) if moment == "end" else end

    monkeypatch.setattr(images_read, "observe", observe_and_read)
    with closing(reads.begin()):
        if moment == "begin":
            read_on(next(steps))
    read_on(3)
    for read in reads.images:
        assert read.size is None or (read.box, read.size) == ((0, 0, 4, 4), (2, 2))
