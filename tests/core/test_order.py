"""The order of an epoch, by an independent Philox; and its positions that each rank takes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.order import RankBatch, ShardedBatches, epoch_order
from fastpipe.errors import OptionError
from fastpipe.options import Shard

MASK = 2**64 - 1


def philox_words(count: int, key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 (Salmon et al., 2011); NumPy counts up before each block of four words."""
    words: list[int] = []
    while len(words) < count:
        counter = (counter + 1) % 2**256
        c = [counter >> shift & MASK for shift in (0, 64, 128, 192)]
        k0, k1 = key
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [second >> 64 ^ c[1] ^ k0, second & MASK, first >> 64 ^ c[3] ^ k1, first & MASK]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
        words += c
    return words[:count]


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [7, 3, 6, 4, 2, 5, 1, 0]), (0, 1, [3, 5, 6, 1, 4, 2, 7, 0]), (-1, 0, [1, 4, 7, 3, 5, 0, 2, 6]),
        (2**64 + 3, 5, [6, 5, 7, 0, 3, 1, 4, 2]), (np.int32(0), np.int64(1), [3, 5, 6, 1, 4, 2, 7, 0]),
    ],
)  # fmt: skip
def test_the_order_never_changes(seed: int, epoch: int, expected: list[int]) -> None:
    state = np.random.get_state(legacy=False)["state"]["key"].tobytes()
    assert epoch_order(8, seed=seed, epoch=epoch).tolist() == expected
    assert np.random.get_state(legacy=False)["state"]["key"].tobytes() == state


@given(st.integers(0, 60), st.integers(), st.integers(0, MASK))
@settings(max_examples=50, deadline=None)
def test_the_order_is_the_documented_derivation(length: int, seed: int, epoch: int) -> None:
    counter = int.from_bytes(b"fp-order", "little") << 192
    words = philox_words(length, (seed % 2**64, epoch), counter)
    order = epoch_order(length, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(length), key=lambda i: (words[i], i))


@pytest.mark.parametrize("epoch", [-1, 2**64])
def test_an_epoch_out_of_range_is_named(epoch: int) -> None:
    with pytest.raises(OptionError, match=rf"epoch=….*got {epoch}"):
        epoch_order(3, seed=0, epoch=epoch)


@pytest.mark.parametrize("name", ["seed", "epoch"])
@pytest.mark.parametrize("value", [1.5, np.float64(1), "1", None])
def test_only_integers_are_taken(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"integers, .*{name}={re.escape(repr(value))}"):
        epoch_order(3, **{"seed": 0, "epoch": 0, name: value})


@pytest.mark.parametrize("length", [1 << 50, 1 << 62])
def test_an_order_that_fits_into_no_memory_is_an_error(length: int) -> None:
    with pytest.raises(OptionError, match=f"{length:,} samples .* sampler="):
        epoch_order(length, seed=0, epoch=0)


# The positions of ranks: properties of all ranks together.

COUNT, SIZE, WORLD, START = st.integers(0, 70), st.integers(1, 7), st.integers(1, 6), st.integers(0, 30)


def ranks(
    count: int, size: int, world: int, mode: str, drop_last: bool, start: int = 0
) -> list[list[RankBatch]]:
    return [
        list(ShardedBatches(count, size, Shard(rank, world, mode), drop_last=drop_last, start=start))
        for rank in range(world)
    ]


def steps(of_ranks: list[list[RankBatch]]) -> list[tuple[RankBatch, ...]]:
    return list(zip(*of_ranks, strict=True))  # as many on each rank


@given(count=COUNT, size=SIZE, world=WORLD, drop_last=st.booleans(), start=START)
def test_training_takes_equal_parts(count: int, size: int, world: int, drop_last: bool, start: int) -> None:
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


@given(count=COUNT, size=SIZE, world=WORLD, start=START)
def test_evaluation_takes_each_sample_once(count: int, size: int, world: int, start: int) -> None:
    left = max(count - start, 0)
    if 0 < left < world:
        with pytest.raises(OptionError, match=f"{left} samples are left for {world} ranks"):
            ShardedBatches(count, size, Shard(0, world, "eval"), drop_last=False, start=start)
        return
    taken = []
    for step in steps(ranks(count, size, world, "eval", False, start)):
        sizes = [batch.size for batch in step]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and max(sizes) <= max(size, 2)
        taken += [position for batch in step for position in batch.positions]
    assert sorted(taken) == list(range(start, start + left))


@given(count=COUNT, size=SIZE, world=WORLD, mode=st.sampled_from(["train", "eval"]), drop_last=st.booleans())
def test_an_epoch_is_cut_at_any_step(count: int, size: int, world: int, mode: str, drop_last: bool) -> None:
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


def test_the_last_steps_of_an_evaluation_leave_no_rank_alone() -> None:
    """By hand: 2 ranks, batches of 4; of 17 samples one would be left alone."""
    assert [[b.size for b in rank] for rank in ranks(17, 4, 2, "eval", False)] == [[4, 4, 1], [4, 3, 1]]
    assert [[b.size for b in rank] for rank in ranks(3, 1, 2, "eval", False)] == [[2], [1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank=…. must be from 0 to world - 1 = 1, got 2"), ((0, 0), "world=…. must be at least 1"),
        ((0.5, 2), "must be an integer, got 0.5"), ((0, 1, "test"), "mode"),
    ],
)  # fmt: skip
def test_a_bad_shard_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Shard(*arguments)


def test_auto_reads_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Shard.auto() == Shard(0, 1)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(OptionError, match="RANK='2' and WORLD_SIZE=None"):
        Shard.auto()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Shard.auto("eval") == Shard(2, 3, "eval")
