"""Draws come from the sample's key, in any thread, and leave the global generators as they were."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fastpipe import FastImageFolder, FastLoader
from fastpipe.torch.randomness import (
    KeyedGenerator,
    key_for,
    keyed,
    preserved_generators,
    run_keyed,
    run_seeded,
    take_key,
)

pytestmark = pytest.mark.usefixtures("same_generators")

_T = torch.arange(1.0, 25.0)
_LAST = _T.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
DISTRIBUTIONS = torch.distributions
DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(2, 3),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
    "randn": lambda: torch.randn(20),
    "randint": lambda: torch.randint(1000, (4,)),
    "randint low": lambda: torch.randint(low=5, high=1000, size=(4,)),
    "randperm": lambda: torch.randperm(20),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal tensor": lambda: torch.normal(_T),
    "bernoulli": lambda: torch.bernoulli(_T / 25),
    "multinomial": lambda: torch.multinomial(_T, 5),
    "poisson": lambda: torch.poisson(_T),
    "binomial": lambda: torch.binomial(_T, _T / 30),
    "gamma": lambda: torch._standard_gamma(_T),
    "dirichlet": lambda: torch._sample_dirichlet(_T),
    "rand_like": lambda: torch.rand_like(_T),
    "rand_like options": lambda: torch.rand_like(_T, dtype=torch.float64, requires_grad=True),
    "randn_like strided": lambda: torch.randn_like(_LAST),
    "rand_like named": lambda: torch.rand_like(input=_T),
    "randint_like": lambda: torch.randint_like(_T, 1000),
    "randint_like low": lambda: torch.randint_like(_T, 100, 1000),
    "randint_like named": lambda: torch.randint_like(_T, low=100, high=1000),
    "randint_like high": lambda: torch.randint_like(_T, high=1000, dtype=torch.int64),
    "uniform_": lambda: torch.empty(3).uniform_(2, 3),
    "normal_": lambda: torch.empty(3).normal_(),
    "random_": lambda: torch.empty(3).random_(),
    "bernoulli_": lambda: torch.empty(50).bernoulli_(0.5),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "geometric_": lambda: torch.empty(50).geometric_(0.1),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "method bernoulli": lambda: (_T / 25).bernoulli(),
    "method multinomial": lambda: _T.multinomial(5),
    "Beta": lambda: DISTRIBUTIONS.Beta(2.0, 3.0).sample((9,)),  # type: ignore[no-untyped-call]
    "Categorical": lambda: DISTRIBUTIONS.Categorical(_T).sample((9,)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_comes_from_the_keys_generator(name: str) -> None:
    draw, state = DRAWS[name], torch.get_rng_state()
    with KeyedGenerator(5):
        first, following = draw(), draw()
    with KeyedGenerator(5):
        again = draw()
    with KeyedGenerator(6):
        other = draw()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, following)
    with preserved_generators():
        torch.default_generator.manual_seed(5)
        stock = draw()
    assert torch.equal(stock, first)
    assert (stock.requires_grad, stock.stride()) == (first.requires_grad, first.stride())
    assert torch.equal(torch.get_rng_state(), state)


def _seeded(seed: int, kind: str = "cpu") -> torch.Generator:
    return torch.Generator(kind).manual_seed(seed)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_with_and_without_its_number_is_one(kind: str) -> None:
    with KeyedGenerator(7):
        both = torch.cat([torch.rand(3, device=kind), torch.rand(3, device=f"{kind}:0")])
        assert torch.rand(3, device="meta").device.type == "meta"
        assert torch.rand_like(torch.empty(3, device="meta")).shape == (3,)
    expected = _seeded(7, kind)
    assert torch.equal(both[:3], torch.rand(3, device=kind, generator=expected))
    assert torch.equal(both[3:], torch.rand(3, device=kind, generator=expected))


def test_a_named_generator_is_used() -> None:
    def draws() -> list[torch.Tensor]:
        filled = torch.empty(3).normal_(generator=_seeded(99))
        return [torch.rand(3, generator=_seeded(99)), torch.poisson(_T, _seeded(99)), filled]

    expected = draws()
    with KeyedGenerator(5):
        assert all(map(torch.equal, draws(), expected))
        unnamed = torch.rand(3, generator=None)
    assert torch.equal(unnamed, torch.rand(3, generator=_seeded(5)))


@pytest.mark.parametrize("run", [run_keyed, run_seeded])
def test_any_integer_is_a_seed(run: Callable[..., Any]) -> None:
    draw = [lambda size: torch.rand(size)]
    assert torch.equal(run(draw, 3, -1), run(draw, 3, 2**64 - 1))
    assert torch.equal(run(draw, 3, 2**64 + 5), run(draw, 3, 5))
    assert not torch.equal(run(draw, 3, 5), run(draw, 3, 6))
    assert run([], "value", 0) == "value"


def _everything(_: Any) -> list[float]:
    drawn = [random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.normal()]
    return [*drawn, torch.rand(()).item()]


def _states() -> Any:
    numpy_state = tuple(np.asarray(part).tolist() for part in np.random.get_state())
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state


def test_run_seeded_restores_everything() -> None:
    random.gauss(0, 1), np.random.normal()  # leaves half of a pair in each
    before = _states()
    first = run_seeded([_everything], None, 12)
    assert _states() == before
    assert run_seeded([_everything], None, 12) == first != run_seeded([_everything], None, 13)
    assert len(set(first)) == len(first)

    def fail(_: Any) -> None:
        random.seed(1), np.random.seed(1), torch.default_generator.manual_seed(1)
        raise RuntimeError("as transforms do")

    with pytest.raises(RuntimeError, match="as transforms do"):
        run_seeded([_everything, fail], None, 12)
    assert _states() == before


def test_python_numpy_and_torch_do_not_draw_the_same_numbers() -> None:
    draws = np.array([run_seeded([_everything], None, seed) for seed in range(500)])[:, [0, 2, 4]]
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.2
    assert np.unique(draws.round(6)).size > 1450


def test_samples_take_the_draws_of_their_threads_key_in_order() -> None:
    with pytest.raises(KeyError), keyed(key_for(7, 3, 10, 4)):
        first, is_keyed = take_key(1)
        assert (first.seed, first.epoch, first.draws.tolist(), is_keyed) == (7, 3, [10], True)
        with keyed(key_for(2, 0, 100, 5)):
            assert take_key(1)[0].draws.tolist() == [100]
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(take_key, 1).result()[1], "another thread has none"
        rest, is_keyed = take_key(3)
        assert (rest.draws.tolist(), is_keyed) == ([11, 12, 13], True)
        assert not take_key(1)[1], "there are no more"
        raise KeyError
    assert not take_key(1)[1]


def test_without_a_key_the_seed_is_drawn_from_torchs_generator_when_it_is_needed() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):  # whatever the default device is
        key, _ = take_key(3)
        assert torch.equal(before, torch.get_rng_state())
        seeds = [key.seed, key.seed, take_key(3)[0].seed]
    assert not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    assert [take_key(3)[0].seed for _ in range(2)] == seeds[1:]
    assert seeds[0] == seeds[1] != seeds[2] and key.draws.tolist() == [0, 1, 2]


@pytest.mark.skipif(
    not any(library["user_api"] == "openmp" for library in threadpool_info()),
    reason="install a torch that splits operations by OpenMP, as the wheels for Linux do",
)
def test_transforms_in_decoding_threads_run_without_helpers(photo_tree: Path) -> None:
    seen: dict[str, int] = {}

    def transform(image: Any) -> torch.Tensor:
        torch.rand(512, 512).exp_()  # torch's own setting up, at the first operation, does not undo it
        seen[threading.current_thread().name] = torch.get_num_threads()
        return torch.zeros(1)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for safe in (True, False):
            list(FastLoader(FastImageFolder(photo_tree, transform, thread_safe=safe, threads=2), 4))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen.pop(threading.current_thread().name) == 3
    assert set(seen.values()) == {1}
