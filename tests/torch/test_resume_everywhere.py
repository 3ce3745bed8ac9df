"""A run that is stopped and resumed trains on the samples of a run that was never stopped.

One contract, ``same_as_never_stopped``, for each loader, each way in which trainers resume and each place
where a checkpoint is taken.  A new process is a new call of ``make`` behind the seeds that a script sets
first.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams import Rounds, plain, stream
from torch.utils import data
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import OptionError
from fastpipe.torch import accelerate as accelerated

pytestmark = pytest.mark.usefixtures("same_generators")

EPOCHS, SAMPLES, SIZE = 3, 11, 3
BATCHES = 4
Make = Callable[[], Any]
Stop = tuple[int, Any]

# An epoch, and what was the last thing in it: an iterator was asked for, a batch was received (the fourth is
# the last one, and its successor was not asked for), the epoch's loop was left.
STOPS: list[Stop] = [(epoch, where) for epoch in (0, 1) for where in ("iter", 1, 2, BATCHES, "over")]


def begin_process() -> None:
    """What a script does first."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def train(
    make: Make, stop: Stop | None = None, state: Any = None, first: int = 0, *, sets_epoch: bool = False
) -> tuple[list[Any], Any]:
    """The batches of a script's epochs, up to a checkpoint, and that."""
    begin_process()
    loader, seen = make(), []
    if state is not None:
        loader.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        if sets_epoch:
            loader.set_epoch(epoch)
        batches: Iterable[Any] = enumerate(iter(loader), 1)
        for where, batch in chain([("iter", None)], batches, [("over", None)]):
            seen += [] if batch is None else [plain(batch)]
            if stop == (epoch, where):
                return seen, saved(loader)
    return seen, None


def same_as_never_stopped(
    make: Make, stops: Iterable[Stop | list[Stop]] = STOPS, again: Make | None = None, **options: Any
) -> None:
    """Stop at each of these; at those of a list one after the other, counted from where a run resumes."""
    whole, _ = train(make, **options)
    for one in stops:
        seen: list[Any] = []
        state, first, made = None, 0, make
        for stop in [*(one if isinstance(one, list) else [one]), None]:
            more, state = train(made, stop, state, first, **options)
            seen += more
            if stop is not None:
                first, made = stop[0] + (stop[1] == "over"), again or make
        assert seen == whole, f"stopped at {one}"


DATA = list(range(SAMPLES))
EVEN = list(range(SIZE * BATCHES))


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(data: Any = DATA, **options: Any) -> FastLoader[Any]:
    return FastLoader(data, SIZE, **options)


def shared(sampler: Callable[[torch.Generator], Any], **options: Any) -> FastLoader[Any]:
    """A loader with its sampler's generator, as ``shuffle=True`` makes it."""
    generator = seeded()
    return loader(sampler=sampler(generator), generator=generator, **options)


LOADERS: dict[str, Callable[..., FastLoader[Any]]] = {
    "seed": lambda d=DATA, **o: loader(d, shuffle=True, seed=2, **o),
    "in order": lambda d=DATA, **o: loader(d, **o),
    "shuffle": lambda d=DATA, **o: loader(d, shuffle=True, **o),
    "shuffle, drop_last": lambda **o: loader(range(14), shuffle=True, drop_last=True, **o),
    "shuffle, generator": lambda d=DATA, **o: loader(d, shuffle=True, generator=seeded(), **o),
    "RandomSampler": lambda **o: loader(sampler=RandomSampler(DATA), **o),
    "shared generator": lambda d=DATA, **o: shared(lambda g: RandomSampler(DATA, generator=g), data=d, **o),
    "the sampler's generator": lambda **o: loader(sampler=RandomSampler(DATA, generator=seeded()), **o),
    "the loader's generator": lambda **o: loader(sampler=RandomSampler(DATA), generator=seeded(), **o),
    "two generators": lambda d=DATA, **o: loader(
        d, sampler=RandomSampler(DATA, generator=seeded()), generator=seeded(6), **o
    ),
    "replacement": lambda d=DATA, **o: shared(lambda g: RandomSampler(DATA, True, SAMPLES, generator=g), data=d, **o),
    # More than the 32 that it draws at once.
    "replacement, long": lambda d=DATA, **o: FastLoader(
        d, 12, sampler=RandomSampler(DATA, True, 47, generator=seeded()), **o
    ),
    "several rounds": lambda **o: FastLoader(
        DATA, 12, sampler=RandomSampler(DATA, num_samples=47, generator=seeded()), **o
    ),
    "weighted": lambda **o: shared(
        lambda g: data.WeightedRandomSampler(range(1, SAMPLES + 1), SAMPLES, generator=g), **o
    ),
    "weighted, global": lambda **o: loader(sampler=data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **o),
    "subset": lambda **o: shared(lambda g: data.SubsetRandomSampler(EVEN[:SAMPLES], g), **o),
    "sampler, seed": lambda **o: loader(sampler=RandomSampler(DATA, generator=seeded()), seed=2, **o),
    "distributed": lambda **o: loader(range(21), sampler=data.DistributedSampler(range(21), 2, 1), **o),
    "own sampler": lambda **o: loader(sampler=Rounds(), **o),
    "own sampler, generator": lambda d=DATA, **o: loader(d, sampler=Rounds(), generator=seeded(), **o),
    "batch sampler": lambda **o: FastLoader(
        DATA, batch_sampler=data.BatchSampler(RandomSampler(DATA, generator=seeded()), SIZE, False), **o
    ),
    "batches": lambda **o: FastLoader(DATA, batch_sampler=[[1, 2], [3], [8, 9, 9], [0]], **o),
    "no batches": lambda **o: FastLoader(EVEN[:BATCHES], None, shuffle=True, generator=seeded(), **o),
}  # fmt: skip


