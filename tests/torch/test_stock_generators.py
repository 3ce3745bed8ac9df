from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from fastpipe.torch.randomness import (
    KeyedGenerator,
    preserved_generators,
    run_keyed,
    run_seeded,
    seed_generators,
)

_T = torch.arange(1.0, 25.0)


def _sampled(distribution: Any) -> torch.Tensor:
    drawn: torch.Tensor = distribution.sample((9,))
    return drawn


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
    "randn_like": lambda: torch.randn_like(_T),
    "randn_like strided": lambda: torch.randn_like(
        _T.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
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
    "Beta": lambda: _sampled(torch.distributions.Beta(2.0, 3.0)),
    "Normal": lambda: _sampled(torch.distributions.Normal(0.0, 1.0)),
    "Uniform": lambda: _sampled(torch.distributions.Uniform(0.0, 1.0)),
    "Categorical": lambda: _sampled(torch.distributions.Categorical(_T)),
    "Exponential": lambda: _sampled(torch.distributions.Exponential(1.0)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_comes_from_the_sample_s_generator(name: str) -> None:
    state = torch.get_rng_state()
    with KeyedGenerator(5):
        first, following = DRAWS[name](), DRAWS[name]()
    with KeyedGenerator(5):
        again = DRAWS[name]()
    with KeyedGenerator(6):
        other = DRAWS[name]()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, following)
    with preserved_generators():
        torch.default_generator.manual_seed(5)
        assert torch.equal(DRAWS[name](), first)
        assert DRAWS[name]().requires_grad == first.requires_grad
        assert DRAWS[name]().stride() == first.stride()


@pytest.mark.parametrize(
    "kind",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def test_a_device_with_and_without_its_number_is_one(kind: str) -> None:
    with KeyedGenerator(7):
        both = torch.cat([torch.rand(3, device=kind), torch.rand(3, device=f"{kind}:0")])
    expected = torch.Generator(kind).manual_seed(7)
    assert torch.equal(both[:3], torch.rand(3, device=kind, generator=expected))
    assert torch.equal(both[3:], torch.rand(3, device=kind, generator=expected))


def test_a_generator_that_is_named_is_kept() -> None:
    def mine() -> torch.Generator:
        return torch.Generator().manual_seed(99)

    expected = torch.rand(3, generator=mine()), torch.poisson(_T, mine()), torch.randn(3, generator=mine())
    with KeyedGenerator(5):
        got = (
            torch.rand(3, generator=mine()),
            torch.poisson(_T, mine()),
            torch.empty(3).normal_(generator=mine()),
        )
        unnamed = torch.rand(3, generator=None)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(unnamed, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_modes_nest_and_end() -> None:
    with KeyedGenerator(1):
        outer = torch.rand(2)
        with KeyedGenerator(2):
            inner = torch.rand(2)
        following = torch.rand(2)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(
        torch.cat([outer, following]), torch.cat([torch.rand(2, generator=generator) for _ in "ab"])
    )
    assert torch.equal(inner, torch.rand(2, generator=torch.Generator().manual_seed(2)))
    with pytest.raises(ZeroDivisionError):
        run_keyed([lambda value: value / 0], 1, 3)
    with preserved_generators():
        torch.default_generator.manual_seed(4)
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(4)))


def test_shapes_without_memory_draw_nothing() -> None:
    with KeyedGenerator(1):
        assert torch.rand(3, device="meta").device.type == "meta"
        assert torch.rand_like(torch.empty(3, device="meta")).shape == (3,)


@pytest.mark.parametrize("run", [run_keyed, run_seeded])
def test_any_integer_is_a_seed(run: Callable[..., Any]) -> None:
    draw = [lambda size: torch.rand(size)]
    assert torch.equal(run(draw, 3, -1), run(draw, 3, 2**64 - 1))
    assert torch.equal(run(draw, 3, 2**64 + 5), run(draw, 3, 5))
    assert not torch.equal(run(draw, 3, 5), run(draw, 3, 6))
    assert run([], "value", 0) == "value"


def _everything(_: Any) -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        np.random.normal(),
        torch.rand(()).item(),
    ]


def _states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        tuple(np.asarray(part).tolist() for part in numpy_state),
    )


def test_run_seeded_restores_everything() -> None:
    random.gauss(0, 1), np.random.normal()  # leaves half of a pair in each
    before = _states()
    first = run_seeded([_everything], None, 12)
    assert _states() == before
    assert run_seeded([_everything], None, 12) == first
    assert run_seeded([_everything], None, 13) != first

    def fail(_: Any) -> None:
        _everything(None)
        random.seed(1), np.random.seed(1), torch.default_generator.manual_seed(1)
        raise RuntimeError("as transforms do")

    with pytest.raises(RuntimeError, match="as transforms do"):
        run_seeded([_everything, fail], None, 12)
    assert _states() == before
    assert len(set(first)) == len(first)


def test_python_numpy_and_torch_do_not_draw_the_same_numbers() -> None:
    draws = np.array([run_seeded([_everything], None, seed) for seed in range(500)])[:, [0, 2, 4]]
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.2
    assert np.unique(draws.round(6)).size > 1450


def test_many_samples_may_be_seeded_with_one_restore() -> None:
    before = _states()
    expected = [run_seeded([_everything], None, seed) for seed in range(5)]
    with preserved_generators():
        for seed in (3, 0, 4):
            seed_generators(seed)
            assert _everything(None) == expected[seed]
    assert _states() == before


_SCRIPT = """
import random, numpy as np, torch
from fastpipe.torch.randomness import run_seeded, run_keyed
from torchvision.transforms import v2
draw = lambda _: [random.random(), float(np.random.rand()), torch.rand(()).item()]
print([run_seeded([draw], None, seed) for seed in (7, 3)])
print(run_keyed([v2.RandomRotation(30)], torch.arange(16.).reshape(1, 4, 4), 2**63 + 5).tolist())
"""


@pytest.mark.slow
def test_another_thread_or_process_in_another_order_gives_the_same() -> None:
    def draw(_: Any) -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    here = {seed: run_seeded([draw], None, seed) for seed in (3, 7)}
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_seeded, [draw], None, 7).result() == here[7]
    rotated = run_keyed([v2.RandomRotation(30)], torch.arange(16.0).reshape(1, 4, 4), 2**63 + 5)
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str([here[7], here[3]]), str(rotated.tolist())]
