"""Which positions each rank takes: a property of all ranks together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core.order import RankBatch, ShardedBatches
from fastpipe.errors import OptionError
from fastpipe.options import Shard

COUNT, SIZE, WORLD = st.integers(0, 70), st.integers(1, 7), st.integers(1, 6)


def ranks(
    count: int, size: int, world: int, mode: str, drop_last: bool, start: int = 0
) -> list[list[RankBatch]]:
    return [
        list(ShardedBatches(count, size, Shard(rank, world, mode), drop_last=drop_last, start=start))
        for rank in range(world)
    ]


def steps(of_ranks: list[list[RankBatch]]) -> list[tuple[RankBatch, ...]]:
    return list(zip(*of_ranks, strict=True))  # as many on each rank


@given(count=COUNT, size=SIZE, world=WORLD, drop_last=st.booleans(), start=st.integers(0, 30))
def test_train(count: int, size: int, world: int, drop_last: bool, start: int) -> None:
    taken = []
    for step in steps(ranks(count, size, world, "train", drop_last, start)):
        assert len({batch.size for batch in step}) == 1
        assert 1 <= step[0].size <= size
        taken += sorted(position for batch in step for position in batch.positions)
        assert taken[-1] + 1 == step[0].end
    assert taken == list(range(start, start + len(taken)))
    left = max(count - start, 0)
    if drop_last:
        assert len(taken) == left - left % (size * world)
    else:
        assert left <= len(taken) < left + world


@given(count=COUNT, size=SIZE, world=WORLD, start=st.integers(0, 30))
def test_eval_takes_each_sample_once(count: int, size: int, world: int, start: int) -> None:
    left = max(count - start, 0)
    if 0 < left < world:
        with pytest.raises(OptionError, match=f"{left} samples are left for {world} ranks"):
            ShardedBatches(count, size, Shard(0, world, "eval"), drop_last=False, start=start)
        return
    taken = []
    for step in steps(ranks(count, size, world, "eval", False, start)):
        sizes = [batch.size for batch in step]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= max(size, 2)
        taken += [position for batch in step for position in batch.positions]
    assert sorted(taken) == list(range(start, start + left))


@given(count=COUNT, size=SIZE, world=WORLD, mode=st.sampled_from(["train", "eval"]), drop_last=st.booleans())
def test_an_epoch_can_be_cut_at_any_step(
    count: int, size: int, world: int, mode: str, drop_last: bool
) -> None:
    try:
        whole = ShardedBatches(count, size, Shard(0, world, mode), drop_last=drop_last)
    except OptionError:
        return
    for number in range(len(whole) + 1):
        at = whole.end(number)
        assert at == (list(whole)[number - 1].end if number else 0)
        if mode == "train":
            rest = ShardedBatches(count, size, Shard(0, world, mode), drop_last=drop_last, start=at)
            assert list(rest) == list(whole)[number:]


@given(count=COUNT, size=SIZE, world=WORLD)
def test_a_step_is_the_same_set_for_any_number_of_ranks(count: int, size: int, world: int) -> None:
    many = steps(ranks(count, size, world, "train", True))
    (one,) = ranks(count, size * world, 1, "train", True)
    assert [sorted(p for batch in step for p in batch.positions) for step in many] == [
        list(batch.positions) for batch in one
    ]


def test_the_last_steps_of_an_evaluation() -> None:
    """By hand: 2 ranks, batches of 4; of 17 samples one would be left alone."""
    assert [[b.size for b in rank] for rank in ranks(17, 4, 2, "eval", False)] == [[4, 4, 1], [4, 3, 1]]
    assert [[b.size for b in rank] for rank in ranks(3, 1, 2, "eval", False)] == [[2], [1]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(2, 2), "rank=…. must be from 0 to world - 1 = 1, got 2"),
        (lambda: Shard(0, 0), "world=…. must be at least 1"),
        (lambda: Shard(0.5, 2), "must be an integer, got 0.5"),
        (lambda: Shard(0, 1, "test"), "mode"),
    ],
)
def test_a_shard_that_cannot_be(make: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()  # type: ignore[operator]


def test_auto_reads_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Shard.auto() == Shard(0, 1)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(OptionError, match="RANK='2' and WORLD_SIZE=None"):
        Shard.auto()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Shard.auto("eval") == Shard(2, 3, "eval")
