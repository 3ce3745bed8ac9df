"""Which part of each batch a device decodes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from fastpipe.images.gpu_share import Share, takes


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_a_share_is_spread_evenly(share: float, count: int) -> None:
    taken = [takes(share, number) for number in range(count)]
    assert sum(taken) == int(count * share)
    for begin in range(count):  # of any run of samples nearly the same part
        for end in range(begin + 1, count + 1):
            assert abs(sum(taken[begin:end]) - (end - begin) * share) <= 1


def test_a_given_share_stays() -> None:
    share = Share(0.3)
    assert share.begin() == 0.3
    share.given(0.3)
    share.waited(1.0)
    assert share.begin() == 0.3 and share.describe() == "30% of each batch"
    assert Share(1.0).describe() == ""


class Training:
    """Takes batches, of which two are begun ahead; ``seconds`` from batch to batch are those of their share."""

    def __init__(self, seconds: Callable[[float], float], waits: float = 1.0) -> None:
        self.now, self._seconds, self._waits = 0.0, seconds, waits
        self.share = Share("auto", 1.0, lambda: self.now)
        self.shares: list[float] = []
        self._begun = [self.share.begin(), self.share.begin()]

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self._begun.append(self.share.begin())
            share = self._begun.pop(0)
            self.now += self._seconds(share)
            self.share.given(share)
            self.share.waited(self._waits * self._seconds(share))
            self.shares.append(share)
        return self


@pytest.mark.parametrize(("best", "expected"), [(0.5, 0.5), (0.3, 0.25), (0.9, 1.0), (0.7, 0.75)])
def test_the_share_with_which_batches_follow_fastest_is_found(best: float, expected: float) -> None:
    training = Training(lambda share: 0.010 + 0.050 * abs(share - best)).steps(200)
    assert training.share.begin() == expected and training.shares[-1] == expected
    assert training.now < 6, "of a second's measuring, and the rest of the steps"
    assert f"{expected:.0%} of each batch, by the time from batch to batch: 0% →" in training.share.describe()


def test_where_the_cpu_keeps_up_nothing_else_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe")
    training = Training(lambda share: 0.1, waits=0.01).steps(30)
    assert set(training.shares) == {0.0} and training.share.begin() == 0.0
    assert "gpu_share=0: the CPU keeps up" in caplog.text


def test_a_larger_share_has_to_be_clearly_better() -> None:
    assert Training(lambda share: 0.1 - 0.002 * share).steps(60).share.begin() == 0.0


def test_a_pause_does_not_count() -> None:
    training = Training(lambda share: 0.05 + 0.05 * share)
    for pause in range(40):
        training.steps(3)
        training.now += 100.0 if pause % 2 else 0.0  # a validation, say
    assert training.share.begin() == 0.0


def test_until_it_is_known_it_is_said_so() -> None:
    assert "being measured" in Training(lambda share: 0.1).steps(3).share.describe()