def begun(name: str, state: Any = None) -> FastLoader[Any]:
    """A loader in a new process."""
    begin_process()
    made = LOADERS[name]()
    if state is not None:
        made.load_state_dict(state)
    return made


TWICE: list[Stop | list[Stop]] = [
    [(0, 1), (0, 2)], [(0, 2), (0, "over")], [(0, "iter"), (0, "iter"), (1, 1)], [(0, "over"), (1, "iter")],
    [(0, "over"), (1, 3), (1, 1), (1, "over")], [(1, BATCHES), (1, "over")],
]  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_without_workers_is_as_never_stopped(name: str) -> None:
    same_as_never_stopped(LOADERS[name], [*STOPS, *TWICE])


@pytest.mark.parametrize("name", ["shuffle, generator", "replacement, long", "own sampler", "shuffle"])
def test_a_copy_of_a_resumed_loader_goes_on_as_well(name: str) -> None:
    for stop in STOPS:
        whole, _ = train(LOADERS[name])
        before, state = train(LOADERS[name], stop)
        resumed = begun(name, state)
        assert saved(resumed) == state, "it is the state that was loaded"
        drawn = torch.get_rng_state()
        for each in (copy.deepcopy(resumed), pickle.loads(pickle.dumps(resumed)), resumed):
            torch.set_rng_state(drawn)
            rest = [plain(batch) for _ in range(stop[0] + (stop[1] == "over"), EPOCHS) for batch in each]
            assert before + rest == whole, stop


@pytest.mark.parametrize("name", ["shuffle, generator", "replacement, long", "shuffle"])
def test_a_copy_within_an_epoch_has_its_state(name: str) -> None:
    whole = begun(name)
    for _ in islice(whole, 2):
        for each in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
            assert each.state_dict() == whole.state_dict()


@pytest.mark.parametrize("name", ["seed", "shuffle", "shared generator", "distributed"])
def test_scripts_may_set_the_epoch(name: str) -> None:
    same_as_never_stopped(LOADERS[name], sets_epoch=True)


FEW: list[Stop] = [(0, 2), (0, "over"), (1, "iter"), (1, BATCHES), (1, "over")]


@pytest.mark.few(1)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "name", ["seed", "shuffle", "shared generator", "two generators", "replacement", "own sampler"]
)
def test_a_resumed_run_with_workers_is_as_never_stopped(name: str, workers: int, persistent: bool) -> None:
    same_as_never_stopped(lambda: LOADERS[name](num_workers=workers, persistent_workers=persistent), FEW)


