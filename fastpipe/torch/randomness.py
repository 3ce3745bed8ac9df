"""Sources of random numbers: the keys of batches, and generators that are left unchanged or restored.

A sample's random numbers depend on its key, not on the thread or the time.  `run_keyed` runs transforms that
draw only through torch with the numbers of a seed, in any thread; `run_seeded` runs any callable, in one
thread at a time.  Both give the numbers that it would draw after ``torch.manual_seed(seed)``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fastpipe.core.keys import sample_seed
from fastpipe.core.types import Key

Transform = Callable[[Any], Any]

_SEED_LIMIT = 1 << 64


class KeyedGenerator(TorchFunctionMode):
    """A mode in which torch's random draws in this thread come from a separate generator.

    A draw with an explicit generator keeps it; one on a GPU gets a generator there, with the same seed.  Not
    covered: Python's ``random``, NumPy, ``torch.ops``, and draws inside functions that torch hides from modes
    (``nn.functional.dropout`` and its variants, ``gumbel_softmax``, ``rrelu``, ``nn.init``).

    ``seed`` is any integer, taken modulo 2**64, or a function that returns one at the first draw.
    """

    def __init__(self, seed: int | Callable[[], int]) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[tuple[str, int], torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if any(isinstance(arg, torch.Generator) for arg in args):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        kwargs = {**kwargs, "generator": self._generator(device)}
        return _LIKE[func](*args, **kwargs) if func in _LIKE else func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        index = 0
        if device.type != "cpu":  # without a number it is the current one
            index = torch.empty(0, device=device).device.index if device.index is None else device.index
        key = device.type, index or 0
        if key not in self._generators:
            seed = self._seed() if callable(self._seed) else self._seed
            self._generators[key] = torch.Generator(device).manual_seed(seed % _SEED_LIMIT)
        return self._generators[key]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of a call's draws: its ``device``, else its first tensor's, else the default."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.get_default_device()


def _fill_like(fill: Callable[..., torch.Tensor], input: torch.Tensor, **options: Any) -> torch.Tensor:
    """Do what ``rand_like`` and its variants do, which accept a generator only in newer versions of torch."""
    generator = options.pop("generator")
    requires_grad = options.pop("requires_grad", False)
    filled = fill(torch.empty_like(input, **options), generator=generator)
    return filled.requires_grad_() if requires_grad else filled


def _randint_like(input: torch.Tensor, *bounds: int, **options: Any) -> torch.Tensor:
    named = (options.pop(name) for name in ("low", "high") if name in options)
    low, high = (0, *bounds, *named)[-2:]
    return _fill_like(partial(torch.Tensor.random_, **{"from": low, "to": high}), input, **options)


_LIKE: dict[Any, Callable[..., torch.Tensor]] = {
    torch.rand_like: partial(_fill_like, torch.Tensor.uniform_),
    torch.randn_like: partial(_fill_like, torch.Tensor.normal_),
    torch.randint_like: _randint_like,
}

_FUNCTIONS = """
    rand randn randint randperm normal bernoulli multinomial poisson binomial
    _standard_gamma _sample_dirichlet
"""
_METHODS = """
    uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_
    bernoulli multinomial
"""
_DRAWS = frozenset(
    {
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *_LIKE,
    }
)


def run_keyed(transforms: Sequence[Transform], value: Any, seed: int | Callable[[], int]) -> Any:
    """Apply transforms in order, with draws through torch from ``seed`` alone; works in any thread."""
    with KeyedGenerator(seed):
        for transform in transforms:
            value = transform(value)
    return value


def run_seeded(transforms: Sequence[Transform], value: Any, seed: int) -> Any:
    """Apply any transforms in order, with the global generators (torch's on the CPU, Python's, NumPy's)
    seeded, and restored afterwards; no other thread draws meanwhile.  It costs about 0.1 ms."""
    with preserved_generators():
        seed_generators(seed)
        for transform in transforms:
            value = transform(value)
    return value


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of torch (CPU), Python and NumPy after the block."""
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy from one integer, taken modulo 2**64.

    Only torch gets the seed itself: Python and NumPy would draw the very same numbers from one seed.
    """
    torch.default_generator.manual_seed(seed % _SEED_LIMIT)
    random.seed(sample_seed(seed, 0, 0))
    words = sample_seed(seed, 0, 1)
    np.random.seed([words & 0xFFFF_FFFF, words >> 32])


# ---- keys --------------------------------------------------------------------------------------------
#
# A wrapper such as ``Subset`` rebuilds plain indices, so indices cannot carry a key: the fetching thread
# stores it here, and the dataset at the end of the chain takes one draw for each requested sample.
# Without a loader's key, a seed comes from torch's global generator when the first sample draws, as
# the numbers of torch's own transforms do; if nothing is drawn, that generator stays unchanged.


class _Current(threading.local):
    key: Key | None = None
    used: int = 0


_current = _Current()


@contextmanager
def keyed(key: Key) -> Iterator[None]:
    """Let ``take_key`` in this thread take from ``key`` within the block."""
    before = _current.key, _current.used
    _current.key, _current.used = key, 0
    try:
        yield
    finally:
        _current.key, _current.used = before


class _DrawnKey(Key):
    """A key whose seed is drawn from torch's global generator at its first use, in any thread."""

    _drawn: int | None = None

    def __init__(self, *_: object) -> None:
        self._lock = threading.Lock()  # for each key: a child that is forked meanwhile has other keys

    @property
    def seed(self) -> int:
        with self._lock:
            if self._drawn is None:
                # Always on the CPU, whose generator is the script's, whatever the default device is.
                drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), 2**63 - 1)
                self._drawn = int(drawn.item())
            return self._drawn


def take_key(count: int) -> tuple[Key, bool]:
    """Return the key for the next ``count`` samples of this thread, and whether a loader set it.  Without a
    loader's key, or if it has no draws left, the seed is drawn at its first use."""
    key = _current.key
    if key is not None and _current.used + count <= len(key.draws):
        draws = key.draws[_current.used : _current.used + count]
        _current.used += count
        return Key(key.seed, key.epoch, draws), True
    return _DrawnKey(0, 0, np.arange(count, dtype=np.int64)), False


def key_for(seed: int, epoch: int, first: int, count: int, step: int = 1) -> Key:
    """Return the key of ``count`` samples, every ``step``-th of the epoch's order from ``first`` on."""
    return Key(seed, epoch, np.arange(first, first + step * count, step, dtype=np.int64))
