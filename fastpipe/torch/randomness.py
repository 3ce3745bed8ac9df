"""Where random numbers come from: the keys of batches, and generators that are left alone or put back.

A sample's random numbers depend on its key, not on which thread runs it, or when.  `run_keyed` gives a
transform that draws through torch alone the numbers of a seed, in any thread; `run_seeded` any callable, in
one thread at a time.  Both give the numbers that it would draw after ``torch.manual_seed(seed)``.
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
    """While active, torch's random draws in this thread come from a generator of its own.

    A draw that names its generator keeps it; one on a GPU gets a generator there, seeded alike.  Not covered:
    Python's ``random``, NumPy, ``torch.ops``, and draws inside functions that torch hides from modes
    (``nn.functional.dropout`` and its kind, ``gumbel_softmax``, ``rrelu``, ``nn.init``).

    ``seed`` is any integer, taken modulo 2**64, or a function that gives one when something is drawn.
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
    """Where a call draws: on its ``device``, else that of its first tensor, else the default."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.get_default_device()


def _fill_like(fill: Callable[..., torch.Tensor], input: torch.Tensor, **options: Any) -> torch.Tensor:
    """What ``rand_like`` and its kind do, which take a generator only in newer versions of torch."""
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
    """Apply transforms in order, their draws through torch coming from ``seed`` alone; in any thread."""
    with KeyedGenerator(seed):
        for transform in transforms:
            value = transform(value)
    return value


def run_seeded(transforms: Sequence[Transform], value: Any, seed: int) -> Any:
    """Apply any transforms in order, with the global generators (torch's on the CPU, Python's, NumPy's)
    seeded, and restored afterwards, while no other thread draws.  It costs about 0.1 ms."""
    with preserved_generators():
        seed_generators(seed)
        for transform in transforms:
            value = transform(value)
    return value


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators of torch (CPU), Python and NumPy back as they were found."""
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
# A wrapper such as ``Subset`` rebuilds plain indices, so a key cannot travel with them: it is put here, in
# the thread that fetches, and the dataset at the end of the chain takes as many draws as it is asked for
# samples.  Without a loader's key, a seed comes from torch's global generator when the first sample draws, as
# the numbers of torch's own transforms do; where nothing is drawn, that generator stays as it is.


class _Current(threading.local):
    key: Key | None = None
    used: int = 0


_current = _Current()


@contextmanager
def keyed(key: Key) -> Iterator[None]:
    """Within the block, ``take_key`` in this thread takes from ``key``."""
    before = _current.key, _current.used
    _current.key, _current.used = key, 0
    try:
        yield
    finally:
        _current.key, _current.used = before


class _DrawnKey(Key):
    """A key whose seed is drawn from torch's global generator when it is first asked for, in any thread."""

    _drawn: int | None = None

    def __init__(self, *_: object) -> None:
        self._lock = threading.Lock()  # of its own: a child that is forked meanwhile has other keys

    @property
    def seed(self) -> int:
        with self._lock:
            if self._drawn is None:
                # On the CPU, whatever the default device is: its generator is the script's.
                drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), 2**63 - 1)
                self._drawn = int(drawn.item())
            return self._drawn


def take_key(count: int) -> tuple[Key, bool]:
    """Return the key for the next ``count`` samples of this thread, and whether a loader set it; else, or
    when that has no draws left, its seed is drawn when something first asks for it."""
    key = _current.key
    if key is not None and _current.used + count <= len(key.draws):
        draws = key.draws[_current.used : _current.used + count]
        _current.used += count
        return Key(key.seed, key.epoch, draws), True
    return _DrawnKey(0, 0, np.arange(count, dtype=np.int64)), False


def key_for(seed: int, epoch: int, first: int, count: int, step: int = 1) -> Key:
    """Return the key of ``count`` samples, every ``step``-th of the epoch's order from ``first`` on."""
    return Key(seed, epoch, np.arange(first, first + step * count, step, dtype=np.int64))
