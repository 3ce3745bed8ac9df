"""The tables against the plain lists that they stand for."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastpipe.core.sample_tables import (
    FrozenRecords,
    FrozenSamples,
    FrozenTargets,
    RowTable,
    SampleTable,
    SampleTableBuilder,
    TargetTable,
    checked_offsets,
)
from fastpipe.errors import OptionError

# All strings Python has: lone surrogates are what os.fsdecode makes of odd bytes.
paths = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
targets = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
samples = st.tuples(paths, targets) | st.tuples(st.sampled_from("ab"), st.integers(0, 2))
indices = st.integers(-12, 12)
bounds = st.none() | indices
slices = st.builds(slice, bounds, bounds, st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3]))

SAMPLES = [("cat/1.jpg", 0), ("cat/é\n\udcff.jpg", 0), ("dog/\U0001f436.jpg", 1), ("", -5)]


def is_frozen(table: SampleTable | TargetTable) -> bool:
    return isinstance(table._data, (FrozenSamples, FrozenTargets))


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns (tables as lists), or the type of what it raises."""
    try:
        result = function()
    except (IndexError, ValueError, TypeError) as error:
        return type(error)
    return list(result) if isinstance(result, (SampleTable, TargetTable)) else result


class Given(NamedTuple):
    index: int
    value: Any
    values: list[Any]
    where: slice


CHANGES: dict[str, Callable[[Any, Given], Any]] = {
    "set an item": lambda x, g: x.__setitem__(g.index, g.value),
    "insert": lambda x, g: x.insert(g.index, g.value),
    "append": lambda x, g: x.append(g.value),
    "extend": lambda x, g: x.extend(g.values),
    "extend lazily": lambda x, g: x.extend(iter(g.values)),
    "add": lambda x, g: x.__iadd__(g.values),
    "halve": lambda x, g: x.__delitem__(slice(4, None)),
    "extend with itself": lambda x, g: x.extend(x[:4]) or x.extend(x),
    "multiply": lambda x, g: x.__delitem__(slice(4, None)) or x.__imul__(g.index % 4 - 1),
    "delete": lambda x, g: x.__delitem__(g.index),
    "pop": lambda x, g: x.pop(g.index),
    "pop the last": lambda x, g: x.pop(),
    "remove": lambda x, g: x.remove(g.value),
    "clear": lambda x, g: x.clear(),
    "reverse": lambda x, g: x.reverse(),
    "sort": lambda x, g: x.sort(key=[None, str, repr][g.index % 3], reverse=g.index > 0),
    "search": lambda x, g: x.index(g.value),
    "search a part": lambda x, g: x.index(g.value, g.index, 5),
    "count": lambda x, g: (x.count(g.value), g.value in x),
    "item": lambda x, g: (x[g.index], x[np.int32(g.index)]),
    "concatenate": lambda x, g: [x + g.values, g.values + x, x + x, x * 2, 2 * x],
    "set a slice": lambda x, g: x.__setitem__(g.where, g.values),
    "set a slice to itself": lambda x, g: x.__setitem__(g.where, x),
    "delete a slice": lambda x, g: x.__delitem__(g.where),
    "read a slice": lambda x, g: [x[g.where]],
}


class Machine(RuleBasedStateMachine):
    """Does the same to a table and to a list and compares the results."""

    kind: type[SampleTable | TargetTable]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.one: Any = samples if self.kind is SampleTable else targets
        self.list: Any = data.draw(st.lists(self.one, max_size=8))
        self.table: Any = self.kind(self.list)
        assert is_frozen(self.table)

    @rule(data=st.data(), name=st.sampled_from(sorted(CHANGES)), index=indices, where=slices)
    def change(self, data: st.DataObject, name: str, index: int, where: slice) -> None:
        value = data.draw(self.one if not self.list else st.sampled_from(self.list) | self.one)
        given, change = Given(index, value, data.draw(st.lists(self.one, max_size=5)), where), CHANGES[name]
        made = outcome(lambda: change(self.table, given))
        assert made == outcome(lambda: change(self.list, given))
        if name in ("concatenate", "read a slice"):
            assert all(type(one) is list for one in made)

    @rule()
    def freeze(self) -> None:
        self.table = self.kind(list(self.table))
        assert is_frozen(self.table)

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda t: t.copy(), lambda t: type(t)(t)]))
    def continue_with_a_copy(self, how: Callable[[Any], Any]) -> None:
        old, before = self.table, list(self.table)
        self.table = how(old)
        assert type(self.table) is self.kind
        new: Any = ("a", 1) if self.kind is SampleTable else 1
        self.table.append(new)
        assert list(old) == before
        self.table.pop()

    @rule(protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
    def continue_with_a_pickle(self, protocol: int) -> None:
        frozen = is_frozen(self.table)
        self.table = pickle.loads(pickle.dumps(self.table, protocol))
        assert is_frozen(self.table) == frozen

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "table"):
            return
        assert (len(self.table), bool(self.table)) == (len(self.list), bool(self.list))
        assert list(self.table) == self.list
        assert list(reversed(self.table)) == self.list[::-1]
        assert self.table == self.list == self.table == self.kind(self.list)
        assert self.table != [*self.list, 0]
        assert repr(self.table) == repr(self.list)
        if self.kind is TargetTable:
            assert np.asarray(self.table, dtype=np.int64).tolist() == self.list
            return
        everything = range(-len(self.list), len(self.list))
        assert [self.table.path(i) for i in everything] == [path for path, _ in self.list] * 2
        assert [self.table.target(i) for i in everything] == [target for _, target in self.list] * 2
        array = self.table.targets_array()
        assert array.dtype == np.int64 and array.tolist() == [target for _, target in self.list]


