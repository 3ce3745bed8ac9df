"""The tables against the plain lists they stand for."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.sample_tables import (
    FrozenSamples,
    FrozenTargets,
    SampleTable,
    SampleTableBuilder,
    TargetTable,
    checked_offsets,
)
from fastpipe.errors import OptionError

# All strings Python has: lone surrogates are what os.fsdecode makes of odd bytes.
paths = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
targets = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
samples = st.tuples(paths, targets)

SAMPLES = [("cat/1.jpg", 0), ("cat/é\n\udcff.jpg", 0), ("dog/\U0001f436.jpg", 1), ("", -5)]


def is_frozen(table: SampleTable | TargetTable) -> bool:
    return isinstance(table._data, (FrozenSamples, FrozenTargets))


@pytest.fixture(params=["frozen", "changed"])
def table(request: pytest.FixtureRequest) -> SampleTable:
    made = SampleTable(SAMPLES)
    if request.param == "changed":
        made.append(made.pop())
    assert is_frozen(made) == (request.param == "frozen")
    return made


def test_types_of_what_comes_out(table: SampleTable) -> None:
    for sample in (*table, table[0], table[np.int64(-1)], *table[:2]):
        assert (type(sample), type(sample[0]), type(sample[1])) == (tuple, str, int)
    assert (type(table.path(0)), type(table.target(np.uint8(1)))) == (str, int)


def test_the_list_given_is_not_kept() -> None:
    given = list(SAMPLES)
    made = SampleTable(given)
    made.append(("new", 1))
    odd: list[Any] = [("a", "b")]
    kept = SampleTable(odd)
    kept.append(("new", 1))
    assert (given, odd) == (SAMPLES, [("a", "b")])


@pytest.mark.parametrize("index", [4, -5, 2**70, np.int64(9)])
def test_index_errors_say_index_and_length(table: SampleTable, index: int) -> None:
    for access in (table.__getitem__, table.path, table.target, table.__delitem__, table.pop):
        with pytest.raises(IndexError, match=rf"SampleTable index {index} is out of range: its length is 4"):
            access(index)


@pytest.mark.parametrize("index", [1.0, "1", None, (0, 1)])
def test_indices_that_are_no_integers(table: SampleTable, index: Any) -> None:
    for access in (table.__getitem__, table.path, table.target):
        with pytest.raises(TypeError, match=r"indices must be integers or slices, got .* of type"):
            access(index)


def test_errors_say_which_value_is_not_there(table: SampleTable) -> None:
    missing = ("new", 7)
    for one in (table, SampleTable([*table, ("odd", "target")])):  # type: ignore[list-item]
        for search in (one.index, one.remove):
            with pytest.raises(ValueError, match=r"\('new', 7\) is not in this SampleTable"):
                search(missing)


def test_iteration_shows_changes_as_a_lists_does() -> None:
    changes: list[Callable[[Any, int], Any]] = [
        lambda x, i: x.__setitem__(i, ("later", i)),
        lambda x, i: x.__setitem__(-1, ("last", 9)),
        lambda x, i: x.append(("more", i)) if i < 6 else None,
        lambda x, i: x.pop(),
        lambda x, i: x.insert(0, ("first", i)) if i < 3 else None,
    ]
    for change in changes:
        for when in range(5):
            plain, made = list(SAMPLES), SampleTable(SAMPLES)
            seen: list[list[Any]] = [[], []]
            for kept, items in zip(seen, (plain, made), strict=True):
                for i, item in enumerate(items):
                    kept.append(item)
                    if i >= when:
                        change(items, i)
            assert seen[0] == seen[1]
            assert plain == made


def test_the_last_step_of_an_iteration_sees_an_append() -> None:
    made = SampleTable(SAMPLES)
    iterator = iter(made)
    assert [next(iterator) for _ in SAMPLES] == SAMPLES
    made.append(("new", 3))
    assert list(iterator) == [("new", 3)]


def test_long_iteration_and_equality() -> None:
    plain = [(f"é{i}" if i % 3 else f"{i}", i) for i in range(5000)]
    made = SampleTable(plain)
    assert list(made) == plain
    assert made == SampleTable(plain)
    assert made != SampleTable([*plain[:-1], ("x", 4999)])
    assert made != SampleTable([*plain[:-1], ("4999", 0)])
    assert list(TargetTable(range(5000))) == list(range(5000))
    assert made != tuple(plain)


def test_repr_is_short_for_many() -> None:
    assert repr(TargetTable(range(1000))) == repr(list(range(1000)))
    assert repr(TargetTable(range(1001))) == "[0, 1, 2, … 995 more …, 998, 999, 1000]"


def test_not_hashable_like_a_list(table: SampleTable) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(table)


def test_frozen_pickle_has_no_objects_for_samples() -> None:
    plain = [(f"folder/{i:06}.jpg", i % 10) for i in range(5000)]
    made = SampleTable(plain)
    # 17 bytes of path, 8 of offset, 8 of target for each sample, and a little around them.
    assert len(pickle.dumps(made)) < len(plain) * 33 + 1000
    assert len(pickle.dumps(TargetTable(made.targets_array()))) < len(plain) * 8 + 1000


def reachable(thing: object) -> int:
    """How many objects hang on this one, types and modules left out."""
    seen: dict[int, object] = {}
    pending = [thing]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, (type, type(gc), type(reachable))):
            continue
        seen[id(item)] = item
        pending += gc.get_referents(item)
    return len(seen)


def test_frozen_tables_hold_no_objects_for_samples() -> None:
    # So a forked worker that reads them has no reference counts to write next to the data.
    few, many = ([(f"{i}.jpg", i) for i in range(n)] for n in (3, 3000))
    for kind in (SampleTable, lambda plain: TargetTable([target for _, target in plain])):
        assert reachable(kind(few)) == reachable(kind(many))


def test_memory_of_a_table() -> None:
    count, prefix = 20_000, "/data/imagenet/ILSVRC2012/train/n01440764/"
    names = [f"n01440764_{i:05}.JPEG" for i in range(count)]
    builder = SampleTableBuilder()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        builder.add(prefix, names, 3)
        made = builder.build()
        del builder
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == count
    assert after - before <= 150 * count


@given(st.lists(st.tuples(paths, st.lists(paths, max_size=4), targets), max_size=5))
@settings(max_examples=100, deadline=None)
def test_builder(groups: list[tuple[str, list[str], int]]) -> None:
    builder = SampleTableBuilder()
    for group in groups:
        builder.add(*group)
    plain = [(prefix + name, target) for prefix, names, target in groups for name in names]
    assert len(builder) == len(plain)
    assert builder.build() == plain
    assert is_frozen(builder.build())


@pytest.mark.parametrize(
    ("block", "lengths", "message"),
    [
        (b"ab", [1], "2 bytes are of texts of 1"),
        (b"ab", [2, -1, 1], "texts of 2"),
        (b"a\xff", [2], "can't decode"),
        ("aé".encode(), [2, 1], "middle of a character"),
    ],
)
def test_what_is_no_block_of_texts_is_refused(block: bytes, lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_offsets(block, np.array(lengths))


@pytest.mark.parametrize(
    "odd",
    [
        ("a", 1, 2),
        ("a",),
        ["a", 1],
        ("a", True),
        ("a", np.int64(1)),
        ("a", "cat"),
        ("a", 2**63),
        (b"a", 1),
        None,
    ],
)
def test_items_that_do_not_fit_are_kept_as_they_are(odd: Any) -> None:
    plain: Any = [("x", 0), odd]
    made: Any = SampleTable(plain)
    assert made == plain
    assert made[1] is odd
    assert TargetTable([0, odd])[1] is odd


def test_odd_items_in_the_fast_path(table: Any) -> None:
    odd: list[Any] = [(b"bytes.jpg", np.int16(3)), ("x.jpg", "cat"), None, 7, ((), 1)]
    table[:] = odd
    assert (table.path(0), table.target(0), table.target(1)) == ("bytes.jpg", 3, "cat")
    for index in (2, 3, 4):
        with pytest.raises(TypeError, match=rf"sample {index} must be a \(path, class index\) tuple, got "):
            table.path(index)
    with pytest.raises(TypeError, match=r"sample 1 must have an int64 class index .*'cat'"):
        table.targets_array()
    del table[1:]
    assert table.targets_array().tolist() == [3]
    table[0] = ("x", 2**63)
    with pytest.raises(TypeError, match=r"sample 0 must have an int64"):
        table.targets_array()


def test_arrays_handed_out_cannot_change_the_table(table: SampleTable) -> None:
    array = table.targets_array()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    loaded = pickle.loads(pickle.dumps(table)).targets_array()
    assert not loaded.flags.writeable


def test_samples_and_targets_are_independent(table: SampleTable) -> None:
    classes = TargetTable(table.targets_array())
    classes[0] = 42
    assert table[0][1] == 0
    table[1] = ("x", 43)
    assert classes == [42, 0, 1, -5]


def test_targets_from_arrays() -> None:
    array = np.array([1, 2, 3], dtype=np.int16)
    made = TargetTable(array)
    wide = np.array([1, 2, 3])
    other = TargetTable(wide)
    array[0] = wide[0] = 9
    assert made == other == [1, 2, 3]
    assert type(made[0]) is int
    assert TargetTable(np.array([2**64 - 1], dtype=np.uint64)) == [2**64 - 1]
    assert TargetTable(np.array([0.5])) == [0.5]
    with pytest.raises(OptionError, match=r"one-dimensional .*shape \(1, 2\)"):
        TargetTable(np.array([[1, 2]]))


@pytest.mark.parametrize("changed", [False, True])
def test_numpy_and_torch_take_targets_as_a_list(changed: bool) -> None:
    plain = [0, 2, 2, 1, 0, 2]
    made: Any = TargetTable(plain)
    if changed:
        made.append(made.pop())
    array: Any = np.asarray(made)
    assert (array.dtype, array.tolist()) == (np.int64, plain)
    array[0] = 9
    assert made == plain
    assert np.asarray(made, dtype=np.float32).dtype == np.float32
    assert np.array(made).tolist() == plain
    assert np.bincount(made).tolist() == [2, 1, 3]
    assert np.unique(made).tolist() == [0, 1, 2]
    assert Counter(made) == Counter(plain)
    for tensor in (torch.tensor(made), torch.as_tensor(made)):
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == plain
    assert torch.LongTensor(made).tolist() == plain
    assert sorted(made, reverse=True) == sorted(plain, reverse=True)
    assert [2.0 in made, 0.5 in made, "2" in made, made.count(2.0), made.count(2**80)] == [
        True,
        False,
        False,
        3,
        0,
    ]


def test_array_protocol_without_a_copy() -> None:
    made = TargetTable([1, 2])
    view = made.__array__(copy=False)
    assert not view.flags.writeable
    assert view.tolist() == [1, 2]
    with pytest.raises(ValueError, match="without a copy"):
        made.__array__(np.float32, copy=False)
    made.append(3)
    with pytest.raises(ValueError, match="without a copy"):
        made.__array__(copy=False)


def test_torch_samplers_take_the_tables() -> None:
    made, classes = SampleTable(SAMPLES), TargetTable([0, 0, 1, 1])
    subset: torch.utils.data.Subset[Any] = torch.utils.data.Subset(made, [2, 0])  # type: ignore[arg-type]
    assert [subset[i] for i in range(len(subset))] == [SAMPLES[2], SAMPLES[0]]
    weights = 1.0 / torch.bincount(torch.tensor(classes)).double()
    assert weights[torch.tensor(classes)].tolist() == [0.5] * 4


@pytest.mark.parametrize(
    "other",
    [
        [("a", 0), ("bc", 0)],  # the same bytes, cut elsewhere
        [("ab", 0), ("d", 0)],
        [("ab", 0), ("c", 1)],
        [("ab", 0)],
    ],
)
def test_unequal_tables(other: list[tuple[str, int]]) -> None:
    made = SampleTable([("ab", 0), ("c", 0)])
    assert made == SampleTable([("ab", 0), ("c", 0)])
    assert made != SampleTable(other)
    assert made != other


def test_counting_does_not_round() -> None:
    plain = [2**53, 2**53 + 1, 0]
    made = TargetTable(plain)
    for value in (2.0**53, 2**53, True, 0.0, float("nan"), "0", None):
        assert made.count(value) == plain.count(value)  # type: ignore[arg-type]
        assert (value in made) == (value in plain)


def test_a_scans_table_keeps_the_root_once() -> None:
    short, long = (built(prefix) for prefix in ("r/", "r" * 1000 + "/"))
    assert long == [("r" * 1000 + path[1:], target) for path, target in short]
    assert len(pickle.dumps(long)) - len(pickle.dumps(short)) < 1100


def built(prefix: str) -> SampleTable:
    builder = SampleTableBuilder(prefix)
    builder.add("cat/", ["1.jpg", "é\udcff.jpg"], 0)
    builder.add("dog/", [f"{number}.jpg" for number in range(3000)], 1)
    return builder.build()


@pytest.mark.parametrize("prefix", ["", "r/", "é\udcff/", "/a/b/"])
def test_a_scans_table_is_like_any_other(prefix: str) -> None:
    made = built(prefix)
    plain = [(f"{prefix}cat/1.jpg", 0), (f"{prefix}cat/é\udcff.jpg", 0)]
    plain += [(f"{prefix}dog/{number}.jpg", 1) for number in range(3000)]
    assert is_frozen(made)
    assert made == plain
    assert [made.path(position) for position in range(-3002, 3002)] == [path for path, _ in plain] * 2
    assert (made[1], made[-1], made[1:3], made.index(plain[7])) == (plain[1], plain[-1], plain[1:3], 7)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.copy(), SampleTable(plain)):
        assert is_frozen(other)
        assert other == made
        assert made == other
        assert list(other) == plain
    for change in (("x", 1), (plain[0][0], 7)):
        assert made != SampleTable([change, *plain[1:]])
        assert SampleTable([change, *plain[1:]]) != made
    assert made != SampleTable(plain[:-1])
    made[0] = ("x", 1)
    assert made == [("x", 1), *plain[1:]]


def test_class_indices_that_are_no_integers_keep_the_root() -> None:
    builder = SampleTableBuilder("root/")
    odd: Any = "cat"
    builder.add("cat/", ["1.jpg"], odd)
    assert builder.build() == [("root/cat/1.jpg", "cat")]