CROP = v1.Compose([v1.RandomResizedCrop(8), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.mark.few(3)
@pytest.mark.parametrize("ahead", [0, 1, 9])
@pytest.mark.parametrize(
    "name",
    ["seed", "shuffle", "shuffle, generator", "two generators", "replacement", "own sampler, generator"],
)
def test_batches_made_ahead_are_not_counted(eleven: Path, name: str, ahead: int) -> None:
    """Also with what augmentation makes of the samples."""
    dataset = FastImageFolder(eleven, CROP, threads=2)
    same_as_never_stopped(lambda: LOADERS[name](dataset, prefetch_batches=ahead))
    if name == "shuffle, generator":
        options = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
        stock = lambda: DataLoader(ImageFolder(eleven, CROP), SIZE, generator=seeded(), **options)  # noqa: E731
        same_as_never_stopped(lambda: accelerated(stock()), FEW)


def test_a_run_may_go_on_with_another_number_of_workers(eleven: Path) -> None:
    def make(workers: int) -> Make:
        return lambda: LOADERS["shuffle, generator"](FastImageFolder(eleven, CROP), num_workers=workers)

    # A state holds what was asked for ahead, also where a later run asks for less ahead, and is stopped too.
    twice: list[Stop] = [(0, 1), (0, 1)]
    same_as_never_stopped(make(2), [*FEW[:3], twice], again=make(0))
    same_as_never_stopped(make(2), [twice], again=make(1))
    same_as_never_stopped(make(0), FEW[:3], again=make(1))


@pytest.mark.parametrize("name", ["shuffle", "weighted, global"])
def test_a_model_may_draw_from_torchs_generator(name: str) -> None:
    """Dropout: what the script draws is the same as well, and so are the orders behind it."""

    class Drawing:
        def __init__(self) -> None:
            self.loader = LOADERS[name]()
            self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

        def __iter__(self) -> Iterator[Any]:
            return ([batch, torch.rand(2)] for batch in iter(self.loader))

    same_as_never_stopped(Drawing)


@pytest.mark.parametrize("is_parts", [False, True])
def test_a_validation_loader_may_draw_from_the_same_generator(is_parts: bool) -> None:
    """Also within an epoch, as ``val_check_interval`` asks for."""

    class Both:
        def __init__(self) -> None:
            generator = seeded()
            # Of many it draws 32, and when these are taken, after the validation, the next.
            sampler = RandomSampler(DATA, is_parts, 47 if is_parts else None, generator)
            self.loader = FastLoader(DATA, 12 if is_parts else SIZE, sampler=sampler)
            self.other = FastLoader(DATA, 4, shuffle=True, generator=generator)
            self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

        def __iter__(self) -> Iterator[Any]:
            for batch in self.loader:
                yield [batch, *self.other]

    places = (1, 2, "over") if is_parts else (1, 2, 3, "over")
    same_as_never_stopped(Both, [(epoch, where) for epoch in (0, 1) for where in places])
    if is_parts:
        with pytest.raises(OptionError, match="give the sampler a generator of its own"):
            train(Both, (1, 3))


def test_the_state_of_a_broken_off_epoch_is_its_place() -> None:
    """The state is where it broke off; the number of the next epoch begins that one instead."""
    for name in ("seed", "shuffle", "shared generator", "replacement, long", "own sampler"):
        first = begun(name)
        batches = stream(islice(first, 2))
        state = saved(first)
        following = stream(first)
        assert batches + stream(begun(name, state)) == stream(begun(name))
        if name != "own sampler":  # which has no numbers of epochs
            third = begun(name, state)
            third.set_epoch(1)
            assert stream(third) == following, name


def test_states_of_other_generators_are_refused() -> None:
    for name in (names := ["shuffle", "shuffle, generator", "distributed"]):
        for stop in ((0, 1), (0, "over")):
            _, state = train(LOADERS[name], stop)
            for other in names:
                again = LOADERS[other]()
                fitting = {**state, "samples": len(again.dataset)}  # type: ignore[arg-type]
                if name == other:
                    again.load_state_dict(fitting)
                else:
                    with pytest.raises(OptionError, match="belongs to a loader whose order was drawn"):
                        again.load_state_dict(fitting)


@pytest.mark.parametrize("name", ["shuffle", "shared generator", "replacement, long", "own sampler", "seed"])
def test_states_of_older_versions_are_read(name: str) -> None:
    """They held the sampler's generator within an epoch only."""
    whole, _ = train(LOADERS[name])
    for stop in STOPS:
        before, state = train(LOADERS[name], stop)
        older = {key: value for key, value in state.items() if key not in ("asked", "now", "global", "seeds")}
        if state.get("generator") is None and name not in ("seed", "own sampler"):
            with pytest.raises(OptionError, match="between two epochs by an older fastpipe"):
                LOADERS[name]().load_state_dict(older)
            continue
        left = -len(before) % BATCHES
        assert stream(islice(begun(name, older), left)) == whole[len(before) : len(before) + left]


def test_a_run_that_begins_later_needs_a_seed() -> None:
    def third_epoch(name: str) -> list[Any]:
        late = begun(name)
        late.set_epoch(2)
        return stream(late)

    for name in ("seed", "in order", "distributed"):
        assert third_epoch(name) == train(LOADERS[name], sets_epoch=True)[0][-BATCHES:]
    for name in ("shuffle", "shuffle, generator"):
        with pytest.warns(UserWarning, match="begins with epoch 2, but the loader has no seed"):
            third_epoch(name)