class SampleMachine(Machine):
    kind = SampleTable


class TargetMachine(Machine):
    kind = TargetTable


TestSampleMachine = SampleMachine.TestCase
TestTargetMachine = TargetMachine.TestCase
TestSampleMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestTargetMachine.settings = TestSampleMachine.settings


@pytest.fixture(params=["frozen", "changed"])
def table(request: pytest.FixtureRequest) -> SampleTable:
    made = SampleTable(SAMPLES)
    if request.param == "changed":
        made.append(made.pop())
    assert is_frozen(made) == (request.param == "frozen")
    return made


def test_errors_name_the_index_or_the_value(table: SampleTable) -> None:
    for index in (4, -5, 2**70, np.int64(9)):
        for access in (table.__getitem__, table.path, table.target, table.__delitem__, table.pop):
            with pytest.raises(IndexError, match=rf"SampleTable index {index} is out of range: .* is 4"):
                access(index)
    for bad in (1.0, "1", None, (0, 1)):
        for access in (table.__getitem__, table.path, table.target):
            with pytest.raises(TypeError, match=r"indices must be integers or slices, got .* of type"):
                access(bad)
    for one in (table, SampleTable([*table, ("odd", "target")])):  # type: ignore[list-item]
        for search in (one.index, one.remove):
            with pytest.raises(ValueError, match=r"\('new', 7\) is not in this SampleTable"):
                search(("new", 7))


def test_iteration_sees_changes_as_a_list_s_does() -> None:
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


def test_frozen_tables_take_little_memory() -> None:
    # 17 bytes of path, 8 of offset, 8 of target for each sample, and a little around them.
    many = SampleTable([(f"folder/{i:06}.jpg", i % 10) for i in range(5000)])
    assert len(pickle.dumps(many)) < 5000 * 33 + 1000
    assert len(pickle.dumps(TargetTable(many.targets_array()))) < 5000 * 8 + 1000


