"""Random numbers of samples, and the keys of batches.

A key contains a seed, an epoch and each sample's position in the epoch's order.  A sample's random numbers
depend only on its key, not on the thread or the time.  `run_keyed` runs transforms in any thread, if they
draw random numbers only through torch.  `run_seeded` runs any callables, in one thread at a time.  Both
functions give the random numbers that torch would give after ``torch.manual_seed(seed)``.
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
    """A mode in which torch's random numbers in this thread come from a separate generator.

    A call with an explicit generator keeps this generator.  A call on a GPU uses a generator on this GPU,
    with the same seed.  The mode does not affect Python's ``random``, NumPy and ``torch.ops``.  It also does
    not affect functions that torch hides from modes: ``nn.functional.dropout`` and its variants,
    ``gumbel_softmax``, ``rrelu`` and ``nn.init``.

    ``seed`` is any integer, taken modulo 2**64, or a function that returns such an integer.  The function is
    called when random numbers are first needed.
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
        if device.type != "cpu":  # a device without a number means the current device
            index = torch.empty(0, device=device).device.index if device.index is None else device.index
        key = device.type, index or 0
        if key not in self._generators:
            seed = self._seed() if callable(self._seed) else self._seed
            self._generators[key] = torch.Generator(device).manual_seed(seed % _SEED_LIMIT)
        return self._generators[key]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which a call draws random numbers: the argument ``device``, else the first
    tensor's device, else torch's default device."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.get_default_device()


def _fill_like(fill: Callable[..., torch.Tensor], input: torch.Tensor, **options: Any) -> torch.Tensor:
    """Do the same as ``torch.rand_like`` and its variants, but with the given generator.  Torch's own
    functions accept a generator only in newer versions."""
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
    """Apply transforms in order.  Torch's random numbers depend only on ``seed``.  Any thread may call this
    function."""
    with KeyedGenerator(seed):
        for transform in transforms:
            value = transform(value)
    return value


def run_seeded(transforms: Sequence[Transform], value: Any, seed: int) -> Any:
    """Seed the global generators of torch (CPU), Python and NumPy, apply any transforms in order, and restore
    the generators.  No other thread may draw random numbers meanwhile.  The overhead is about 0.1 ms."""
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

    Torch gets the seed itself.  Python and NumPy get two other seeds, because they would draw identical
    numbers from the same seed.
    """
    torch.default_generator.manual_seed(seed % _SEED_LIMIT)
    random.seed(sample_seed(seed, 0, 0))
    words = sample_seed(seed, 0, 1)
    np.random.seed([words & 0xFFFF_FFFF, words >> 32])


# ---- keys --------------------------------------------------------------------------------------------
#
# A wrapper such as ``Subset`` rebuilds plain indices, so indices cannot carry a key.  The fetching thread
# therefore stores the key here, and the innermost dataset takes one position from it for each requested
# sample.  Without a loader's key, the seed comes from torch's global generator, like the random numbers of
# torch's own transforms.  This happens when the first sample needs random numbers.  If no sample needs any,
# the generator stays unchanged.


class _Current(threading.local):
    key: Key | None = None
    used: int = 0


_current = _Current()


@contextmanager
def keyed(key: Key) -> Iterator[None]:
    """Within the ``with`` block and in this thread, let ``take_key`` return parts of ``key``."""
    before = _current.key, _current.used
    _current.key, _current.used = key, 0
    try:
        yield
    finally:
        _current.key, _current.used = before


class _DrawnKey(Key):
    """A key whose seed is drawn from torch's global generator when a thread first reads the seed."""

    _drawn: int | None = None

    def __init__(self, *_: object) -> None:
        self._lock = threading.Lock()  # one for each key: a child that is forked meanwhile uses other keys

    @property
    def seed(self) -> int:
        with self._lock:
            if self._drawn is None:
                # The CPU's generator is used even if the script has set another default device.
                drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), 2**63 - 1)
                self._drawn = int(drawn.item())
            return self._drawn


def take_key(count: int) -> tuple[Key, bool]:
    """Return the key (seed, epoch, positions) for the next ``count`` samples of this thread, and whether a
    loader has set it.  If no loader has set a key with enough unused positions, the seed of the returned key
    is drawn when it is first read."""
    key = _current.key
    if key is not None and _current.used + count <= len(key.draws):
        draws = key.draws[_current.used : _current.used + count]
        _current.used += count
        return Key(key.seed, key.epoch, draws), True
    return _DrawnKey(0, 0, np.arange(count, dtype=np.int64)), False


def key_for(seed: int, epoch: int, first: int, count: int, step: int = 1) -> Key:
    """Return the key of ``count`` samples.  Their positions in the epoch's order begin at ``first`` and are
    ``step`` apart."""
    return Key(seed, epoch, np.arange(first, first + step * count, step, dtype=np.int64))
