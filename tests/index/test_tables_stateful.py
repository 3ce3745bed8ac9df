"""Random sequences of list operations, done to a table and to a list."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastpipe.core.sample_tables import FrozenSamples, FrozenTargets, SampleTable, TargetTable

# All strings Python has: lone surrogates are what os.fsdecode makes of odd bytes.
paths = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
targets = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
samples = st.tuples(paths, targets)
few_samples = st.tuples(st.sampled_from("ab"), st.integers(0, 2))
indices = st.integers(-12, 12)
bounds = st.none() | indices
slices = st.builds(slice, bounds, bounds, st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3]))


def is_frozen(table: SampleTable | TargetTable) -> bool:
    return isinstance(table._data, (FrozenSamples, FrozenTargets))


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns (tables as lists), or the type of what it raises."""
    try:
        result = function()
    except (IndexError, ValueError, TypeError) as error:
        return type(error)
    return list(result) if isinstance(result, (SampleTable, TargetTable)) else result


class Machine(RuleBasedStateMachine):
    """Does the same to a table and to a list and compares what comes of it."""

    kind: type[SampleTable | TargetTable]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.list: Any = data.draw(self.many())
        self.table: Any = self.kind(self.list)
        assert is_frozen(self.table)

    @classmethod
    def one(cls) -> st.SearchStrategy[Any]:
        return (samples | few_samples) if cls.kind is SampleTable else targets

    @classmethod
    def many(cls) -> st.SearchStrategy[list[Any]]:
        return st.lists(cls.one(), max_size=8)

    def same(self, change: Callable[[Any], Any]) -> None:
        assert outcome(lambda: change(self.table)) == outcome(lambda: change(self.list))

    @rule(data=st.data(), index=indices)
    def set_item(self, data: st.DataObject, index: int) -> None:
        value = data.draw(self.one())
        self.same(lambda x: x.__setitem__(index, value))

    @rule(data=st.data(), where=slices)
    def set_slice(self, data: st.DataObject, where: slice) -> None:
        values = data.draw(self.many())
        self.same(lambda x: x.__setitem__(where, values))

    @rule(where=slices)
    def set_slice_to_itself(self, where: slice) -> None:
        self.same(lambda x: x.__setitem__(where, x))

    @rule(where=indices | slices)
    def delete(self, where: int | slice) -> None:
        self.same(lambda x: x.__delitem__(where))

    @rule(data=st.data(), index=indices)
    def insert(self, data: st.DataObject, index: int) -> None:
        value = data.draw(self.one())
        self.same(lambda x: x.insert(index, value))

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        value = data.draw(self.one())
        self.same(lambda x: x.append(value))

    @rule(data=st.data(), lazy=st.booleans())
    def extend(self, data: st.DataObject, lazy: bool) -> None:
        values = data.draw(self.many())
        self.same(lambda x: x.extend(iter(values) if lazy else values))

    @rule(data=st.data())
    def add_in_place(self, data: st.DataObject) -> None:
        values = data.draw(self.many())
        self.table += values
        self.list += values

    @rule()
    def halve_and_extend_with_itself(self) -> None:
        self.same(lambda x: x.__delitem__(slice(4, None)))
        self.same(lambda x: x.extend(x))

    @rule(times=st.integers(-1, 2))
    def multiply_in_place(self, times: int) -> None:
        self.same(lambda x: x.__delitem__(slice(4, None)))
        self.table *= times
        self.list *= times

    @rule(index=st.none() | indices)
    def pop(self, index: int | None) -> None:
        self.same(lambda x: x.pop() if index is None else x.pop(index))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        value = data.draw(self.one() if not self.list else st.sampled_from(self.list) | self.one())
        self.same(lambda x: x.remove(value))

    @rule()
    def clear(self) -> None:
        self.same(lambda x: x.clear())

    @rule(reverse=st.booleans(), key=st.sampled_from([None, str, repr]))
    def sort(self, reverse: bool, key: Any) -> None:
        self.same(lambda x: x.sort(key=key, reverse=reverse))

    @rule()
    def reverse(self) -> None:
        self.same(lambda x: x.reverse())

    @rule()
    def freeze(self) -> None:
        self.table = self.kind(list(self.table))
        assert is_frozen(self.table)

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda t: t.copy(), lambda t: type(t)(t)]))
    def go_on_with_a_copy(self, how: Callable[[Any], Any]) -> None:
        old, before = self.table, list(self.table)
        self.table = how(old)
        assert type(self.table) is self.kind
        new: Any = ("a", 1) if self.kind is SampleTable else 1
        self.table.append(new)
        assert list(old) == before
        self.table.pop()

    @rule(protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
    def go_on_with_a_pickle(self, protocol: int) -> None:
        frozen = is_frozen(self.table)
        self.table = pickle.loads(pickle.dumps(self.table, protocol))
        assert is_frozen(self.table) == frozen

    @rule(where=slices)
    def read_slice(self, where: slice) -> None:
        assert type(self.table[where]) is list
        assert self.table[where] == self.list[where]

    @rule(index=indices)
    def read_item(self, index: int) -> None:
        self.same(lambda x: x[index])
        self.same(lambda x: x[np.int32(index)])

    @rule(data=st.data(), start=indices, stop=indices)
    def search(self, data: st.DataObject, start: int, stop: int) -> None:
        value = data.draw(self.one() if not self.list else st.sampled_from(self.list) | self.one())
        self.same(lambda x: x.index(value))
        self.same(lambda x: x.index(value, start, stop))
        self.same(lambda x: x.count(value))
        self.same(lambda x: value in x)

    @rule(data=st.data())
    def combine(self, data: st.DataObject) -> None:
        values = data.draw(self.many())
        changes: list[Callable[[Any], Any]] = [
            lambda x: x + values,
            lambda x: values + x,
            lambda x: x * 2,
            lambda x: 2 * x,
        ]
        for change in changes:
            assert type(change(self.table)) is list
            assert change(self.table) == change(self.list)
        assert self.table + self.table == self.list + self.list

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.list)
        assert bool(self.table) == bool(self.list)
        assert list(self.table) == self.list
        assert list(reversed(self.table)) == self.list[::-1]
        assert self.table == self.list
        assert self.list == self.table
        assert self.table == self.kind(self.list)
        assert self.table != [*self.list, 0]
        assert repr(self.table) == repr(self.list)


class SampleMachine(Machine):
    kind = SampleTable

    @invariant()
    def columns_equal(self) -> None:
        if hasattr(self, "table"):
            everything = range(-len(self.list), len(self.list))
            assert [self.table.path(i) for i in everything] == [path for path, _ in self.list] * 2
            assert [self.table.target(i) for i in everything] == [target for _, target in self.list] * 2
            array = self.table.targets_array()
            assert array.dtype == np.int64
            assert array.tolist() == [target for _, target in self.list]


class TargetMachine(Machine):
    kind = TargetTable

    @invariant()
    def array_equals(self) -> None:
        if hasattr(self, "table"):
            assert np.asarray(self.table, dtype=np.int64).tolist() == self.list


TestSampleMachine = SampleMachine.TestCase
TestTargetMachine = TargetMachine.TestCase
TestSampleMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTargetMachine.settings = TestSampleMachine.settings