_COLUMNS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "floats": (lambda: FrozenTargets(np.array([0.5, -1.0, 0.5])), [0.5, -1.0, 0.5]),
    "texts": (lambda: ["a", "b", "a"], ["a", "b", "a"]),
    "tuples": (lambda: FrozenRecords([[1, 2, 1], ["a", "b", "a"]]), [(1, "a"), (2, "b"), (1, "a")]),
    "dicts": (
        lambda: FrozenRecords([FrozenTargets(np.array([1, 2, 1])), ["a", "b", "a"]], ["x", 3]),
        [{"x": 1, 3: "a"}, {"x": 2, 3: "b"}, {"x": 1, 3: "a"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", _COLUMNS)
def test_rows_with_other_targets_are_like_a_list(kind: str) -> None:
    make, targets = _COLUMNS[kind]
    plain = list(zip(["a.jpg", "é\udcff.jpg", "a.jpg"], targets, strict=True))
    for how in (
        lambda t: t,
        copy.copy,
        copy.deepcopy,
        lambda t: t.copy(),
        lambda t: pickle.loads(pickle.dumps(t)),
    ):
        made: Any = how(RowTable([path for path, _ in plain], make()))
        assert made == plain == made == RowTable([path for path, _ in plain], make())
        assert made != RowTable(["b.jpg"] * 3, make()) and made != plain[:2]
        assert made != RowTable([path for path, _ in plain], list(range(3)))
        everything = range(-3, 3)
        assert [made[i] for i in everything] == plain * 2 and made[np.int64(1)] == plain[1]
        assert (made[::-1], made[1:], made[5:], list(reversed(made))) == (
            plain[::-1],
            plain[1:],
            [],
            plain[::-1],
        )
        assert (made.index(plain[1]), made.count(plain[0]), plain[1] in made, 7 in made) == (
            1,
            2,
            True,
            False,
        )
        own = made.targets()
        assert own == targets and (own[-1], own[:2], own.count(targets[0])) == (targets[2], targets[:2], 2)
        assert [type(one) for one in own] == list(map(type, targets))
        own[0] = "new"
        assert made == plain, "a list of its own"
        made.append(("new.jpg", "new"))
        made[0] = ("other.jpg", None)
        assert made == [("other.jpg", None), *plain[1:], ("new.jpg", "new")]
        assert made.targets() == [None, *targets[1:], "new"]


@given(st.lists(st.tuples(paths, st.lists(paths, max_size=4), targets), max_size=5), paths)
@settings(max_examples=60, deadline=None)
def test_a_builder_adds_names_to_prefixes(groups: list[tuple[str, list[str], int]], root: str) -> None:
    builder = SampleTableBuilder(root)
    for group in groups:
        builder.add(*group)
    plain = [(root + prefix + name, target) for prefix, names, target in groups for name in names]
    assert len(builder) == len(plain)
    assert builder.build() == plain
    assert is_frozen(builder.build())


@pytest.mark.parametrize("prefix", ["", "é\udcff/", "r" * 1000 + "/"])
def test_a_scan_s_table_is_like_any_other_and_keeps_the_root_once(prefix: str) -> None:
    def built(root: str) -> SampleTable:
        builder = SampleTableBuilder(root)
        builder.add("cat/", ["1.jpg", "é\udcff.jpg"], 0)
        builder.add("dog/", [f"{number}.jpg" for number in range(3000)], 1)
        return builder.build()

    made = built(prefix)
    assert len(pickle.dumps(made)) - len(pickle.dumps(built("r/"))) < 1100
    plain = [(f"{prefix}cat/1.jpg", 0), (f"{prefix}cat/é\udcff.jpg", 0)]
    plain += [(f"{prefix}dog/{number}.jpg", 1) for number in range(3000)]
    assert [made.path(position) for position in range(-3002, 3002)] == [path for path, _ in plain] * 2
    assert (made[1], made[-1], made[1:3], made.index(plain[7])) == (plain[1], plain[-1], plain[1:3], 7)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.copy(), SampleTable(plain)):
        assert is_frozen(other)
        assert other == made == other == plain
    for change in (("x", 1), (plain[0][0], 7)):
        assert made != SampleTable([change, *plain[1:]])
        assert SampleTable([change, *plain[1:]]) != made
    made[0] = ("x", 1)
    assert made == [("x", 1), *plain[1:]]


@pytest.mark.parametrize(
    ("block", "lengths", "message"),
    [
        (b"ab", [1], "2 bytes does not hold texts of 1"), (b"ab", [2, -1, 1], "texts of 2"),
        (b"a\xff", [2], "can't decode"), ("aé".encode(), [2, 1], "middle of a character"),
    ],
)  # fmt: skip
def test_a_bad_block_of_texts_is_refused(block: bytes, lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_offsets(block, np.array(lengths))


@pytest.mark.parametrize(
    "odd",
    [("a", 1, 2), ("a",), ["a", 1], ("a", True), ("a", np.int64(1)), ("a", "cat"), ("a", 2**63), (b"a", 1), None],
)  # fmt: skip
def test_items_that_do_not_fit_are_kept_as_they_are(odd: Any) -> None:
    plain: Any = [("x", 0), odd]
    made: Any = SampleTable(plain)
    assert made == plain
    assert made[1] is odd
    assert TargetTable([0, odd])[1] is odd
    made.append(("new", 1))
    assert plain == [("x", 0), odd], "the list given is not kept"


def test_odd_items_have_paths_and_targets_where_they_can(table: Any) -> None:
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
    builder, target = SampleTableBuilder("root/"), odd[1][1]
    builder.add("cat/", ["1.jpg"], target)
    assert builder.build() == [("root/cat/1.jpg", "cat")]


def test_arrays_and_tables_do_not_change_each_other(table: SampleTable) -> None:
    array = table.targets_array()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    assert not pickle.loads(pickle.dumps(table)).targets_array().flags.writeable
    classes = TargetTable(array)
    classes[0] = 42
    table[1] = ("x", 43)
    assert (table[0][1], classes) == (0, [42, 0, 1, -5])
    given = np.array([1, 2, 3], dtype=np.int16), np.array([1, 2, 3])
    made = [TargetTable(one) for one in given]
    for one in given:
        one[0] = 9
    assert made == [[1, 2, 3], [1, 2, 3]] and type(made[0][0]) is int
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
    assert made == plain and made != tuple(plain)
    assert np.asarray(made, dtype=np.float32).dtype == np.float32
    assert np.array(made).tolist() == plain
    assert np.bincount(made).tolist() == [2, 1, 3]
    assert Counter(made) == Counter(plain)
    for tensor in (torch.tensor(made), torch.as_tensor(made), torch.LongTensor(made)):
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == plain
    weights = 1.0 / torch.bincount(torch.tensor(made)).double()
    assert weights[torch.tensor(made)].tolist() == [1 / plain.count(one) for one in plain]
    assert [2.0 in made, 0.5 in made, made.count(2.0), made.count(2**80)] == [True, False, 3, 0]
    assert TargetTable([2**53 + 1]).count(2.0**53) == 0, "it does not round"
    assert changed or made.__array__(copy=False).tolist() == plain
    assert changed or not made.__array__(copy=False).flags.writeable
    with pytest.raises(ValueError, match="without a copy"):
        made.__array__(None if changed else np.float32, copy=False)


def test_the_repr_of_a_long_table_is_short() -> None:
    assert repr(TargetTable(range(1001))) == "[0, 1, 2, … 995 more …, 998, 999, 1000]"
