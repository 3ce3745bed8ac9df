"""Augmentation of motion: what NumPy makes of it in a loop, by kernels and by torch's operations."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastpipe import FastLoader, augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.motion import on_motion
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

PAIRS = ((0, 1), (2, 4))
CASES: dict[str, Any] = {
    "speed": augment.MotionSpeed((0.4, 2.5)),
    "slower": augment.MotionSpeed((0.3, 0.5)),
    "speed of one": augment.MotionSpeed((1.0, 1.0)),
    "translation": augment.MotionTranslation(0.3),
    "translation of each": augment.MotionTranslation((0.0, 0.5, 2.0)),
    "scale": augment.MotionScale((0.5, 2.0)),
    "scale about a joint": augment.MotionScale((0.5, 2.0), about=3),
    "mirror": augment.MotionMirror(PAIRS),
    "mirror of another": augment.MotionMirror({2: 0, 0: 2, 1: 4}, axis=2, p=0.8, about=0.7),
    "some": augment.RandomApply([augment.MotionSpeed((0.5, 2.0)), augment.MotionMirror(PAIRS)], 0.5),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def motion_of(shape: tuple[int, ...] = (40, 30, 5, 3), dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator).cumsum(1) / 5).to(dtype)


def lengths_of(motion: Tensor) -> Tensor:
    count, frames = motion.shape[:2]
    found = torch.randint(1, frames + 1, (count,), generator=torch.Generator().manual_seed(1))
    found[:3] = torch.tensor([1, 2, frames])
    return found


def recipe(**options: Any) -> augment.Compose:
    return augment.Compose(
        [
            augment.RandomApply(augment.MotionSpeed((0.5, 2.0)), 0.7),
            augment.MotionTranslation(0.5),
            augment.MotionScale((0.8, 1.25), about=0),
            augment.MotionMirror(PAIRS),
        ],
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_motion_is_what_a_loop_makes_of_it(case: str, has_lengths: bool, dtype: torch.dtype) -> None:
    op, motion = CASES[case], motion_of(dtype=dtype)
    kept, lengths = motion.clone(), lengths_of(motion) if has_lengths else None
    for seed in range(3):
        parameters = op.draw(motion.shape, generator=torch.Generator().manual_seed(seed))
        wanted, wanted_lengths = op.reference(motion, parameters, lengths), None
        applied = applied_table([op], parameters.table, tuple(motion.shape[1:]))
        results = [
            on_motion([op], motion, applied, lengths, SlotPool(0), is_host=is_host)
            for is_host in (True, False)
        ]
        if has_lengths:
            wanted, wanted_lengths = wanted
            results.append(op.apply(motion, parameters, lengths))
        else:
            results.append((op.apply(motion, parameters), None))
        for found, now in results:
            assert found.dtype == dtype and found.shape == motion.shape
            apart = (found.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1)
            assert apart.max() < TOLERANCE[dtype]
            if has_lengths:
                assert now.dtype == torch.int64 and torch.equal(now, wanted_lengths)
    assert torch.equal(motion, kept)


@settings(max_examples=60)
@given(
    frames=st.integers(1, 12), joints=st.integers(5, 7), coordinates=st.integers(1, 3), count=st.integers(1, 5),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_shape(frames: int, joints: int, coordinates: int, count: int, seed: int) -> None:
    motion = motion_of((count, frames, joints, coordinates))
    chain, lengths = (
        recipe(),
        torch.randint(1, frames + 1, (count,), generator=torch.Generator().manual_seed(seed)),
    )
    parameters = chain.draw(motion.shape, generator=torch.Generator().manual_seed(seed))
    found, now = chain.apply(motion, parameters, lengths)
    wanted, wanted_now = chain.reference(motion, parameters, lengths)
    assert torch.allclose(found, wanted, atol=1e-5) and torch.equal(now, wanted_now)
    assert (now >= 1).all() and (now <= frames).all()
    for row, length, before in zip(found, now, lengths, strict=True):
        end = max(int(length), int(before))
        assert torch.equal(row[end:], row[end:] * 0) or not (row[end:] == 0).all()


def test_mirrored_twice_is_what_it_was() -> None:
    for op in (augment.MotionMirror(PAIRS, p=1.0), augment.MotionMirror(PAIRS, axis=2, p=1.0)):
        motion = motion_of()
        once = op(motion)
        assert not torch.equal(once, motion) and torch.equal(op(once), motion)


def test_speed_keeps_the_path() -> None:
    """A joint that moves evenly moves evenly at any speed, from where it was to where it was."""
    motion = torch.linspace(0, 1, 30).view(1, 30, 1, 1).repeat(50, 1, 1, 1)
    chain = augment.Compose([augment.MotionSpeed((0.5, 3.0))], lengths=1)
    found, lengths = chain(motion, torch.full((50,), 30, dtype=torch.int32))
    assert lengths.dtype == torch.int32 and lengths.unique().numel() > 10
    for row, length in zip(found[..., 0, 0], lengths.tolist(), strict=True):
        steps = row[:length].diff()
        assert row[0] == 0 and torch.allclose(steps, steps[:1].expand_as(steps), atol=1e-5)
        assert (row[length:] == 0).all()
    held = augment.MotionSpeed((2.0, 2.0))(motion)
    assert (held[:, 15:] == held[:, 14:15]).all() and torch.allclose(held[:, 14], motion[:, 28])


def test_lengths_that_their_type_cannot_hold_afterwards_are_an_error() -> None:
    motion, chain = torch.zeros(2, 300, 1, 1), augment.Compose([augment.MotionSpeed((0.5, 0.5))], lengths=1)
    with pytest.raises(AugmentError, match=r"sequence 1 .* is 300 frames long .* torch.uint8 cannot hold"):
        chain(motion, torch.tensor([3, 200], dtype=torch.uint8))
    found = chain(motion, torch.tensor([3, 100], dtype=torch.uint8))[1]
    assert found.dtype == torch.uint8 and found.tolist() == [5, 199]


def test_a_joint_that_is_missing_is_missing_where_it_is() -> None:
    motion = torch.arange(6.0).view(1, 6, 1, 1).clone()
    motion[0, 3] = torch.nan
    op, parameters = augment.MotionSpeed((2.0, 2.0)), augment.Parameters(speed=np.array([2.0]))
    applied = applied_table([op], parameters.table, (6, 1, 1))
    for is_host in (True, False):
        found, _ = on_motion([op], motion, applied, None, SlotPool(0), is_host=is_host)
        assert found.flatten().tolist() == [0, 2, 4, 4, 4, 4]


def test_lengths_that_nobody_has_looked_at_do_no_harm() -> None:
    """On a device to look would be to wait."""
    motion, lengths = motion_of((3, 12, 5, 3)), torch.tensor([40, -3, 12])
    op = augment.MotionSpeed((0.7, 0.9))
    applied = applied_table([op], op.draw(motion.shape).table, (12, 5, 3))
    for is_host in (True, False):
        found, now = on_motion([op], motion, applied, lengths, SlotPool(0), is_host=is_host)
        assert found.isfinite().all() and now is not None and now.min() >= 1 and now.max() <= 12


def test_frames_behind_the_end_are_left_as_they_are() -> None:
    motion, lengths = motion_of(), lengths_of(motion_of())
    chain = augment.Compose(recipe().ops[1:], lengths=2)
    found, labels, now = chain(motion, torch.arange(40), lengths)
    assert torch.equal(now, lengths) and torch.equal(labels, torch.arange(40))
    for before, after, length in zip(motion, found, lengths.tolist(), strict=True):
        assert torch.equal(after[length:], before[length:])
        assert not torch.equal(after[:length], before[:length])


def test_a_sequence_is_the_same_whatever_is_beside_it() -> None:
    chain, motion = recipe(lengths=1), motion_of((600, 30, 5, 3))
    lengths = lengths_of(motion)
    whole, now = chain(motion, lengths, key=Key(3, 1, np.arange(600)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        rows = np.array([599, 7, 300])
        part, own = chain(motion[rows], lengths[rows], key=Key(3, 1, rows))
        assert torch.equal(part, whole[rows]) and torch.equal(own, now[rows])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def each_level() -> Iterator[Any]:
    """The instruction sets that this processor has: an iterator, which puts each one in use."""
    best = native.level()
    yield (level for level in range(best + 1) if native.force_level(level))
    assert native.force_level(best)


LAYOUTS: dict[str, Any] = {
    "in order": lambda motion: motion,
    "coordinates first": lambda motion: motion.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "joints first": lambda motion: motion.transpose(1, 2).contiguous().transpose(1, 2),
    "of more frames": lambda motion: torch.cat([motion, motion], dim=1)[:, : motion.shape[1]],
    "of more joints": lambda motion: torch.cat([motion, motion], dim=2)[:, :, : motion.shape[2]],
    "every second": lambda motion: motion.repeat_interleave(2, dim=1)[:, ::2],
    "one for all": lambda motion: motion[:1].expand_as(motion),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_its_memory_and_the_instruction_set(
    layout: str, dtype: torch.dtype, each_level: Iterator[int]
) -> None:
    motion = LAYOUTS[layout](motion_of((40, 31, 7, 3), dtype=dtype))
    assert motion.is_contiguous() == (layout == "in order")
    chain, lengths = recipe(), torch.arange(40)[:, None].repeat(1, 2)[:, 0] % 31 + 1
    parameters = chain.draw(motion.shape, generator=torch.Generator().manual_seed(0))
    wanted = chain.reference(motion, parameters, lengths)[0].double()
    results = [
        [chain.apply(batch, parameters, lengths)[0], chain.apply(batch, parameters)]
        for _ in each_level
        for batch in (motion, motion.contiguous())
    ]
    for found in results:
        assert all(
            torch.equal(one.view(torch.int16), first.view(torch.int16))
            for one, first in zip(found, results[0], strict=True)
        )
    apart = (results[0][0].double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert apart.max() < TOLERANCE[dtype]


def test_two_speeds_are_rounded_once() -> None:
    motion = motion_of(dtype=torch.float16)
    chain = augment.Compose([augment.MotionSpeed((0.5, 2.0)), augment.MotionSpeed((0.5, 2.0))], lengths=1)
    parameters = chain.draw(motion.shape)
    found, now = chain.apply(motion, parameters, lengths_of(motion))
    whole, wanted_now = chain.apply(motion.float(), parameters, lengths_of(motion))
    assert torch.equal(found, whole.half()) and torch.equal(now, wanted_now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_that_are_none(dtype: torch.dtype) -> None:
    """NaN and infinity are where the loop has them, and nowhere else."""
    motion = motion_of((30, 20, 5, 3), dtype)
    chosen = torch.rand(motion.shape, generator=torch.Generator().manual_seed(2))
    motion[chosen < 0.02], motion[chosen > 0.98], motion[(chosen > 0.5) & (chosen < 0.52)] = (
        torch.nan, torch.inf, -torch.inf,
    )  # fmt: skip
    for speeds in ((0.5, 0.5), (2.0, 2.0), (1.0, 1.0), (0.7, 1.5)):
        chain = augment.Compose(
            [augment.MotionSpeed(speeds), augment.MotionTranslation(0.5), augment.MotionMirror(PAIRS)]
        )
        parameters = chain.draw(motion.shape, generator=torch.Generator().manual_seed(3))
        found, wanted = chain.apply(motion, parameters), chain.reference(motion, parameters)
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
        assert torch.allclose(
            found.float(), wanted.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
        )


@pytest.mark.parametrize("speed", [np.nan, np.inf, -np.inf, 0.0, -2.0, 1e-300, 1e300])
def test_parameters_that_nobody_draws_do_no_harm(speed: float) -> None:
    motion, lengths = motion_of((6, 12, 5, 3)), torch.arange(6) + 4
    parameters = augment.Parameters(speed=np.full(6, speed))
    _, now = augment.MotionSpeed().apply(motion, parameters, lengths)
    assert now.min() >= 1 and now.max() <= 12
    assert augment.MotionSpeed().apply(motion, parameters).shape == motion.shape


def test_arrays_that_do_not_fit_are_errors() -> None:
    def call(**other: Any) -> None:
        values = np.zeros((2, 3, 4, 3), np.float32)
        arrays = {
            "source": values, "source_type": 0, "out": np.empty_like(values), "out_type": 0,
            "speeds": np.ones(2), "scales": np.ones((2, 3)), "shifts": np.zeros((2, 3)),
            "order": np.zeros((2, 4), np.int64), "lengths": np.ones(2, np.int64),
            "new_lengths": np.zeros(2, np.int64), "threads": 1,
        }  # fmt: skip
        native.change_motion(**{**arrays, **other})

    call()
    small, empty = np.zeros((2, 3, 4, 2), np.float32), np.zeros((2, 0, 4, 3), np.float32)
    wrong: list[dict[str, Any]] = [
        {"source_type": 3}, {"source_type": -1}, {"source_type": 1}, {"out_type": 2}, {"out": small},
        {"source": empty, "out": empty}, {"source": np.zeros((2, 3, 4, 3))}, {"speeds": np.ones(3)},
        {"scales": np.ones((2, 2))}, {"shifts": np.ones((1, 3))}, {"order": np.full((2, 4), 4)},
        {"order": np.full((2, 4), -1)}, {"order": np.zeros((2, 3), np.int64)},
        {"lengths": np.ones(3, np.int64)},
        {"new_lengths": np.zeros(1, np.int64)},
    ]  # fmt: skip
    for other in wrong:
        with pytest.raises(ValueError, match=r"."):
            call(**other)
    for other in ({"speeds": np.ones(2, np.float32)}, {"order": np.zeros((2, 8), np.int64)[:, ::2]}):
        with pytest.raises(TypeError):
            call(**other)


def test_in_a_loader_and_compiled_and_sent() -> None:
    motion, lengths = motion_of((12, 20, 5, 3)), torch.arange(12) + 5
    dataset = torch.utils.data.TensorDataset(motion, lengths, torch.arange(12))
    chain = recipe(lengths=1)
    loader = FastLoader(dataset, batch_size=4, augment=chain, seed=2)
    first = [[part.clone() for part in batch] for batch in loader]
    assert all(not torch.equal(batch[0], motion[4 * at : 4 * at + 4]) for at, batch in enumerate(first))
    assert torch.equal(torch.cat([batch[2] for batch in first]), torch.arange(12))
    loader.set_epoch(0)
    for one, other in zip(first, loader, strict=True):
        assert all(map(torch.equal, one, other))
    sent = pickle.loads(pickle.dumps(chain))
    assert repr(sent) == repr(chain) and "lengths=1" in repr(chain)
    torch.manual_seed(1)
    wanted = chain(motion, lengths)
    for other in (sent, torch.compile(lambda *batch: chain(*batch), backend="eager")):
        torch.manual_seed(1)
        assert all(map(torch.equal, other(motion, lengths), wanted))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: augment.MotionSpeed((0.0, 1.0)), "speed= is two numbers above 0"),
        (lambda: augment.MotionScale((2.0, 1.0)), "factor= is two numbers above 0"),
        (lambda: augment.MotionScale(about=-1), "about= is the number of a joint, or None, got -1"),
        (lambda: augment.MotionTranslation(-0.1), "most= is a number of at least 0"),
        (lambda: augment.MotionTranslation(()), "most= is a number of at least 0"),
        (lambda: augment.MotionMirror([(0, 1), (1, 2)]), "pairs= is numbers of joints, two by two"),
        (lambda: augment.MotionMirror([(0, 1, 2)]), "pairs= is numbers of joints, two by two"),
        (lambda: augment.MotionMirror([(3, 3)]), "pairs= is numbers of joints, two by two"),
        (lambda: augment.MotionMirror({0: 1, 1: 2}), "pairs= is numbers of joints, two by two"),
        (lambda: augment.MotionMirror(axis=-1), "axis= is the number of a coordinate"),
        (lambda: augment.Compose([augment.MotionSpeed()], lengths=0), "lengths= is of motion, the number"),
        (lambda: augment.Compose([augment.RandomFlip3D()], lengths=1), "for augmentations of volumes"),
        (
            lambda: augment.preview(augment.MotionSpeed(), torch.zeros(1, 4, 3, 2)),
            "preview shows images, spectrograms and volumes, got augmentations of motion",
        ),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work(make: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(4, 3, 2), torch.ones(4).long()), r"takes a batch \(N, T, J, C\), got shape .*sequence\[None\]"),
        ((torch.zeros(4, 5, 5, 3).long(), torch.ones(4).long()), "got torch.int64"),
        ((torch.zeros(4, 5, 5, 3),), "lengths=1 says where a batch has the sequences' lengths, got 1 parts"),
        ((torch.zeros(4, 5, 5, 3), torch.ones(3).long()), r"whole numbers \(4,\), got torch.int64 \(3,\) there"),
        ((torch.zeros(4, 5, 5, 3), torch.ones(4)), r"got torch.float32 \(4,\) there"),
        ((torch.zeros(4, 5, 5, 3), [5, 5, 5, 5]), "got list there"),
        ((torch.zeros(4, 5, 5, 3), torch.ones(4, dtype=torch.bool)), r"got torch.bool \(4,\) there"),
        ((torch.zeros(4, 5, 5, 3), torch.tensor([5, 6, 5, 5])), "sequence 1 of the batch has length 6"),
        ((torch.zeros(4, 5, 5, 3), torch.tensor([5, 5, 5, 0])), "sequence 3 of the batch has length 0"),
        ((torch.zeros(4, 5, 4, 3), torch.ones(4).long()), "pairs= has joint 4, and there are 4"),
        ((torch.zeros(4, 5, 5, 4), torch.ones(4).long()), "most= has 3 numbers for motion of 4 coordinates"),
    ],
)  # fmt: skip
def test_motion_that_is_none(given: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        recipe(lengths=1)(*given)
