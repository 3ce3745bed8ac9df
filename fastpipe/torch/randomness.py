"""Where random numbers come from: the keys of batches, and generators that are left alone or put back.

A sample's random numbers must depend on its key and not on which thread runs it, or when.
There are two ways to get that:

* :func:`run_keyed` leaves every global generator alone: a ``TorchFunctionMode``, which only
  its own thread sees, hands a generator of the sample's own to every draw made through
  torch.  So any number of threads may use it at the same time.  It is for transforms that
  draw through torch only, such as those of ``threads.thread_safe_types``.
* :func:`run_seeded` seeds the global generators of torch (CPU), Python and NumPy and puts
  them back afterwards.  It is for any callable, and for one thread at a time.

Both give a transform that draws through torch only the same numbers for the same seed: those it would draw
right after ``torch.manual_seed(seed)``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fastpipe.core.keys import sample_seed
from fastpipe.core.types import Key

__all__ = [
    "KeyedGenerator", "key_for", "keyed", "preserved_generators", "run_keyed", "run_seeded",
    "seed_generators", "take_key",
]  # fmt: skip


Transform = Callable[[Any], Any]

_SEED_LIMIT = 1 << 64


class KeyedGenerator(TorchFunctionMode):
    """While active, torch's random draws in this thread come from a generator of its own.

    Covered are the functions and tensor methods that draw: ``rand``, ``randn``, ``randint``,
    ``randperm``, ``normal``, ``bernoulli``, ``multinomial``, ``poisson``, ``binomial``, their
    ``_like`` relatives, the in-place ``uniform_``, ``normal_``, ``random_``, ``bernoulli_``,
    ``exponential_``, ``cauchy_``, ``geometric_`` and ``log_normal_``, and what
    ``torch.distributions`` makes of them.  A draw that names its generator keeps it.  Draws
    on another device than the CPU get a generator there, seeded alike.

    Not covered, so still drawn from the global generators: Python's ``random``, NumPy,
    ``torch.ops`` called directly, and draws inside functions that torch itself hides from
    modes (``torch.nn.functional.dropout`` and its kind, ``gumbel_softmax``, ``rrelu``,
    ``fractional_max_pool``, ``torch.nn.init``).

    ``seed`` is any integer, taken modulo 2**64, or a function that gives one when something is drawn.

    >>> with KeyedGenerator(7):
    ...     first = torch.rand(3)
    >>> torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    True
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
        key = device.type, _index_of(device)
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


def _index_of(device: torch.device) -> int:
    """Which of its kind a device is: without a number the current one."""
    if device.type == "cpu":
        return 0
    index = torch.empty(0, device=device).device.index if device.index is None else device.index
    return index or 0


def _fill_like(fill: Callable[..., torch.Tensor], like: torch.Tensor, **options: Any) -> torch.Tensor:
    """What ``rand_like`` and its kind do, which take a generator only in newer versions of torch."""
    generator = options.pop("generator")
    requires_grad = options.pop("requires_grad", False)
    filled = fill(torch.empty_like(like, **options), generator=generator)
    return filled.requires_grad_() if requires_grad else filled


def _rand_like(input: torch.Tensor, **options: Any) -> torch.Tensor:
    return _fill_like(torch.Tensor.uniform_, input, **options)


def _randn_like(input: torch.Tensor, **options: Any) -> torch.Tensor:
    return _fill_like(torch.Tensor.normal_, input, **options)


def _randint_like(input: torch.Tensor, *bounds: int, **options: Any) -> torch.Tensor:
    named = (options.pop(name) for name in ("low", "high") if name in options)
    low, high = (0, *bounds, *named)[-2:]

    def fill(empty: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return empty.random_(low, high, generator=generator)

    return _fill_like(fill, input, **options)


_LIKE: dict[Any, Callable[..., torch.Tensor]] = {
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
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
    """Apply transforms in order, their draws through torch coming from ``seed`` alone.

    For any thread, at any time: no global generator is read or changed, given transforms that draw
    through torch only.

    >>> from torchvision.transforms import v2
    >>> flip = v2.RandomHorizontalFlip()
    >>> image = torch.arange(3).reshape(1, 1, 3)
    >>> [run_keyed([flip], image, seed).flatten().tolist() for seed in (0, 1)]
    [[2, 1, 0], [0, 1, 2]]
    """
    with KeyedGenerator(seed):
        for transform in transforms:
            value = transform(value)
    return value


def run_seeded(transforms: Sequence[Transform], value: Any, seed: int) -> Any:
    """Apply any transforms in order, with the global generators seeded from ``seed`` and restored afterwards.

    These are torch's CPU generator, Python's ``random`` and ``numpy.random``; draws on a GPU are not
    reproduced.

    For one thread at a time, in a process whose other threads do not draw meanwhile.  It costs about 0.1 ms.

    >>> run_seeded([lambda x: x + random.random()], 1, 5) == run_seeded([lambda x: x + random.random()], 1, 5)
    True
    """
    with preserved_generators():
        seed_generators(seed)
        for transform in transforms:
            value = transform(value)
    return value


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators of torch (CPU), Python and NumPy back as they were found.

    >>> with preserved_generators():
    ...     seed_generators(3)
    """
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

    torch gets the seed itself, as from ``torch.manual_seed``; the others get seeds derived from it, since
    Python and NumPy would draw the very same numbers from one seed.
    """
    torch.default_generator.manual_seed(seed % _SEED_LIMIT)
    random.seed(sample_seed(seed, 0, 0))
    words = sample_seed(seed, 0, 1)
    np.random.seed([words & 0xFFFF_FFFF, words >> 32])


# ---- keys --------------------------------------------------------------------------------------------
#
# A wrapper such as ``Subset`` rebuilds plain indices, so a key cannot travel with them. It is put here,
# in the thread that fetches, and the dataset at the end of the chain takes from it as many draws as it is
# asked for samples.
#
# Without a loader's key a seed comes from torch's global generator, as the numbers of torch's own
# transforms do: one 64-bit number for a batch (``__getitems__``) or a sample (``dataset[i]``), when the
# first of its samples draws. Where nothing is drawn the generator stays as it is, as under the dataset
# that is replaced, and so do shuffles and dropout after it.


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
    """Return the key for the next ``count`` samples of this thread, and whether a loader set it.

    Without a loader's key, or when it has no draws left, the seed is a 64-bit number from torch's global
    generator, drawn when something first asks for it: the generator is left alone if nothing is drawn.
    """
    key = _current.key
    if key is not None and _current.used + count <= len(key.draws):
        draws = key.draws[_current.used : _current.used + count]
        _current.used += count
        return Key(key.seed, key.epoch, draws), True
    return _DrawnKey(0, 0, np.arange(count, dtype=np.int64)), False


def key_for(seed: int, epoch: int, first: int, count: int, step: int = 1) -> Key:
    """Return the key of ``count`` samples, every ``step``-th of the epoch's order from ``first`` on."""
    return Key(seed, epoch, np.arange(first, first + step * count, step, dtype=np.int64))
